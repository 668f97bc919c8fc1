"""What is trained: the gains of a drafter's normalizations, all in one vector.

They are few (35,000 in a model of 135 million weights), stand in the graph as floats whatever the format of
the matrices, and cost a pass nothing. Tuning them alone recovers most of what tuning everything does (Zhao et
al. 2024, "Tuning LayerNorm in Attention", arXiv 2312.11420).
"""

from collections.abc import Iterator, Mapping

import numpy as np

from edgespec.learning.layer_math import F32

__all__ = ["Gains"]


class Gains:
    """Names and places of the gains in a vector.

    Args:
        stored: each gain as the bundle has it, by its name in the graph, in the graph's order.
    """

    def __init__(self, stored: Mapping[str, F32]) -> None:
        self._places: dict[str, slice] = {}
        at = 0
        for name, gain in stored.items():
            self._places[name] = slice(at, at + gain.size)
            at += gain.size
        self.stored: F32 = np.concatenate([gain.ravel() for gain in stored.values()])
        """As the bundle has them."""

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
