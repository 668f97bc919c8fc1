"""The weights of a correction: one hashed table, small enough to copy and to add up between processes.

Every pair of a context and a token has a slot; pairs that share one disturb each other little
(Weinberger et al. 2009, "Feature hashing for large scale multitask learning").
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["CONTEXTS", "LONGEST", "SHAPE", "SLOTS", "Table", "Weights"]

Table = npt.NDArray[np.float32]
"""float32, of the shape :data:`SHAPE`: weights, and the sums of their squared gradients."""

SLOTS: Final = 1 << 16
SHAPE: Final = (2, SLOTS)
"""Of a table: half a megabyte."""
LONGEST: Final = 3
"""Tokens of the longest context."""
CONTEXTS: Final = LONGEST + 1
"""Contexts of a token: the last three, two, one, and none."""
_RATE: Final = 0.3
_FIRST: Final = 0.25  # what the sum of squared gradients begins with
_LEAST: Final = 0.01  # gradients below it change nothing that matters
_LARGEST: Final = 1e6  # of a number in a table; where sums of several programs run away
_EVEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xBF58476D1CE4E5B9)
_HALF: Final = np.uint64(32)
_UPPER: Final = np.uint64(64 - 16)  # leaves the bits of a slot


class Weights:
    """A log-linear correction: the sum of one weight for each context that a token follows.

    Trained by gradient descent on the log loss, with rates by weight (AdaGrad: Duchi et al. 2011).

    Args:
        table: what is known; None is nothing. Copied; may hold any numbers.
    """

    def __init__(self, table: Table | None = None) -> None:
        self._table = np.zeros(SHAPE, np.float32)
        if table is not None:
            np.clip(np.nan_to_num(table), -_LARGEST, _LARGEST, out=self._table)
            np.maximum(self._table[1], 0.0, out=self._table[1])  # two programs may have taken back the same

    def copy(self) -> Table:
        """All of it."""
        return self._table.copy()

    def replace(self, table: Table) -> None:
        """Become ``table``, which is copied."""
        self._table[:] = table

    @staticmethod
    def slots(text: Sequence[int], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """Where the weights of ``tokens``, int64 ``(n,)``, behind ``text`` stand: ``(CONTEXTS, n)``."""
        mask = 2**64 - 1
        hashes = [0]
        for order, token in enumerate(reversed(text[-LONGEST:]), start=1):
            mixed = ((hashes[-1] ^ (token + order)) * int(_EVEN)) & mask
            hashes.append(mixed ^ (mixed >> 29))
        hashes += [hashes[-1]] * (CONTEXTS - len(hashes))  # at a text's beginning
        keys = np.array(hashes, np.uint64)[:, None] + tokens.astype(np.uint64) * _EVEN
        keys = (keys ^ (keys >> _HALF)) * _MIX
        slots: npt.NDArray[np.intp] = (keys >> _UPPER).astype(np.intp)
        return slots

    def read(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.float32]:
        """What is added to the logits of the tokens with these slots, float32 ``(n,)``."""
        added: npt.NDArray[np.float32] = self._table[0, slots].sum(axis=0)
        return added

    def learn(self, slots: npt.NDArray[np.intp], gradient: npt.NDArray[np.float32]) -> None:
        """Move weights along ``gradient`` of the log likelihood by their tokens' logits, float32 ``(n,)``."""
        told = np.abs(gradient) > _LEAST
        if not told.any():
            return
        at = slots[:, told]
        steps = np.broadcast_to(gradient[told], at.shape)
        weights, energy = self._table
        energy[at] += steps * steps
        weights[at] += _RATE * steps / np.sqrt(_FIRST + energy[at])
