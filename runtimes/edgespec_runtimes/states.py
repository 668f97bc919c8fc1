"""States of sequences: their memory, and the places from which sequences can go on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.kept import BLOCK, LOGGED, KeptTensor
from edgespec_runtimes.kv_cache import ort_value


@dataclass(frozen=True, slots=True)
class ResumePoints:
    """The places from which the sequences of a model can go on.

    A sequence's states lie behind one of its tokens, the *place*, and the log has the rows since.

    Attributes:
        every: they can also go on from each multiple of this many tokens. It is 1 with keys and values alone,
            :data:`BLOCK` if every layer with a state keeps its inputs at the ends of blocks, else 0.
    """

    every: int

    @classmethod
    def of(cls, kept: Sequence[KeptTensor]) -> "ResumePoints":
        """The places of a model whose graph keeps these tensors."""
        states, blocks = (sum(tensor.per == per for tensor in kept) for per in ("sequence", "block"))
        if not states:
            return ANYWHERE
        return cls(BLOCK if states == blocks else 0)

    @property
    def undone(self) -> int | None:
        """The most rows of a pass that can be undone; None for all."""
        return None if self.every == 1 else LOGGED

    def floor(self, length: int) -> int:
        """The nearest place, at most ``length``, that needs no log."""
        return length // self.every * self.every if self.every else 0

    def nearest(self, length: int, behind: int) -> int:
        """The nearest place at most ``length``, where states lie behind ``behind`` tokens."""
        return length if length >= behind else self.floor(length)

    def behind(self, before: int, past: int, end: int) -> int:
        """The number of tokens behind which states lie after a pass from ``past`` to ``end``; ``before`` is
        theirs before it.

        A ring of inputs only loses its oldest rows; a pass brings other states up to ``past`` at least.
        """
        return max(before if self.every else past, end - LOGGED)


ANYWHERE: Final = ResumePoints(1)
"""The places of models with keys and values alone."""


class States:
    """The states of all sequences in NumPy's memory: ``(slots, *shape)`` each. A sequence owns a slot.

    It holds the tensors of ``layout`` that are kept per sequence.
    """

    def __init__(self, layout: Sequence[KeptTensor]) -> None:
        """Reserve nothing yet."""
        self._layout = [tensor for tensor in layout if tensor.per == "sequence"]
        self.arrays: list[npt.NDArray[Any]] = []
        self._values: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(array.nbytes for array in self.arrays)

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` sequences and keep their content; earlier bindings may be void."""
        if self.arrays and len(self.arrays[0]) == slots:
            return
        olds, self.arrays, self._values = self.arrays, [], []
        arrays = list[npt.NDArray[Any]]()  # complete or not at all: memory may lack
        for tensor in self._layout:
            array = np.zeros((slots, *tensor.shape), tensor.dtype)
            if olds:  # each goes when it is copied
                old = olds.pop(0)[:slots]
                array[: len(old)] = old
            arrays.append(array)
        self.arrays, self._values = arrays, [ort_value(array) for array in arrays]

    def of_slot(self, slot: int) -> tuple[npt.NDArray[Any], ...]:
        """The states of a slot, in the memory of passes."""
        return tuple(array[slot] for array in self.arrays)

    def bind(self, binding: Any) -> None:
        """Bind the states to a pass."""
        for tensor, value in zip(self._layout, self._values, strict=True):
            binding.bind_ortvalue_input(tensor.input, value)
            binding.bind_ortvalue_output(tensor.output, value)

    def clear(self) -> None:
        """Free the memory."""
        self.arrays.clear()
        self._values.clear()
