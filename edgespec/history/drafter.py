"""Proposals from the user's earlier answers, alone and together with proposals from the text."""

import logging
from collections.abc import Callable, Container, Sequence
from math import prod
from typing import Final, NamedTuple

from edgespec.decoding.draft import NO_DRAFT, Draft, Remarks, Step
from edgespec.drafting.pricing import Guard
from edgespec.history.memory import MAX_N, Match, Memory
from edgespec.history.passages import Cutter, Turn

_SOURCE: Final = "history"
_LOG = logging.getLogger("edgespec")


class TurnContext(NamedTuple):
    """What makes a turn of an answer: its prompt (:class:`Turn`), ids that end it, and the bytes of
    tokens.
    """

    prompt: bytes
    ends: Container[int]
    text_of: Callable[[Sequence[int]], bytes]


class HistoryDrafter:
    """Proposes what followed the text's last tokens in earlier answers.

    It serves one request. It judges its proposals by the committed tokens, from any source, and learns the
    answer.

    If its proposals cost more than they bring, it proposes nothing for the rest of the request, and longer if
    the guard says so. It then learns anew how far each kind of match can be trusted, from verdicts since the
    proposals last proved their worth. Meanwhile it goes on judging what it would have proposed.

    ``memory`` is refreshed here, and when a request ends. ``guard`` watches what proposals bring; requests
    share it, and None watches nothing. ``remarks`` receive the reason why trust was taken back. A draft ends
    before the token whose product of confidences falls below ``stop_below``. With ``context`` the whole turn
    is kept.
    """

    def __init__(
        self,
        memory: Memory,
        guard: Guard | None = None,
        *,
        remarks: Remarks | None = None,
        problem: Callable[[], str | None] = lambda: None,
        stop_below: float = 0.15,
        context: TurnContext | None = None,
    ) -> None:
        self._memory, self._guard, self._stop_below = memory, guard, stop_below
        self._remarks, self._problem = remarks or Remarks(), problem
        self._failed = False  # whether proposals lost in this request
        self._cutter = Cutter()
        self._context, self._answer = context, list[int]()
        self._considered: list[tuple[tuple[int, ...], list[Match]]] = []  # behind others' proposals
        memory.refresh()

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        draft = self._draft(tokens, NO_DRAFT, limit)
        return NO_DRAFT if self._pauses else draft

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        if self._pauses:
            return draft
        return draft.then(self._draft(tokens, draft, limit - len(draft.tokens)))

    def observe(self, step: Step) -> None:
        self._judge(step.judged)
        if self._guard is not None:
            self._watch(step, self._guard)
        self._memory.learn(self._cutter.push(step.tokens))
        self._answer += step.tokens

    def close(self) -> None:
        """Learn the end of the answer, and index it now rather than before the next request."""
        self._memory.learn(self._cutter.finish())
        self._memory.refresh()
        if self._context is not None and self._answer:
            prompt, ends, text_of = self._context
            ended = self._answer[-1] in ends
            self._memory.keep(Turn(prompt, text_of(self._answer[: len(self._answer) - ended]), ended))
        self._remarks.history_problem = self._problem()

    @property
    def _pauses(self) -> bool:
        return self._failed or (self._guard is not None and not self._guard.allows)

    def _watch(self, step: Step, guard: Guard) -> None:
        """Watch whether proposals are worth their rows."""
        finding = guard.observe_source(_SOURCE, step)
        if finding == "proved":
            self._memory.trust()
        elif finding == "failed":
            self._memory.distrust()
            self._failed, reason = True, f"n-grams of the history: {guard.reason}"
            self._remarks.rolled_back = (reason,)
            _LOG.warning("%s; they pause, and trust in them begins anew", reason)

    def _draft(self, tokens: Sequence[int], before: Draft, limit: int) -> Draft:
        context = [*tokens[-MAX_N:], *before.tokens]
        considered: list[Match] = []
        drafted: list[int] = []
        confidence: list[float] = []
        reached = prod(before.confidence)
        while len(drafted) < limit and (match := self._memory.find(context)) is not None:
            considered.append(match)
            estimate = self._memory.estimate(match)
            reached *= estimate
            if reached < self._stop_below:
                break  # judged as well, or what fell out of favour would never be tried again
            drafted.append(match.token)
            confidence.append(estimate)
            context.append(match.token)
        if considered:
            self._considered.append((before.tokens, considered))
        if not drafted:
            return NO_DRAFT
        return Draft(tuple(drafted), (_SOURCE,) * len(drafted), tuple(confidence))

    def _judge(self, came: tuple[int, ...]) -> None:
        judged: set[int] = set()
        for head, proposals in self._considered:
            offset = len(head)
            if came[:offset] != head:
                continue
            for position, (match, token) in enumerate(zip(proposals, came[offset:], strict=False), offset):
                if position not in judged:
                    judged.add(position)
                    self._memory.judge(match, match.token == token)
                if match.token != token:
                    break  # what follows a rejected token was never judged
        self._considered = []
