"""What a request changes in a row of logits before the verifier reads it: penalties, biases, masks.

One place for all of it: a row is the target's until :class:`Rows` has applied every step, and everything
that is decided at that position (greedy or by a draw, with or without a proposal) is decided by the result.
Every step is a function of the tokens before the row, so plain and speculative decoding see the same row.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgespec.decoding.sampling import Row, SamplingParams
from edgespec_models.errors import RequestError
from edgespec_runtimes.predictions import Predictions, check_best

__all__ = ["Bias", "Penalties", "RowStep", "Rows", "TokenCounts", "steps_of"]

Ids = npt.NDArray[np.int64]


class RowStep(Protocol):
    """One change of one request's rows. It may keep state, which follows the committed tokens."""

    def begin(self, tokens: Sequence[int]) -> None:
        """A round begins behind ``tokens``, all that are committed; the first round's are the prompt."""

    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        """Change ``row`` in place: the logits, float32 ``(vocab,)``, of the token behind ``drafted``.

        ``drafted`` are the proposals before it, which follow the tokens of :meth:`begin`. In a round rows
        come in order (none drafted, one, two), each once, and end where a proposal is rejected.
        """


class Rows:
    """The rows that a request's verifier reads.

    Args:
        steps: what changes them, in this order.
    """

    def __init__(self, steps: Sequence[RowStep] = ()) -> None:
        self._steps = tuple(steps)

    @property
    def changed(self) -> bool:
        """Whether rows are anything but the target's own; if not, what a device found in them holds."""
        return bool(self._steps)

    def begin(self, tokens: Sequence[int]) -> None:
        """A round begins behind ``tokens``, all that are committed."""
        for step in self._steps:
            step.begin(tokens)

    def row(self, predictions: Predictions, drafted: Sequence[int]) -> Row:
        """The row behind ``drafted``, float32 ``(vocab,)``: after every step, and a copy if there are any.

        Raises:
            EdgespecError: the row was not a distribution (it held NaN, or nothing finite).
            RequestError: the steps have left no token.
        """
        original: Row = predictions.logits[len(drafted)]
        if not self._steps:
            return original
        row: Row = original.copy()
        for step in self._steps:
            step.apply(row, drafted)
        if not np.isfinite(row.max()):
            check_best(float(original.max()))
            raise RequestError(
                "the request leaves no token that may come next: its constraint and logit_bias exclude all"
            )
        return row


def steps_of(params: SamplingParams) -> list[RowStep]:
    """What ``params`` change in the rows."""
    steps = list[RowStep]()
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        steps.append(Penalties(params))
    if params.logit_bias:
        steps.append(Bias(params))
    return steps


class TokenCounts:
    """How often each token occurs in one sequence, kept as it grows."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._slots: dict[int, int] = {}  # of every distinct token, its place in the arrays below
        self._ids = self._counts = np.empty(0, np.int64)

    def align(self, tokens: Sequence[int]) -> None:
        """Count ``tokens``: cheap if they only grew, from the first on if they changed."""
        if list(tokens[: len(self._tokens)]) != self._tokens:
            self._tokens, self._slots = [], {}
            self._ids = self._counts = np.empty(0, np.int64)
        new = list(tokens[len(self._tokens) :])
        self._tokens += new
        self._ids, self._counts = self.behind(new)
        for token in new:
            self._slots.setdefault(token, len(self._slots))

    def behind(self, drafted: Sequence[int]) -> tuple[Ids, Ids]:
        """The distinct ids of the aligned tokens and ``drafted`` behind them, and how often each occurs.

        Both int64, of one shape ``(distinct,)``; not to be changed.
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
    """The penalties for tokens that were there before: a :class:`RowStep`.

    ``repetition_penalty`` first, which looks at prompt and output and scales the model's own logits; then
    ``presence_penalty`` and ``frequency_penalty``, which look at the output alone and subtract:
    ``logit - presence_penalty - frequency_penalty * count`` for each token that occurs ``count`` times in it.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._repetition = params.repetition_penalty
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._subtracts = bool(self._presence or self._frequency)
        self._all, self._output = TokenCounts(), TokenCounts()
        self._prompt_length: int | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """See :class:`RowStep`."""
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        if self._repetition != 1.0:
            self._all.align(tokens)
        if self._subtracts:
            self._output.align(tokens[self._prompt_length :])

    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        """See :class:`RowStep`."""
        if self._repetition != 1.0:
            ids, _ = self._all.behind(drafted)
            values = row[ids]
            row[ids] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._subtracts:
            ids, counts = self._output.behind(drafted)
            row[ids] -= (self._presence + self._frequency * counts).astype(np.float32)


class Bias:
    """What ``logit_bias`` adds to the logits of single tokens: a :class:`RowStep`."""

    def __init__(self, params: SamplingParams) -> None:
        self._ids = np.array([*params.logit_bias], np.int64)
        self._biases = np.array([*params.logit_bias.values()], np.float32)

    def begin(self, tokens: Sequence[int]) -> None:
        """See :class:`RowStep`."""

    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        """See :class:`RowStep`."""
        row[self._ids] += self._biases
