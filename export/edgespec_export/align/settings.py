"""What is trained on, and how. Needs no extra."""

from dataclasses import dataclass
from typing import Annotated

from edgespec_models.schema import Checked, within

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

    ``rank`` is of the change of a matrix in floats. ``batch_tokens`` are tokens of a step, prompts counted.
    ``seed`` is of the order of texts and of the first factors.
    """

    rank: Annotated[int, within(1, 256)] = 8
    rate: Annotated[float, within(0, 1)] = 1e-3
    passes: Annotated[int, within(1, 100)] = 1
    batch_tokens: Annotated[int, within(16, 1 << 20)] = 1024
    seed: Annotated[int, within(0, 2**31)] = 0
