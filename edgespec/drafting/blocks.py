"""A head as drafter that drafts a block of tokens in one pass (DFlash, Chen et al. 2026, arXiv 2602.06036).

Its KV cache holds keys and values that it computes from the target's features of committed tokens. A pass
reads the new ones, and a block of the last token and masks, which does not stay in the cache.
"""

from collections.abc import Sequence

from edgespec.decoding.draft import NO_DRAFT, Draft, Passed, Round
from edgespec.drafting.heads import Unread
from edgespec.drafting.model import SOURCE, TYPICAL, Calibration, Guess, draft_of
from edgespec.drafting.pricing import Prices
from edgespec.drafting.rates import Rate
from edgespec.drafting.reading import RunningMean
from edgespec.drafting.source import Source
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows, Session

_MEMORY, _FADING = 20.0, 0.003


def usual_rates(longest: int) -> list[Rate]:
    """The expected acceptance of a block's tokens, place by place, before the block is drafted."""
    return [Rate.usual(TYPICAL, _MEMORY) for _ in range(longest)]


class BlockDrafter(Source):
    """Drafts behind a prompt of ``length`` tokens. The length of a block is the one expected to gain most.

    Proposals are a function of the text and the block's length. They are verified by sample and match, so
    neither changes the answer. Tokens that a grammar forces stand in the block instead of masks.
    Requests share ``calibration`` and ``rates``, which earlier blocks teach. At places that a block does not
    reach they fade to the usual rate.
    """

    def __init__(
        self,
        session: Session,
        curve: CostCurve,
        length: int,
        *,
        calibration: Calibration,
        rates: list[Rate],
    ) -> None:
        block = session.model.config.block
        assert block is not None  # which a head of blocks has
        self._session, self._curve, self._block = session, curve, block
        self._calibration, self._rates = calibration, rates
        self._unread, self._slower = Unread(session, length), RunningMean(1.0)
        self._asked: Rows | None = None
        self._prices: Prices  # of the round
        self._guesses: list[Guess] = []
        self._expected_s: float | None = None  # of the pass; None where it reads the prompt

    def begin(self, tokens: Sequence[int], limit: int, prices: Prices) -> Rows | Draft:
        self._prices, self._guesses = prices, []
        known = len(tokens) - self._unread.length  # forced tokens, behind the committed ones
        most = min(limit, self._block.longest - known)
        count = self._length(known, most)
        masks = count - 1 if self._block.anchored else count
        if not count or not self._unread.room_for(1 + known + masks):
            self._slower.fade()
            self._learn(())
            return NO_DRAFT
        features = self._unread.features
        self._session.rewind(self._unread.held)  # the last block goes; keys and values go back anywhere
        new = tokens[self._unread.length - 1 - len(features) :]
        ids = [*new, *[self._block.mask] * masks]
        self._expected_s = self._seconds(1 + known + masks) if self._unread.held else None
        self._asked = Rows(self._session, ids, count, features=features, injected=len(features))
        return self._asked

    def take(self, predictions: Predictions, passed: Passed) -> Draft:
        rows, self._asked = self._asked, None
        assert rows is not None
        if self._expected_s is not None:
            self._slower.observe(self._slower.value * passed.unshared_s / self._expected_s)
        self._unread.read()
        kept = self._session.model.head_tokens
        best = [predictions.best(row) for row in range(rows.wanted)]
        ids = best if kept is None else [int(kept[column]) for column in best]
        guesses = [Guess(token, predictions.probability(row), open=False) for row, token in enumerate(ids)]
        self._learn([self._calibration.probability(guess) for guess in guesses])
        draft = draft_of(guesses, self._prices, self._calibration)
        self._guesses = guesses[: len(draft.tokens)]
        return draft

    def observe(self, round_: Round) -> None:
        """Compare the proposals with the committed tokens."""
        if round_.features is not None:
            self._unread.add(round_.features, len(round_.tokens))
        self._calibration.judge(self._guesses, round_.judged)
        self._guesses = []

    def _length(self, known: int, most: int) -> int:
        """The number of tokens to draft, at most ``most``, that is expected to gain most over its cost."""
        more = known + (not self._block.anchored)  # rows besides the drafted tokens' rows

        confidence = [rate.share() for rate in self._rates[: max(most, 0)]]

        def drafting_s(count: int) -> float:
            return self._seconds(more + count) / self._prices.load.sequences

        return self._prices.keep(confidence, SOURCE, drafting_s)[0]

    def _learn(self, confidence: Sequence[float]) -> None:
        """Learn from the expected acceptance of a block's tokens."""
        for place, rate in enumerate(self._rates):
            if place < len(confidence):
                rate.add(confidence[place])
            else:
                rate.fade(_FADING, TYPICAL)

    def _seconds(self, rows: int) -> float:
        return self._curve.seconds(rows) * self._slower.value
