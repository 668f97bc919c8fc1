"""What is known of a passage: how often it was written, how its tokens fared as proposals; what it is worth.

The same rules hold in memory and in the file, so they stand here once. Time is counted in learned tokens:
a history that is not used for a month forgets nothing.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from edgespec.history.passages import Passage

__all__ = ["CLASS_MEMORY", "HALF_LIFE", "Entry", "Tally", "decayed", "total_tokens"]

HALF_LIFE: Final = 65_536
"""Learned tokens after which a use counts half."""
CLASS_MEMORY: Final = 256.0
"""Judged proposals of a class after which an observation has lost most (1 - 1/e) of its weight."""
_MOST_JUDGED: Final = 32  # verdicts remembered for one token
_PATIENCE: Final = 4.0  # verdicts that a passage is trusted for in advance


def decayed(value: float, tokens: int) -> float:
    """What is left of ``value`` after so many learned tokens."""
    return value * math.exp2(-max(tokens, 0) / HALF_LIFE)


@dataclass(slots=True)
class Entry:
    """A passage with its history.

    Attributes:
        passage: its tokens.
        uses: how often it was written, and how much of it was proposed and accepted, decayed until ``at``.
        at: the clock (learned tokens of the scope) when ``uses`` was last brought up to date.
        right: by token of the body, verdicts that found it right as a proposal, decayed; a byte each.
        wrong: the same, wrong.
    """

    passage: Passage
    uses: float = 0.0
    at: int = 0
    right: bytearray = field(default_factory=bytearray)
    wrong: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if not self.right:
            self.right = bytearray(len(self.passage.body))
            self.wrong = bytearray(len(self.passage.body))

    def use(self, count: float, now: int) -> None:
        """Count ``count`` uses (a part of the passage is a part of a use) at the clock ``now``."""
        self.uses = decayed(self.uses, now - self.at) + count
        self.at = max(self.at, now)

    def judge(self, offset: int, *, right: int, wrong: int) -> None:
        """Count verdicts on a token of the body; old ones fade, so that a token may recover."""
        yes, no = self.right[offset] + right, self.wrong[offset] + wrong
        while yes + no > _MOST_JUDGED:
            yes, no = yes // 2, no // 2
        self.right[offset], self.wrong[offset] = yes, no

    def worth(self, now: int) -> float:
        """What decides who stays: decayed uses, less the more its proposals misled."""
        right, wrong = sum(self.right), sum(self.wrong)
        trust = (right + _PATIENCE) / (right + wrong + _PATIENCE)
        return decayed(self.uses, now - self.at) * trust


@dataclass(slots=True)
class Tally:
    """Judged proposals and how many of them were right, both decayed by what came after them."""

    right: float = 0.0
    judged: float = 0.0

    def add(self, right: float, judged: float) -> None:
        """Append ``judged`` verdicts, ``right`` of them in favour."""
        keep = (1.0 - 1.0 / CLASS_MEMORY) ** judged
        self.right = keep * self.right + right
        self.judged = keep * self.judged + judged


def total_tokens(entries: Iterable[Entry]) -> int:
    """Tokens that entries take."""
    return sum(len(entry.passage) for entry in entries)
