"""Drafts that are copied from the text: what followed its last tokens when they stood there before.

A context tree holds where every run of tokens occurred and what followed it (prompt lookup: Saxena 2023; the
statistics of a suffix tree: Oliaro et al. 2024, SuffixDecoding). It grows by one bounded walk a token. It is
exact: it hashes no runs, so there is nothing to verify.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, Protocol

from edgespec.decoding.draft import NO_DRAFT, Draft, Step
from edgespec.drafting.source import Extending
from edgespec_runtimes.kv_cache import shared_length

_OLDEST, _LATEST = 0, -1
LONGEST: Final = 32  # longer matches tell no more about acceptance
_PRIOR_STRENGTH: Final = 8.0  # judged proposals
_MEMORY: Final = 64.0  # judged proposals until an observation has lost 1 - 1/e of its weight


@dataclass(slots=True)
class _Node:
    """A context (a run of tokens, read backwards from the root) that occurred more than once.

    A context is split only when it recurs, so a text that never repeats costs one entry a token.
    """

    positions: list[int] = field(default_factory=list)  # of the tokens that followed the context, ascending
    counts: dict[int, int] = field(default_factory=dict)  # how often each token followed
    # Contexts with one more token before, by that token. For one that occurred once, its follower stands at
    # this position.
    longer: dict[int, "_Node | int"] = field(default_factory=dict)

    def add(self, position: int, token: int) -> None:
        self.positions.append(position)
        self.counts[token] = self.counts.get(token, 0) + 1

    def remove(self, which: int, token: int) -> int:
        """Remove the oldest or latest position, where ``token`` followed, and return how many are left."""
        self.positions.pop(which)
        if self.counts[token] == 1:
            del self.counts[token]
        else:
            self.counts[token] -= 1
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Match:
    """The text's prediction behind a context.

    Attributes:
        token: the token that is proposed.
        length: the tokens of context that its occurrence shares, at most 32.
        count: the occurrences of the longest context in the tree that recurred. 1 is a unique context.
        support: the number of these that ``token`` followed.
    """

    token: int
    length: int
    count: int
    support: int

    @property
    def kind(self) -> Hashable:
        """The class: the length by powers of two, whether the context is unique, whether most agree."""
        return self.length.bit_length(), self.count == 1, 2 * self.support > self.count

    @property
    def prior(self) -> float:
        """The probability that the prediction is right, before anything was learned."""
        if self.count == 1:
            return self.length / (self.length + 3.5)
        if self.support == self.count:
            return self.length / (self.length + 1.0)
        return (self.support - 0.5) / (self.count + 1.0)


class Proposal(Protocol):
    """A token, the class that it is judged in, and the probability before anything was learned."""

    @property
    def token(self) -> int: ...

    @property
    def kind(self) -> Hashable: ...

    @property
    def prior(self) -> float: ...


class Finder(Protocol):
    """Finds what to copy behind a context."""

    def follow(self, tokens: Sequence[int]) -> int:
        """Take over ``tokens``, the prompt and the answer, and return how many were known already."""

    def find(self, context: Sequence[int], ahead: int) -> Proposal | None:
        """The proposal behind ``context``, which ends with ``ahead`` tokens of a draft; None without one."""


class ContextTree:
    """The contexts of one sequence, which is edited at its end only.

    The tree tells contexts of up to ``max_n`` tokens apart. It holds the latest ``window`` tokens; older ones
    leave it.
    """

    def __init__(self, *, max_n: int = 8, window: int = 32768) -> None:
        self._max_n = max_n
        self._window = window
        self._tokens: list[int] = []
        self._root = _Node()
        self._oldest = 0  # first position that is still in the tree

    def __len__(self) -> int:
        return len(self._tokens)

    def follow(self, tokens: Sequence[int]) -> int:
        """Make this the tree of ``tokens`` and return how many first tokens it held already.

        Every token that came or went costs one walk. Tokens that have left the window do not come back when
        later ones are taken away.
        """
        shared = shared_length(self._tokens, tokens)
        while len(self._tokens) > shared:
            self._pop()
        for token in tokens[shared:]:
            self._append(token)
        return shared

    def find(self, context: Sequence[int], ahead: int = 0) -> Match | None:
        """What followed the longest context in the tree with which ``context`` ends; None without one.

        If the two latest occurrences disagree, the more frequent follower is taken, else the latest.
        """
        node, at = self._root, None
        for token in reversed(context[-self._max_n :]):
            at = node.longer.get(token)
            if not isinstance(at, _Node):
                break
            node = at
        if isinstance(at, int):
            position, count, support = at, 1, 1
        elif node is not self._root:
            position, count, support = self._choose(node)
        else:
            return None
        length = self._shared_length(position, context)
        return Match(self._tokens[position], length, count, support)

    def _choose(self, node: _Node) -> tuple[int, int, int]:
        latest = node.positions[-1]
        token = self._tokens[latest]
        if len(node.positions) > 1:
            before = node.positions[-2]
            other = self._tokens[before]
            if node.counts[other] > node.counts[token]:
                latest, token = before, other
        return latest, len(node.positions), node.counts[token]

    def _shared_length(self, position: int, context: Sequence[int]) -> int:
        longest = min(position, len(context), LONGEST)
        for length in range(longest):
            if self._tokens[position - 1 - length] != context[-1 - length]:
                return length
        return longest

    def _append(self, token: int) -> None:
        position = len(self._tokens)
        self._tokens.append(token)
        node = self._root
        for depth in range(min(self._max_n, position)):
            before = self._tokens[position - 1 - depth]
            at = node.longer.get(before)
            if at is None:
                node.longer[before] = position
                break
            if isinstance(at, int):
                at = node.longer[before] = self._split(at, depth + 1)
            at.add(position, token)
            node = at
        if position - self._oldest >= self._window:
            self._remove(self._oldest, _OLDEST)
            self._oldest += 1

    def _split(self, position: int, depth: int) -> _Node:
        node = _Node()
        node.add(position, self._tokens[position])
        if depth < min(self._max_n, position):
            node.longer[self._tokens[position - 1 - depth]] = position
        return node

    def _pop(self) -> None:
        position = len(self._tokens) - 1
        if position >= self._oldest:
            self._remove(position, _LATEST)
        else:
            self._oldest = position
        self._tokens.pop()

    def _remove(self, position: int, which: int) -> None:
        """Remove the oldest or latest position from every context that it followed."""
        node = self._root
        for depth in range(min(self._max_n, position)):
            before = self._tokens[position - 1 - depth]
            at = node.longer[before]
            if isinstance(at, int) or at.remove(which, self._tokens[position]) == 0:
                del node.longer[before]
                return
            node = at


class NgramDrafter(Extending):
    """Finds the longest end of the text that occurred before, and proposes the tokens that followed it there.

    Another ``finder`` copies from elsewhere; ``source`` names its proposals.

    The rule applies again after every proposed token. So a copy goes on into its own proposals (periodic
    text), and moves to a better occurrence where one appears.

    ``confidence`` is the posterior mean of a Beta distribution, which learns from the committed tokens and
    slowly forgets. Proposals have classes: by the length of the match (in powers of two), by whether its
    context was unique, and by whether most of its occurrences agree. The prior, worth 8 observations, was
    fitted on replayed prose and code: its mean is n / (n + 3.5) for a unique match of n tokens, n / (n + 1)
    if several occurrences agree, and (s - 0.5) / (c + 1) if s of c do.

    A draft ends before the token whose product of confidences falls below ``stop_below``.
    """

    def __init__(
        self, finder: Finder | None = None, *, source: str = "ngram", stop_below: float = 0.15
    ) -> None:
        self._stop_below, self._source = stop_below, source
        self._finder: Finder = ContextTree() if finder is None else finder
        self._fared: dict[Hashable, tuple[float, float]] = {}  # by class: right, judged
        # The last call's proposals and the match at which it stopped. That one is judged too, or else a
        # class of matches that once fell out of favour would never be tried again.
        self._considered: list[Proposal] = []

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """Propose a continuation. It is a function of the tokens."""
        self._finder.follow(tokens)
        self._considered, draft = self._draft(tokens, NO_DRAFT, limit)
        return draft

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        """Extend another source's draft. Nothing is learned from the added tokens."""
        return draft.then(self._draft(tokens, draft, limit)[1])

    def observe(self, step: Step) -> None:
        """Judge the considered proposals, whichever source drafted."""
        considered, self._considered = self._considered, []
        for match, token in zip(considered, step.judged, strict=False):
            key, is_right = match.kind, match.token == token
            right, judged = self._fared.get(key, (0.0, 0.0))
            keep = 1.0 - 1.0 / _MEMORY
            self._fared[key] = (keep * right + is_right, keep * judged + 1.0)
            if not is_right:
                break  # what follows a rejected token was never judged

    def _draft(self, tokens: Sequence[int], before: Draft, limit: int) -> tuple[list[Proposal], Draft]:
        """The matches considered behind ``tokens`` and ``before``, and their proposals."""
        context = [*tokens[-LONGEST:], *before.tokens]
        considered: list[Proposal] = []
        drafted: list[int] = []
        confidence: list[float] = []
        reached = prod(before.confidence)
        room = limit - len(before.tokens)
        while len(drafted) < room:
            match = self._finder.find(context, len(before.tokens) + len(drafted))
            if match is None:
                break
            considered.append(match)
            estimate = self._estimate(match)
            reached *= estimate
            if reached < self._stop_below:
                break
            drafted.append(match.token)
            confidence.append(estimate)
            context.append(match.token)
        if not drafted:
            return considered, NO_DRAFT
        sources = (self._source,) * len(drafted)
        return considered, Draft(tuple(drafted), sources=sources, confidence=tuple(confidence))

    def _estimate(self, match: Proposal) -> float:
        """The posterior mean of the probability that ``match`` is right."""
        right, judged = self._fared.get(match.kind, (0.0, 0.0))
        return (right + _PRIOR_STRENGTH * match.prior) / (judged + _PRIOR_STRENGTH)


class BestOf(Extending):
    """The draft of ``near`` extended by ``far``, or the draft of ``far``: the one that promises more tokens.

    Both draft deterministically: ``near`` from the text, ``far`` from elsewhere.
    """

    def __init__(self, near: Extending, far: Extending) -> None:
        self._near, self._far = near, far

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        near, far = self._near.propose(tokens, limit), self._far.propose(tokens, limit)
        if near.tokens:
            near = self._far.extend(tokens, near, limit)
        return max(near, far, key=_expected)

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        drafts = (source.extend(tokens, draft, limit) for source in (self._near, self._far))
        return max(drafts, key=_expected)

    def observe(self, step: Step) -> None:
        self._near.observe(step)
        self._far.observe(step)

    def close(self) -> None:
        self._near.close()
        self._far.close()


def _expected(draft: Draft) -> float:
    """The expected number of accepted proposals."""
    expected, reached = 0.0, 1.0
    for probability in draft.confidence:
        reached *= probability
        expected += reached
    return expected
