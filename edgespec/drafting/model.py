"""A small model as drafter, of any vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgespec.drafting.bridge import Bridge
from edgespec.drafting.draft import NO_DRAFT, Draft
from edgespec.pricing import Pricing
from edgespec_models.errors import TokenizerError
from edgespec_runtimes.session import Logits, Session

__all__ = ["Calibration", "ModelDrafter", "VocabularyEnds"]

_SOURCE = "model"
_BINS = 10
_PRIOR = 12.0
_DECAY = 0.995
_STEP_SMOOTHING = 0.1
_FORGETTING = 0.002
_STEP_FORGETTING = 0.01


class Calibration:
    """How often proposals of a given confidence are accepted: decayed Beta counts by bin.

    The prior of a bin says that a drafter's probability means what it says; ``_PRIOR`` observations
    weigh as much.
    """

    def __init__(self) -> None:
        self._prior = _PRIOR * (np.arange(_BINS) + 0.5) / _BINS
        self._accepted = self._prior.copy()
        self._seen = np.full(_BINS, _PRIOR)

    def probability(self, confidence: float) -> float:
        """Expected acceptance of a proposal the drafter gives ``confidence``."""
        index = self._bin(confidence)
        return float(self._accepted[index] / self._seen[index])

    def mean(self) -> float:
        """Expected acceptance of a proposal not drafted yet."""
        return float(self._accepted.sum() / self._seen.sum())

    def observe(self, confidence: float, accepted: bool) -> None:
        """Tell how a proposal fared."""
        index = self._bin(confidence)
        self._accepted[index] = self._accepted[index] * _DECAY + accepted
        self._seen[index] = self._seen[index] * _DECAY + 1

    def forget(self) -> None:
        """Tell that nothing was proposed: a verdict that nothing tests any more fades."""
        self._accepted += _FORGETTING * (self._prior - self._accepted)
        self._seen += _FORGETTING * (_PRIOR - self._seen)

    @staticmethod
    def _bin(confidence: float) -> int:
        return min(int(confidence * _BINS), _BINS - 1)


@dataclass(frozen=True, slots=True)
class VocabularyEnds:
    """Tokens that end a text: the drafter's, and the one of the target to propose for them."""

    drafter: frozenset[int]
    target: int | None


class ModelDrafter:
    """Drafts greedily with a model, stopping when the next token no longer pays.

    It drafts its own argmax whatever the request's temperature: the proposals are then a function of
    the text, and sample-and-match verification accepts each with the target's probability of it, as
    rejection sampling of a deterministic proposal would.

    Args:
        session: the drafter's session; shared between requests, one at a time.
        bridge: between the vocabularies, for this request.
        ends: tokens that end a text.
        pricing: what verification costs.
        calibration: acceptance by confidence; shared between requests.
        step_s: measured seconds of a drafter step.
    """

    def __init__(
        self,
        session: Session,
        bridge: Bridge,
        ends: VocabularyEnds,
        *,
        pricing: Pricing,
        calibration: Calibration,
        step_s: float,
    ) -> None:
        self._session, self._bridge, self._ends = session, bridge, ends
        self._pricing, self._calibration = pricing, calibration
        self._step_s = self._usual_step_s = step_s
        self._last: tuple[int, Draft] = (0, NO_DRAFT)

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`edgespec.drafting.Drafter`."""
        self._learn(tokens)
        draft = NO_DRAFT
        if limit > 0 and self._pricing.pays(self._calibration.mean(), 1, self._step_s):
            try:
                draft = self._draft(self._bridge.align(tokens), limit)
            except TokenizerError:  # a byte one of the vocabularies cannot spell: seen in binary data only
                draft = NO_DRAFT
        if not draft.tokens:
            self._calibration.forget()
            self._step_s += _STEP_FORGETTING * (self._usual_step_s - self._step_s)
        self._last = (len(tokens), draft)
        return draft

    def _draft(self, ids: list[int], limit: int) -> Draft:
        if len(ids) + limit * 2 > self._session.capacity:
            return NO_DRAFT
        drafted: list[int] = []
        probabilities: list[float] = []
        translated: list[tuple[int, int]] = []
        logits = self._session.next_logits(ids)
        while True:
            token, probability = _best(logits)
            if token in self._ends.drafter:
                return self._finish(translated, probabilities, limit, probability)
            drafted.append(token)
            probabilities.append(probability)
            translated = self._bridge.translate(drafted)
            survival = float(np.prod([self._calibration.probability(p) for p in probabilities]))
            rows = 1 + len(translated)
            if len(translated) >= limit or len(drafted) >= 2 * limit:
                break
            if not self._pricing.pays(survival * self._calibration.mean(), rows, self._step_s):
                break
            started = perf_counter()
            logits = self._session.forward([token])[0]
            elapsed = min(perf_counter() - started, 2.0 * self._step_s)  # outliers count for little
            self._step_s += _STEP_SMOOTHING * (elapsed - self._step_s)
        return self._finish(translated, probabilities, limit, None)

    def _finish(
        self, translated: list[tuple[int, int]], probabilities: list[float], limit: int, end: float | None
    ) -> Draft:
        """Target tokens with their confidence; ``end`` is the probability that the text ends behind them."""
        tokens, confidence, used = [], [], 0
        for token, needed in translated:
            tokens.append(token)
            confidence.append(float(np.prod(probabilities[used:needed])))
            used = max(used, needed)
        if end is not None and self._ends.target is not None:
            tokens.append(self._ends.target)
            confidence.append(end)
        count, _ = self._pricing.keep(self._calibration.probability(c) for c in confidence[:limit])
        return Draft(tuple(tokens[:count]), None, (_SOURCE,) * count, tuple(confidence[:count]))

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compare the last draft with what was committed in its place."""
        at, draft = self._last
        for offset, (token, confidence) in enumerate(zip(draft.tokens, draft.confidence, strict=True)):
            if at + offset >= len(tokens):
                return
            accepted = tokens[at + offset] == token
            self._calibration.observe(confidence, accepted)
            if not accepted:
                return


def _best(logits: Logits) -> tuple[int, float]:
    """The most probable token and its probability."""
    token = int(logits.argmax())
    return token, float(1.0 / np.exp(logits - logits[token]).sum())
