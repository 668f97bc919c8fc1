"""The weights of a bundle as NumPy arrays, one matrix at a time, for training and reports.

Decoding leaves weights to the kernels. Training in NumPy needs them as floats, a layer at a time. The file is
mapped, so memory holds one layer.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.tiles import unpack_tiles
from edgespec_models.bundles.weight_format import FORMATS, LANES, tile_bytes
from edgespec_models.errors import BundleError, UnsupportedModelError
from edgespec_models.files.onnx_header import Node, Tensor, read_header

_F32 = npt.NDArray[np.float32]
_PRODUCT, _TABLE = "Linear", "Embedding"
_FIRST_MATRIX = 5  # among the inputs of a product
_Shape = tuple[str, int, int]  # format, rows, columns


class StoredWeights:
    """The weights of a bundle whose graph has edgespec's own operators.

    Names are the graph's, such as ``layers.3.attention.qkv`` (:func:`edgespec_models.graphs.build_native`).

    ``bundle`` has one graph of any shape.

    Raises:
        BundleError: the graph or its weights cannot be read.
        UnsupportedModelError: a graph of other operators.
    """

    def __init__(self, bundle: Bundle) -> None:
        if bundle.manifest.operators != "edgespec":
            raise UnsupportedModelError(f"{bundle.path} has no graph of edgespec's own operators")
        self._folder, graph = bundle.path, read_header(bundle.graph)
        self._tensors = graph.weights
        self._shapes: dict[str, _Shape] = {}
        self._parts: dict[str, list[str]] = {}
        for node in graph.nodes:
            if node.op_type == _TABLE:
                shape = node.texts["format"], node.attributes["rows"], node.attributes["width"]
                self._shapes[node.inputs[1]] = shape
            elif node.op_type == _PRODUCT:
                self._add_product(node)
        self._files: dict[str, npt.NDArray[np.uint8]] = {}

    def _add_product(self, node: Node) -> None:
        weights = list(node.inputs[_FIRST_MATRIX:])
        for name, part in zip(weights, node.texts["parts"].split(","), strict=True):
            form, _, rows = part.partition(":")
            self._shapes[name] = form, int(rows), node.attributes["inputs"]
        path, is_projection, _ = weights[0].partition(".parts.")
        self._parts[path if is_projection else "lm_head"] = (
            weights  # the embedding's own matrix is the LM head's
        )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def vector(self, name: str) -> _F32:
        """A stored tensor of floats, float32 of any shape; a view of the file."""
        tensor = self._tensor(name)
        return self._bytes(name).view(np.float32).reshape([int(dim) for dim in tensor.dims])

    def matrix(self, name: str) -> _F32:
        """A projection's weights, float32 ``(out_features, in_features)``.

        Raises:
            UnsupportedModelError: the graph has no such projection.
        """
        parts = [self.rows(part, 0, self._shape(part)[1]) for part in self.parts(name)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def bias(self, name: str) -> _F32 | None:
        """A projection's biases, float32 ``(out_features,)``; None without."""
        self.parts(name)
        return self.vector(f"{name}.bias") if f"{name}.bias" in self else None

    def parts(self, name: str) -> list[str]:
        """The matrices whose products stand side by side in a projection's; one or more.

        Raises:
            UnsupportedModelError: the graph has no such projection.
        """
        if name not in self._parts:
            raise UnsupportedModelError(f"{self._folder} has no stored weights {name}")
        return self._parts[name]

    def count(self, matrix: str) -> int:
        """Rows of a matrix, by its name in :meth:`parts`."""
        return self._shape(matrix)[1]

    def rows(self, matrix: str, start: int, stop: int) -> _F32:
        """Rows from ``start``, where a tile begins, to ``stop``: float32 ``(rows, in_features)``."""
        form, rows, columns = self._shape(matrix)
        stop = min(stop, rows)
        assert start % LANES == 0
        size = tile_bytes(form, LANES, columns)
        tiles = self._bytes(matrix)[start // LANES * size : -(-stop // LANES) * size]
        return unpack_tiles(form, tiles, stop - start, columns)

    def embed(self, tokens: npt.NDArray[np.int64]) -> _F32:
        """The embedding's rows of ``tokens``, float32 ``(tokens, in_features)``."""
        embedded: dict[int, _F32] = {}
        for tile in np.unique(tokens // LANES):
            start = int(tile) * LANES
            embedded |= enumerate(self.rows("embedding.weight", start, start + LANES), start)
        return np.stack([embedded[int(token)] for token in tokens])

    def _shape(self, matrix: str) -> _Shape:
        if matrix not in self._shapes or self._shapes[matrix][0] not in FORMATS:
            raise UnsupportedModelError(f"{self._folder} has no stored weights {matrix}")
        return self._shapes[matrix]

    def _tensor(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None or not tensor.location:
            raise UnsupportedModelError(f"{self._folder} has no stored weights {name}")
        return tensor

    def _bytes(self, name: str) -> npt.NDArray[np.uint8]:
        tensor = self._tensor(name)
        if tensor.location not in self._files:
            self._files[tensor.location] = _map(self._folder, tensor)
        data = self._files[tensor.location][tensor.offset : tensor.offset + tensor.size_bytes]
        if tensor.offset < 0 or len(data) != tensor.size_bytes:
            raise BundleError(f"{self._folder / tensor.location} ends within {name}; export the model again")
        return data


def _map(folder: Path, tensor: Tensor) -> npt.NDArray[np.uint8]:
    if tensor.location != Path(tensor.location).name:
        raise BundleError(f"{folder} names a file outside the bundle: {tensor.location!r}")
    try:
        return np.memmap(folder / tensor.location, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read {folder / tensor.location}: {error}") from error
