"""Tokens that may follow in a drafter's text, so that one pass of the drafter checks several tokens.

A drafter's pass over four rows takes far less time than four passes over one. So a table, which costs no
time, drafts for the drafter, and a token on which the drafter agrees needs no pass of its own (cascade
drafting, CS-Drafting: Chen et al. 2023, arXiv 2312.11462). Drafts stay the drafter's own choices. They may be
longer where tokens take no pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.drafting.rates import Rate
from edgespec_runtimes.cost import CostCurve

CONTEXT = 4
"""The most tokens of context."""
_ORDERS = range(CONTEXT, 0, -1)
_MOST = 3
_KEPT = 32_768  # contexts; as many older ones are kept too
_MEMORY, _FADING = 50.0, 0.0002
_USUAL = {4: 0.5, 3: 0.4, 2: 0.3, 1: 0.15}  # share of followers that spare a pass, by tokens of context


@dataclass(slots=True)
class Follower:
    """A token, the tokens of context that it followed (``order``), and the number of followers before it."""

    token: int
    order: int
    place: int


@dataclass(slots=True)
class Followers:
    """A table of the token that last followed each one to four tokens in a drafter's texts.

    It learns from all texts of a process and keeps nothing on disk. It also learns how often one spares a
    pass, by the length of its context and its place, and names it if that is worth more than its row.
    """

    curve: CostCurve
    _latest: dict[tuple[int, ...], int] = field(default_factory=dict)
    _before: dict[tuple[int, ...], int] = field(default_factory=dict)
    _spares: dict[tuple[int, int], Rate] = field(default_factory=dict)

    def learn(self, text: Sequence[int], begin: int) -> None:
        """Learn from a text that is new from ``begin`` on."""
        for at in range(max(1, begin), len(text)):
            for order in _ORDERS:
                if order <= at:
                    self._latest[tuple(text[at - order : at])] = text[at]
            if len(self._latest) > _KEPT:
                self._before, self._latest = self._latest, {}

    def forget(self) -> None:
        """Forget all texts."""
        self._latest, self._before = {}, {}

    def behind(self, text: Sequence[int], rows: int, most: int, requests: int = 1) -> list[Follower]:
        """What follows ``text``, for a pass that has ``rows`` rows and room for ``most`` more.

        Each of the ``requests`` that share the pass pays and saves its part of it.
        """
        found = list[Follower]()
        context = list(text[-CONTEXT:])
        while len(found) < min(most, _MOST) and (follower := self._find(context, len(found))) is not None:
            if not self._pays(follower, rows + len(found), requests):
                break
            found.append(follower)
            context.append(follower.token)
        return found

    def fared(self, follower: Follower, spared: bool) -> None:
        """Learn whether one has spared a pass."""
        self._rate(follower).add(spared)

    def _find(self, context: Sequence[int], place: int) -> Follower | None:
        for order in _ORDERS:
            key = tuple(context[-order:])
            token = self._latest.get(key, self._before.get(key))
            if token is not None and len(key) == order:
                return Follower(token, order, place)
        return None

    def _pays(self, follower: Follower, rows: int, requests: int) -> bool:
        rate = self._rate(follower)
        first = rows + requests - 1
        row_s = self.curve.seconds(first + 1) - self.curve.seconds(first)
        if rate.share() * self.curve.seconds(requests) / requests > row_s:
            return True
        rate.fade(_FADING, _usual(follower))  # so that every kind is tried again
        return False

    def _rate(self, follower: Follower) -> Rate:
        return self._spares.setdefault(
            (follower.order, follower.place), Rate.usual(_usual(follower), _MEMORY)
        )


def _usual(follower: Follower) -> float:
    return _USUAL[follower.order] * 0.6**follower.place
