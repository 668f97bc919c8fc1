"""A head as drafter that drafts a block of tokens in one pass (DFlash, Chen et al. 2026, arXiv 2602.06036).

Its KV cache has what the target's features say of committed tokens. A pass reads those that are new, and a
block of the last token and masks, of which nothing stays.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from edgespec.decoding.draft import NO_DRAFT, Draft, Passed, Source, Step
from edgespec.drafting.heads import Unread
from edgespec.drafting.model import SOURCE, Calibration, Guess
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.reading import RunningMean
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows, Session

_SMOOTHING, _FADING = 0.05, 0.003


class Odds:
    """How probably a block's tokens are accepted, place by place, before it is drafted.

    They are learned from the blocks that were, and fade where no block is as long. Requests share them.
    """

    def __init__(self, longest: int, usual: float) -> None:
        self._usual, self.accepted = usual, [usual] * longest

    def observe(self, confidence: Sequence[float]) -> None:
        """Learn from a block's expected acceptances."""
        for place, odds in enumerate(self.accepted):
            if place < len(confidence):
                self.accepted[place] += _SMOOTHING * (confidence[place] - odds)
            else:
                self.accepted[place] += _FADING * (self._usual - odds)


class BlockDrafter(Source):
    """Drafts behind a prompt of ``length`` tokens; a block is as long as its price says.

    Proposals are a function of the text and the block's length. They are verified by sample and match, so
    neither changes what is written. Tokens that a grammar forces stand in the block instead of masks.
    Requests share ``calibration`` and ``odds``.
    """

    def __init__(
        self,
        session: Session,
        curve: CostCurve,
        length: int,
        *,
        pricing: Pricing,
        calibration: Calibration,
        odds: Odds,
    ) -> None:
        block = session.model.config.block
        assert block is not None  # which a head of blocks has
        self._session, self._curve, self._block = session, curve, block
        self._pricing, self._calibration, self._odds = pricing, calibration, odds
        self._unread, self._slower = Unread(session, length), RunningMean(1.0)
        self._guesses: list[Guess] = []
        self._expected_s: float | None = None  # of the pass; None where it reads the prompt

    def begin_round(self, tokens: Sequence[int], limit: int) -> None:
        self.rows, self.draft, self._guesses = None, NO_DRAFT, []
        known = len(tokens) - self._unread.length  # forced tokens, behind the committed ones
        most = min(limit, self._block.longest - known)
        count = self._length(known, most)
        masks = count - 1 if self._block.anchored else count
        if not count or not self._unread.room_for(1 + known + masks):
            self._slower.fade()
            self._odds.observe(())
            return
        features = self._unread.features
        self._session.rewind(self._unread.held)  # the last block goes; keys and values go back anywhere
        new = tokens[self._unread.length - 1 - len(features) :]
        ids = [*new, *[self._block.mask] * masks]
        self._expected_s = self._seconds(1 + known + masks) if self._unread.held else None
        self.rows = Rows(self._session, ids, count, features=features, injected=len(features))

    def take(self, predictions: Predictions, passed: Passed) -> None:
        rows, self.rows = self.rows, None
        assert rows is not None
        if self._expected_s is not None:
            self._slower.observe(self._slower.value * passed.share_s * passed.requests / self._expected_s)
        self._unread.read()
        kept = self._session.model.head_tokens
        best = [predictions.best(row) for row in range(rows.wanted)]
        ids = best if kept is None else [int(kept[column]) for column in best]
        guesses = [Guess(token, predictions.probability(row), open=False) for row, token in enumerate(ids)]
        confidence = tuple(self._calibration.probability(guess) for guess in guesses)
        self._odds.observe(confidence)
        count, _ = self._pricing.keep(confidence, SOURCE)
        if not count:
            self._calibration.fade()
        self._guesses = guesses[:count]
        self.draft = Draft(tuple(ids[:count]), (SOURCE,) * count, confidence[:count])

    def observe(self, step: Step) -> None:
        """Compare the proposals with the committed tokens."""
        if step.features is not None:
            self._unread.add(step.features, len(step.tokens))
        self._calibration.judge(self._guesses, step.judged)
        self._guesses = []

    def _length(self, known: int, most: int) -> int:
        """The number of tokens to draft, at most ``most``, that is expected to gain most over its cost."""
        best, best_surplus, expected, rate = 0, 0.0, 0.0, self._pricing.rate
        for count, survival in enumerate(accumulate(self._odds.accepted[: max(most, 0)], mul), start=1):
            expected += survival
            rows = known + count + (not self._block.anchored)
            drafting_s = self._seconds(rows) / self._pricing.sequences
            surplus = expected - rate * (drafting_s + self._pricing.rows_seconds(count, source=SOURCE))
            if surplus > best_surplus:
                best, best_surplus = count, surplus
        return best

    def _seconds(self, rows: int) -> float:
        return self._curve.seconds(rows) * self._slower.value
