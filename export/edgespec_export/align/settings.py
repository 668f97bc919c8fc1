"""Texts and settings of training. Needs no extra."""

from dataclasses import dataclass
from typing import Annotated

from edgespec_models.schema import Checked, within

Guesses = dict[str, tuple[int, int]]
"""The number of right first guesses, and of all, by category."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer in the drafter's tokens; ``tokens[start:]`` is the answer."""

    tokens: tuple[int, ...]
    start: int
    category: str = ""


@dataclass(frozen=True, slots=True)
class TrainingOptions(Checked):
    """How to train.

    Attributes:
        rank: The rank of the change of each matrix in floats.
        rate: The learning rate.
        passes: The number of passes over the answers.
        batch_tokens: Tokens of a step, with prompts.
        seed: Seed for the order of the answers and the initial weights.
    """

    rank: Annotated[int, within(1, 256)] = 8
    rate: Annotated[float, within(0, 1)] = 1e-3
    passes: Annotated[int, within(1, 100)] = 1
    batch_tokens: Annotated[int, within(16, 1 << 20)] = 1024
    seed: Annotated[int, within(0, 2**31)] = 0
