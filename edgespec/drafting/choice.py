"""Which source drafts this round, and whether any does: expected tokens per second decide."""

from collections.abc import Sequence
from time import perf_counter

from edgespec.drafting.draft import NO_DRAFT, Draft, Drafter
from edgespec.pricing import Pricing

__all__ = ["Choice", "Guard"]

_MIN_ROUNDS = 8
_MEMORY = 0.9
_TOLERANCE = 0.97
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256
_SMOOTHING = 0.1
_FORGETTING = 0.005


class Guard:
    """Pauses drafting when the rounds that drafted were, on the whole, slower than plain decoding.

    Estimates can be wrong; what was realised cannot. After a pause drafting is tried again, and each
    failure doubles the pause.
    """

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing
        self._tokens = self._seconds = 0.0
        self._rounds = 0
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
        self._tokens = _MEMORY * self._tokens + committed
        self._seconds = _MEMORY * self._seconds + seconds
        self._rounds += 1
        if self._rounds < _MIN_ROUNDS:
            return
        ratio = self._tokens / self._seconds / self._pricing.plain_rate
        if ratio >= _TOLERANCE:
            self._pause, self.reason = _FIRST_PAUSE, None
            return
        self._left = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._tokens = self._seconds = 0.0
        self._rounds = 0
        self.reason = f"rounds with drafts ran at {ratio:.2f} times the speed of plain decoding"


class Choice:
    """N-grams, which cost nothing, or the model, whichever is expected to gain more; or neither.

    Args:
        free: a drafter whose proposals cost no time worth counting.
        model: a drafter that takes time and prices its own drafts; None if there is none.
        pricing: what verification costs.
        guard: whether drafting is allowed now.
    """

    def __init__(self, free: Drafter, model: Drafter | None, *, pricing: Pricing, guard: Guard) -> None:
        self._free, self._model = free, model
        self._pricing, self._guard = pricing, guard
        self._model_surplus = 0.5  # expected surplus of asking the model, tokens a round
        self._asked = False

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`edgespec.drafting.Drafter`."""
        if limit < 1 or not self._guard.allows():
            return NO_DRAFT
        free = self._free.propose(tokens, limit)
        count, surplus = self._pricing.keep(free.confidence)
        if self._model is None or surplus > self._model_surplus or self._model_surplus <= 0.0:
            # Time lets an old verdict on the model fade, so that it is asked again.
            self._model_surplus += _FORGETTING
            return _head(free, count)
        started = perf_counter()
        draft = self._model.propose(tokens, limit)
        asking = perf_counter() - started
        _, gained = self._pricing.keep(draft.confidence)
        if self._asked:  # the first time, the drafter reads the prompt
            loss = self._pricing.rate * asking
            self._model_surplus += _SMOOTHING * (gained - loss - self._model_surplus)
        self._asked = True
        return draft if draft.tokens else _head(free, count)


def _head(draft: Draft, count: int) -> Draft:
    """The first ``count`` proposals of a deterministic draft."""
    return Draft(draft.tokens[:count], None, draft.sources[:count], draft.confidence[:count])
