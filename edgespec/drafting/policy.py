"""One request's drafting: which source drafts, whether any does, and what is learned from every round."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter

from edgespec.decoding.draft import (
    NO_DRAFT,
    Asking,
    Clock,
    Draft,
    Extending,
    Remarks,
    Source,
    Step,
    Work,
    alone,
    timed,
)
from edgespec.decoding.grammar import Constraint
from edgespec.drafting.pricing import Guard, Pricing

_SMOOTHING = 0.1
_FORGETTING = 0.005
_NOTICEABLE = 0.03
_FIRST_LENGTH = 8  # tokens; a longer draft that is wrong from its beginning costs too much to be the first


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a drafter that takes time in one request: a model, or an app's own.

    ``source`` is None where drafts are not wanted or will not pay. ``ended`` is told the answer's tokens when
    the request has ended, however that came. It is not asked before the answer has ``earliest`` tokens.
    """

    source: Source | None = None
    ended: Callable[[Sequence[int]], None] = lambda answer: None
    earliest: int = 0


class Policy:
    """N-grams, which cost nothing, or the model, whichever is expected to gain more; or neither.

    What the model drafted is continued by n-grams where the rows that takes are expected to pay. The pricing,
    the guard and every source are told what rounds realised. Without a free source nothing is drafted: that
    is plain decoding, which tells the pricing what passes cost all the same.

    The first round of a request is not priced, and drafted only with an ``opening``: a drafter that has a
    prompt to read would delay the first token. A draft may be twice as long as what was accepted in the round
    before it, and eight tokens in any case: so a copy that goes on is soon drafted in long pieces, and one
    that is none has cost few rows.

    Under a grammar a token is forced where it is the only one allowed. It is certain to be accepted, so its
    confidence is 1 and it costs the row whose keys and values the target needs anyway; sources go on behind
    it. What they propose is cut where the grammar forbids it, and continued there by what it forces instead.
    The token that completes the text is never proposed: the pass that would verify it gives it anyway.

    Args:
        free: a source whose proposals cost no time worth counting.
        part: of a source that takes time and prices its own drafts.
        pricing: what verification costs; shared between requests, as is the guard.
        guard: whether sources are asked now.
        constraint: the request's grammar.
        opening: what the free source continues in the first round, perhaps nothing; None leaves that round
            undrafted.
        remarks: where the reason of a pause is written at the end.
    """

    def __init__(
        self,
        free: Extending | None = None,
        part: Part = Part(),
        *,
        pricing: Pricing,
        guard: Guard,
        constraint: Constraint | None = None,
        opening: Draft | None = None,
        remarks: Remarks | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        self._clock, self._opening = clock, opening
        self.remarks = remarks or Remarks()
        self._free, self._model, self._part = free, part.source, part
        self._all = [each for each in (free, part.source) if each is not None]
        self._pricing, self._guard, self._constraint = pricing, guard, constraint
        self._model_surplus = 0.5  # expected surplus of asking the model, tokens a round
        self._promised: float | None = None  # the surplus that the model promised this round; None: not asked
        self._asked_s: float | None = None  # what asking it took; None is what the round says
        self._begun = self._has_read = self._has_asked = self._reads = False
        self._longest = _FIRST_LENGTH
        self._answer: list[int] = []

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`~edgespec.decoding.draft.Source`."""
        return alone(self.proposing(tokens, limit), self._clock)

    def proposing(self, tokens: Sequence[int], limit: int) -> Work[Draft]:
        """See :class:`~edgespec.decoding.draft.Asking`."""
        constraint = self._constraint
        if not self._begun and self._opening is None:
            return NO_DRAFT
        if constraint is None:
            return (yield from self._choose(tokens, limit))
        constraint.begin(tokens)
        forced = self._fitting(constraint, NO_DRAFT, NO_DRAFT, limit)
        more = yield from self._choose([*tokens, *forced.tokens], limit - len(forced.tokens))
        draft = replace(self._fitting(constraint, forced, more, limit), forced=len(forced.tokens))
        return draft.head(self._pricing.keep(draft.confidence)[0])

    def observe(self, step: Step) -> None:
        """See :class:`~edgespec.decoding.draft.Source`."""
        passed = step.target_pass
        if (
            self._begun and not passed.reads
        ):  # what a piece of another's prompt adds to a pass is not known well
            rests = self._free is not None and not self._guard.allows
            self._judge_model(step)
            self._pricing.observe_pass(passed.rows, passed.seconds / step.draft.slowdown)
            self._judge_round(step)
            if rests:
                self._guard.rest()
        self._begun = True
        self._longest = max(_FIRST_LENGTH, 2 * step.accepted)
        self._answer += step.tokens
        for each in self._all:
            each.observe(step)

    def close(self) -> None:
        """See :class:`~edgespec.decoding.draft.Source`. The model is closed first, each in any case."""
        self.remarks.speculation_off_reason = self.remarks.speculation_off_reason or self._guard.reason
        with ExitStack() as closing:
            closing.callback(self._part.ended, self._answer)
            for each in self._all:
                closing.callback(each.close)

    def _choose(self, tokens: Sequence[int], limit: int) -> Work[Draft]:
        if self._free is None or limit < 1 or not self._guard.allows:
            return NO_DRAFT
        limit, self._promised = min(limit, self._longest), None
        free = self._free.propose(tokens, limit)
        if not self._begun and self._opening is not None and self._opening.tokens:
            free = self._free.extend(tokens, self._opening.head(limit), limit)
        count, surplus = self._pricing.keep(free.confidence)
        if self._model is None or not self._begun or len(self._answer) < self._part.earliest:
            return free.head(count)
        if surplus > self._model_surplus or self._model_surplus <= 0.0:
            # Time lets an old verdict on the model fade, so that it is asked again.
            self._model_surplus += _FORGETTING
            return free.head(count)
        if isinstance(self._model, Asking):
            work, sequences = self._model.proposing(tokens, limit), self._pricing.sequences
            # As if all shared its passes: none would begin to draft if it had to pay for all.
            draft, self._asked_s = yield from timed(
                work, self._clock, lambda each: each.share_s * each.requests / sequences
            )
        else:
            draft = self._model.propose(tokens, limit)
        self._reads = draft.reading
        if draft.reading:
            return free.head(count)
        _, self._promised = self._pricing.keep(draft.confidence)
        if not draft.tokens:
            return free.head(count)
        draft = self._free.extend(tokens, draft, limit)  # idle rows are filled, others if that pays
        return draft.head(self._pricing.keep(draft.confidence)[0])

    @staticmethod
    def _fitting(constraint: Constraint, forced: Draft, more: Draft, limit: int) -> Draft:
        """``forced``, then what of ``more`` the grammar allows and what it forces there."""
        tokens, sources, confidence = list(forced.tokens), list(forced.sources), list(forced.confidence)
        proposals = zip(more.tokens, more.sources, more.confidence, strict=False)
        while len(tokens) < limit:
            allowed = constraint.allowed(tokens)
            token, source, sure = next(proposals, (None, "", 0.0))
            if (only := allowed.only) is not None:
                if token != only:
                    proposals = zip((), (), (), strict=False)  # they go on behind another token
                token, source, sure = only, "grammar", 1.0
            if token is None or token not in allowed or constraint.completes([*tokens, token]):
                break
            tokens.append(token)
            sources.append(source)
            confidence.append(sure)
        return Draft(tuple(tokens), tuple(sources), tuple(confidence), more.slowdown)

    def _judge_model(self, step: Step) -> None:
        """Was it worth asking the model?"""
        promised, self._promised = self._promised, None
        if promised is None:
            return
        if self._has_read:  # the first time, it reads the prompt
            asked_s = step.drafter_s if self._asked_s is None else self._asked_s
            gain = promised - self._pricing.rate * asked_s
            self._model_surplus += _SMOOTHING * (gain - self._model_surplus)
        self._has_read = True

    def _judge_round(self, step: Step) -> None:
        """Is drafting worth its time? What is realised decides, and prices the time of rounds to come."""
        # A source that is asked costs time whether it proposes or not. Once a request that is the
        # reading of the prompt, which says nothing about the rounds to come.
        # What a grammar forces would come without the sources too.
        forced = min(step.draft.forced, len(step.tokens) - 1)
        asked = len(step.draft.tokens) > step.draft.forced or step.drafter_s > _NOTICEABLE * step.target_s
        asked &= self._free is not None
        reads_prompt = asked and not self._has_asked and step.drafter_s > step.target_s
        self._has_asked |= asked
        reads_prompt |= self._reads
        self._reads = False
        if not reads_prompt:
            self._pricing.observe_round(len(step.tokens), step.seconds)
            if asked:
                rows_s = self._pricing.rows_seconds(forced)
                self._guard.observe(len(step.tokens) - forced, step.seconds - rows_s)
