"""Rounding a matrix to 4 or 8 bits: the scale and the offset of each block, by least squares.

A code means ``scale * code + offset``. The offset is free in formats with minimums (:class:`WeightFormat`),
else ``-scale`` times the middle code. Several shares of the block's range are tried. Scale and offset are
fitted to the codes of each, and the best fit is taken.
"""

from dataclasses import dataclass

import numpy as np

from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.files.blocks import F32, Blocks

_Grid = tuple[F32, F32]  # scale and offset of every block, (rows, blocks): scale * code + offset

# Shrinking the range of a block clips its extremes and makes every step finer; which is better
# differs by block, so each of these is tried.
_SHARES = (1.0, 0.94, 0.88, 0.82, 0.76)
_ROUNDING_ERROR = np.float32(1e-6)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix in blocks, ``(rows, blocks, block)``, and the freedoms of its format.

    Attributes:
        grouped: the weights, minus their ``means`` if offsets are free.
        means: float32 ``(rows, blocks)``.
        free: whether offsets may be anything.
        top: the highest code.
    """

    grouped: F32
    means: F32
    free: bool
    top: int

    @property
    def middle(self) -> int:
        """The code of zero if offsets are not free."""
        return (self.top + 1) // 2

    def codes(self, grid: _Grid) -> F32:
        """The nearest codes, as whole float32 numbers like ``grouped``."""
        scales, offsets = grid
        codes = self.grouped - offsets[..., None]
        codes /= _nonzero(scales)[..., None]
        np.rint(codes, out=codes)
        return np.clip(codes, 0, self.top, out=codes)


def round_matrix(values: F32, form: WeightFormat) -> Blocks:
    """Round ``values``, finite float32 ``(rows, columns)``, to the bits and blocks of ``form``.

    The blocks have minimums if ``form`` has them, else they lie around the middle code.
    """
    grouped = values.reshape(len(values), -1, form.block)
    means = np.zeros(grouped.shape[:2], np.float32)
    if form.minimums:  # keeps the digits of sums of squares if a block lies far from zero
        means = grouped.mean(axis=-1)
        grouped = grouped - means[..., None]
    matrix = _Matrix(grouped, means, form.minimums, (1 << form.bits) - 1)
    codes, (scales, offsets) = _search(matrix)
    flat = codes.astype(np.uint8).reshape(values.shape)
    if not form.minimums:
        return Blocks(flat, matrix.middle, scales, None, form.bits, form.block)
    return Blocks(flat, 0, scales, -(offsets + means), form.bits, form.block)


def _nonzero(values: F32) -> F32:
    """``values`` to divide by: ones for zeros."""
    safe: F32 = np.where(values == 0, np.float32(1), values)
    return safe


def _range(matrix: _Matrix) -> tuple[F32, F32]:
    """The ends of each block's range; zero is within unless the offset is free."""
    low, high = matrix.grouped.min(axis=-1), matrix.grouped.max(axis=-1)
    if matrix.free:
        return low, high
    return np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))


def _share_of_range(matrix: _Matrix, ends: tuple[F32, F32], share: float) -> _Grid:
    """Steps of ``share`` times the range over the codes, with the same middle."""
    low, high = ends
    if not matrix.free:  # the larger end at code 0: there is one code more below the middle
        scales = np.where(-low >= high, low, high) * np.float32(-share / matrix.middle)
        return scales, -np.float32(matrix.middle) * scales
    scales = (high - low) * np.float32(share / matrix.top)
    return scales, (low + high) / 2 - scales * np.float32(matrix.top / 2)


def _search(matrix: _Matrix) -> tuple[F32, _Grid]:
    """The codes and the grid of the best share, refitted to its codes."""
    ends = _range(matrix)
    shape = ends[0].shape
    best = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    best_gain = np.full(shape, -1, np.float32)
    for share in _SHARES:
        grid = _share_of_range(matrix, ends, share)
        _, gain = _refit(matrix, grid)
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best = np.where(better, grid[0], best[0]), np.where(better, grid[1], best[1])
    return matrix.codes(best), _refit(matrix, best)[0]


def _refit(matrix: _Matrix, grid: _Grid) -> tuple[_Grid, F32]:
    """Least squares for the codes of ``grid``, and the decrease of the sum of squares.

    With a free offset it is a regression of weights on codes, otherwise one through the code of zero.
    """
    codes = matrix.codes(grid)
    if not matrix.free:
        codes -= np.float32(matrix.middle)
    square = np.einsum("rbi,rbi->rb", codes, codes)
    cross = np.einsum("rbi,rbi->rb", codes, matrix.grouped)
    if not matrix.free:
        scales = cross / _nonzero(square)
        return (scales, -np.float32(matrix.middle) * scales), scales * cross
    total = np.float32(codes.shape[-1])
    mean_code, mean = codes.sum(axis=-1) / total, matrix.grouped.sum(axis=-1) / total
    spread = square - mean_code * mean_code * total
    constant = spread <= _ROUNDING_ERROR * square
    scales = (cross - mean_code * mean * total) / np.where(constant, np.float32(1), spread)
    scales[constant] = 0
    return (scales, mean - scales * mean_code), scales * scales * spread
