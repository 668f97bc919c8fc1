"""Rounding a matrix to 4 or 8 bits: how the scale and the offset of each block are chosen.

A block's codes stand for ``scale * code + offset``. What the offset may be is the format's
(:class:`~edgespec_models.weight_format.WeightFormat`): anything where a remainder carries it, ``-scale``
times an integer with zero points, ``-scale`` times the middle code without. How both are chosen is the
method's:

``rtn``      round to nearest: the block's range, nothing else.
``fit``      the ranges of ``_FIT`` in turn; for the codes each gives, scale and offset by least squares.
``k-quant``  the same with llama.cpp's twenty ranges, errors weighted by magnitude: a block's large weights
             count for more (``make_qkx2_quants`` and, where column weights are given, ``make_qkx3_quants``
             in ggml-quants.c).
``hqq``      half-quadratic quantization (Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine
             Learning Models"): no data, a norm that forgives outliers.

All are functions of one block and, but for ``rtn``, of optional column weights: the mean squares of the
activations that meet each column, so that errors count as much as they change the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgespec_export.blocks import F32, Blocks
from edgespec_models.weight_format import WeightFormat

__all__ = ["Rounding", "round_matrix"]

Rounding = Literal["rtn", "fit", "k-quant", "hqq"]
_Offset = Literal["free", "integer", "middle"]

# Shrinking the range of a block clips its extremes and makes every step finer; which is better
# differs by block, so each of these is tried.
_FIT = (1.0, 0.94, 0.88, 0.82, 0.76)
_K_QUANT = tuple(step / 10 for step in range(-10, 10))  # added to the number of steps a range has
_HQQ_STEPS = 20
_HQQ_NORM = 0.7
# The paper's beta, growing by a percent a step. It has a unit: here errors are counted in quantization
# steps, so that a matrix and its multiple get the same codes.
_HQQ_BETA, _HQQ_GROWTH = 10.0, 1.01
_ROUNDING_ERROR = np.float32(1e-6)
_LITTLE = np.float32(1e-3)  # of the mean: what a column that saw no activation counts at least


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix in blocks, ``(rows, blocks, block)``, and what its format allows.

    Attributes:
        grouped: the weights; where the offset is free, less their ``means``.
        means: float32 ``(rows, blocks)``.
        importance: what each error counts, broadcast over rows, or None where all count alike.
        offset: what offsets may be.
        top: the highest code.
    """

    grouped: F32
    means: F32
    importance: F32 | None
    offset: _Offset
    top: int

    @property
    def middle(self) -> int:
        """The code of zero in formats without zero points."""
        return (self.top + 1) // 2


@dataclass(frozen=True, slots=True)
class _Grid:
    """``scale * code + offset`` for every block, float32 ``(rows, blocks)``."""

    scales: F32
    offsets: F32

    def codes(self, matrix: _Matrix) -> F32:
        """The nearest codes, as whole float32 numbers like ``matrix.grouped``."""
        safe = _nonzero(self.scales)
        codes = matrix.grouped - self.offsets[..., None]
        codes /= safe[..., None]
        np.rint(codes, out=codes)
        return np.clip(codes, 0, matrix.top, out=codes)


def round_matrix(
    values: F32, form: WeightFormat, method: Rounding = "fit", importance: F32 | None = None
) -> Blocks:
    """Round ``values``, float32 ``(rows, columns)``, to the bits and blocks of ``form``.

    Args:
        values: finite weights; columns are a multiple of the block.
        form: 4 or 8 bits.
        method: how scales and offsets are chosen (the module's docstring).
        importance: float32 ``(columns,)``, not negative: what an error in each column counts; ``rtn``
            takes no notice.

    Returns:
        Blocks that ``form`` holds: with minimums, whole multiples of the scale unless ``form`` has
        remainders, or around the middle code without any.
    """
    grouped = values.reshape(len(values), -1, form.block)
    offset: _Offset = "middle" if not form.zero_points else "integer" if form.remainder == "drop" else "free"
    means = np.zeros(grouped.shape[:2], np.float32)
    if offset == "free":  # sums of squares keep their digits where a block lies far from zero
        means = grouped.mean(axis=-1)
        grouped = grouped - means[..., None]
    matrix = _Matrix(grouped, means, _column_weights(importance, form.block), offset, (1 << form.bits) - 1)
    codes, grid = _round(matrix, method)
    flat = codes.astype(np.uint8).reshape(values.shape)
    if offset == "middle":
        return Blocks(flat, matrix.middle, grid.scales, None, form.bits, form.block)
    return Blocks(flat, 0, grid.scales, -(grid.offsets + means), form.bits, form.block)


def _nonzero(values: F32) -> F32:
    """``values`` to divide by: ones for zeros."""
    safe: F32 = np.where(values == 0, np.float32(1), values)
    return safe


def _column_weights(importance: F32 | None, block: int) -> F32 | None:
    if importance is None:
        return None
    mean = importance.mean(dtype=np.float64)
    if not mean > 0:
        return None
    return (importance / np.float32(mean) + _LITTLE).reshape(1, -1, block).astype(np.float32)


def _round(matrix: _Matrix, method: Rounding) -> tuple[F32, _Grid]:
    whole = _range_grid(matrix, _range(matrix), 1.0, "low")
    if method == "rtn":
        return whole.codes(matrix), whole
    if method == "hqq":
        return _half_quadratic(matrix, whole)
    if method == "k-quant":
        return _search(matrix, _k_quant_weights(matrix), _k_quant_ratios(matrix), "low")
    return _search(matrix, matrix.importance, _FIT, "both")


def _range(matrix: _Matrix) -> tuple[F32, F32]:
    """The ends of each block's range; zero is within unless the offset is free."""
    low, high = matrix.grouped.min(axis=-1), matrix.grouped.max(axis=-1)
    if matrix.offset == "free":
        return low, high
    return np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))


def _range_grid(
    matrix: _Matrix, ends: tuple[F32, F32], ratio: float, clipped: Literal["low", "both"]
) -> _Grid:
    """Steps of ``ratio`` times the range over the codes, its low end or its middle where it was."""
    low, high = ends
    if matrix.offset == "middle":  # the larger end at code 0, of which there is one more than above
        scales = np.where(-low >= high, low, high) * np.float32(-ratio / matrix.middle)
        return _Grid(scales, -np.float32(matrix.middle) * scales)
    scales = (high - low) * np.float32(ratio / matrix.top)
    middle = (low + high) / 2 - scales * np.float32(matrix.top / 2)
    return _snapped(matrix, _Grid(scales, low if clipped == "low" else middle))


def _snapped(matrix: _Matrix, grid: _Grid) -> _Grid:
    """The nearest offsets that the format holds."""
    if matrix.offset != "integer":
        return grid
    safe = _nonzero(grid.scales)
    zero = np.clip(np.rint(-grid.offsets / safe), 0, matrix.top)
    return _Grid(grid.scales, -grid.scales * zero)


def _search(
    matrix: _Matrix, weights: F32 | None, ratios: Sequence[float], clipped: Literal["low", "both"]
) -> tuple[F32, _Grid]:
    """The best grid over several ranges, refitted to its codes by weighted least squares."""
    weighted = matrix.grouped if weights is None else weights * matrix.grouped
    ends = _range(matrix)
    shape = ends[0].shape
    best = _Grid(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    best_gain = np.full(shape, -1, np.float32)
    for ratio in ratios:
        grid = _range_grid(matrix, ends, ratio, clipped)
        _, gain = _refit(matrix, grid, weights, weighted)
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best = _better(better, grid, best)
    return best.codes(matrix), _refit(matrix, best, weights, weighted)[0]


def _refit(matrix: _Matrix, grid: _Grid, weights: F32 | None, weighted: F32) -> tuple[_Grid, F32]:
    """Least squares for the codes of ``grid``; and by how much it lowers the weighted sum of squares.

    With a free offset a regression of weights on codes, otherwise one through the code of zero.
    """
    codes = grid.codes(matrix)
    zero = np.zeros_like(grid.scales)
    if matrix.offset != "free":
        zero = np.rint(-grid.offsets / _nonzero(grid.scales))
        codes -= zero[..., None]
    counted = codes if weights is None else codes * weights
    square = np.einsum("rbi,rbi->rb", codes, counted)
    cross = np.einsum("rbi,rbi->rb", codes, weighted)
    if matrix.offset != "free":
        scales = cross / _nonzero(square)
        return _Grid(scales, -zero * scales), scales * cross
    total = np.float32(codes.shape[-1]) if weights is None else weights.sum(axis=-1)
    mean_code, mean = counted.sum(axis=-1) / total, weighted.sum(axis=-1) / total
    spread = square - mean_code * mean_code * total
    constant = spread <= _ROUNDING_ERROR * square
    scales = (cross - mean_code * mean * total) / np.where(constant, np.float32(1), spread)
    scales[constant] = 0
    return _Grid(scales, mean - scales * mean_code), scales * scales * spread


def _k_quant_weights(matrix: _Matrix) -> F32:
    values = matrix.grouped + matrix.means[..., None]
    squares = np.square(values)
    if matrix.importance is None:
        weights: F32 = np.abs(values, out=values)
        weights += np.sqrt(squares.mean(axis=-1, keepdims=True))
    else:
        squares += 2 * squares.mean(axis=-1, keepdims=True)
        weights = np.sqrt(squares, out=squares) * matrix.importance
    sums = weights.sum(axis=-1, keepdims=True)
    weights /= _nonzero(sums)
    weights[sums[..., 0] == 0] = 1
    return weights


def _k_quant_ratios(matrix: _Matrix) -> list[float]:
    steps = matrix.middle if matrix.offset == "middle" else matrix.top
    return [steps / (steps + more) for more in _K_QUANT]


def _half_quadratic(matrix: _Matrix, grid: _Grid) -> tuple[F32, _Grid]:
    """Alternate between what counts as outlier (the shrinkage operator) and the offsets of the rest.

    Where the offset is not free to move the scale is, in closed form too. As in the paper's code, the grid
    with the least mean absolute error is kept; here by block.
    """
    best, best_error = grid, np.full(grid.scales.shape, np.inf, np.float32)
    beta = _HQQ_BETA
    for _ in range(_HQQ_STEPS):
        safe = _nonzero(grid.scales)
        codes, zero = grid.codes(matrix), -grid.offsets / safe
        misses = matrix.grouped / safe[..., None] + zero[..., None] - codes
        error = _mean(np.abs(misses), matrix.importance) * np.abs(grid.scales)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best = _better(better, grid, best)
        misses -= _shrink(misses, beta)
        if matrix.offset == "free":
            moved = _mean(misses, matrix.importance)
            grid = _Grid(grid.scales, grid.offsets + grid.scales * moved)
        else:
            zero = np.rint(zero)
            codes -= zero[..., None]
            square = _mean(codes * codes, matrix.importance)
            growth = _mean(codes * misses, matrix.importance) / _nonzero(square)
            grid = _Grid(grid.scales * (1 + growth), -zero * grid.scales * (1 + growth))
        beta *= _HQQ_GROWTH
    return best.codes(matrix), best


def _better(better: npt.NDArray[np.bool_], grid: _Grid, best: _Grid) -> _Grid:
    return _Grid(np.where(better, grid.scales, best.scales), np.where(better, grid.offsets, best.offsets))


def _mean(values: F32, weights: F32 | None) -> F32:
    mean: F32
    if weights is None:
        mean = values.mean(axis=-1)
        return mean
    mean = np.einsum("rbi,rbi->rb", values, np.broadcast_to(weights, values.shape))
    mean /= weights.sum(axis=-1)
    return mean


def _shrink(errors: F32, beta: float) -> npt.NDArray[np.float32]:
    """The proximal step of ``|e|^p / beta``: equation 6 of the paper, ``p`` 0.7."""
    size = np.abs(errors)
    floor = np.float32(np.finfo(np.float32).tiny)
    less = np.exp(np.log(np.maximum(size, floor)) * np.float32(_HQQ_NORM - 1)) / np.float32(beta)
    return np.copysign(np.maximum(size - less, np.float32(0)), errors)
