"""Tensors in files: their formats, and where their blocks lie.

Layouts: ggml ``ggml-common.h``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod
from typing import BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt

from edgespec_models.errors import ModelFileError, UnsupportedModelError

U8 = npt.NDArray[np.uint8]


class GGMLType(IntEnum):
    """Weight formats edgespec reads.

    Each has its number in GGUF files, weights and bytes of a block, the place of the float16 factors that all
    its numbers share, and how many there are: of scales, and of minimums.
    """

    block: int
    block_bytes: int
    factors_at: int
    factors: int

    def __new__(cls, number: int, *layout: int) -> Self:
        member = int.__new__(cls, number)
        member._value_ = number
        member.block, member.block_bytes, member.factors_at, member.factors = (*layout, 0, 0)[:4]
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18, 0, 1
    Q4_1 = 3, 32, 20, 0, 2
    Q5_0 = 6, 32, 22, 0, 1
    Q5_1 = 7, 32, 24, 0, 2
    Q8_0 = 8, 32, 34, 0, 1
    Q2_K = 10, 256, 84, 80, 2
    Q3_K = 11, 256, 110, 108, 1
    Q4_K = 12, 256, 144, 0, 2
    Q5_K = 13, 256, 176, 0, 2
    Q6_K = 14, 256, 210, 208, 1
    IQ2_XXS = 16, 256, 66, 0, 1
    IQ2_XS = 17, 256, 74, 0, 1
    IQ3_XXS = 18, 256, 98, 0, 1
    IQ4_NL = 20, 32, 18, 0, 1
    IQ3_S = 21, 256, 110, 0, 1
    IQ2_S = 22, 256, 82, 0, 1
    IQ4_XS = 23, 256, 136, 0, 1
    BF16 = 30, 1, 2
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36


FLOATS = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})
"""The floating-point formats, whose weights are not quantized."""

NVFP4_FACTOR: Final = 1024
"""The float16 behind a block in NVFP4 that stands for the factor 1: half the inverse of the unit of its
scales, because most factors are small.
"""
MOST_SCALE: Final = 60.0
"""No factor of a matrix in NVFP4 is larger, because float16 holds it times :data:`NVFP4_FACTOR`."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file, or rows or columns of one: ``shape`` in row-major order, from ``offset`` on.

    Each row of the file has ``before`` columns before these, and ``behind`` columns behind them. Every
    ``step``-th row from ``offset`` on belongs to the tensor. Tensors of three dimensions are matrices, one
    behind the other; rows are counted over all of them.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    file: BinaryIO
    offset: int
    before: int = 0
    behind: int = 0
    step: int = 1

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) // self.type.block * self.type.block_bytes

    @property
    def n_rows(self) -> int:
        """The number of rows; a vector counts as one."""
        return prod(self.shape[:-1])

    def rows(self, start: int, stop: int) -> "Tensor":
        """Rows ``start`` to ``stop`` as a tensor of their own."""
        offset = self.offset + start * self.step * (self.n_bytes // self.shape[0])
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=offset)

    def columns(self, start: int, stop: int) -> "Tensor":
        """Some columns of a matrix; UnsupportedModelError unless blocks begin and end there."""
        rows, width = self.shape
        if start % self.type.block or stop % self.type.block:
            raise UnsupportedModelError(
                f"tensor {self.name!r} is cut at column {stop}, but {self.type.name} has blocks of "
                f"{self.type.block}; take a file in floats or in another format"
            )
        return replace(self, shape=(rows, stop - start), before=start, behind=width - stop)

    def read(self, start: int = 0, stop: int | None = None) -> U8:
        """Raw blocks of rows ``start`` to ``stop``: uint8 ``(rows, blocks per row, bytes per block)``.

        The file is read and not mapped, because a mapped file would count as memory of the export.
        """
        block, n_bytes = self.type.block, self.type.block_bytes
        per_row = (self.before + self.shape[-1] + self.behind) // block
        raw = self._raw(start, stop, (self.file, self.offset), per_row * n_bytes)
        raw = raw.reshape(-1, per_row, n_bytes)
        return np.ascontiguousarray(raw[:, self.before // block : per_row - self.behind // block])

    def matrices(self) -> "list[Tensor]":
        """The matrices of a tensor of three dimensions."""
        count, *rest = self.shape
        places = range(self.offset, self.offset + self.n_bytes, self.n_bytes // count)
        return [replace(self, shape=tuple(rest), offset=offset) for offset in places]

    def _raw(self, start: int, stop: int | None, place: tuple[BinaryIO, int], width: int) -> U8:
        """Bytes of rows ``start`` to ``stop``, ``width`` bytes each; row 0 lies at ``place``."""
        file, offset = place
        stop = self.n_rows if stop is None else stop
        lines = max((stop - start - 1) * self.step + 1, 0)
        raw = np.empty((lines, width), np.uint8)
        file.seek(offset + start * self.step * width)
        if file.readinto(raw.data.cast("B")) != raw.nbytes:  # type: ignore[attr-defined]
            raise ModelFileError(
                f"{file.name} ended while tensor {self.name!r} was read; another program may have changed it"
            )
        return raw[:: self.step]


@dataclass(frozen=True, slots=True)
class Stack(Tensor):
    """Matrices of one shape and format, one below the other; each may lie anywhere."""

    parts: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Self:
        """The stack of ``parts``, of one shape; UnsupportedModelError for different formats."""
        first = parts[0]
        for part in parts:
            if part.type != first.type:
                raise UnsupportedModelError(
                    f"tensor {part.name!r} is in {part.type.name}, and {first.name!r}, of another expert, in "
                    f"{first.type.name}; allowed: one format for all experts of a layer"
                )
        shape = len(parts) * first.shape[0], first.shape[1]
        return cls(first.name, shape, first.type, first.file, first.offset, parts=tuple(parts))

    def read(self, start: int = 0, stop: int | None = None) -> U8:
        rows = self.parts[0].shape[0]
        stop = self.n_rows if stop is None else stop
        places = range(start // rows, -(-stop // rows))
        pieces = [
            self.parts[at].read(max(start - at * rows, 0), min(stop - at * rows, rows)) for at in places
        ]
        return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]


@dataclass(frozen=True, slots=True)
class Reordered(Tensor):
    """The rows of a matrix in another order: row i is row ``order[i]`` of the file's."""

    order: npt.NDArray[np.int64] = field(kw_only=True)

    def read(self, start: int = 0, stop: int | None = None) -> U8:
        matrix = Tensor(self.name, self.shape, self.type, self.file, self.offset)
        return np.concatenate([matrix.read(row, row + 1) for row in self.order[start:stop].tolist()])


@dataclass(frozen=True, slots=True)
class SplitBlocks(Tensor):
    """MXFP4 in safetensors: exponents lie elsewhere, from some byte of a file on, and a byte of codes holds
    neighbours.
    """

    exponents: tuple[BinaryIO, int] = field(kw_only=True)

    def every(self, step: int, first: int) -> Self:
        """Every ``step``-th row of each matrix, from its row ``first`` on."""
        count, rows, columns = self.shape
        blocks = columns // self.type.block
        return replace(
            self,
            shape=(count, rows // step, columns),
            step=step,
            offset=self.offset + first * blocks * 16,
            exponents=(self.exponents[0], self.exponents[1] + first * blocks),
        )

    def read(self, start: int = 0, stop: int | None = None) -> U8:
        """Like :meth:`Tensor.read`, in the order of GGUF files."""
        blocks = self.shape[-1] // self.type.block
        packed = self._raw(start, stop, (self.file, self.offset), blocks * 16).reshape(-1, blocks, 16)
        exponents = self._raw(start, stop, self.exponents, blocks).reshape(-1, blocks, 1)
        return np.concatenate([exponents, _in_halves(packed)], axis=-1)


@dataclass(frozen=True, slots=True)
class Columns(Tensor):
    """Matrices of floats whose rows are columns in the file: every ``step``-th behind the first ``before``.

    A matrix in the file has ``file_columns``.
    """

    file_columns: int = field(kw_only=True)

    def read(self, start: int = 0, stop: int | None = None) -> U8:
        """Like :meth:`Tensor.read`. One matrix at a time is in memory."""
        inputs, rows = self.shape[-1], self.file_columns // self.step
        stop, size = self.n_rows if stop is None else stop, inputs * self.file_columns * self.type.block_bytes
        pieces = [np.empty((0, inputs, self.type.block_bytes), np.uint8)]
        for number in range(start // rows, -(-stop // rows)):
            place = (self.type, self.file, self.offset + number * size)
            matrix = Tensor(self.name, (inputs, self.file_columns), *place).read()
            some = np.arange(max(start - number * rows, 0), min(stop - number * rows, rows))
            pieces.append(matrix[:, self.before + some * self.step].transpose(1, 0, 2))
        return np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class ScaledBlocks(Tensor):
    """NVFP4 whose scales are multiplied with ``factors``, one of each matrix, which lie elsewhere."""

    factors: tuple[float, ...] = field(kw_only=True)

    def matrices(self) -> list[Tensor]:
        matrices = zip(Tensor.matrices(self), self.factors, strict=True)
        return [replace(matrix, factors=(factor,)) for matrix, factor in matrices]  # type: ignore[call-arg]

    def read(self, start: int = 0, stop: int | None = None) -> U8:
        """Like :meth:`Tensor.read`, with a float16 of the factor behind each block."""
        raw = Tensor.read(self, start, stop)
        own = (np.array(self.factors, np.float32) * NVFP4_FACTOR).astype("<f2")
        rows = (start + np.arange(len(raw))) * len(own) // self.n_rows
        halves = np.broadcast_to(own[rows].view(np.uint8).reshape(-1, 1, 2), (*raw.shape[:2], 2))
        return np.concatenate([raw, halves], axis=-1)


@dataclass(frozen=True, slots=True)
class SplitScaledBlocks(Tensor):
    """NVFP4 as safetensors have it: neighbours in a byte of codes, scales from some byte of a file on.

    Scales are multiplied with ``factor``.
    """

    scales: tuple[BinaryIO, int] = field(kw_only=True)
    factor: float = field(kw_only=True)

    def rows(self, start: int, stop: int) -> Tensor:
        columns, (file, offset) = self.shape[1], self.scales
        return replace(
            self,
            shape=(stop - start, columns),
            offset=self.offset + start * columns // 2,
            scales=(file, offset + start * columns // 16),
        )

    def columns(self, start: int, stop: int) -> Tensor:
        """No columns are read apart: UnsupportedModelError."""
        raise UnsupportedModelError(f"tensor {self.name!r} in NVFP4 is cut at column {stop}; allowed: floats")

    def read(self, start: int = 0, stop: int | None = None) -> U8:
        """Like :meth:`Tensor.read` in NVFP4, with a float16 of the factor behind each block."""
        blocks = self.shape[-1] // self.type.block
        packed = self._raw(start, stop, (self.file, self.offset), blocks * 32).reshape(-1, blocks, 4, 8)
        scales = self._raw(start, stop, self.scales, blocks * 4).reshape(-1, blocks, 4)
        halves = _in_halves(packed).reshape(-1, blocks, 32)
        own = np.array([self.factor * NVFP4_FACTOR], "<f2").view(np.uint8)
        return np.concatenate([scales, halves, np.broadcast_to(own, (*scales.shape[:2], 2))], axis=-1)


def _in_halves(packed: U8) -> U8:
    """Codes of four bits as GGUF files have them: the second half of a block above the first.

    In ``packed``, ``(..., bytes of a block)``, neighbours share a byte.
    """
    codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    first, second = np.moveaxis(codes.reshape(*packed.shape[:-1], 2, -1), -2, 0)
    halves: U8 = first | second << np.uint8(4)
    return halves
