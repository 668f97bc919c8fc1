"""Drafters made of drafters: choose between them, or let one go on where another stopped.

What is chosen, and where a draft ends, depends on the committed tokens and on earlier proposals only, so
the law of the output is kept (see :mod:`edgespec.verification`).
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

from edgespec.drafting.draft import Draft, Drafter
from edgespec_models.errors import RequestError

__all__ = ["Extended", "FirstConfident", "expected_accepted"]


def expected_accepted(draft: Draft) -> float:
    """How many proposals the draft itself expects to be accepted; 0 if it states no confidence.

    Token i counts if it and all before it are accepted: the sum of the running products of ``confidence``.
    """
    return math.fsum(accumulate(draft.confidence, mul))


class FirstConfident:
    """The first drafter whose draft promises enough, else the last drafter's draft, whatever it promises.

    Drafters after the chosen one are not asked; they catch up when they are. A draft that was sampled
    (it has ``probs``) is taken whatever it promises: to set it aside for the tokens it turned out to
    have would change the law of the output.

    Args:
        drafters: in the order they are asked, the cheapest first; at least one.
        min_expected: accepted tokens that a draft must expect (:func:`expected_accepted`) to be taken.

    Raises:
        RequestError: no drafters, or a negative ``min_expected``.
    """

    def __init__(self, drafters: Sequence[Drafter], *, min_expected: float) -> None:
        if not drafters:
            raise RequestError("drafters is empty; give at least one")
        if not min_expected >= 0.0:
            raise RequestError(f"min_expected is {min_expected!r}; allowed: 0 or more accepted tokens")
        self._cheaper = tuple(drafters[:-1])
        self._last = drafters[-1]
        self._min_expected = min_expected

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`~edgespec.drafting.draft.Drafter`."""
        for drafter in self._cheaper:
            draft = drafter.propose(tokens, limit)
            enough = expected_accepted(draft) >= self._min_expected or draft.probs is not None
            if draft.tokens and enough:
                return draft
        return self._last.propose(tokens, limit)


class Extended:
    """The draft of one drafter, continued by another up to the limit.

    The second sees the first one's proposals as if they were committed, and has to step back from those
    that are rejected: it should be cheap at that, as n-grams are.
    """

    def __init__(self, first: Drafter, then: Drafter) -> None:
        self._first = first
        self._then = then

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`~edgespec.drafting.draft.Drafter`."""
        start = self._first.propose(tokens, limit)
        left = limit - len(start.tokens)
        if left <= 0:
            return start
        return _joined(start, self._then.propose([*tokens, *start.tokens], left))


def _joined(start: Draft, rest: Draft) -> Draft:
    if not start.tokens or not rest.tokens:
        return rest if rest.tokens else start
    stated = bool(start.confidence) and bool(rest.confidence)
    return Draft(
        tokens=start.tokens + rest.tokens,
        probs=_joined_probs(start, rest),
        sources=start.sources + rest.sources,
        confidence=start.confidence + rest.confidence if stated else (),
    )


def _joined_probs(start: Draft, rest: Draft) -> npt.NDArray[np.float64] | None:
    sampled = start.probs if start.probs is not None else rest.probs
    if sampled is None:
        return None
    vocab = sampled.shape[1]
    return np.concatenate([_law(start, vocab), _law(rest, vocab)])


def _law(draft: Draft, vocab: int) -> npt.NDArray[np.float64]:
    """The law the proposals came from: all mass on each, if they are a function of the context."""
    if draft.probs is not None:
        return draft.probs
    law = np.zeros((len(draft.tokens), vocab), dtype=np.float64)
    law[np.arange(len(draft.tokens)), draft.tokens] = 1.0
    return law
