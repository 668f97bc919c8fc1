"""Finding what followed a context: every token of every passage, sorted by the tokens before it, last first.

A suffix array over the reversed contexts, of at most 8 tokens each: occurrences of a context of any length
up to 8 stand side by side, so two binary searches find all of them, whatever the size. 47 bytes a token.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec.history.entries import Entry, decayed

__all__ = ["MAX_N", "Found", "Index"]

MAX_N: Final = 8
"""Tokens by which occurrences are told apart."""
_KEY: Final = 4 * MAX_N  # bytes
_MOST_READ: Final = 32  # occurrences that vote; of more, an even selection
_LEAST_USES: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a context.

    Attributes:
        token: the proposal for what follows.
        length: tokens of context that occurred before it, 1 to 8.
        count: occurrences of that context.
        share: of their votes (decayed uses, times how often they were right), those for ``token``; 0 to 1.
        entry: the passage of the latest occurrence that was followed by ``token``.
        offset: where in its body.
    """

    token: int
    length: int
    count: int
    share: float
    entry: Entry
    offset: int


class Index:
    """The contexts of some passages. Which passages is fixed; how their votes weigh is not.

    Args:
        entries: oldest first.
        now: the clock that uses are decayed to.
    """

    def __init__(self, entries: Sequence[Entry], now: int) -> None:
        self._entries = list(entries)
        lengths = np.array([len(entry.passage) for entry in entries], np.int64)
        leads = np.array([len(entry.passage.lead) for entry in entries], np.int64)
        starts = np.cumsum(lengths) - lengths
        tokens = np.array([t for e in entries for t in (*e.passage.lead, *e.passage.body)], np.uint32)
        owner = np.repeat(np.arange(len(entries)), lengths)
        place = np.arange(len(tokens)) - starts[owner]
        positions = np.flatnonzero((place >= leads[owner]) & (place > 0))
        keys = _keys(tokens, positions, place[positions])
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._positions = positions[order].astype(np.int32)
        self._tokens = tokens.astype(np.int32)
        self._owner = owner.astype(np.int32)
        self._first = (starts + leads).tolist()  # where each body begins
        # A passage that has not been used for long still votes, if it is the only one.
        uses = [max(decayed(entry.uses, now - entry.at), _LEAST_USES) for entry in entries]
        self._uses = np.array(uses, np.float32)

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, context: Sequence[int]) -> Found | None:
        """What followed the longest known context, of up to 8 tokens, that ``context`` ends with.

        The followers of its occurrences vote; between equals the latest wins.
        """
        read = context[: -MAX_N - 1 : -1]
        if not read or not len(self._keys):
            return None
        key = struct.pack(f">{len(read)}I", *[token + 1 for token in read])
        at = int(self._keys.searchsorted(key))
        length = max(_shared(self._keys[i], key) for i in (at - 1, at) if 0 <= i < len(self._keys))
        if length == 0:
            return None
        begins = key[: 4 * length]
        low = int(self._keys.searchsorted(begins))
        high = int(self._keys.searchsorted(begins.ljust(_KEY, b"\xff"), side="right"))
        return self._elect(
            self._positions[low : high : (high - low - 1) // _MOST_READ + 1], length, high - low
        )

    def _elect(self, positions: npt.NDArray[np.int32], length: int, count: int) -> Found:
        if count == 1:
            position = int(positions[0])
            return self._found(position, length, count, 1.0)
        votes: dict[int, float] = {}
        latest: dict[int, int] = {}
        rows = zip(positions.tolist(), self._tokens[positions].tolist(), self._votes(positions), strict=True)
        for position, token, vote in rows:
            votes[token] = votes.get(token, 0.0) + vote
            latest[token] = max(position, latest.get(token, -1))
        token = max(votes, key=lambda each: (votes[each], latest[each]))
        return self._found(latest[token], length, count, votes[token] / sum(votes.values()))

    def _found(self, position: int, length: int, count: int, share: float) -> Found:
        which = int(self._owner[position])
        offset = position - self._first[which]
        return Found(int(self._tokens[position]), length, count, share, self._entries[which], offset)

    def _votes(self, positions: npt.NDArray[np.int32]) -> list[float]:
        owners = self._owner[positions]
        votes = []
        rows = zip(positions.tolist(), owners.tolist(), self._uses[owners].tolist(), strict=True)
        for position, which, uses in rows:
            entry, offset = self._entries[which], position - self._first[which]
            right, wrong = entry.right[offset], entry.wrong[offset]
            votes.append(uses * (right + 1.0) / (right + wrong + 1.0))
        return votes


def _keys(
    tokens: npt.NDArray[np.uint32], positions: npt.NDArray[np.int64], place: npt.NDArray[np.int64]
) -> npt.NDArray[np.bytes_]:
    """The tokens before each position, last first, as big-endian bytes: they sort as their tokens do.

    Ids are raised by one, so that 0 stands for no token.
    """
    keys = np.zeros((len(positions), MAX_N), ">u4")
    for back in range(MAX_N):
        there = place > back
        keys[there, back] = tokens[positions[there] - back - 1] + 1
    return keys.view(f"S{_KEY}").reshape(-1)


def _shared(stored: bytes, key: bytes) -> int:
    """Tokens that a stored context and a key share, from the last on."""
    padded = stored.ljust(_KEY, b"\0")  # NumPy strips zeros from the end
    length = 0
    while length < len(key) and padded[length : length + 4] == key[length : length + 4]:
        length += 4
    return length // 4
