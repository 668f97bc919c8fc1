"""Read safetensors files: a header of JSON, then the tensors' bytes.

The format: github.com/huggingface/safetensors, "Format". Nothing in the file is trusted. The
``safetensors`` package maps whole files, which counts as memory of the export, and its numpy
side does not know bfloat16; here rows are read in place. Tests compare with it.
"""

import json
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.impostors import refuse_impostor
from edgespec_models.files.tensors import GGMLType, Tensor

Raw = tuple[tuple[int, ...], BinaryIO, int]
"""Shape, file and place of bytes."""
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_FORMATS = MappingProxyType({kind.name: kind for kind in (GGMLType.F32, GGMLType.F16, GGMLType.BF16)})
_INTEGERS = MappingProxyType({"I8": "<i1", "I32": "<i4", "I64": "<i8"})


class SafetensorsFile:
    """A safetensors file opened for reading.

    ``metadata`` are texts that the file's writer put beside the tensors.

    Raises:
        ModelFileError: the file cannot be read, is truncated, or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._size = path.stat().st_size
            self._file = path.open("rb")
        except OSError as error:
            raise ModelFileError(f"cannot read {path}: {error}") from error
        try:
            self._start, self._header = self._read_header()
        except BaseException:
            self._file.close()
            raise
        self.names = frozenset(self._header)

    def close(self) -> None:
        """Close the file; values that were read stay valid."""
        self._file.close()

    def tensor(self, name: str, *, scalars: bool = False) -> Tensor:
        """The tensor called ``name``, which must be one of ``names``. Of ``scalars`` it has a shape of (1,).

        Raises:
            ModelFileError: its entry is damaged, or its bytes lie beyond the end of the file.
            UnsupportedModelError: its dtype is none of F32, F16 and BF16.
        """
        dtype = self._entry(name, scalars=scalars)[0]
        if dtype not in _FORMATS:
            raise UnsupportedModelError(
                f"tensor {name!r} of {self.path.name} has the dtype {dtype}; edgespec exports "
                f"{', '.join(_FORMATS)}. Use the model's unquantized checkpoint, or a GGUF file."
            )
        kind = _FORMATS[dtype]
        shape, offset = self._place(name, kind.block_bytes, scalars=scalars)
        return Tensor(name, shape or (1,), kind, self._file, offset)

    def raw(self, name: str) -> Raw:
        """The shape of a tensor of single bytes, the file, and the place of its bytes.

        Raises:
            ModelFileError: its entry is damaged, or its bytes lie beyond the file's end.
        """
        shape, offset = self._place(name, 1)
        return shape, self._file, offset

    def kind(self, name: str) -> str:
        """The dtype of a tensor, as the file says it."""
        return str(self._entry(name, scalars=True)[0])

    def number(self, name: str) -> float:
        """The one number of a tensor in F32.

        Raises:
            ModelFileError: it holds others, its entry is damaged, or it lies beyond the file's end.
        """
        dtype, shape, begin, end = self._entry(name, scalars=True)
        self._file.seek(self._start + begin)
        data = self._file.read(4)
        if dtype != "F32" or prod(shape) != 1 or end - begin != 4 or len(data) != 4:
            raise self._fail(f"tensor {name!r} is {dtype} of shape {shape}, not one number in F32")
        return float(np.frombuffer(data, "<f4")[0])

    def integers(self, name: str, kinds: tuple[str, ...] = ("I8",)) -> npt.NDArray[Any]:
        """The tensor called ``name``, which must be one of ``names`` and of one of ``kinds``: I8, I32, I64.

        Raises:
            ModelFileError: its entry is damaged or of another dtype, or its bytes lie beyond the file's end.
        """
        dtype = self._entry(name)[0]
        if dtype not in kinds:
            raise self._fail(f"tensor {name!r} has the dtype {dtype}, not {' or '.join(kinds)}")
        numbers = np.dtype(_INTEGERS[dtype])
        shape, offset = self._place(name, numbers.itemsize)
        self._file.seek(offset)
        data = self._file.read(prod(shape) * numbers.itemsize)
        if len(data) != prod(shape) * numbers.itemsize:
            raise ModelFileError(
                f"{self.path} ended while tensor {name!r} was read; another program may have changed it"
            )
        return np.frombuffer(data, numbers).reshape(shape)

    def _place(self, name: str, width: int, *, scalars: bool = False) -> tuple[tuple[int, ...], int]:
        """Shape of a tensor with numbers of this many bytes, and its place in the file."""
        dtype, shape, begin, end = self._entry(name, scalars=scalars)
        if end - begin != prod(shape) * width:
            raise self._fail(f"tensor {name!r} of shape {shape} ({dtype}) takes {end - begin:,} bytes")
        if self._start + end > self._size:
            raise self._fail(f"tensor {name!r} ends at byte {self._start + end:,}: the file is truncated")
        return shape, self._start + begin

    def _entry(self, name: str, *, scalars: bool = False) -> tuple[str, tuple[int, ...], int, int]:
        """Dtype, shape and place among the tensors' bytes."""
        entry = self._header[name]
        try:
            shape, (begin, end), dtype = tuple(entry["shape"]), entry["data_offsets"], str(entry["dtype"])
            sound = (scalars or bool(shape)) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound or 0 in shape:
            raise self._fail(f"the entry of tensor {name!r} is {entry!r:.200}")
        return dtype, shape, begin, end

    def _fail(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path.name} is not a sound safetensors file: {what}. Download or copy it again."
        )

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        length = int.from_bytes(self._file.read(8), "little")
        refuse_impostor(self.path)
        if self._size < 8 or length > min(self._size - 8, _MAX_HEADER_BYTES):
            raise self._fail(f"its header takes {length:,} bytes, the file has {self._size:,}")
        try:
            header = json.loads(self._file.read(length))
        except (ValueError, RecursionError) as error:
            raise self._fail(f"its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._fail("its header is no JSON object")
        texts = header.pop("__metadata__", None)
        self.metadata = (
            {k: v for k, v in texts.items() if isinstance(v, str)} if isinstance(texts, dict) else {}
        )
        return 8 + length, header
