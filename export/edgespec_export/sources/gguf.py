"""Read GGUF files: metadata as plain Python values, tensors as memory-mapped bytes.

The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
Nothing in the file is trusted: every length is checked against the rest of the file before it is used. The
``gguf`` package reads the same files, but takes 7 s and 0.5 GB for a 152k vocabulary, this module a fraction
of both, and it raises NumPy's errors for damaged files. Tests compare with it.
"""

import mmap
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.gguf_parts import parts_of
from edgespec_models.files.impostors import refuse_impostor
from edgespec_models.files.tensors import MOST_SCALE, GGMLType, ScaledBlocks, Tensor

MetadataValue = str | int | float | bool | list[str] | list[object] | npt.NDArray[np.generic]

_ALIGNMENT = 32
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_I64 = 27  # the one format that holds no weights
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
)
_UNREAD: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        9: ("Q8_1", "Q8_0"),
        15: ("Q8_K", "Q8_0"),
        19: ("IQ1_S", "IQ2_XXS"),
        28: ("F64", "F32"),
        29: ("IQ1_M", "IQ2_XXS"),
        34: ("TQ1_0", "Q2_K"),
        35: ("TQ2_0", "Q2_K"),
        41: ("Q1_0", "Q2_K"),
        42: ("Q2_0", "Q2_K"),
    }
)
"""Formats that edgespec does not read, each with a readable format of similar size."""


class _Cursor:
    """A position in the file that refuses to run over its end."""

    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self.view, self.path, self.at = view, path, 0

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path.name} is not a sound GGUF file: {what} (at byte {self.at:,} of {len(self.view):,}). "
            "Download or copy it again."
        )

    def require(self, n_bytes: int, what: str) -> None:
        if n_bytes > len(self.view) - self.at:
            raise self.fail(f"{what} needs {n_bytes:,} bytes, the file ends before that")

    def scalar(self, code: str, what: str) -> int | float | bool:
        size = struct.calcsize(code)
        self.require(size, what)
        value: int | float | bool = struct.unpack_from(code, self.view, self.at)[0]
        self.at += size
        return value

    def count(self, what: str) -> int:
        return int(self.scalar("<Q", what))

    def string(self, what: str) -> str:
        n_bytes = self.count(what)
        self.require(n_bytes, what)
        raw = self.view[self.at : self.at + n_bytes]
        self.at += n_bytes
        return raw.decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, what: str, depth: int = 0) -> MetadataValue:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown type {kind}")
        return self.scalar(_SCALARS[kind], what)

    def _array(self, what: str, depth: int) -> MetadataValue:
        if depth > 2:
            raise self.fail(f"{what} is nested too deeply")
        kind, length = int(self.scalar("<I", what)), self.count(what)
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            self.require(length * dtype.itemsize, what)
            array = np.frombuffer(self.view, dtype, length, self.at).copy()
            self.at += array.nbytes
            return array
        self.require(length * 8, what)  # every string and inner array takes 8 bytes at least
        if kind == _STRING:
            return [self.string(what) for _ in range(length)]
        values: list[object] = [self.value(kind, what, depth + 1) for _ in range(length)]
        return values


class GGUFFile(AbstractContextManager["GGUFFile"]):
    """A GGUF file opened for reading; a context manager.

    ``metadata`` is key -> str, int, float, bool, list of str, or numpy array; ``tensors`` is name -> tensor,
    ``integers`` name -> a vector of int64.

    Raises:
        ModelFileError: the file cannot be read, is truncated, or contradicts itself.
        UnsupportedModelError: byte order, version or a weight format that edgespec does not import.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, MetadataValue] = {}
        self.tensors: dict[str, Tensor] = {}
        self.integers: dict[str, npt.NDArray[np.int64]] = {}
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ModelFileError(f"cannot read {path}: {error}") from error
        try:
            with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                self._parse(_Cursor(view, path))
        except (OSError, ValueError) as error:
            self._file.close()
            raise ModelFileError(f"{path} is not a sound GGUF file: {error}") from error
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; values that were read stay valid."""
        self._file.close()

    def facts(self, architecture: str) -> dict[str, object]:
        """The metadata of an ``architecture``, without its prefix, and of xIELU; arrays become lists."""
        prefix = f"{architecture}."
        return {
            key.removeprefix(prefix): value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in self.metadata.items()
            if key.startswith((prefix, "xielu."))
        }

    def _parse(self, cursor: _Cursor) -> None:
        n_tensors, n_keys = self._header(cursor)
        for _ in range(n_keys):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise cursor.fail(f"metadata key {key!r} appears twice")
            self.metadata[key] = cursor.value(int(cursor.scalar("<I", key)), key)
        infos = [self._tensor_info(cursor) for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
            raise cursor.fail(f"general.alignment is {alignment!r}")
        base = -(-cursor.at // alignment) * alignment
        for name, shape, number, offset in infos:
            if offset % alignment:
                raise cursor.fail(f"tensor {name!r} starts at {offset:,}, not a multiple of {alignment}")
            self._add(cursor, name, shape, number, base + offset)

    def _header(self, cursor: _Cursor) -> tuple[int, int]:
        if cursor.view[:4] != b"GGUF":
            refuse_impostor(self.path)
            raise cursor.fail(f"it starts with {cursor.view[:4]!r}, not b'GGUF'")
        cursor.at = 4
        version = int(cursor.scalar("<I", "the version"))
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = " (a big-endian file)" if swapped in (2, 3) else ""
            raise UnsupportedModelError(
                f"{self.path.name} has GGUF version {version}{hint}; "
                "edgespec reads little-endian versions 2 and 3"
            )
        n_tensors, n_keys = cursor.count("the tensor count"), cursor.count("the metadata count")
        # The smallest tensor entry takes 24 bytes, the smallest metadata entry 13.
        cursor.require(n_tensors * 24 + n_keys * 13, f"a list of {n_tensors:,} tensors and {n_keys:,} keys")
        return n_tensors, n_keys

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string("a tensor name")
        n_dims = int(cursor.scalar("<I", name))
        if not 0 < n_dims <= _MAX_DIMS:
            raise cursor.fail(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(cursor.count(name) for _ in range(n_dims))[::-1]
        return name, shape, int(cursor.scalar("<I", name)), cursor.count(name)

    def _add(self, cursor: _Cursor, name: str, shape: tuple[int, ...], number: int, offset: int) -> None:
        if name in self.tensors or name in self.integers:
            raise cursor.fail(f"tensor {name!r} appears twice")
        if number == _I64 and len(shape) == 1:
            cursor.at = min(offset, len(cursor.view))
            cursor.require(shape[0] * 8, f"tensor {name!r}")
            self.integers[name] = np.frombuffer(cursor.view, "<i8", shape[0], offset).astype(np.int64)
            return
        kind = next((known for known in GGMLType if known == number), None)
        if kind is None:
            form, instead = _UNREAD.get(number, (f"number {number}", "Q4_K_M or Q8_0"))
            raise UnsupportedModelError(
                f"tensor {name!r} of {self.path.name} has the weight format {form}; edgespec reads "
                f"{', '.join(known.name for known in GGMLType)}. Use a file of the model quantized to these, "
                f"such as {instead}."
            )
        if min(shape) < 1 or shape[-1] % kind.block:
            raise cursor.fail(f"tensor {name!r} has shape {shape}, which {kind.name} cannot hold")
        tensor = Tensor(name, shape, kind, self._file, offset)
        if offset + tensor.n_bytes > len(cursor.view):
            raise cursor.fail(
                f"tensor {name!r} ends at byte {offset + tensor.n_bytes:,}: the file is truncated"
            )
        self.tensors[name] = tensor


def open_parts(path: Path, stack: ExitStack) -> GGUFFile:
    """The first file of the model in ``path``, which may be a part, with the tensors of all its files.

    ``stack`` closes them. Raises as GGUFFile does, and ModelFileError where a part is missing or misnamed.
    """
    files = [stack.enter_context(GGUFFile(part)) for part in parts_of(path)]
    for number, file in enumerate(files):
        place, count = file.metadata.get("split.no", 0), file.metadata.get("split.count", 0) or 1
        if (place, count) != (number, len(files)):
            raise ModelFileError(
                f"{file.path.name} says that it is one of {count} parts of a model, number {place} from 0. "
                "Parts are found by names such as NAME-00001-of-00003.gguf: name all as they were published."
            )
        files[0].tensors |= file.tensors
        files[0].integers |= file.integers
    files[0].tensors = _with_scales(files[0].tensors, path.name)
    return files[0]


def _with_scales(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Tensors in NVFP4 with their factors, which lie beside them, one of a matrix; ModelFileError for others.

    Factors of activations, which are not rounded to this format here, are left out.
    """
    scaled = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.type is GGMLType.NVFP4:
            stem, count = name.removesuffix(".weight"), tensor.shape[0] if len(tensor.shape) > 2 else 1
            scaled.pop(f"{stem}.input_scale", None)
            scales = scaled.pop(f"{stem}.scale", None)
            factors = (1.0,) * count
            if scales is not None:
                if scales.type is not GGMLType.F32 or scales.shape != (count,):
                    raise ModelFileError(
                        f"tensor {scales.name!r} of {where} is {scales.type.name} of shape {scales.shape}; "
                        f"allowed beside {name!r}: F32 of shape {(count,)}. Download or convert it again."
                    )
                factors = tuple(map(float, scales.read().view(np.float32).ravel()))
            if not max(map(abs, factors)) < MOST_SCALE:
                raise ModelFileError(
                    f"tensor {stem + '.scale'!r} of {where} has a scale of {max(factors, key=abs):.3g}; "
                    f"allowed: below {MOST_SCALE:g}. Download or convert it again."
                )
            facts = {field.name: getattr(tensor, field.name) for field in fields(tensor)}
            scaled[name] = ScaledBlocks(**facts, factors=factors)
    return scaled
