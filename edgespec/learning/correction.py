"""A drafter that learns its user online: what the target wrote corrects the drafter's guesses.

Online distillation (OmniDraft, arXiv 2507.02659; Online Speculative Decoding, arXiv 2310.07177) in a form
that takes microseconds and no training framework: to the logits of the likeliest tokens comes a learned
weight for each token behind each of the contexts of none to three tokens. What was committed where the
drafter had guessed is the label, whether the guess was right or not.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import exp, log
from time import perf_counter
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec.learning.weights import Table, Weights
from edgespec.watch import Verdict, Watch
from edgespec_runtimes.session import Logits

__all__ = ["Correction", "Lesson"]

_WITHIN: Final = 6.0  # logits below the largest
_MOST: Final = 32  # tokens whose logits are corrected
_STAKE: Final = 8.0  # guesses; see edgespec.watch
_SAVED_S: Final = 0.05  # time for learning that is saved up, at most
_LOG = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class Lesson:
    """What was learned since it was told last.

    Attributes:
        change: what is to be added to the weights.
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


@dataclass(frozen=True, slots=True)
class _Guess:
    """One guess, to be judged.

    Attributes:
        tokens: the candidates, int64 ``(n,)``.
        slots: their weights, ``(CONTEXTS, n)``.
        law: their corrected probabilities, float32 ``(n,)``.
        plain: the drafter's own guess.
        chosen: the corrected one.
    """

    tokens: npt.NDArray[np.int64]
    slots: npt.NDArray[np.intp]
    law: npt.NDArray[np.float32]
    plain: int
    chosen: int


class Correction:
    """Corrects the guesses of one drafter for one target. One request at a time.

    Corrected guesses are a function of committed text, never of what the target would draw next, so
    verification keeps its output exact. When they were right less often than the drafter's own, by more than
    eight guesses that no gains made good, the weights are put back to the last state that had proved itself,
    by being ahead by eight, or to those it began with; if that fails too, to nothing. So what misleads always
    is gone after 18 guesses that differ from the drafter's own.

    Args:
        table: what is known; None is nothing.
        fixed: tokens that are not corrected: those whose coming is never seen, as the text's end is not.
        share: the share of time that learning may take; what it has no time for is not learned.
    """

    def __init__(
        self, table: Table | None = None, *, fixed: Collection[int] = (), share: float = 0.02
    ) -> None:
        self._weights, self._nothing = Weights(table), Weights().copy()
        self._told = self._good = self._weights.copy()
        self._fixed = tuple(fixed)
        self._share, self._allowed_s, self._last = share, 0.0, perf_counter()
        self._watch = Watch(_STAKE)
        self._before: list[int] = []  # the text before the first of the guesses
        self._guesses: list[_Guess] = []
        self._anew = False
        self._learned = 0  # tokens, since the last lesson
        self._undone = 0

    @property
    def undone(self) -> int:
        """How often what had been learned was put back."""
        return self._undone

    def guess(
        self, text: Sequence[int], logits: Logits, tokens: npt.NDArray[np.int32] | None
    ) -> tuple[int, float]:
        """What follows ``text``, the drafter's tokens so far, guessed ones included.

        Args:
            text: each guess after the first that follows a :meth:`settle` extends the text by the one before.
            logits: the drafter's, float32 ``(rows,)``.
            tokens: the token of every row, int32 ``(rows,)``; None where row i is token i.

        Returns:
            The row, and its corrected probability.
        """
        if not self._guesses:
            self._before = list(text)
        guess, row, probability = self._weigh(text, logits, tokens)
        self._guesses.append(guess)
        return row, probability

    def peek(
        self, text: Sequence[int], logits: Logits, tokens: npt.NDArray[np.int32] | None
    ) -> tuple[int, float]:
        """What :meth:`guess` would say, of any text; nothing is learned from it."""
        return self._weigh(text, logits, tokens)[1:]

    def settle(self, text: Sequence[int]) -> None:
        """Learn what ``text``, the drafter's tokens of all committed text, tells of the guesses so far."""
        started = perf_counter()
        self._allowed_s = min(self._allowed_s + self._share * (started - self._last), _SAVED_S)
        self._last = started
        guesses, self._guesses = self._guesses, []
        start = len(self._before)
        if list(text[:start]) != self._before:
            return
        for guess, token in zip(guesses, text[start:], strict=False):
            if self._allowed_s >= 0.0:
                self._learn(guess, token)
            self._judge(guess, token)  # whether there is time to learn or not
            if token != guess.chosen:
                break  # what follows a wrong guess was never judged
        self._allowed_s -= perf_counter() - started

    def lesson(self) -> Lesson | None:
        """What was learned since the last call; None if nothing."""
        now = self._weights.copy()
        change = now if self._anew else now - self._told
        if not self._anew and not change.any():
            return None
        lesson = Lesson(change, self._anew, self._learned)
        self._told, self._anew, self._learned = now, False, 0
        return lesson

    def _weigh(
        self, text: Sequence[int], logits: Logits, tokens: npt.NDArray[np.int32] | None
    ) -> tuple[_Guess, int, float]:
        """The guess, its row and its probability."""
        top = int(logits.argmax())
        scores = logits - logits[top]
        mass = float(np.exp(scores).sum())
        rows = _likely(scores)
        found = rows.astype(np.int64) if tokens is None else tokens[rows].astype(np.int64)
        slots = self._weights.slots(text, found)
        own = scores[rows]
        scores = own + self._free(found, self._weights.read(slots))
        rest = mass - float(np.exp(own).sum())  # of the rows that are not corrected
        highest = float(scores.max())
        base = max(highest, log(rest)) if rest > 0.0 else highest
        law = np.exp(scores - base)
        law /= float(law.sum()) + max(rest, 0.0) * exp(-base)
        best = int(law.argmax())
        plain = top if tokens is None else int(tokens[top])
        return _Guess(found, slots, law, plain, int(found[best])), int(rows[best]), float(law[best])

    def _learn(self, guess: _Guess, token: int) -> None:
        gradient = (guess.tokens == token) - guess.law
        self._weights.learn(guess.slots, self._free(guess.tokens, gradient))
        self._learned += 1

    def _judge(self, guess: _Guess, token: int) -> None:
        if guess.chosen == guess.plain:
            return
        verdict = self._watch.observe(int(token == guess.chosen) - int(token == guess.plain))
        if verdict is Verdict.PROVED:
            self._good = self._weights.copy()
        elif verdict is Verdict.FAILED:
            self._put_back()

    def _put_back(self) -> None:
        if not self._good.any():
            self._anew, self._learned = True, 0
        self._weights.replace(self._good)
        self._good = self._nothing
        self._undone += 1
        _LOG.warning(
            "corrected guesses were right less often than the drafter's own; what it learned is undone"
        )

    def _free(
        self, tokens: npt.NDArray[np.int64], values: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """``values``, 0 for fixed tokens; changed in place."""
        for token in self._fixed:
            values[tokens == token] = 0.0
        return values


def _likely(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Rows whose scores, 0 at most, are near the best: 32 of them at most."""
    rows = np.flatnonzero(scores > -_WITHIN)
    if len(rows) > _MOST:
        rows = rows[np.argpartition(scores[rows], -_MOST)[-_MOST:]]
    return rows
