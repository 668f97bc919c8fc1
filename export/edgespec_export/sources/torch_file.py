"""Read the ``pytorch_model.bin`` of heads, which are published in no other form at times.

torch reads it, with ``weights_only``: tensors come out, and no code runs.
"""

from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from edgespec_export.sources.blocks import U8, GGMLType, Tensor
from edgespec_models.errors import EdgespecError, ModelFileError, UnsupportedModelError


class TorchFile:
    """Such a file, read as :class:`~edgespec_export.sources.safetensors_file.SafetensorsFile` is.

    Raises:
        EdgespecError: torch is not installed.
        ModelFileError: the file cannot be read, or holds something else than tensors by name.
    """

    def __init__(self, path: Path) -> None:
        try:
            import torch
        except ImportError as error:
            raise EdgespecError(
                f"{path} needs torch, which is not installed: pip install 'edgespec[align]', or take safetensors"
            ) from error
        self.path, self._bytes = path, torch.uint8
        self._kinds = {
            torch.float32: GGMLType.F32,
            torch.float16: GGMLType.F16,
            torch.bfloat16: GGMLType.BF16,
        }
        self._integers = {torch.int32: "I32", torch.int64: "I64"}
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # those of zip files, of pickles and torch's own share no base class
            raise ModelFileError(f"cannot read {path}: {error!r:.200}. Download or copy it again.") from error
        if not isinstance(found, dict) or not all(
            isinstance(value, torch.Tensor) and value.is_contiguous() for value in found.values()
        ):
            raise ModelFileError(f"{path} holds something else than tensors by name; take safetensors")
        self._tensors: dict[str, Any] = found
        self.names = frozenset(map(str, found))

    def close(self) -> None:
        """Free the file."""
        self._tensors = {}

    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``, one of ``names``; UnsupportedModelError if not in floats."""
        value = self._tensors[name]
        if value.dtype not in self._kinds:
            raise UnsupportedModelError(
                f"tensor {name!r} of {self.path.name} has the dtype {value.dtype}; edgespec exports floats"
            )
        file = cast(BinaryIO, _Bytes(value.reshape(-1).view(self._bytes).numpy(), str(self.path)))
        return Tensor(name, tuple(value.shape), self._kinds[value.dtype], file, 0)

    def integers(self, name: str, kinds: tuple[str, ...]) -> npt.NDArray[Any]:
        """The tensor called ``name``, which must be of one of ``kinds``; ModelFileError for others."""
        value = self._tensors[name]
        if self._integers.get(value.dtype) not in kinds:
            raise ModelFileError(f"tensor {name!r} of {self.path} has the dtype {value.dtype}, not {kinds}")
        return np.array(value.numpy())


class _Bytes(RawIOBase):
    """A tensor's bytes, which torch maps, as a file."""

    def __init__(self, data: U8, name: str) -> None:
        self._data, self._at, self.name = data, 0, name

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        taken = self._data[self._at : self._at + len(buffer)]
        buffer[: len(taken)] = taken.data
        self._at += len(taken)
        return len(taken)
