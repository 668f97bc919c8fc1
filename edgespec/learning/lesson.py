"""What a drafter learned, as a history keeps it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["ROWS", "Lesson", "Table"]

Table = npt.NDArray[np.float32]
"""float32 ``(ROWS, gains)``: by how much gains differ from the bundle's, and the two means of Adam."""

ROWS = 3
"""Of a table."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What was learned since it was told last. Lessons of several programs add up.

    Attributes:
        change: what is to be added to the table.
        anew: whether to nothing: what was known had turned out wrong.
        tokens: committed tokens that it was learned from.
    """

    change: Table
    anew: bool
    tokens: int = 0

    def after(self, earlier: "Lesson | None") -> "Lesson":
        """Both, one after the other."""
        if earlier is None or self.anew:
            return self
        return Lesson(earlier.change + self.change, earlier.anew, earlier.tokens + self.tokens)
