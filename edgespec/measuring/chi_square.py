"""Pearson's chi-square test of whether two samples of outcomes may come from one distribution.

The statistic for samples of unequal size follows Press et al., Numerical Recipes (3rd ed.), section 14.3.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

Outcome = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A statistic and its degrees of freedom; independent ones add up."""

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
    """Probability that chi-square with ``degrees`` of freedom (1 or more) is at least ``x``.

    For whole degrees it is a finite sum (Abramowitz and Stegun, 26.4.4 and 26.4.5).
    """
    half = x / 2.0
    if half <= 0.0:
        return 1.0
    odd = degrees % 2
    powers = (term + odd / 2.0 for term in range(degrees // 2))
    terms = (math.exp(a * math.log(half) - half - math.lgamma(a + 1.0)) for a in powers)
    return min(1.0, math.fsum(terms) + (math.erfc(math.sqrt(half)) if odd else 0.0))


def _totals(bins: Mapping[Outcome, Outcome], joint: Mapping[Outcome, int]) -> Counter[Outcome]:
    totals: Counter[Outcome] = Counter()
    for outcome, bin_ in bins.items():
        totals[bin_] += joint[outcome]
    return totals
