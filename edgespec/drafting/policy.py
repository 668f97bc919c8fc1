"""The policy of one request: which source drafts, or none, and what every round teaches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter

from edgespec.decoding.draft import NO_DRAFT, Clock, Draft, Passed, Remarks, Round
from edgespec.decoding.grammar import Constraint
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.pricing import Guard, Prices, Pricing
from edgespec.drafting.source import Extending, Observer, Source, Wanted
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows

_SMOOTHING = 0.1
_FORGETTING = 0.005
_NOTICEABLE = 0.03
_FIRST_LENGTH = 8  # tokens; a longer first draft costs too much if it is wrong from its beginning


@dataclass(slots=True)
class _Choice:
    """The choice of a round's draft, kept until its outcome is known."""

    prices: Prices
    limit: int = 0  # tokens of the draft
    forced: Draft = NO_DRAFT  # the grammar's forced tokens
    tokens: Sequence[int] = ()  # committed and forced tokens, behind which the sources go on
    most: int = 0  # tokens that the sources may propose
    free: Draft = NO_DRAFT  # the free source's draft, as far as it is worth its rows
    model_s: float = 0.0  # seconds that the model took
    promised: float | None = None  # expected surplus of the model's draft in tokens; None without one
    reads: bool = False  # the model only read a piece of the prompt


class Policy:
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

    A draft is priced wherever it grows: by the model, by n-grams behind that, by a grammar. A source that
    fails is closed, the statistics say so, and the request goes on without it.

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
        self._free, self._model, self._opening, self._clock = free or CopyDrafter(), model, opening, clock
        self._observers: list[Observer] = [source for source in (free, model) if source is not None]
        self._drafts = free is not None
        self._pricing, self._guard, self._constraint = pricing, guard, constraint
        self._model_surplus = 0.5  # expected surplus of asking the model, tokens a round
        self._choice = _Choice(pricing.at())
        self._written, self._longest = 0, _FIRST_LENGTH  # tokens: of the answer, of the next draft
        self._has_read = self._has_asked = False

    def begin(self, tokens: Sequence[int], limit: int, prices: Prices) -> Rows | Draft:
        """Begin a draft of at most ``limit`` tokens; returns the rows that the model wants, or the draft."""
        choice = self._choice = _Choice(prices, limit, tokens=tokens)
        if not self._written and self._opening is None:
            return NO_DRAFT
        if self._constraint is not None:
            self._constraint.begin(tokens)
            choice.forced = self._constraint.fit(NO_DRAFT, NO_DRAFT, limit)
            choice.tokens = [*tokens, *choice.forced.tokens]
        return self._choose(choice)

    def take(self, predictions: Predictions, passed: Passed) -> Rows | Draft:
        """Go on with the predictions for the rows that :meth:`begin` or this returned."""
        began = self._clock()
        wanted = self._ask(lambda model: model.take(predictions, passed))
        # As if all requests shared the pass: no request would draft if it had to pay for all of it.
        shared_s = passed.unshared_s / self._choice.prices.load.sequences
        return self._go_on(wanted, self._clock() - began + shared_s)

    def fail(self, error: Exception) -> Rows | Draft:
        """Go on without the model, whose pass over the wanted rows failed."""
        if self._model is not None:
            self._leave_out(self._model, error)
        return self._go_on(NO_DRAFT, 0.0)

    def observe(self, round_: Round) -> None:
        """Learn from a round that has ended, and tell all sources."""
        passed = round_.target_pass
        choice, self._choice = self._choice, _Choice(self._pricing.at())
        prices = self._pricing.at(passed.load)
        round_ = replace(round_, forced=len(choice.forced.tokens))
        # How much a piece of another request's prompt adds to a pass is not known well.
        if self._written and not passed.reads:
            rests = self._drafts and not self._guard.allows
            self._judge_model(choice, prices)
            self._pricing.observe_pass(
                passed.rows, passed.seconds, passed.experts, round_.draft.first, passed.load
            )
            self._judge_round(choice, round_, self._pricing.at(passed.load))
            if rests:
                self._guard.rest()
        self._longest = max(_FIRST_LENGTH, 2 * round_.accepted)
        self._written += len(round_.tokens)
        for observer in [*self._observers]:
            with self._optional(observer):
                observer.observe(round_)

    def close(self) -> None:
        """Close all sources, the model first, even if one fails."""
        self.remarks.speculation_off_reason = self.remarks.speculation_off_reason or self._guard.reason
        observers, self._observers = self._observers, []
        with ExitStack() as closing:
            for observer in observers:
                closing.callback(self._close, observer)

    def _close(self, source: Observer) -> None:
        with self._optional(source):
            source.close()

    def _choose(self, choice: _Choice) -> Rows | Draft:
        """Ask the free source, and the model too if that is expected to gain more."""
        tokens, most = choice.tokens, min(choice.limit - len(choice.forced.tokens), self._longest)
        if not self._drafts or most < 1 or not self._guard.allows:
            return self._fitting(NO_DRAFT)
        opening = NO_DRAFT if self._written or self._opening is None else self._opening.head(most)
        free = NO_DRAFT
        with self._optional(self._free):
            free = self._free.propose(tokens, most)
            free = self._free.extend(tokens, opening, most) if opening.tokens else free
        count, surplus = choice.prices.keep(free.confidence, free.first)
        choice.most, choice.free = most, free.head(count)
        if self._model is None or self._written < max(1, self._model.earliest):
            return self._fitting(choice.free)
        if surplus > self._model_surplus or self._model_surplus <= 0.0:
            # Time lets an old verdict on the model fade, so that it is asked again.
            self._model_surplus += _FORGETTING
            return self._fitting(choice.free)
        began = self._clock()
        wanted = self._ask(lambda model: model.begin(tokens, most, choice.prices))
        return self._go_on(wanted, self._clock() - began)

    def _ask(self, of: Callable[[Source], Wanted]) -> Wanted:
        """What the model wants; an empty draft if it fails."""
        model = self._model
        if model is not None:
            with self._optional(model):
                return of(model)
        return NO_DRAFT

    @contextmanager
    def _optional(self, source: Observer) -> Iterator[None]:
        """Close a source if the block fails, and do without it, unless it is needed."""
        try:
            yield
        except Exception as error:
            if source is self._model and self._model.is_needed:
                raise
            self._leave_out(source, error)

    def _leave_out(self, source: Observer, error: Exception) -> None:
        self.remarks.note_failure(error)
        if source not in self._observers:  # it is being closed
            return
        self._observers.remove(source)
        if source is self._model:
            self._model = None
        else:
            self._free = CopyDrafter()
        with suppress(Exception):
            source.close()

    def _go_on(self, wanted: Wanted, seconds: float) -> Rows | Draft:
        """Go on after the model drafted for ``seconds``. Its complete draft completes the round's."""
        choice = self._choice
        choice.model_s += seconds
        if isinstance(wanted, Rows):
            return wanted
        if wanted is None:
            choice.reads = True
            return self._fitting(choice.free)
        choice.promised = choice.prices.keep(wanted.confidence, wanted.first)[1]
        if not wanted.tokens:
            return self._fitting(choice.free)
        draft = wanted
        with self._optional(self._free):  # n-grams fill idle rows, and others if they pay
            draft = self._free.extend(choice.tokens, draft, choice.most)
        return self._fitting(self._worth(draft))

    def _worth(self, draft: Draft) -> Draft:
        """The beginning of a draft that is worth its rows."""
        return draft.head(self._choice.prices.keep(draft.confidence, draft.first)[0])

    def _fitting(self, draft: Draft) -> Draft:
        """The draft, as far as a grammar allows it."""
        if self._constraint is None:
            return draft
        return self._worth(self._constraint.fit(self._choice.forced, draft, self._choice.limit))

    def _judge_model(self, choice: _Choice, prices: Prices) -> None:
        """Learn whether it was worth asking the model."""
        if choice.promised is not None and self._has_read:  # the first time, it reads the prompt
            gain = choice.promised - prices.rate * choice.model_s
            self._model_surplus += _SMOOTHING * (gain - self._model_surplus)
        self._has_read |= choice.promised is not None

    def _judge_round(self, choice: _Choice, round_: Round, prices: Prices) -> None:
        """Learn from a round's gain whether drafting is worth its time; this prices later rounds."""
        # A source that is asked costs time whether it proposes or not. Once a request that is the
        # reading of the prompt, which says nothing about the rounds to come.
        drafted = len(round_.draft.tokens) > round_.forced or round_.drafter_s > _NOTICEABLE * round_.target_s
        drafted &= self._drafts
        reads_prompt = drafted and not self._has_asked and round_.drafter_s > round_.target_s
        self._has_asked |= drafted
        if reads_prompt or choice.reads:
            return
        self._pricing.observe_round(len(round_.tokens), round_.seconds, prices.load)
        if drafted:  # forced tokens would come without the sources too
            forced = min(round_.forced, len(round_.tokens) - 1)
            own_s = round_.seconds - prices.rows_seconds(forced)
            self._guard.observe(len(round_.tokens) - forced, own_s, prices.load)
