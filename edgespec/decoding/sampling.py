"""From the logits of one position to the token there: temperature, truncation, one draw.

Randomness is a function of the seed and the position, never of how many draws came before, so a seeded
generation is the same with and without speculation as long as the proposals are deterministic.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import numpy as np
import numpy.typing as npt

from edgespec_models.schema import check_fields, within
from edgespec_runtimes.predictions import check_best

__all__ = [
    "Row",
    "SamplingParams",
    "distribution",
    "draw",
    "resolve_seed",
    "uniform",
    "TOKEN_LANE",
    "ACCEPT_LANE",
    "DRAFT_LANE",
]

Row = npt.NDArray[np.float32]
Distribution = npt.NDArray[np.float64]

TOKEN_LANE: Final = 0
"""Lane of :func:`uniform` that draws a position's token, from the target's distribution or its residual."""
ACCEPT_LANE: Final = 1
"""Lane that decides whether the token proposed for a position is accepted."""
DRAFT_LANE: Final = 2
"""Lane a sampling drafter draws its proposals from; it must never use another."""

_BLOCK: Final = 1024
_TokenId = Annotated[int, within(0, 2**31 - 1)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the token is chosen at every position. The defaults are greedy decoding.

    Attributes:
        temperature: divides the logits; 0 is greedy, and then the truncations below have no effect.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: then keep the fewest most likely tokens whose share of the rest is at least top_p
            (Holtzman et al. 2020); 1 keeps all.
        min_p: then keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
        repetition_penalty: for tokens of the prompt and the output so far, positive logits are divided
            by it and others multiplied (Keskar et al. 2019, section 4.1); 1 is off.
        presence_penalty: subtracted from the logits of tokens that the output so far holds; 0 is off.
        frequency_penalty: subtracted from the logit of a token once for each time that the output so far
            holds it; 0 is off. Both are OpenAI's, and the prompt does not count.
        logit_bias: what is added to the logits of single tokens, by id; -100 as good as excludes one.
        seed: makes a sampled generation repeatable; None takes a fresh one for each request.

    Raises:
        RequestError: a field out of its range.
    """

    temperature: Annotated[float, within(0, 100, " (0 is greedy)")] = 0.0
    top_k: Annotated[int, within(0, 2**31 - 1, " (0 is no limit)")] = 0
    top_p: Annotated[float, within(None, 1, " (1 is off)", above=0)] = 1.0
    min_p: Annotated[float, within(0, 1, " (0 is off)")] = 0.0
    repetition_penalty: Annotated[float, within(0.1, 10, " (1 is off)")] = 1.0
    presence_penalty: Annotated[float, within(-2, 2, " (0 is off)")] = 0.0
    frequency_penalty: Annotated[float, within(-2, 2, " (0 is off)")] = 0.0
    logit_bias: Mapping[_TokenId, Annotated[float, within(-100, 100)]] = field(default_factory=dict)
    seed: Annotated[int, within(0, 2**64 - 1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def resolve_seed(params: SamplingParams) -> int:
    """The seed of one request: the given one, or a fresh one from the operating system."""
    return params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")


def distribution(row: Row, params: SamplingParams) -> Distribution:
    """The distribution of the next token, float64 ``(vocab,)``, summing to 1.

    The order is that of transformers: penalties (:mod:`rows`), temperature, top-k, top-p, min-p.
    (llama.cpp puts the temperature last by default: at a temperature of 1 the two agree.) Each truncation
    keeps every token that ties with the last one it keeps, so the result does not depend on a sort order.

    Args:
        row: logits, float32 ``(vocab,)``, after penalties and masks; it is not changed.
        params: temperature 0 gives all mass to the most likely token, the lowest id of equals.

    Raises:
        EdgespecError: the row is not a distribution (it holds NaN, or nothing finite).
    """
    probs = np.zeros(len(row), dtype=np.float64)
    top = float(row.max())
    check_best(top)
    if params.greedy:
        probs[int(row.argmax())] = 1.0
        return probs
    kept: npt.NDArray[np.int64] | slice = slice(None)
    if 0 < params.top_k < len(row):
        kept = np.flatnonzero(row >= np.partition(row, -params.top_k)[-params.top_k])
    weights = row[kept].astype(np.float64)
    weights -= top
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        weights /= params.temperature
    np.exp(weights, out=weights)
    # The heaviest weight is 1: a min-p cutoff is min_p itself.
    cutoff = max(_nucleus_cutoff(weights, params.top_p), params.min_p)
    if cutoff > 0.0:
        weights[weights < cutoff] = 0.0
    weights /= weights.sum()
    probs[kept] = weights
    return probs


def _nucleus_cutoff(weights: Distribution, top_p: float) -> float:
    """The least weight that top-p keeps, 0 if it keeps all. Weights are in [0, 1]. Linear in their number."""
    if top_p >= 1.0:
        return 0.0
    total = float(weights.sum())
    target = top_p * total
    # All tokens below the floor weigh less than (1 - top_p) of the total together, so what top-p keeps
    # is among the others.
    candidates = weights[weights >= (1.0 - top_p) * total / len(weights)]
    # The exponent and four bits of the mantissa order positive floats coarsely: only the bucket in which
    # the share is reached has to be sorted.
    buckets = candidates.view(np.int64) >> 48
    mass = np.bincount(buckets, weights=candidates).astype(np.float64)
    below, above = _locate(mass[::-1], target, side="left")
    inside = np.sort(candidates[buckets == len(mass) - 1 - below])[::-1]
    last, _ = _locate(inside, target - above, side="left")
    return float(inside[last])


def uniform(seed: int, position: int, lane: int = TOKEN_LANE) -> float:
    """A number in [0, 1) that depends on the arguments alone: one word of Philox4x64 (Salmon et al. 2011).

    ``position`` is the index in the sequence of the token it serves; different lanes are independent.
    """
    # The generator counts up from the lowest word: the words above it keep calls apart.
    words = np.random.Philox(counter=[0, lane, position, 0], key=seed)
    return float(int(words.random_raw()) >> 11) * 2.0**-53


def draw(probs: Distribution, u: float) -> int:
    """The token at ``u`` in [0, 1) of the cumulative ``probs``, float64 ``(vocab,)``, of any positive sum.

    A token of probability zero is never returned, whatever the rounding.
    """
    # Two levels, because a running sum over the whole vocabulary is ten times dearer than block sums.
    sums = np.add.reduceat(probs, np.arange(0, len(probs), _BLOCK))
    target = u * float(sums.sum())
    block, before = _locate(sums, target, side="right")
    start = block * _BLOCK
    token, _ = _locate(probs[start : start + _BLOCK], max(0.0, target - before), side="right")
    return start + token


def _locate(masses: Distribution, target: float, *, side: Literal["left", "right"]) -> tuple[int, float]:
    """The first index where the cumulative mass reaches (left) or passes (right) ``target``, and the mass
    before that index.

    Passing, the index has mass of its own. Where rounding leaves none, it is the last that has.
    """
    cumulative = np.cumsum(masses)
    index = int(np.searchsorted(cumulative, target, side=side))
    if index == len(masses):
        index = int(np.flatnonzero(masses)[-1])
    return index, float(cumulative[index - 1]) if index else 0.0
