"""Rounding a matrix to 4 or 8 bits: how the scale and the offset of each block are chosen.

A block's codes stand for ``scale * code + offset``. The offset is anything in formats with minimums
(:class:`WeightFormat`), and ``-scale`` times the middle code in those without.
How both are chosen is the method's:

``rtn``      round to nearest: the block's range, nothing else.
``fit``      the ranges of ``_FIT`` in turn; for the codes each gives, scale and offset by least squares.
``k-quant``  the same with llama.cpp's twenty ranges, errors weighted by magnitude: a block's large weights
             count for more (``make_qkx2_quants`` in ggml-quants.c).

All are functions of one block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgespec_export.sources.blocks import F32, Blocks
from edgespec_models.bundles.weight_format import WeightFormat

Rounding = Literal["rtn", "fit", "k-quant"]
_Grid = tuple[F32, F32]  # scale and offset of every block, (rows, blocks): scale * code + offset

# Shrinking the range of a block clips its extremes and makes every step finer; which is better
# differs by block, so each of these is tried.
_FIT = (1.0, 0.94, 0.88, 0.82, 0.76)
_K_QUANT = tuple(step / 10 for step in range(-10, 10))  # added to the number of steps a range has
_ROUNDING_ERROR = np.float32(1e-6)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix in blocks, ``(rows, blocks, block)``, and what its format allows.

    Attributes:
        grouped: the weights; where offsets are free, less their ``means``.
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
        """The code of zero where offsets are not free."""
        return (self.top + 1) // 2

    def codes(self, grid: _Grid) -> F32:
        """The nearest codes, as whole float32 numbers like ``grouped``."""
        scales, offsets = grid
        codes = self.grouped - offsets[..., None]
        codes /= _nonzero(scales)[..., None]
        np.rint(codes, out=codes)
        return np.clip(codes, 0, self.top, out=codes)


def round_matrix(values: F32, form: WeightFormat, method: Rounding = "fit") -> Blocks:
    """Round ``values``, finite float32 ``(rows, columns)``, to the bits and blocks of ``form``.

    The blocks have minimums where ``form`` has them, and lie around the middle code elsewhere.
    """
    grouped = values.reshape(len(values), -1, form.block)
    means = np.zeros(grouped.shape[:2], np.float32)
    if form.minimums:  # sums of squares keep their digits where a block lies far from zero
        means = grouped.mean(axis=-1)
        grouped = grouped - means[..., None]
    matrix = _Matrix(grouped, means, form.minimums, (1 << form.bits) - 1)
    codes, (scales, offsets) = _round(matrix, method)
    flat = codes.astype(np.uint8).reshape(values.shape)
    if not form.minimums:
        return Blocks(flat, matrix.middle, scales, None, form.bits, form.block)
    return Blocks(flat, 0, scales, -(offsets + means), form.bits, form.block)


def _nonzero(values: F32) -> F32:
    """``values`` to divide by: ones for zeros."""
    safe: F32 = np.where(values == 0, np.float32(1), values)
    return safe


def _round(matrix: _Matrix, method: Rounding) -> tuple[F32, _Grid]:
    if method == "rtn":
        whole = _range_grid(matrix, _range(matrix), 1.0, "low")
        return matrix.codes(whole), whole
    if method == "k-quant":
        return _search(matrix, _k_quant_weights(matrix), _k_quant_ratios(matrix), "low")
    return _search(matrix, None, _FIT, "both")


def _range(matrix: _Matrix) -> tuple[F32, F32]:
    """The ends of each block's range; zero is within unless the offset is free."""
    low, high = matrix.grouped.min(axis=-1), matrix.grouped.max(axis=-1)
    if matrix.free:
        return low, high
    return np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))


def _range_grid(
    matrix: _Matrix, ends: tuple[F32, F32], ratio: float, clipped: Literal["low", "both"]
) -> _Grid:
    """Steps of ``ratio`` times the range over the codes, its low end or its middle where it was."""
    low, high = ends
    if not matrix.free:  # the larger end at code 0, of which there is one more than above
        scales = np.where(-low >= high, low, high) * np.float32(-ratio / matrix.middle)
        return scales, -np.float32(matrix.middle) * scales
    scales = (high - low) * np.float32(ratio / matrix.top)
    middle = (low + high) / 2 - scales * np.float32(matrix.top / 2)
    return scales, low if clipped == "low" else middle


def _search(
    matrix: _Matrix, weights: F32 | None, ratios: Sequence[float], clipped: Literal["low", "both"]
) -> tuple[F32, _Grid]:
    """The best grid over several ranges, refitted to its codes by weighted least squares."""
    weighted = matrix.grouped if weights is None else weights * matrix.grouped
    ends = _range(matrix)
    shape = ends[0].shape
    best = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    best_gain = np.full(shape, -1, np.float32)
    for ratio in ratios:
        grid = _range_grid(matrix, ends, ratio, clipped)
        _, gain = _refit(matrix, grid, weights, weighted)
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best = np.where(better, grid[0], best[0]), np.where(better, grid[1], best[1])
    return matrix.codes(best), _refit(matrix, best, weights, weighted)[0]


def _refit(matrix: _Matrix, grid: _Grid, weights: F32 | None, weighted: F32) -> tuple[_Grid, F32]:
    """Least squares for the codes of ``grid``; and by how much it lowers the weighted sum of squares.

    With a free offset a regression of weights on codes, otherwise one through the code of zero.
    """
    codes = matrix.codes(grid)
    if not matrix.free:
        codes -= np.float32(matrix.middle)
    counted = codes if weights is None else codes * weights
    square = np.einsum("rbi,rbi->rb", codes, counted)
    cross = np.einsum("rbi,rbi->rb", codes, weighted)
    if not matrix.free:
        scales = cross / _nonzero(square)
        return (scales, -np.float32(matrix.middle) * scales), scales * cross
    total = np.float32(codes.shape[-1]) if weights is None else weights.sum(axis=-1)
    mean_code, mean = counted.sum(axis=-1) / total, weighted.sum(axis=-1) / total
    spread = square - mean_code * mean_code * total
    constant = spread <= _ROUNDING_ERROR * square
    scales = (cross - mean_code * mean * total) / np.where(constant, np.float32(1), spread)
    scales[constant] = 0
    return (scales, mean - scales * mean_code), scales * scales * spread


def _k_quant_weights(matrix: _Matrix) -> F32:
    weights: F32 = np.abs(matrix.grouped + matrix.means[..., None])
    weights += np.sqrt(np.square(weights).mean(axis=-1, keepdims=True))
    sums = weights.sum(axis=-1, keepdims=True)
    weights /= _nonzero(sums)
    weights[sums[..., 0] == 0] = 1
    return weights


def _k_quant_ratios(matrix: _Matrix) -> list[float]:
    steps = matrix.top if matrix.free else matrix.middle
    return [steps / (steps + more) for more in _K_QUANT]
