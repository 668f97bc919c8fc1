"""Drafts that are copied: from the text, from earlier answers, from a text that the app predicts."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from math import prod
from typing import Final, NamedTuple, Protocol

from edgespec.decoding.draft import NO_DRAFT, Draft, Round
from edgespec.drafting.rates import Rate
from edgespec.drafting.source import Extending

LONGEST: Final = 32
"""The tokens of context that finders get; longer matches tell no more about acceptance."""
_PRIOR_STRENGTH: Final = 8.0  # judged proposals
_MEMORY: Final = 64.0  # judged proposals
_STOP_BELOW: Final = 0.15


class Proposal(Protocol):
    """A token, the class that it is judged in, and the probability before anything was learned."""

    @property
    def token(self) -> int: ...

    @property
    def kind(self) -> Hashable: ...

    @property
    def prior(self) -> float: ...


class Copy(NamedTuple):
    """A proposal; see :class:`Proposal`."""

    token: int
    kind: Hashable
    prior: float


class Finder(ABC):
    """Finds what to copy behind a context, and learns how often that is right.

    ``probability`` is the posterior mean of a Beta distribution by class, which slowly forgets. Its prior is
    worth 8 observations.

    Attributes:
        source: the name of its proposals.
        judges_more: whether proposals behind other sources' drafts are judged too.
    """

    source: str
    judges_more = False

    def __init__(self) -> None:
        self._rates: dict[Hashable, Rate] = {}

    @property
    def pauses(self) -> bool:
        """Whether it proposes nothing; what it would have proposed is judged meanwhile."""
        return False

    def follow(self, tokens: Sequence[int]) -> None:
        """Take over ``tokens``, the prompt and the answer."""
        return

    @abstractmethod
    def find(self, context: Sequence[int], ahead: int) -> Proposal | None:
        """The proposal behind ``context``, which ends with ``ahead`` tokens of a draft; None without one."""

    def probability(self, proposal: Proposal) -> float:
        """The probability that a proposal is right."""
        return self._rates.get(proposal.kind, Rate()).share(proposal.prior, _PRIOR_STRENGTH)

    def judge(self, proposal: Proposal, right: bool) -> None:
        """Learn whether a proposal was right."""
        self._rates.setdefault(proposal.kind, Rate(memory=_MEMORY)).add(right)

    def observe(self, round_: Round) -> None:
        """A round has ended, and its proposals are judged."""
        return

    def close(self) -> None:
        """The request has ended; called once."""
        return


class CopyDrafter(Extending):
    """Proposes what the finders copy: the draft of the one that promises most, extended by the others.

    A finder is asked again after every proposed token. So a copy goes on into its own proposals (periodic
    text), and moves to a better occurrence where one appears. Drafts are a function of the tokens, and of
    what was learned in earlier rounds. A draft ends before the token whose product of confidences falls below
    ``stop_below``.
    """

    def __init__(self, *finders: Finder, stop_below: float = _STOP_BELOW) -> None:
        self._finders, self._stop_below = finders, stop_below
        # Behind tokens of others' drafts: proposals, and the one at which a draft stopped. That one is judged
        # too, or else a class that once fell out of favour would never be tried again.
        self._considered: list[tuple[Finder, tuple[int, ...], list[Proposal]]] = []

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        best, self._considered = NO_DRAFT, []
        for finder in self._finders:
            finder.follow(tokens)
            own = self._draft(finder, tokens, NO_DRAFT, limit)
            extended = self._draft(finder, tokens, best, limit) if best.tokens else best
            best = max(extended, own, key=_expected)
        return best

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        extended = (self._draft(finder, tokens, draft, limit) for finder in self._finders)
        return max([draft, *extended], key=_expected)

    def observe(self, round_: Round) -> None:
        """Judge the considered proposals, whichever source drafted."""
        considered, self._considered = self._considered, []
        for finder in self._finders:
            judged = set[int]()
            for owner, head, proposals in considered:
                came = round_.judged[len(head) :]
                if owner is not finder or round_.judged[: len(head)] != head:
                    continue
                for place, (proposal, token) in enumerate(zip(proposals, came, strict=False), len(head)):
                    if place not in judged:
                        judged.add(place)
                        finder.judge(proposal, proposal.token == token)
                    if proposal.token != token:
                        break  # what follows a rejected token was never judged
            finder.observe(round_)

    def close(self) -> None:
        for finder in self._finders:
            finder.close()

    def _draft(self, finder: Finder, tokens: Sequence[int], before: Draft, limit: int) -> Draft:
        """The draft ``before``, and what a finder copies behind it."""
        if before.tokens and finder.pauses:
            return before
        context, reached = [*tokens[-LONGEST:], *before.tokens], prod(before.confidence)
        considered, confidence = list[Proposal](), list[float]()
        while (ahead := len(before.tokens) + len(confidence)) < limit:
            proposal = finder.find(context, ahead)
            if proposal is None:
                break
            considered.append(proposal)
            probability = finder.probability(proposal)
            reached *= probability
            if reached < self._stop_below:
                break
            confidence.append(probability)
            context.append(proposal.token)
        if considered and (finder.judges_more or not before.tokens):
            self._considered.append((finder, before.tokens, considered))
        if not confidence or finder.pauses:
            return before
        count = len(confidence)
        return before.then(Draft(tuple(context[-count:]), (finder.source,) * count, tuple(confidence)))


def _expected(draft: Draft) -> float:
    """The expected number of accepted proposals."""
    expected, reached = 0.0, 1.0
    for probability in draft.confidence:
        reached *= probability
        expected += reached
    return expected


def shared_end(tokens: Sequence[int], place: int, context: Sequence[int]) -> int:
    """The number of tokens, at most 32, with which both ``context`` and ``tokens[:place]`` end."""
    longest = min(place, len(context), LONGEST)
    for length in range(longest):
        if tokens[place - 1 - length] != context[-1 - length]:
            return length
    return longest
