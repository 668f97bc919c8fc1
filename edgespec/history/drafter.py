"""Proposals from the user's earlier answers."""

import logging
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, cast

from edgespec.decoding.draft import Remarks, Round
from edgespec.drafting.copies import Finder, Proposal
from edgespec.drafting.pricing import Guard
from edgespec.history.memory import Match, Memory
from edgespec.history.passages import Cutter, Turn

_LOG = logging.getLogger("edgespec")


class TurnContext(NamedTuple):
    """What makes a turn of an answer: its prompt (:class:`Turn`), ids that end it, and the bytes of
    tokens.
    """

    prompt: bytes
    ends: Container[int]
    text_of: Callable[[Sequence[int]], bytes]


class HistoryFinder(Finder):
    """Finds what followed the text's last tokens in earlier answers.

    It serves one request. Its proposals are judged by the committed tokens, from any source, and it learns
    the answer.

    If its proposals cost more than they bring, it proposes nothing for the rest of the request, and longer if
    the guard says so. It then learns anew how far each kind of match can be trusted, from verdicts since the
    proposals last proved their worth. Meanwhile what it would have proposed is judged.

    ``memory`` is refreshed here, and when a request ends. ``guard`` watches what proposals bring; requests
    share it, and None watches nothing. ``remarks`` receive the reason why trust was taken back. With
    ``context`` the whole turn is kept.
    """

    source = "history"
    judges_more = True

    def __init__(
        self,
        memory: Memory,
        guard: Guard | None = None,
        *,
        remarks: Remarks | None = None,
        problem: Callable[[], str | None] = lambda: None,
        context: TurnContext | None = None,
    ) -> None:
        super().__init__()
        self._memory, self._guard = memory, guard
        self._remarks, self._problem = remarks or Remarks(), problem
        self._failed = False  # whether proposals lost in this request
        self._cutter = Cutter()
        self._context, self._answer = context, list[int]()
        memory.refresh()

    @property
    def pauses(self) -> bool:
        return self._failed or (self._guard is not None and not self._guard.allows)

    def find(self, context: Sequence[int], ahead: int) -> Match | None:
        return self._memory.find(context)

    def probability(self, proposal: Proposal) -> float:
        return self._memory.estimate(cast(Match, proposal))

    def judge(self, proposal: Proposal, right: bool) -> None:
        self._memory.judge(cast(Match, proposal), right)

    def observe(self, round_: Round) -> None:
        if self._guard is not None:
            self._watch(round_, self._guard)
        self._memory.learn(self._cutter.push(round_.tokens))
        self._answer += round_.tokens

    def close(self) -> None:
        """Learn the end of the answer, and index it now rather than before the next request."""
        self._memory.learn(self._cutter.finish())
        self._memory.refresh()
        if self._context is not None and self._answer:
            prompt, ends, text_of = self._context
            ended = self._answer[-1] in ends
            self._memory.keep(Turn(prompt, text_of(self._answer[: len(self._answer) - ended]), ended))
        self._remarks.history_problem = self._problem()

    def _watch(self, round_: Round, guard: Guard) -> None:
        """Watch whether proposals are worth their rows."""
        finding = guard.observe_source(self.source, round_)
        if finding == "proved":
            self._memory.trust()
        elif finding == "failed":
            self._memory.distrust()
            self._failed, reason = True, f"n-grams of the history: {guard.reason}"
            self._remarks.rolled_back = (reason,)
            _LOG.warning("%s; they pause, and trust in them begins anew", reason)
