"""The gains of a drafter's normalizations, which training changes, in one vector; and lessons of training.

They are few (35,000 in a model of 135 million weights), stand in the graph as floats whatever the format of
the matrices, and cost a pass nothing. Tuning them alone recovers most of what tuning everything does (Zhao et
al. 2024, "Tuning LayerNorm in Attention", arXiv 2312.11420).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.learning.layer_math import F32

Table = npt.NDArray[np.float32]
"""float32 ``(ROWS, gains)``: the differences of gains from the bundle's, and the two means of Adam."""

ROWS = 3
"""The number of rows of a table."""


class Gains:
    """Names and places of the gains in a vector, from those in the bundle, in the graph's order."""

    def __init__(self, stored: Mapping[str, F32]) -> None:
        self._places: dict[str, slice] = {}
        at = 0
        for name, gain in stored.items():
            self._places[name] = slice(at, at + gain.size)
            at += gain.size
        self.stored: F32 = np.concatenate([gain.ravel() for gain in stored.values()])
        """The gains of the bundle, which were not trained."""

    def __len__(self) -> int:
        return len(self.stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def part(self, vector: F32, name: str) -> F32:
        """The gain ``name`` in ``vector``: a view."""
        return vector[self._places[name]]

    def named(self, vector: F32) -> dict[str, F32]:
        """``vector`` as the graph's inputs: views."""
        return {name: vector[place] for name, place in self._places.items()}


class Example(NamedTuple):
    """A text to learn from, in the drafter's tokens; ``tokens[start:]`` is the answer."""

    tokens: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Lesson:
    """The training since the last lesson. Lessons of several programs add up.

    ``anew`` begins from nothing, because earlier lessons had turned out wrong. ``tokens`` is the number of
    committed tokens that were learned from.
    """

    change: Table
    anew: bool
    tokens: int = 0

    def after(self, earlier: "Lesson | None") -> "Lesson":
        """The sum of an earlier lesson and this one."""
        if earlier is None or self.anew:
            return self
        return Lesson(earlier.change + self.change, earlier.anew, earlier.tokens + self.tokens)
