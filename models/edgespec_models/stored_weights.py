"""The weights of a bundle as numpy arrays, one matrix at a time: for what computes beside the graph.

Decoding leaves weights to ONNX Runtime. Training in NumPy needs them as floats, a layer at a time; the file
is mapped, so a layer is what it costs.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec_models.bundle import Bundle
from edgespec_models.errors import BundleError, UnsupportedModelError
from edgespec_models.onnx_header import Node, Tensor, read_header

__all__ = ["StoredWeights"]

_F32 = npt.NDArray[np.float32]
_PRODUCT, _GATHER = "MatMulNBits", "GatherBlockQuantized"


class StoredWeights:
    """What the graph of a bundle that edgespec exported multiplies by.

    Names are the graph's, such as ``layers.3.attention.qkv`` (:func:`edgespec_models.graphs.build_decoder`).

    Args:
        bundle: of one graph of any shape.

    Raises:
        BundleError: the graph or its weights cannot be read.
        UnsupportedModelError: graphs of fixed shapes.
    """

    def __init__(self, bundle: Bundle) -> None:
        if bundle.manifest.static is not None:
            raise UnsupportedModelError(f"{bundle.path} has graphs of fixed shapes")
        self._folder, graph = bundle.path, read_header(bundle.graph)
        self._tensors = graph.weights
        self._readers: dict[str, Node] = {}
        for node in graph.nodes:
            if node.op_type in (_PRODUCT, _GATHER):
                self._readers[node.inputs[1 if node.op_type == _PRODUCT else 0]] = node
        self._files: dict[str, npt.NDArray[np.uint8]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def vector(self, name: str) -> _F32:
        """A stored tensor of floats, float32 of any shape; a view of the file where it has those."""
        return self._read(name).astype(np.float32, copy=False)

    def parts(self, name: str) -> list[str]:
        """The matrices that a projection's outputs are concatenated from; one or more.

        Raises:
            UnsupportedModelError: the graph has no such projection.
        """
        found = [f"{name}.parts.0"]
        self._tensor(f"{found[0]}.weight")
        while f"{name}.parts.{len(found)}.weight" in self._tensors:
            found.append(f"{name}.parts.{len(found)}")
        return found

    def matrix(self, name: str, in_features: int) -> _F32:
        """A projection's weights, float32 ``(out_features, in_features)``.

        Raises:
            UnsupportedModelError: stored in a way that edgespec cannot undo here.
        """
        parts = [self.rows(part, slice(None), in_features) for part in self.parts(name)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def bias(self, name: str) -> _F32 | None:
        """A projection's biases, float32 ``(out_features,)``; None without."""
        names = [f"{part}.bias" for part in self.parts(name)]
        if not any(name in self for name in names):
            return None
        return np.concatenate([self.vector(name) for name in names])

    def count(self, name: str) -> int:
        """Rows of the matrix ``name``."""
        return int(self._tensor(f"{name}.weight").dims[0])

    def rows(self, name: str, which: slice | npt.NDArray[np.int64], in_features: int) -> _F32:
        """Some rows of the matrix ``name``, such as ``embedding`` or ``lm_head.parts.0``.

        Raises:
            UnsupportedModelError: stored in a way that edgespec cannot undo here.
        """
        reader = self._readers.get(f"{name}.weight")
        if reader is None:
            return self.vector(f"{name}.weight")[which]
        bits, block = reader.attributes["bits"], reader.attributes["block_size"]
        if reader.attributes.get("K", in_features) != in_features or f"{name}.remainders" in self:
            raise UnsupportedModelError(f"{name} is stored with remainders")
        scales = self.vector(f"{name}.scales")[which]
        count, blocks = scales.shape
        packed = self._codes(f"{name}.weight")[which].reshape(count, -1)
        codes = _unpack(packed, bits).reshape(count, blocks, block)
        zeros = np.float32(1 << (bits - 1))
        values = codes.astype(np.float32)
        if f"{name}.zero_points" in self:
            packed = self._codes(f"{name}.zero_points")[which]
            values -= _unpack(packed, bits)[:, :blocks, None].astype(np.float32)
        else:
            values -= zeros
        values *= scales[:, :, None]
        if f"{name}.offsets" in self:
            values += self.vector(f"{name}.offsets")[which][:, :, None]
        return values.reshape(count, -1)[:, :in_features]

    def _codes(self, name: str) -> npt.NDArray[np.uint8]:
        return self._read(name).astype(np.uint8, copy=False)

    def _tensor(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None or not tensor.location:
            raise UnsupportedModelError(f"{self._folder} has no stored weights {name}")
        return tensor

    def _read(self, name: str) -> npt.NDArray[np.generic]:
        tensor = self._tensor(name)
        if tensor.location not in self._files:
            self._files[tensor.location] = _map(self._folder, tensor)
        shape = [int(dim) for dim in tensor.dims]
        data = self._files[tensor.location][tensor.offset : tensor.offset + tensor.size_bytes]
        if tensor.offset < 0 or len(data) != tensor.size_bytes:
            raise BundleError(f"{self._folder / tensor.location} ends within {name}; export the model again")
        return data.view(tensor.type).reshape(shape)


def _map(folder: Path, tensor: Tensor) -> npt.NDArray[np.uint8]:
    if tensor.location != Path(tensor.location).name:
        raise BundleError(f"{folder} names a file outside the bundle: {tensor.location!r}")
    try:
        return np.memmap(folder / tensor.location, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read {folder / tensor.location}: {error}") from error


def _unpack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Codes of ``bits`` each, the first in the lowest, along the last axis."""
    if bits == 8:
        return codes
    pairs = np.stack((codes & 15, codes >> 4), axis=-1)
    return pairs.reshape(*codes.shape[:-1], -1)
