"""Which source drafts this round, and whether any does: expected tokens per second decide."""

from collections.abc import Sequence
from time import perf_counter

from edgespec.drafting.draft import NO_DRAFT, Draft, Drafter, Extending
from edgespec.pricing import Pricing

__all__ = ["Choice", "Guard"]

_STAKE = 5.0  # tokens
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256
_SMOOTHING = 0.1
_FORGETTING = 0.005
_PATIENCE = 2.0  # times what reading takes


class Guard:
    """Pauses drafting when rounds that drafted lose time against plain decoding.

    Estimates can be wrong; what was realised cannot. Luck decides single rounds, so what is watched is the
    sum of losses that no gains have made good (the cumulative sum test of Page 1954, "Continuous
    inspection schemes"): a drafter that pays never gets far below, one that does not gets there soon.
    After a pause drafting is tried again, and each failure doubles the pause.
    """

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing
        self._lost = self._won = 0.0  # tokens that plain decoding would have been ahead; that drafts were
        self._tokens = self._seconds = 0.0  # of the losing streak
        self._pause, self._left = _FIRST_PAUSE, 0
        self.reason: str | None = None

    def allows(self) -> bool:
        """Whether to draft this round; counts the rounds of a pause down."""
        if self._left == 0:
            return True
        self._left -= 1
        return False

    def observe(self, committed: int, seconds: float) -> None:
        """Tell of a round that drafted."""
        gain = committed - seconds * self._pricing.plain_rate
        self._lost, self._won = max(0.0, self._lost - gain), self._won + gain
        self._tokens, self._seconds = self._tokens + committed, self._seconds + seconds
        if self._lost == 0.0:
            self._tokens = self._seconds = 0.0
        if self._won >= _STAKE:
            self._pause, self.reason = _FIRST_PAUSE, None
        if self._lost <= _STAKE:
            return
        ratio = self._tokens / self._seconds / self._pricing.plain_rate
        self.reason = f"rounds with drafts ran at {ratio:.2f} times the speed of plain decoding"
        self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        self._lost = self._won = self._tokens = self._seconds = 0.0


class Choice:
    """N-grams, which cost nothing, or the model, whichever is expected to gain more; or neither.

    What the model drafted is gone on with by n-grams where the rows that takes are expected to pay.

    Args:
        free: a drafter whose proposals cost no time worth counting.
        model: a drafter that takes time and prices its own drafts; None if there is none.
        pricing: what verification costs.
        guard: whether drafting is allowed now.
        reading_s: seconds the model needs for the prompt when it is first asked. It is asked when decoding
            has taken twice that: a short answer is over by then.
    """

    def __init__(
        self,
        free: Extending,
        model: Drafter | None,
        *,
        pricing: Pricing,
        guard: Guard,
        reading_s: float = 0.0,
    ) -> None:
        self._free, self._model = free, model
        self._wait_s = _PATIENCE * reading_s
        self._pricing, self._guard = pricing, guard
        self._model_surplus = 0.5  # expected surplus of asking the model, tokens a round
        self._asked = False

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`edgespec.drafting.Drafter`."""
        if limit < 1 or not self._guard.allows():
            return NO_DRAFT
        free = self._free.propose(tokens, limit)
        count, surplus = self._pricing.keep(free.confidence)
        if self._wait_s > 0.0:
            self._wait_s -= self._pricing.pass_seconds(1)
            return free.head(count)
        if self._model is None or surplus > self._model_surplus or self._model_surplus <= 0.0:
            # Time lets an old verdict on the model fade, so that it is asked again.
            self._model_surplus += _FORGETTING
            return free.head(count)
        started = perf_counter()
        draft = self._model.propose(tokens, limit)
        asking = perf_counter() - started
        _, gained = self._pricing.keep(draft.confidence)
        if self._asked:  # the first time, the drafter reads the prompt
            loss = self._pricing.rate * asking
            self._model_surplus += _SMOOTHING * (gained - loss - self._model_surplus)
        self._asked = True
        if not draft.tokens:
            return free.head(count)
        draft = self._free.extend(tokens, draft, limit)  # idle rows are filled, others if that pays
        return draft.head(self._pricing.keep(draft.confidence)[0])
