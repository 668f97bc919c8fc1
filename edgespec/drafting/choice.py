"""Which source drafts this round, and whether any does: expected tokens per second decide."""

from collections.abc import Sequence
from time import perf_counter

from edgespec.drafting.draft import NO_DRAFT, Draft, Drafter, Extending
from edgespec.drafting.guard import Guard
from edgespec.pricing import Pricing

__all__ = ["Choice"]

_SMOOTHING = 0.1
_FORGETTING = 0.005
_PATIENCE = 2.0  # times what reading takes


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
