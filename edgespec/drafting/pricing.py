"""What drafting costs and gains: :class:`Pricing` by what is expected, :class:`Guard` by what was realised.

A round that verifies k proposals commits 1 + sum of the products of acceptance probabilities and costs
T(k + 1) plus the drafting. The rate (tokens per second) over many rounds is highest if each round takes
a token exactly when its expected gain exceeds what its time is worth at that rate (renewal-reward;
Dinkelbach 1967). So one number, the rate, prices every decision.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import Final

from edgespec.decoding.draft import Step
from edgespec.decoding.watch import Finding, Watch
from edgespec_runtimes.cost import CostCurve

STAKE: Final = 5.0
"""Tokens that plain decoding may be ahead by."""

_SMOOTHING = 0.03
_MEMORY = 0.97
_NEIGHBOURS = 0.25  # of a token's experts, which the next one uses too, until passes tell; see lab/pricing.md
_OVERLAP_SMOOTHING = 0.1
_AHEAD = 3  # tokens; steps of T(n) are two or four rows wide
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # rounds
_FLOWING = 3.0
_LEAST_PIECE, _MOST_PIECE = 8, 128  # tokens


class Pricing:
    """Prices proposals for a target, whose measured T(n) every pass that it is told of refines.

    A pass may be that of several requests. ``sequences`` says of how many: each has a row in any case, and
    proposals are priced behind these. Plain decoding gives all of them a token in T(sequences).
    ``context`` is how many tokens a layer attends to, the mean of these requests: rows get dearer along it.
    Of a mixture of experts rows are as dear as they use other experts, which passes tell of too.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._curve, self.sequences, self.context = curve, 1, 0.0
        self._scale = 1.0  # this moment's speed against the measured curve
        self._shape: dict[int, float] = {}  # by rows: what the curve got wrong beyond that
        self._overlap = max(_NEIGHBOURS, curve.experts.overlap) if curve.experts else 1.0
        self._tokens = self._plain_tokens = 0.0  # of late rounds, and of plain decoding in their time

    def pass_seconds(self, rows: int) -> float:
        """Expected seconds of a target pass over ``rows`` tokens, now."""
        seconds, costs = self._curve.seconds(rows, self.context, self.sequences), self._curve.experts
        if costs is not None:
            seconds += costs.read_s * (costs.expected(rows, self._overlap) - costs.expected(rows))
        return seconds * self._scale * self._shape.get(rows, 1.0)

    def rows_seconds(self, count: int, behind: int = 0) -> float:
        """Expected seconds by which ``count`` proposals, behind others, make a pass longer."""
        first = self.sequences + behind
        return self.pass_seconds(first + count) - self.pass_seconds(first)

    @property
    def token_s(self) -> float:
        """Seconds a token takes in plain decoding, now."""
        return self.pass_seconds(self.sequences) / self.sequences

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding, now."""
        return 1.0 / self.token_s

    @property
    def rate(self) -> float:
        """Tokens per second that time is worth: plain decoding's, or what rounds realise if that is more.

        What they realise is kept as times plain decoding, since both get slower along a context.
        """
        gain = self._tokens / self._plain_tokens if self._plain_tokens else 0.0
        return self.plain_rate * max(1.0, gain)

    def keep(self, confidence: Iterable[float]) -> tuple[int, float]:
        """How many proposals to verify: the prefix with the highest expected surplus over its cost.

        Args:
            confidence: for each proposal, the probability that it is accepted if those before it are.

        Returns:
            The length, and the surplus: expected accepted tokens less those the time would yield otherwise.
        """
        survivals = list(accumulate(confidence, mul))
        return self._best(survivals)

    def share(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many proposals of each request to verify in a pass of all: those that promise most.

        A proposal is never more probable than those before it, so the best of all are beginnings of drafts.
        """
        drafts = [list(accumulate(confidence, mul)) for confidence in confidences]
        places = sorted((-survival, at) for at, survivals in enumerate(drafts) for survival in survivals)
        count, _ = self._best([-survival for survival, _ in places])
        taken = [at for _, at in places[:count]]
        return [taken.count(at) for at in range(len(drafts))]

    def piece(self, rows: int) -> int:
        """Tokens of a prompt to read beside ``rows`` of requests that are being answered.

        The pass takes at most thrice what it would take without, so that the answers go on flowing.
        """
        most, count = _FLOWING * self.pass_seconds(rows), _LEAST_PIECE
        while count < _MOST_PIECE and self.pass_seconds(rows + 2 * count) <= most:
            count *= 2
        return count

    def _best(self, survivals: Sequence[float]) -> tuple[int, float]:
        """The best number of proposals with such probabilities to be accepted, and its surplus."""
        best_count, best_surplus, expected = 0, 0.0, 0.0
        for count, survival in enumerate(survivals, start=1):
            expected += survival
            surplus = expected - self.rate * self.rows_seconds(count)
            if surplus > best_surplus:
                best_count, best_surplus = count, surplus
        return best_count, best_surplus

    def pays(self, survival: float, rows: int, drafting_s: float, *, typical: float = 0.0) -> bool:
        """Whether to draft on for a pass that has ``rows`` already: one more token, or several.

        Several, since T(n) has steps: where two more rows cost what one does, one token alone may not pay.

        Args:
            survival: probability that the next token and all before it are accepted.
            rows: rows of this request without it.
            drafting_s: seconds it takes to draft a token.
            typical: expected acceptance of the tokens behind it.
        """
        gain = 0.0
        for count in range(1, 1 + (_AHEAD if typical else 1)):
            gain += survival
            cost = self.rate * (count * drafting_s + self.rows_seconds(count, behind=rows - 1))
            if gain > cost:
                return True
            survival *= typical
        return False

    def observe_pass(self, rows: int, seconds: float, experts: int = 0) -> None:
        """Tell of a target pass that took ``seconds``, and of its ``experts``; outliers count for little.

        Each of the requests that share a pass tells of it.
        """
        expected, costs = self.pass_seconds(rows), self._curve.experts
        if costs is not None and rows > 1 and experts:
            seconds -= self._scale * costs.read_s * (experts - costs.expected(rows, self._overlap))
            overlap = costs.overlap_of(rows, experts)
            self._overlap += _OVERLAP_SMOOTHING / self.sequences * (overlap - self._overlap)
        ratio = min(max(seconds / expected, 0.5), 2.0)
        factor = 1.0 + _SMOOTHING / self.sequences * (ratio - 1.0)
        self._scale *= factor
        self._shape[rows] = self._shape.get(rows, 1.0) * factor

    def observe_round(self, committed: int, seconds: float) -> None:
        """Tell of a whole round, drafting included."""
        self._tokens = _MEMORY * self._tokens + committed
        self._plain_tokens = _MEMORY * self._plain_tokens + seconds * self.plain_rate


class Guard:
    """Pauses what is to save time when it loses time against plain decoding.

    Estimates can be wrong; what was realised cannot. A gain is what was committed less what plain decoding
    would have committed in that time; :class:`Watch` tells bad luck from a loss. After a pause it is tried
    again, and each failure doubles the pause.

    ``reason`` says why it was paused last; None while it pays. It begins with ``what``: what is watched, and
    what that does.
    """

    def __init__(self, pricing: Pricing, what: str = "rounds with drafts ran") -> None:
        self._pricing, self._what = pricing, what
        self._watch = Watch(STAKE)
        self._tokens = self._seconds = 0.0  # of the losing streak
        self._pause, self._left = _FIRST_PAUSE, 0
        self.reason: str | None = None

    @property
    def allows(self) -> bool:
        """Whether to go on."""
        return self._left == 0

    def rest(self) -> None:
        """Tell of a round of a pause."""
        self._left = max(0, self._left - 1)

    def observe(self, committed: int, seconds: float) -> Finding | None:
        """Tell of tokens that were committed and the time they took; returns what that shows, if anything."""
        self._tokens, self._seconds = self._tokens + committed, self._seconds + seconds
        finding = self._watch.observe(committed - seconds * self._pricing.plain_rate)
        if finding == "proved":
            self._pause, self.reason = _FIRST_PAUSE, None
        elif finding == "failed":
            ratio = self._tokens / self._seconds / self._pricing.plain_rate
            self.reason = f"{self._what} at {ratio:.2f} times the speed of plain decoding"
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        if self._watch.lost == 0.0:
            self._tokens = self._seconds = 0.0
        return finding

    def observe_source(self, source: str, step: Step) -> Finding | None:
        """Tell of a round, of which the proposals of one source are watched; pauses go by in rounds too.

        What they brought is how many were accepted, what they cost is the time by which a pass is longer for
        their rows.
        """
        if not self.allows:
            self.rest()
        places = [place for place, name in enumerate(step.draft.sources) if name == source]
        if not places:
            return None
        behind = len(step.draft.tokens) - len(places)
        seconds = self._pricing.rows_seconds(len(places), behind)
        return self.observe(sum(place < step.accepted for place in places), max(0.0, seconds))
