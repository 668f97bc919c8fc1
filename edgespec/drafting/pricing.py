"""Costs and gains of drafting: :class:`Prices` are the expected ones, :class:`Guard` has the realised ones.

A round that verifies k proposals commits 1 + sum of the products of acceptance probabilities and costs
T(k + 1) plus the drafting. The rate (tokens per second) over many rounds is highest if each round takes
a token exactly when its expected gain exceeds its time multiplied by that rate (renewal-reward; Dinkelbach
1967). So one number, the rate, prices every decision.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Final, Literal

from edgespec.decoding.draft import ALONE, Load, Round
from edgespec_runtimes.cost import CostCurve

STAKE: Final = 5.0
"""The number of tokens by which plain decoding may be ahead."""
USUAL_TOKENS: Final = 1024
"""The tokens of an answer whose request allows more: what few answers exceed."""

_SMOOTHING = 0.03
_MEMORY = 0.97
_FADING = 0.9998  # of a size's error in each pass, so that what one of long ago showed is forgotten
_FEW = 16  # rows; times of so many are computed at once
_NEIGHBOURS = 0.25  # of a token's experts, which the next one uses too, until passes tell; see lab/pricing.md
_OVERLAP_SMOOTHING = 0.1
_AHEAD = 3  # tokens; steps of T(n) are two or four rows wide
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # rounds
_FLOWING = 3.0
_LEAST_PIECE, _MOST_PIECE = 8, 128  # tokens


class Pricing:
    """Learns what passes of a target cost, and what rounds bring; :meth:`at` has the prices.

    Every observed pass refines the measured T(n). In a mixture of experts, rows cost more the more different
    experts they use, which passes report too. So the rows of each source's drafts have prices of their own.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._scale = 1.0  # the present speed against the measured curve
        self._shape: dict[int, float] = {}  # by rows: the curve's remaining error
        self._share: dict[int, float] = {}  # of late passes that had so many rows
        self._prices: Prices | None = None  # the latest, until something is learned
        self._overlap = max(_NEIGHBOURS, curve.experts.overlap) if curve.experts else 1.0
        self._overlaps: dict[str, float] = {}  # of the rows of each source's drafts
        self._tokens = self._plain_tokens = 0.0  # of late rounds, and of plain decoding in their time

    def at(self, load: Load = ALONE) -> "Prices":
        """The present prices of passes that these requests share."""
        if self._prices is None or self._prices.load != load:
            self._prices = Prices(self, load)
        return self._prices

    @property
    def gain(self) -> float:
        """The tokens of late rounds over those that plain decoding gives in their time; 0 without rounds."""
        return self._tokens / self._plain_tokens if self._plain_tokens else 0.0

    @property
    def tells_sources_apart(self) -> bool:
        """Whether rows cost more or less by the source that drafted them."""
        return self._curve.experts is not None

    def times(self, rows: int, load: Load, source: str) -> list[float]:
        """Expected seconds of passes over no tokens, one, and so on up to ``rows`` or more, now.

        ``source`` drafted the tokens. The times never fall, whatever passes took: they are at most those of
        wider passes that were observed, and at least those of narrower ones.
        """
        most, wider = max(rows, _FEW, *self._shape), math.inf
        times = [self._seconds(n, load, source) for n in range(most + 1)]
        for n in reversed(range(most + 1)):
            times[n] = min(times[n], wider)
            wider = times[n] if n in self._shape else wider
        return list(accumulate(times, max))

    def _seconds(self, rows: int, load: Load, source: str) -> float:
        """The curve's seconds, as far as passes over so many rows corrected them."""
        costs = self._curve.experts
        seconds = self._curve.seconds(rows, load.context, load.sequences)
        if costs is not None:
            read_s = costs.read_s * costs.expected(rows, self._overlaps.get(source, self._overlap))
            # No pass takes less than the reading of its experts, whatever the curve says.
            seconds = max(read_s, seconds + read_s - costs.read_s * costs.expected(rows))
        return seconds * self._scale * self._shape.get(rows, 1.0)

    def observe_pass(
        self, rows: int, seconds: float, experts: int = 0, source: str = "", load: Load = ALONE
    ) -> None:
        """Learn from a target pass that took ``seconds``, and from its ``experts``; outliers count little.

        Rows that ``source`` drafted may share more experts than others, because copies repeat earlier tokens.
        Each of the requests that share a pass reports it.
        """
        expected, costs = self._seconds(rows, load, source), self._curve.experts
        if costs is not None and rows > 1 and experts:
            known = self._overlaps.get(source, self._overlap)
            seconds -= self._scale * costs.read_s * (experts - costs.expected(rows, known))
            overlap, smoothing = costs.overlap_of(rows, experts), _OVERLAP_SMOOTHING / load.sequences
            self._overlaps[source] = known + smoothing * (overlap - known)
            self._overlap += smoothing * (overlap - self._overlap)
        ratio = min(max(seconds / expected, 0.5), 2.0)
        smoothing = _SMOOTHING / load.sequences
        factor = 1.0 + smoothing * (ratio - 1.0)
        self._shape[rows] = self._shape.get(rows, 1.0) * factor
        self._share = {n: (1.0 - smoothing) * self._share.get(n, 0.0) for n in self._shape}
        self._share[rows] += smoothing
        # Errors that all sizes have are the machine's speed; what is left is the shape's.
        logs = sum(share * math.log(self._shape[n]) for n, share in self._share.items())
        common = math.exp(logs / sum(self._share.values()))
        self._scale *= factor * common
        self._shape = {n: (error / common) ** _FADING for n, error in self._shape.items()}
        self._prices = None

    def observe_round(self, committed: int, seconds: float, load: Load = ALONE) -> None:
        """Learn from a whole round, drafting included."""
        self._tokens = _MEMORY * self._tokens + committed
        self._plain_tokens = _MEMORY * self._plain_tokens + seconds * self.at(load).plain_rate


@dataclass(frozen=True)
class Prices:
    """What rows cost now in passes that the requests of ``load`` share, and what time is worth.

    Each of these requests has a row in any case, and proposals are priced behind these rows. Plain decoding
    gives all of them a token in T(sequences). A round asks for prices some fifty times, so they are computed
    once.
    """

    pricing: Pricing
    load: Load
    _times: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def pass_seconds(self, rows: int, source: str = "") -> float:
        """Expected seconds of a target pass over ``rows`` tokens, if ``source`` drafted them."""
        source = source if self.pricing.tells_sources_apart else ""
        times = self._times.get(source, [])
        if rows >= len(times):
            times = self._times[source] = self.pricing.times(rows, self.load, source)
        return times[rows]

    def rows_seconds(self, count: int, behind: int = 0, source: str = "") -> float:
        """Expected seconds by which ``count`` proposals, behind others, make a pass longer."""
        first = self.load.sequences + behind
        return self.pass_seconds(first + count, source) - self.pass_seconds(first, source)

    @cached_property
    def token_s(self) -> float:
        """Present seconds of a token in plain decoding."""
        return self.pass_seconds(self.load.sequences) / self.load.sequences

    @property
    def plain_rate(self) -> float:
        """Present tokens per second of plain decoding."""
        return 1.0 / self.token_s

    @property
    def rate(self) -> float:
        """Tokens per second that time is worth: the higher of plain decoding's rate and the rounds' rate.

        The rate of rounds is kept as a multiple of plain decoding, because both get slower along a context.
        """
        return self.plain_rate * max(1.0, self.pricing.gain)

    def keep(
        self,
        confidence: Iterable[float],
        source: str = "",
        drafting_s: Callable[[int], float] = lambda count: 0.0,
    ) -> tuple[int, float]:
        """The number of proposals to verify: the prefix with the highest expected surplus over its cost.

        Args:
            confidence: for each proposal, the probability that it is accepted if those before it are.
            source: who drafts them.
            drafting_s: seconds that it will take to draft a number of proposals; 0 if they are drafted.

        Returns:
            The length, and the surplus: the expected accepted tokens less the tokens that the same time would
            yield otherwise.
        """

        def seconds_of(count: int) -> float:
            return drafting_s(count) + self.rows_seconds(count, source=source)

        return self._best(accumulate(confidence, mul), seconds_of)

    def share(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """The number of proposals of each request to verify in a shared pass; the most probable are taken.

        A proposal is never more probable than an earlier one, so these are beginnings of the drafts.
        """
        drafts = [list(accumulate(confidence, mul)) for confidence in confidences]
        places = sorted((-survival, at) for at, survivals in enumerate(drafts) for survival in survivals)
        count, _ = self._best([-survival for survival, _ in places], self.rows_seconds)
        taken = [at for _, at in places[:count]]
        return [taken.count(at) for at in range(len(drafts))]

    def piece(self, rows: int) -> int:
        """Tokens of a prompt to read beside ``rows`` of requests that are being answered.

        The pass takes at most three times as long as without them, so that the answers go on flowing.
        """
        most, count = _FLOWING * self.pass_seconds(rows), _LEAST_PIECE
        while count < _MOST_PIECE and self.pass_seconds(rows + 2 * count) <= most:
            count *= 2
        return count

    def _best(self, survivals: Iterable[float], seconds_of: Callable[[int], float]) -> tuple[int, float]:
        """The best number of proposals with such probabilities to be accepted, and its surplus.

        ``seconds_of`` has the cost of a number of proposals.
        """
        best_count, best_surplus, expected, rate = 0, 0.0, 0.0, self.rate
        for count, survival in enumerate(survivals, start=1):
            expected += survival
            surplus = expected - rate * seconds_of(count)
            if surplus > best_surplus:
                best_count, best_surplus = count, surplus
        return best_count, best_surplus

    def pays(
        self, survival: float, rows: int, drafting_s: float, *, typical: float = 0.0, source: str = ""
    ) -> bool:
        """Whether to draft on for a pass that has ``rows`` already: one more token, or several.

        T(n) has steps, so several are tried: if two more rows cost as much as one, one token may not pay.

        Args:
            survival: probability that the next token and all before it are accepted.
            rows: rows of this request without it.
            drafting_s: seconds it takes to draft a token.
            typical: expected acceptance of the tokens behind it.
            source: who drafts them.
        """
        gain = 0.0
        for count in range(1, 1 + (_AHEAD if typical else 1)):
            gain += survival
            cost = self.rate * (count * drafting_s + self.rows_seconds(count, rows - 1, source))
            if gain > cost:
                return True
            survival *= typical
        return False


Finding = Literal["proved", "failed"]
"""The finding of a :class:`Watch`."""


class Watch:
    """Adds up gains and losses until they prove something, then begins anew.

    Single gains are luck, so the test watches the sum of losses that no gains have made good (the cumulative
    sum test of Page 1954, "Continuous inspection schemes"). What pays never loses much; what does not pay
    soon does.

    A loss above ``stake`` is a failure; a total gain of ``stake`` is a proof. ``lost`` is the sum of losses
    that no gains have made good.
    """

    def __init__(self, stake: float) -> None:
        self._stake = stake
        self._won = self.lost = 0.0

    def observe(self, gain: float) -> Finding | None:
        """Add a gain, or a loss below 0. Returns what the sum proves, if anything."""
        self._won += gain
        self.lost = max(0.0, self.lost - gain)
        finding: Finding | None = None
        if self.lost > self._stake:
            finding = "failed"
        elif self._won >= self._stake:
            finding = "proved"
        if finding:
            self._won = self.lost = 0.0
        return finding


class Guard:
    """Pauses a technique that should save time while it loses time against plain decoding.

    Estimates can be wrong; realised times cannot. A gain is the number of committed tokens less the number
    that plain decoding would have committed in that time. :class:`Watch` tells bad luck from a loss. After a
    pause the technique is tried again, and each failure doubles the pause.

    ``reason`` says why it was paused last; it is None while it pays. It begins with ``what``, the subject and
    verb of that sentence.
    """

    def __init__(self, pricing: Pricing, what: str = "rounds with drafts ran") -> None:
        self._pricing, self._what = pricing, what
        self._watch = Watch(STAKE)
        self._tokens = self._seconds = 0.0  # of the losing streak
        self._pause, self._left = _FIRST_PAUSE, 0
        self.reason: str | None = None

    @property
    def allows(self) -> bool:
        """Whether the technique may be used."""
        return self._left == 0

    def rest(self) -> None:
        """Count a round of a pause."""
        self._left = max(0, self._left - 1)

    def observe(self, committed: int, seconds: float, load: Load = ALONE) -> Finding | None:
        """Learn from committed tokens and their time; return the finding, if there is one."""
        plain_rate = self._pricing.at(load).plain_rate
        self._tokens, self._seconds = self._tokens + committed, self._seconds + seconds
        finding = self._watch.observe(committed - seconds * plain_rate)
        if finding == "proved":
            self._pause, self.reason = _FIRST_PAUSE, None
        elif finding == "failed":
            ratio = self._tokens / self._seconds / plain_rate
            self.reason = f"{self._what} at {ratio:.2f} times the speed of plain decoding"
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        if self._watch.lost == 0.0:
            self._tokens = self._seconds = 0.0
        return finding

    def observe_source(self, source: str, round_: Round) -> Finding | None:
        """Learn from the proposals of one source in a round. Pauses are counted in rounds too.

        Their gain is the number of accepted tokens. Their cost is the time that their rows add to the pass.
        """
        if not self.allows:
            self.rest()
        places = [place for place, name in enumerate(round_.draft.sources) if name == source]
        if not places:
            return None
        behind = len(round_.draft.tokens) - len(places)
        load = round_.target_pass.load
        seconds = self._pricing.at(load).rows_seconds(len(places), behind, source)
        return self.observe(sum(place < round_.accepted for place in places), max(0.0, seconds), load)
