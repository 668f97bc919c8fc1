"""Proposals from what the user's earlier answers said, alone and together with those of the text."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from edgespec.drafting.draft import NO_DRAFT, Draft, Extending
from edgespec.drafting.guard import Guard
from edgespec.profile.index import MAX_N, Found
from edgespec.profile.memory import Memory
from edgespec.profile.passages import Cutter
from edgespec.watch import Verdict

__all__ = ["BestOf", "ProfileDrafter"]

_SOURCE: Final = "profile"
_LOG = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class _Considered:
    """Proposals that were considered behind ``start`` committed tokens and ``head``, proposals of others."""

    start: int
    head: tuple[int, ...]
    found: list[Found]


class ProfileDrafter:
    """Proposes what followed, in earlier answers, the longest run of tokens that the text ends with.

    It serves one request: it judges its proposals by what is committed, whoever drafted it, and learns
    the answer (:meth:`commit`, :meth:`finish`).

    Where its proposals cost more than they bring (:meth:`observe`) it proposes nothing for the rest of the
    request, and longer if the guard says so, and how far which kind of match can be trusted is learned anew,
    beginning with what was found since they last proved their worth. Meanwhile it goes on judging what it
    would have proposed.

    Args:
        memory: what was learned; refreshed here, and not again until the next request.
        guard: watches what its proposals bring; shared between requests. None watches nothing.
        stop_below: a draft ends before the token that would be reached and accepted with less than
            this probability (the product of the confidences so far).

    Attributes:
        rolled_back: why trust in it was taken back in this request, in words; empty if it was not.
    """

    def __init__(self, memory: Memory, guard: Guard | None = None, *, stop_below: float = 0.15) -> None:
        self._memory, self._guard, self._stop_below = memory, guard, stop_below
        self._pauses = False  # this round
        self._cutter = Cutter()
        self._considered: list[_Considered] = []
        self.rolled_back: tuple[str, ...] = ()
        memory.refresh()

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`~edgespec.drafting.draft.Drafter`. ``tokens`` grows from call to call."""
        self._judge(tokens)
        allowed = self._guard is None or self._guard.allows()
        self._pauses = bool(self.rolled_back) or not allowed
        draft = self._draft(tokens, NO_DRAFT, limit)
        return NO_DRAFT if self._pauses else draft

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        """See :class:`~edgespec.drafting.draft.Extending`."""
        if self._pauses:
            return draft
        return draft.then(self._draft(tokens, draft, limit - len(draft.tokens)))

    def observe(self, draft: Draft, accepted: int) -> None:
        """Tell what was verified, whoever drafted it, and how many tokens of it were accepted.

        What its own tokens brought is how many of them were accepted; what they cost, the time that the pass
        took longer for their rows.
        """
        places = [place for place, source in enumerate(draft.sources) if source == _SOURCE]
        if self._guard is None or not places or self.rolled_back:
            return
        right = sum(place < accepted for place in places)
        verdict = self._guard.observe_rows(right, len(places), rows=1 + len(draft.tokens))
        if verdict is Verdict.PROVED:
            self._memory.trust()
        elif verdict is Verdict.FAILED:
            self._memory.distrust()
            self.rolled_back = (f"n-grams of the profile: {self._guard.reason}",)
            _LOG.warning("%s; they pause, and trust in them begins anew", *self.rolled_back)

    def commit(self, tokens: Sequence[int]) -> None:
        """Learn the next tokens of the answer."""
        self._memory.learn(self._cutter.push(tokens))

    def finish(self) -> None:
        """Learn the end of the answer, and make it findable now rather than in front of the next one."""
        self._memory.learn(self._cutter.finish())
        self._memory.refresh()

    def _draft(self, tokens: Sequence[int], before: Draft, limit: int) -> Draft:
        context = [*tokens[-MAX_N:], *before.tokens]
        considered: list[Found] = []
        drafted: list[int] = []
        confidence: list[float] = []
        reached = prod(before.confidence)
        while len(drafted) < limit and (found := self._memory.find(context)) is not None:
            considered.append(found)
            estimate = self._memory.estimate(found)
            reached *= estimate
            if reached < self._stop_below:
                break  # judged as well, or what fell out of favour would never be tried again
            drafted.append(found.token)
            confidence.append(estimate)
            context.append(found.token)
        if considered:
            self._considered.append(_Considered(len(tokens), before.tokens, considered))
        if not drafted:
            return NO_DRAFT
        return Draft(tuple(drafted), None, (_SOURCE,) * len(drafted), tuple(confidence))

    def _judge(self, tokens: Sequence[int]) -> None:
        judged: set[int] = set()
        for considered in self._considered:
            came = tuple(tokens[considered.start :])
            offset = len(considered.head)
            if came[:offset] != considered.head:
                continue
            for position, (found, token) in enumerate(
                zip(considered.found, came[offset:], strict=False), start=offset
            ):
                if position not in judged:
                    judged.add(position)
                    self._memory.judge(found, found.token == token)
                if found.token != token:
                    break  # what follows a rejected token was never judged
        self._considered = []


class BestOf:
    """N-grams of the text, gone on with by the profile, or the profile alone: whichever promises more tokens.

    Args:
        near: drafts from the text; its drafts are deterministic.
        far: drafts from earlier answers.
    """

    def __init__(self, near: Extending, far: ProfileDrafter) -> None:
        self._near, self._far = near, far

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`~edgespec.drafting.draft.Drafter`."""
        near, far = self._near.propose(tokens, limit), self._far.propose(tokens, limit)
        if near.tokens:
            near = self._far.extend(tokens, near, limit)
        return max(near, far, key=_expected)

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        """See :class:`~edgespec.drafting.draft.Extending`."""
        drafts = (source.extend(tokens, draft, limit) for source in (self._near, self._far))
        return max(drafts, key=_expected)


def _expected(draft: Draft) -> float:
    """Expected number of accepted proposals."""
    expected, reached = 0.0, 1.0
    for probability in draft.confidence:
        reached *= probability
        expected += reached
    return expected
