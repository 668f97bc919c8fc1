"""One request's drafting: which source drafts, whether any does, and what is learned from every round."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter

from edgespec.decoding.draft import (
    NO_DRAFT,
    Clock,
    Draft,
    Extending,
    Observer,
    Passed,
    Remarks,
    Source,
    Step,
)
from edgespec.decoding.grammar import Constraint
from edgespec.drafting.pricing import Guard, Pricing
from edgespec_runtimes.predictions import Predictions

_SMOOTHING = 0.1
_FORGETTING = 0.005
_NOTICEABLE = 0.03
_FIRST_LENGTH = 8  # tokens; a longer draft that is wrong from its beginning costs too much to be the first


@dataclass(slots=True)
class _Choice:
    """How a round's draft is chosen; kept until what came of it is known."""

    limit: int = 0  # tokens of the draft
    forced: Draft = NO_DRAFT  # by the grammar
    tokens: Sequence[int] = ()  # that the sources go on behind: those that are committed, and forced ones
    most: int = 0  # tokens that the sources may propose
    free: Draft = NO_DRAFT  # of the free source, as far as it is worth its rows
    model_s: float = 0.0  # seconds that the model took
    promised: float | None = None  # the surplus of the model's draft, tokens; None where there is none
    reads: bool = False  # the model only read a piece of the prompt


class Policy(Source):
    """N-grams, which cost nothing, or the model, whichever is expected to gain more; or neither.

    What the model drafted is continued by n-grams where the rows that takes are expected to pay. The pricing,
    the guard and every source are told what rounds realised. Without a free source nothing is drafted: that
    is plain decoding, which tells the pricing what passes cost all the same.

    The first round of a request is not priced, and drafted only with an ``opening``: a drafter that has a
    prompt to read would delay the first token. A draft may be twice as long as what was accepted in the round
    before it, and eight tokens in any case: so a copy that goes on is soon drafted in long pieces, and one
    that is none has cost few rows.

    Under a grammar a token is forced where it is the only one allowed. It is certain to be accepted and costs
    the row whose keys and values the target needs anyway; sources go on behind it. What they propose is cut
    where the grammar forbids it, and continued there by what it forces instead.

    Args:
        free: a source whose proposals cost no time worth counting.
        model: a source that takes time and prices its own drafts, a model or an app's own; None where such
            drafts are not wanted or will not pay.
        pricing: what verification costs; shared between requests, as is the guard.
        guard: whether sources are asked now.
        constraint: the request's grammar.
        opening: what the free source continues in the first round, perhaps nothing; None leaves that round
            undrafted.
        teaching: what else is told of the rounds; closed last.
        remarks: where the reason of a pause is written at the end.
    """

    def __init__(
        self,
        free: Extending | None = None,
        model: Source | None = None,
        *,
        pricing: Pricing,
        guard: Guard,
        constraint: Constraint | None = None,
        opening: Draft | None = None,
        teaching: Observer | None = None,
        remarks: Remarks | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        self.remarks = remarks or Remarks()
        self._free, self._model, self._opening, self._clock = free, model, opening, clock
        self._observers = [observer for observer in (teaching, free, model) if observer is not None]
        self._pricing, self._guard, self._constraint = pricing, guard, constraint
        self._model_surplus = 0.5  # expected surplus of asking the model, tokens a round
        self._choice = _Choice()
        self._written, self._longest = 0, _FIRST_LENGTH  # tokens: of the answer, of the next draft
        self._has_read = self._has_asked = False

    def begin_round(self, tokens: Sequence[int], limit: int) -> None:
        self.rows, self.draft, self._choice = None, NO_DRAFT, _Choice(limit, tokens=tokens)
        if not self._written and self._opening is None:
            return
        if self._constraint is not None:
            self._constraint.begin(tokens)
            forced = self._constraint.fit(NO_DRAFT, NO_DRAFT, limit)
            self._choice = _Choice(limit, forced, [*tokens, *forced.tokens])
        self._choose(self._choice)

    def take(self, predictions: Predictions, passed: Passed) -> None:
        assert self._model is not None
        began = self._clock()
        self._model.take(predictions, passed)
        # As if all requests shared the pass: none would begin to draft if it had to pay for all.
        shared_s = passed.share_s * passed.requests / self._pricing.sequences
        self._go_on(self._model, self._clock() - began + shared_s)

    def observe(self, step: Step) -> None:
        choice, self._choice, passed = self._choice, _Choice(), step.target_pass
        step = replace(step, forced=len(choice.forced.tokens))
        # What a piece of another's prompt adds to a pass is not known well.
        if self._written and not passed.reads:
            rests = self._free is not None and not self._guard.allows
            self._judge_model(choice)
            slowdown = 1.0 if self._model is None else self._model.slowdown
            self._pricing.observe_pass(passed.rows, passed.seconds / slowdown, passed.experts)
            self._judge_round(choice, step)
            if rests:
                self._guard.rest()
        self._longest = max(_FIRST_LENGTH, 2 * step.accepted)
        self._written += len(step.tokens)
        for observer in self._observers:
            observer.observe(step)

    def close(self) -> None:
        """The model is closed first, each in any case."""
        self.remarks.speculation_off_reason = self.remarks.speculation_off_reason or self._guard.reason
        with ExitStack() as closing:
            for observer in self._observers:
                closing.callback(observer.close)

    def _choose(self, choice: _Choice) -> None:
        """Ask the free source, and the model where that is expected to gain more."""
        tokens, most = choice.tokens, min(choice.limit - len(choice.forced.tokens), self._longest)
        if self._free is None or most < 1 or not self._guard.allows:
            self._propose(NO_DRAFT)
            return
        free = self._free.propose(tokens, most)
        if not self._written and self._opening is not None and self._opening.tokens:
            free = self._free.extend(tokens, self._opening.head(most), most)
        count, surplus = self._pricing.keep(free.confidence)
        choice.most, choice.free = most, free.head(count)
        if self._model is None or self._written < max(1, self._model.earliest):
            self._propose(choice.free)
        elif surplus > self._model_surplus or self._model_surplus <= 0.0:
            # Time lets an old verdict on the model fade, so that it is asked again.
            self._model_surplus += _FORGETTING
            self._propose(choice.free)
        else:
            began = self._clock()
            self._model.begin_round(tokens, most)
            self._go_on(self._model, self._clock() - began)

    def _go_on(self, model: Source, seconds: float) -> None:
        """The model has drafted for so long; where its draft is complete, the round's is."""
        choice, self.rows = self._choice, model.rows
        choice.model_s += seconds
        if self.rows is not None:
            return
        choice.reads, draft = model.is_reading, model.draft
        if not choice.reads:
            _, choice.promised = self._pricing.keep(draft.confidence)
        if not draft.tokens or self._free is None:
            self._propose(choice.free)
        else:  # idle rows are filled, others if that pays
            draft = self._free.extend(choice.tokens, draft, choice.most)
            self._propose(draft.head(self._pricing.keep(draft.confidence)[0]))

    def _propose(self, draft: Draft) -> None:
        """The round's draft is ``draft``, where there is no grammar."""
        if self._constraint is not None:
            draft = self._constraint.fit(self._choice.forced, draft, self._choice.limit)
            draft = draft.head(self._pricing.keep(draft.confidence)[0])
        self.draft = draft

    def _judge_model(self, choice: _Choice) -> None:
        """Was it worth asking the model?"""
        if choice.promised is not None and self._has_read:  # the first time, it reads the prompt
            gain = choice.promised - self._pricing.rate * choice.model_s
            self._model_surplus += _SMOOTHING * (gain - self._model_surplus)
        self._has_read |= choice.promised is not None

    def _judge_round(self, choice: _Choice, step: Step) -> None:
        """Is drafting worth its time? What is realised decides, and prices the time of rounds to come."""
        # A source that is asked costs time whether it proposes or not. Once a request that is the
        # reading of the prompt, which says nothing about the rounds to come.
        drafted = len(step.draft.tokens) > step.forced or step.drafter_s > _NOTICEABLE * step.target_s
        drafted &= self._free is not None
        reads_prompt = drafted and not self._has_asked and step.drafter_s > step.target_s
        self._has_asked |= drafted
        if reads_prompt or choice.reads:
            return
        self._pricing.observe_round(len(step.tokens), step.seconds)
        if drafted:  # what a grammar forces would come without the sources too
            forced = min(step.forced, len(step.tokens) - 1)
            own_s = step.seconds - self._pricing.rows_seconds(forced)
            self._guard.observe(len(step.tokens) - forced, own_s)
