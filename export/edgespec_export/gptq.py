"""GPTQ: rounding a matrix so that its output changes least, not its weights.

Frantar, Ashkboos, Hoefler & Alistarh 2022, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", algorithm 1. Columns are rounded one after the other; what each rounding does to
the output is made up for by the columns that are still to come, as far as their activations go together.
That is written in the second moments of the activations, ``H = mean(x x^T)``, which come from a calibration
text (:mod:`edgespec_export.activations`).

Moments of a short text hold much that is true of this text only. They are shrunk towards their diagonal
before use, and a wide input is taken in spans whose moments a short text can determine; across spans
nothing is made up for. Columns keep their order: blocks share a scale.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgespec_export.blocks import F32, Blocks
from edgespec_export.rounding import round_matrix
from edgespec_models.weight_format import WeightFormat

__all__ = ["factor", "round_for"]

F64 = npt.NDArray[np.float64]

_SHRINKAGE = 0.2  # of the moments between different columns
_DAMPING = 0.1  # of the mean over columns, added to every column's own moment
_SMALL = 128
_AT_ONCE = 16  # columns rounded before the rest of their block is updated


def factor(moments: F32) -> F32:
    """What the rounding needs to know of the activations.

    Args:
        moments: second moments of the columns of a span, ``(span, span)``, symmetric.

    Returns:
        Float32 upper triangular ``U`` with ``U^T U`` the inverse of the moments, shrunk and damped.
    """
    steady = moments.astype(np.float64)
    own = np.diag(steady).copy()
    mean = float(own.mean())
    if not mean > 0:  # nothing was seen: all columns count alike
        return np.eye(len(own), dtype=np.float32)
    steady *= 1 - _SHRINKAGE
    np.fill_diagonal(steady, own + _DAMPING * mean)
    # H = R R^T with R upper triangular is Cholesky's decomposition from the last column to the first.
    upper = np.linalg.cholesky(steady[::-1, ::-1])[::-1, ::-1]
    return _inverse(upper.astype(np.float64)).astype(np.float32)


def _inverse(upper: F64) -> F64:
    """The inverse of an upper triangular matrix, half by half: an eighth of what a general one takes."""
    size = len(upper)
    if size <= _SMALL:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    inverse = np.zeros_like(upper)
    inverse[:half, :half] = _inverse(upper[:half, :half])
    inverse[half:, half:] = _inverse(upper[half:, half:])
    inverse[:half, half:] = -inverse[:half, :half] @ upper[:half, half:] @ inverse[half:, half:]
    return inverse


def round_for(values: F32, form: WeightFormat, factors: Sequence[F32]) -> Blocks:
    """Round ``values``, float32 ``(rows, columns)``, to the bits and blocks of ``form``.

    Args:
        values: finite weights; columns are a multiple of the block.
        form: 4 or 8 bits.
        factors: of the spans the columns are divided into, in order (:func:`factor`); each is a multiple
            of the block.
    """
    waiting = np.ascontiguousarray(values.T)
    blocks, start = [], 0
    for upper in factors:
        span = waiting[start : start + len(upper)]
        for at in range(0, len(upper), form.block):
            until = at + form.block
            rounded, errors = _round_block(span[at:until], form, upper[at:until, at:until])
            blocks.append(rounded)
            span[until:] -= upper[at:until, until:].T @ errors
        start += len(upper)
    return _beside_each_other(blocks)


def _round_block(columns: F32, form: WeightFormat, upper: F32) -> tuple[Blocks, F32]:
    """Round a block's ``columns``, ``(block, rows)``, which are overwritten.

    The scale and offset are those that ``fit`` finds for the columns as they are when their turn comes.

    Returns:
        The block, and for each column what remains to be made up for, like ``columns``.
    """
    own = np.diag(upper)
    grid = round_matrix(np.ascontiguousarray(columns.T), form, "fit", own**-2)
    scales = grid.scales[:, 0]
    offsets = grid.zero * -scales if grid.minimums is None else -grid.minimums[:, 0]
    steps = np.float32(1) / np.where(scales == 0, np.float32(1), scales)
    codes, errors = np.empty(columns.shape, np.uint8), np.empty_like(columns)
    top = (1 << form.bits) - 1
    for first in range(0, len(columns), _AT_ONCE):
        last = first + _AT_ONCE
        for j in range(first, last):
            code = np.clip(np.rint((columns[j] - offsets) * steps), 0, top)
            codes[j] = code
            errors[j] = (columns[j] - (code * scales + offsets)) / own[j]
            columns[j + 1 : last] -= upper[j, j + 1 : last, None] * errors[j]
        columns[last:] -= upper[first:last, last:].T @ errors[first:last]
    return replace(grid, codes=np.ascontiguousarray(codes.T)), errors


def _beside_each_other(blocks: Sequence[Blocks]) -> Blocks:
    """One matrix of ``blocks``, a column of blocks each."""
    first, minimums = blocks[0], [block.minimums for block in blocks if block.minimums is not None]
    return replace(
        first,
        codes=np.concatenate([block.codes for block in blocks], axis=1),
        scales=np.concatenate([block.scales for block in blocks], axis=1),
        minimums=np.concatenate(minimums, axis=1) if minimums else None,
    )
