"""Drafts that are copied from the text: what followed its last tokens when they stood there before.

A context tree holds where every run of tokens occurred and what followed it (prompt lookup: Saxena 2023; the
statistics of a suffix tree: Oliaro et al. 2024, SuffixDecoding). It grows by one bounded walk a token. It is
exact: it hashes no runs, so there is nothing to verify.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.drafting.copies import Copy, Finder, shared_end
from edgespec_runtimes.kv_cache import shared_length

_OLDEST, _LATEST = 0, -1


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


class ContextTree(Finder):
    """The contexts of one sequence, which is edited at its end only.

    The tree tells contexts of up to ``max_n`` tokens apart. It holds the latest ``window`` tokens; older ones
    leave it.
    """

    source = "ngram"

    def __init__(self, *, max_n: int = 8, window: int = 32768) -> None:
        super().__init__()
        self._max_n = max_n
        self._window = window
        self._tokens: list[int] = []
        self._root = _Node()
        self._oldest = 0  # first position that is still in the tree

    def follow(self, tokens: Sequence[int]) -> None:
        """Make this the tree of ``tokens``.

        Every token that came or went costs one walk. Tokens that have left the window do not come back when
        later ones are taken away.
        """
        if not self._tokens:  # earlier ones would leave the window at once
            self._oldest = max(0, len(tokens) - self._window)
            self._tokens = [*tokens[: self._oldest]]
        shared = shared_length(self._tokens, tokens)
        while len(self._tokens) > shared:
            self._pop()
        for token in tokens[shared:]:
            self._append(token)

    def find(self, context: Sequence[int], ahead: int = 0) -> Copy | None:
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
        length = shared_end(self._tokens, position, context)
        return copied(self._tokens[position], length, count, support)

    def _choose(self, node: _Node) -> tuple[int, int, int]:
        latest = node.positions[-1]
        token = self._tokens[latest]
        if len(node.positions) > 1:
            before = node.positions[-2]
            other = self._tokens[before]
            if node.counts[other] > node.counts[token]:
                latest, token = before, other
        return latest, len(node.positions), node.counts[token]

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


def copied(token: int, length: int, count: int, support: int) -> Copy:
    """The proposal of a context's follower. Its prior was fitted on replayed prose and code.

    Args:
        token: the token that is proposed.
        length: the tokens of context that its occurrence shares, at most 32.
        count: the occurrences of the longest context that recurred. 1 is a unique context.
        support: the number of these that ``token`` followed.
    """
    if count == 1:
        prior = length / (length + 3.5)
    elif support == count:
        prior = length / (length + 1.0)
    else:
        prior = (support - 0.5) / (count + 1.0)
    return Copy(token, (length.bit_length(), count == 1, 2 * support > count), prior)
