"""What is trained on, and how. Needs no extra."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final, Literal

from edgespec_models.schema import Checked, within

Trained = Literal["low-rank", "scales", "gains", "all"]
"""What is trained: a low-rank change of every projection, or how far the scales and minimums of its blocks
grow, and the gains; the gains alone; every weight."""
RATES: Final[Mapping[Trained, float]] = MappingProxyType(
    {"low-rank": 1e-3, "scales": 1e-3, "gains": 3e-3, "all": 2e-5}
)
"""Learning rates: how far a step may move a number depends on what the number is."""
Guesses = dict[str, tuple[int, int]]
"""By category: how many first guesses were right, and of how many."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer in the drafter's tokens; ``tokens[start:]`` is the answer."""

    tokens: tuple[int, ...]
    start: int
    category: str = ""


@dataclass(frozen=True, slots=True)
class TrainingOptions(Checked):
    """How to train.

    ``rank`` is of the change of a matrix, with ``low-rank``. Without a ``rate`` it is what suits ``trained``.
    ``batch_tokens`` are tokens of a step, prompts counted. ``seed`` is of the order of texts and of the first
    factors.
    """

    trained: Trained = "low-rank"
    rank: Annotated[int, within(1, 256)] = 8
    rate: Annotated[float, within(0, 1)] | None = None
    passes: Annotated[int, within(1, 100)] = 1
    batch_tokens: Annotated[int, within(16, 1 << 20)] = 1024
    seed: Annotated[int, within(0, 2**31)] = 0
