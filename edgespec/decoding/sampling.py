"""From a row of logits to the token there: penalties and masks, temperature, truncation, one draw.

A row is changed by functions of the tokens before it, so plain and speculative decoding see the same rows.
A random number depends on the seed and the position, never on the number of earlier draws. So a seeded answer
is the same with and without speculation, if proposals are deterministic.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from edgespec_models.errors import RequestError
from edgespec_models.schema import Checked, within
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.predictions import Predictions, check_best

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Distribution = npt.NDArray[np.float64]

_BLOCK: Final = 1024
_TokenId = Annotated[int, within(0, 2**31 - 1)]


@dataclass(frozen=True, slots=True)
class SamplingParams(Checked):
    """How the token is chosen at every position. The defaults are greedy decoding.

    Attributes:
        temperature: Divides the logits. With 0 decoding is greedy, and ``top_k``, ``top_p`` and ``min_p``
            have no effect.
        top_k: Sample from the k most likely tokens. 0 is no limit.
        top_p: Then sample from the fewest most likely tokens whose probabilities sum to at least this share
            (Holtzman et al. 2020). 1 is off.
        min_p: Then sample from tokens that are at least this many times as likely as the most likely one. 0
            is off.
        repetition_penalty: For tokens of the prompt and the answer: positive logits are divided by it, others
            are multiplied (Keskar et al. 2019, section 4.1). 1 is off.
        presence_penalty: Subtracted from the logit of each token that the answer contains already. The prompt
            does not count. 0 is off.
        frequency_penalty: Subtracted from the logit of a token once for each time that the answer contains
            it. The prompt does not count. 0 is off.
        logit_bias: Numbers that are added to the logits of tokens, by token id. -100 nearly excludes a token.
        seed: Makes sampling repeatable. Without it each request takes a new one.

    Raises:
        RequestError: a field out of its range.
    """

    temperature: Annotated[float, within(0, 100, " (0 is greedy)")] = 0.0
    top_k: Annotated[int, within(0, 2**31 - 1, " (0 is no limit)")] = 0
    top_p: Annotated[float, within(0, 1, " (1 is off)")] = 1.0
    min_p: Annotated[float, within(0, 1, " (0 is off)")] = 0.0
    repetition_penalty: Annotated[float, within(0.1, 10, " (1 is off)")] = 1.0
    presence_penalty: Annotated[float, within(-2, 2, " (0 is off)")] = 0.0
    frequency_penalty: Annotated[float, within(-2, 2, " (0 is off)")] = 0.0
    logit_bias: Mapping[_TokenId, Annotated[float, within(-100, 100)]] = field(default_factory=dict)
    seed: Annotated[int, within(-(2**63), 2**64 - 1)] | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def changes_rows(self) -> bool:
        """Whether there are penalties or biases."""
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.logit_bias)


class RowStep(Protocol):
    """One change of a request's rows. It may keep state that follows the committed tokens."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Begin a round behind ``tokens``, all committed tokens. In the first round they are the prompt."""

    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        """Change ``row`` in place: the logits, float32 ``(vocab,)``, of the token behind ``drafted``.

        ``drafted`` are the proposals between the tokens of :meth:`begin` and this row. The rows of a round
        come in order (none drafted, one, two), each once, until a proposal is rejected.
        """


def changed_row(predictions: Predictions, drafted: Sequence[int], steps: Sequence[RowStep]) -> Row:
    """The row behind ``drafted``, float32 ``(vocab,)``, after every step; a copy if there are steps.

    This row alone decides the token at its position, greedily or by a draw.

    Raises:
        EdgespecError: the row is no distribution (it holds NaN, or nothing finite).
        RequestError: the steps allow no token.
    """
    original: Row = predictions.logits[len(drafted)]
    if not steps:
        return original
    row: Row = original.copy()
    for step in steps:
        step.apply(row, drafted)
    if not np.isfinite(row.max()):
        check_best(float(original.max()))
        raise RequestError(
            "the request allows no next token: its response_format and logit_bias, with the tokens that the "
            "model never writes, exclude all; relax one of them"
        )
    return row


class TokenCounts:
    """Counts of each token in one sequence, updated as it grows."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._slots: dict[int, int] = {}  # place of each distinct token in the arrays below
        self._ids = self._counts = np.empty(0, np.int64)

    def align(self, tokens: Sequence[int]) -> None:
        """Count ``tokens``. Only new ones are counted, unless earlier ones changed."""
        if list(tokens[: len(self._tokens)]) != self._tokens:
            self._tokens, self._slots = [], {}
            self._ids = self._counts = np.empty(0, np.int64)
        new = list(tokens[len(self._tokens) :])
        self._tokens += new
        self._ids, self._counts = self.behind(new)
        for token in new:
            self._slots.setdefault(token, len(self._slots))

    def behind(self, drafted: Sequence[int]) -> tuple[Ids, Ids]:
        """The distinct ids of the aligned tokens and of ``drafted``, and the count of each.

        Both are int64 of shape ``(distinct,)``. Do not change them.
        """
        if not drafted:
            return self._ids, self._counts
        counts, others = self._counts.copy(), list[int]()
        for token in drafted:
            slot = self._slots.get(token)
            if slot is None:
                others.append(token)
            else:
                counts[slot] += 1
        more = Counter(others)
        ids = np.append(self._ids, np.array([*more], np.int64))
        return ids, np.append(counts, np.array([*more.values()], np.int64))


class Penalties:
    """The :class:`RowStep` of the sampling parameters, in this order.

    ``repetition_penalty`` scales the logits of tokens in prompt and output. ``presence_penalty`` and
    ``frequency_penalty`` look at the output alone: a token that occurs ``count`` times gets
    ``logit - presence_penalty - frequency_penalty * count``. ``logit_bias`` is added.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._subtracts = bool(params.presence_penalty or params.frequency_penalty)
        self._all, self._output = TokenCounts(), TokenCounts()
        self._biased = np.array([*params.logit_bias], np.int64)
        self._biases = np.array([*params.logit_bias.values()], np.float32)
        self._prompt_length: int | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        if self._params.repetition_penalty != 1.0:
            self._all.align(tokens)
        if self._subtracts:
            self._output.align(tokens[self._prompt_length :])

    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        params = self._params
        if params.repetition_penalty != 1.0:
            ids, _ = self._all.behind(drafted)
            values = row[ids]
            penalty = params.repetition_penalty
            row[ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._subtracts:
            ids, counts = self._output.behind(drafted)
            row[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
        row[self._biased] += self._biases


class Spelled:
    """A :class:`RowStep` that has the answer begin with the bytes ``held``, in any tokens (token healing)."""

    def __init__(self, tokenizer: Tokenizer, held: bytes, prompt_length: int) -> None:
        self._tokenizer, self._held, self._prompt_length = tokenizer, held, prompt_length

    def begin(self, tokens: Sequence[int]) -> None:
        answer = tokens[self._prompt_length :][: len(self._held)]
        self._rest = self._held[len(self._tokenizer.bytes_of(answer)) :]

    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        if rest := self._rest and self._rest[len(self._tokenizer.bytes_of(drafted)) :]:
            allowed = self._tokenizer.spelling(rest)
            values = row[allowed]
            row[:] = -np.inf
            row[allowed] = values


class Suppressed:
    """A :class:`RowStep` for the tokens that a model's files exclude from answers.

    The answer's first token is the one behind ``prompt_length`` tokens.
    """

    def __init__(self, special: SpecialTokens, prompt_length: int) -> None:
        self.always = frozenset(special.suppressed)
        self._first, self._prompt_length = frozenset(special.suppressed_first), prompt_length
        self._words = special.bad_words
        self._longest = max(map(len, self._words), default=0)

    def begin(self, tokens: Sequence[int]) -> None:
        self._length = len(tokens)
        self._end = tuple(tokens[-self._longest :]) if self._longest else ()

    def behind(self, drafted: Sequence[int]) -> frozenset[int]:
        """The tokens that may not stand behind ``drafted``."""
        text = (*self._end, *drafted)
        last = {word[-1] for word in self._words if text[len(text) - len(word) + 1 :] == word[:-1]}
        begins = self._length + len(drafted) == self._prompt_length
        return self.always | last | (self._first if begins else frozenset())

    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        row[[*self.behind(drafted)]] = -np.inf


def distribution(row: Row, params: SamplingParams) -> Distribution:
    """The distribution of the next token, float64 ``(vocab,)``, summing to 1.

    The order is the same as in transformers: penalties, temperature, top-k, top-p, min-p. (llama.cpp applies
    the temperature last by default; the two agree at a temperature of 1.) Each truncation keeps all tokens
    that tie with the last kept one, so the result does not depend on a sort order.

    Args:
        row: logits, float32 ``(vocab,)``, after penalties and masks. They are not changed.
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
    # All tokens below the floor together weigh less than (1 - top_p) of the total, so what top-p keeps
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


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the arguments alone: one word of Philox4x64 (Salmon et al. 2011).

    ``position`` is the index of the token that the number decides.
    """
    # The generator counts up from the lowest word: a word above it keeps positions apart.
    words = np.random.Philox(counter=[0, 0, position, 0], key=seed)
    return float(int(words.random_raw()) >> 11) * 2.0**-53


def draw(probs: Distribution, u: float) -> int:
    """The token at ``u`` in [0, 1) of the cumulative ``probs``, float64 ``(vocab,)``, of any positive sum.

    A token of probability zero is never returned, whatever the rounding.
    """
    # Two levels, because a running sum over the whole vocabulary takes ten times as long as block sums.
    sums = np.add.reduceat(probs, np.arange(0, len(probs), _BLOCK))
    target = u * float(sums.sum())
    block, before = _locate(sums, target, side="right")
    start = block * _BLOCK
    token, _ = _locate(probs[start : start + _BLOCK], max(0.0, target - before), side="right")
    return start + token


def _locate(masses: Distribution, target: float, *, side: Literal["left", "right"]) -> tuple[int, float]:
    """The first index where the cumulative mass reaches (left) or exceeds (right) ``target``, and the mass
    before it.

    With "right" the index has a positive mass. If rounding leaves no such index, it is the last that has.
    """
    cumulative = np.cumsum(masses)
    index = int(np.searchsorted(cumulative, target, side=side))
    if index == len(masses):
        index = int(np.flatnonzero(masses)[-1])
    return index, float(cumulative[index - 1]) if index else 0.0


def log_probabilities(row: Row) -> Distribution:
    """The logarithm of the probability of every token, in nats, float64 ``(vocab,)``.

    These are the target's own, before penalties, masks and temperature. If passes give equal bits for any
    number of rows, plain and speculative answers have the same ones.
    """
    values = row.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return values


def most_likely(logprobs: Distribution, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` most likely tokens with their log probabilities, the likeliest first, ties by id."""
    if not count:
        return ()
    count = min(count, len(logprobs))
    least = np.partition(logprobs, -count)[-count]
    likely = np.flatnonzero(logprobs >= least)
    likely = likely[np.argsort(-logprobs[likely], kind="stable")][:count]
    return tuple(zip(likely.tolist(), logprobs[likely].tolist(), strict=True))
