"""The policy of one request: which source drafts, or none, and what every round teaches."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from time import perf_counter

from edgespec.decoding.draft import (
    NO_DRAFT,
    Clock,
    Draft,
    Extending,
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
_FIRST_LENGTH = 8  # tokens; a longer first draft costs too much if it is wrong from its beginning


@dataclass(slots=True)
class _Choice:
    """The choice of a round's draft, kept until its outcome is known."""

    limit: int = 0  # tokens of the draft
    forced: Draft = NO_DRAFT  # the grammar's forced tokens
    tokens: Sequence[int] = ()  # committed and forced tokens, behind which the sources go on
    most: int = 0  # tokens that the sources may propose
    free: Draft = NO_DRAFT  # the free source's draft, as far as it is worth its rows
    model_s: float = 0.0  # seconds that the model took
    promised: float | None = None  # expected surplus of the model's draft in tokens; None without one
    reads: bool = False  # the model only read a piece of the prompt


class Policy(Source):
    """Drafts with n-grams, which cost nothing, or with the model, whichever is expected to gain more, or not.

    N-grams continue the model's draft if the additional rows are expected to pay. The pricing, the guard and
    every source observe what rounds realised. Without a free source nothing is drafted. That is plain
    decoding, from which the pricing still learns what passes cost.

    The first round of a request is not priced. It is drafted only with an ``opening``, because a drafter with
    a prompt to read would delay the first token. A draft may have eight tokens, or twice as many as the last
    round accepted. So a copy that goes on is soon drafted in long pieces, and a wrong one costs few rows.

    A grammar forces a token if it allows no other. A forced token is certain to be accepted, and its row is
    needed anyway; sources go on behind it. Their proposals are cut where the grammar forbids them, and
    continued there by what it forces.

    Args:
        free: a source whose proposals take no time worth counting.
        model: a source that takes time and prices its own drafts: a model, or an app's drafter. None if such
            drafts are not wanted or will not pay.
        pricing: the costs of verification. Requests share it and the guard.
        guard: decides whether sources are asked.
        constraint: the request's grammar.
        opening: a draft that the free source continues in the first round. None leaves that round without
            drafts.
        remarks: receive the reason of a pause at the end.
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
        remarks: Remarks | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        self.remarks = remarks or Remarks()
        self._free, self._model, self._opening, self._clock = free, model, opening, clock
        self._observers = [observer for observer in (free, model) if observer is not None]
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
        with self._without_on_error():
            self._model.take(predictions, passed)
        # As if all requests shared the pass: no request would draft if it had to pay for all of it.
        shared_s = passed.share_s * passed.requests / self._pricing.sequences
        self._go_on(self._clock() - began + shared_s)

    def fail(self, error: Exception) -> None:
        with self._without_on_error():
            raise error
        self._go_on(0.0)

    def observe(self, step: Step) -> None:
        choice, self._choice, passed = self._choice, _Choice(), step.target_pass
        step = replace(step, forced=len(choice.forced.tokens))
        # How much a piece of another request's prompt adds to a pass is not known well.
        if self._written and not passed.reads:
            rests = self._free is not None and not self._guard.allows
            self._judge_model(choice)
            slowdown = 1.0 if self._model is None else self._model.slowdown
            alone_s = passed.seconds / slowdown
            self._pricing.observe_pass(passed.rows, alone_s, passed.experts, step.draft.first)
            self._judge_round(choice, step)
            if rests:
                self._guard.rest()
        self._longest = max(_FIRST_LENGTH, 2 * step.accepted)
        self._written += len(step.tokens)
        for observer in [*self._observers]:
            with self._without_on_error() if observer is self._model else nullcontext():
                observer.observe(step)

    def close(self) -> None:
        """Close all sources, the model first, even if one fails."""
        self.remarks.speculation_off_reason = self.remarks.speculation_off_reason or self._guard.reason
        with ExitStack() as closing:
            for observer in self._observers:
                closing.callback(observer.close)

    def _choose(self, choice: _Choice) -> None:
        """Ask the free source, and the model too if that is expected to gain more."""
        tokens, most = choice.tokens, min(choice.limit - len(choice.forced.tokens), self._longest)
        if self._free is None or most < 1 or not self._guard.allows:
            self._propose(NO_DRAFT)
            return
        free = self._free.propose(tokens, most)
        if not self._written and self._opening is not None and self._opening.tokens:
            free = self._free.extend(tokens, self._opening.head(most), most)
        count, surplus = self._pricing.keep(free.confidence, free.first)
        choice.most, choice.free = most, free.head(count)
        if self._model is None or self._written < max(1, self._model.earliest):
            self._propose(choice.free)
        elif surplus > self._model_surplus or self._model_surplus <= 0.0:
            # Time lets an old verdict on the model fade, so that it is asked again.
            self._model_surplus += _FORGETTING
            self._propose(choice.free)
        else:
            began = self._clock()
            with self._without_on_error():
                self._model.begin_round(tokens, most)
            self._go_on(self._clock() - began)

    @contextmanager
    def _without_on_error(self) -> Iterator[None]:
        """Close the model if the block fails, and do without it, unless it is needed."""
        try:
            yield
        except Exception as error:
            model = self._model
            if model is None or model.is_needed:
                raise
            self._model = None
            self._observers.remove(model)
            self.remarks.note_failure(error)
            with suppress(Exception):
                model.close()

    def _go_on(self, seconds: float) -> None:
        """Go on after the model drafted for ``seconds``. Its complete draft completes the round's."""
        choice, model = self._choice, self._model
        choice.model_s += seconds
        self.rows = None if model is None else model.rows
        if model is None:
            self._propose(choice.free)
        if model is None or self.rows is not None:
            return
        choice.reads, draft = model.is_reading, model.draft
        if not choice.reads:
            _, choice.promised = self._pricing.keep(draft.confidence, draft.first)
        if not draft.tokens or self._free is None:
            self._propose(choice.free)
        else:  # n-grams fill idle rows, and others if they pay
            draft = self._free.extend(choice.tokens, draft, choice.most)
            self._propose(draft.head(self._pricing.keep(draft.confidence, draft.first)[0]))

    def _propose(self, draft: Draft) -> None:
        """Propose ``draft``, as far as a grammar allows it."""
        if self._constraint is not None:
            draft = self._constraint.fit(self._choice.forced, draft, self._choice.limit)
            draft = draft.head(self._pricing.keep(draft.confidence, draft.first)[0])
        self.draft = draft

    def _judge_model(self, choice: _Choice) -> None:
        """Learn whether it was worth asking the model."""
        if choice.promised is not None and self._has_read:  # the first time, it reads the prompt
            gain = choice.promised - self._pricing.rate * choice.model_s
            self._model_surplus += _SMOOTHING * (gain - self._model_surplus)
        self._has_read |= choice.promised is not None

    def _judge_round(self, choice: _Choice, step: Step) -> None:
        """Learn from a round's gain whether drafting is worth its time; this prices later rounds."""
        # A source that is asked costs time whether it proposes or not. Once a request that is the
        # reading of the prompt, which says nothing about the rounds to come.
        drafted = len(step.draft.tokens) > step.forced or step.drafter_s > _NOTICEABLE * step.target_s
        drafted &= self._free is not None
        reads_prompt = drafted and not self._has_asked and step.drafter_s > step.target_s
        self._has_asked |= drafted
        if reads_prompt or choice.reads:
            return
        self._pricing.observe_round(len(step.tokens), step.seconds)
        if drafted:  # forced tokens would come without the sources too
            forced = min(step.forced, len(step.tokens) - 1)
            own_s = step.seconds - self._pricing.rows_seconds(forced)
            self._guard.observe(len(step.tokens) - forced, own_s)
