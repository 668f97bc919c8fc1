"""Two samples of outcomes: could one distribution have made both? Pearson's chi-square test, without scipy.

The statistic for samples of unequal size, and the incomplete gamma function by its series and its
continued fraction, are those of Press et al., Numerical Recipes (3rd ed.), sections 14.3 and 6.2.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ChiSquare", "pool_rare", "survival", "two_samples"]

Outcome = tuple[Hashable, ...]

_MAX_TERMS = 10_000
_EPSILON = 1e-15
_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A statistic with its degrees of freedom. Independent ones add up."""

    statistic: float = 0.0
    degrees: int = 0

    @property
    def p_value(self) -> float | None:
        """Probability of a statistic at least as large under one distribution, or None."""
        return survival(self.statistic, self.degrees) if self.degrees else None

    def __add__(self, other: "ChiSquare") -> "ChiSquare":
        return ChiSquare(self.statistic + other.statistic, self.degrees + other.degrees)


def two_samples(first: Mapping[Hashable, int], second: Mapping[Hashable, int]) -> ChiSquare:
    """Compare counts by bin. Every bin should hold enough of both samples (:func:`pool_rare`)."""
    n1, n2 = sum(first.values()), sum(second.values())
    bins = [key for key in {**first, **second} if first.get(key, 0) + second.get(key, 0)]
    if not n1 or not n2 or len(bins) < 2:
        return ChiSquare()
    ratio = math.sqrt(n2 / n1)
    statistic = 0.0
    for key in bins:
        a, b = first.get(key, 0), second.get(key, 0)
        statistic += (a * ratio - b / ratio) ** 2 / (a + b)
    return ChiSquare(statistic, len(bins) - 1)


def pool_rare(
    first: Sequence[Outcome], second: Sequence[Outcome], *, minimum: int
) -> tuple[Counter[Hashable], Counter[Hashable]]:
    """Count both samples in bins of at least ``minimum`` outcomes of the two together.

    Rare outcomes share a bin with other rare ones of the same beginning, at first all but the last
    element, then fewer. What is pooled depends on the joint counts alone, so the test stays valid.
    With too few outcomes altogether there is one bin.
    """
    bins: dict[Outcome, Outcome] = {outcome: outcome for outcome in (*first, *second)}
    joint = Counter((*first, *second))
    for depth in reversed(range(max(map(len, bins), default=0))):
        totals = _totals(bins, joint)
        for outcome, bin_ in bins.items():
            if totals[bin_] < minimum:
                bins[outcome] = outcome[:depth]
    totals = _totals(bins, joint)
    if 0 < totals[()] < minimum:
        rest = [bin_ for bin_ in totals if bin_ != ()]
        nearest = min(rest, key=lambda bin_: totals[bin_], default=())
        bins = {outcome: nearest if bin_ == () else bin_ for outcome, bin_ in bins.items()}
    return Counter(bins[outcome] for outcome in first), Counter(bins[outcome] for outcome in second)


def survival(x: float, degrees: int) -> float:
    """Probability that chi-square with ``degrees`` of freedom (1 or more) is at least ``x``."""
    a, half = degrees / 2.0, x / 2.0
    if half <= 0.0:
        return 1.0
    scale = math.exp(a * math.log(half) - half - math.lgamma(a))
    if half < a + 1.0:
        return min(1.0, max(0.0, 1.0 - scale * _series(a, half)))
    return min(1.0, scale * _continued_fraction(a, half))


def _series(a: float, x: float) -> float:
    """P(a, x) without its factor; converges fast for x < a + 1."""
    term = total = 1.0 / a
    for n in range(1, _MAX_TERMS):
        term *= x / (a + n)
        total += term
        if term < total * _EPSILON:
            break
    return total


def _continued_fraction(a: float, x: float) -> float:
    """Q(a, x) without its factor, by Lentz's method; converges fast for x > a + 1."""
    b = x + 1.0 - a
    c, d = 1.0 / _TINY, 1.0 / b
    value = d
    for n in range(1, _MAX_TERMS):
        step = -n * (n - a)
        b += 2.0
        d = 1.0 / _away_from_zero(step * d + b)
        c = _away_from_zero(b + step / c)
        value *= c * d
        if abs(c * d - 1.0) < _EPSILON:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _totals(bins: Mapping[Outcome, Outcome], joint: Mapping[Outcome, int]) -> Counter[Outcome]:
    totals: Counter[Outcome] = Counter()
    for outcome, bin_ in bins.items():
        totals[bin_] += joint[outcome]
    return totals
