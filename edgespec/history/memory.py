"""The user's n-gram cache: a bounded number of passages of answers, found by context, with verdicts on each.

An index sorts every token of every passage by up to 8 tokens before it, the last one first (a suffix array
over the reversed contexts). Two binary searches find all occurrences of a context. It takes 47 bytes a token.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec.drafting.rates import Rate
from edgespec.history.passages import Entry, Passage, Turn, decayed, total_tokens

MAX_N: Final = 8
"""The most tokens of context that the index compares."""
_KEY: Final = 4 * MAX_N  # bytes
_MOST_READ: Final = 32  # occurrences that vote; an even selection if there are more
_LEAST_USES: Final = 1e-6
_FRESH: Final = 8192
"""Learned tokens after which everything is sorted anew. Until then they have a small index of their own."""
ROOM: Final = 7 / 8
"""The share of the bound that stays when it is exceeded, so that passages do not leave one by one."""
_CLASS_PRIOR: Final = 8.0  # the weight of a class's prior, in judged proposals
_TOKEN_PRIOR: Final = 2.0  # the weight of the class for one token


@dataclass(slots=True)
class Snapshot:
    """The stored state of a scope.

    ``clock`` counts the tokens learned so far. ``tallies`` are verdicts on proposals by class of match.
    """

    clock: int = 0
    entries: list[Entry] = field(default_factory=list)
    tallies: dict[str, Rate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """A proposal for what follows a context, with its evidence.

    Attributes:
        length: the tokens of context that occurred before it, 1 to 8.
        count: the occurrences of that context.
        share: the share of votes for ``token``, 0 to 1. A vote is the decayed uses times how often they were
            right.
        entry: the passage of the latest occurrence that ``token`` followed; ``offset`` is its place in the
            body.
    """

    token: int
    length: int
    count: int
    share: float
    entry: Entry
    offset: int

    @property
    def kind(self) -> str:
        """The class: the length by powers of two; whether occurrences are one, agree, or mostly agree."""
        if self.count == 1:
            agreement = "unique"
        elif self.share > 0.99:
            agreement = "agreed"
        else:
            agreement = "most" if self.share > 0.5 else "split"
        return f"{agreement} {self.length.bit_length()}"

    @property
    def prior(self) -> float:
        """The prior, fitted on replayed answers of two targets to the calibration texts."""
        if self.count == 1:
            return self.length**2 / (self.length**2 + 6.0)
        return self.share**2 * self.length / (self.length + 1.0)


class Index:
    """An index of the contexts of fixed passages, whose votes may change.

    Entries come oldest first. Uses are decayed to the clock ``now``.
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
        # A passage that was not used for long still votes if it is the only one.
        uses = [max(decayed(entry.uses, now - entry.at), _LEAST_USES) for entry in entries]
        self._uses = np.array(uses, np.float32)

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, context: Sequence[int]) -> Match | None:
        """What followed the longest known context, of up to 8 tokens, with which ``context`` ends.

        The followers of its occurrences vote, and the latest wins a tie.
        """
        recent = context[: -MAX_N - 1 : -1]
        if not recent or not len(self._keys):
            return None
        key = struct.pack(f">{len(recent)}I", *[token + 1 for token in recent])
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

    def _elect(self, positions: npt.NDArray[np.int32], length: int, count: int) -> Match:
        if count == 1:
            position = int(positions[0])
            return self._found(position, length, count, 1.0)
        votes: dict[int, float] = {}
        latest: dict[int, int] = {}
        rows = zip(positions.tolist(), self._tokens[positions].tolist(), self._votes(positions), strict=True)
        for position, token, vote in rows:
            votes[token] = votes.get(token, 0.0) + vote
            latest[token] = max(position, latest.get(token, -1))
        token = max(votes, key=lambda candidate: (votes[candidate], latest[candidate]))
        return self._found(latest[token], length, count, votes[token] / sum(votes.values()))

    def _found(self, position: int, length: int, count: int, share: float) -> Match:
        which = int(self._owner[position])
        offset = position - self._first[which]
        return Match(int(self._tokens[position]), length, count, share, self._entries[which], offset)

    def _votes(self, positions: npt.NDArray[np.int32]) -> list[float]:
        owners = self._owner[positions]
        votes = []
        rows = zip(positions.tolist(), owners.tolist(), self._uses[owners].tolist(), strict=True)
        for position, which, uses in rows:
            entry, offset = self._entries[which], position - self._first[which]
            right, wrong = entry.right[offset], entry.wrong[offset]
            votes.append(uses * (right + 1.0) / (right + wrong + 1.0))
        return votes


@dataclass(slots=True)
class Change:
    """Changes of a passage: how often it was written, its uses, and verdicts (right, wrong) by token."""

    passage: Passage
    written: int = 0
    uses: float = 0.0
    verdicts: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Delta:
    """The changes since the last store. Changes of several processes add up.

    ``changes`` are by digest of the passage, ``verdicts`` (right, judged) by class of match. With ``anew``
    earlier verdicts are dropped, because they misled. ``turns`` are kept whole.
    """

    tokens: int = 0
    changes: dict[bytes, Change] = field(default_factory=dict)
    verdicts: dict[str, tuple[int, int]] = field(default_factory=dict)
    anew: bool = False
    turns: list[Turn] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.changes or self.verdicts or self.anew or self.turns)

    def wrote(self, passage: Passage) -> None:
        """Note that a passage was written."""
        self.tokens += len(passage.body)
        change = self.changes.setdefault(passage.digest, Change(passage))
        change.written += 1
        change.uses += 1.0

    def judged(self, kind: str, match: Match, right: bool) -> None:
        """Note that a proposal of class ``kind`` was right or wrong."""
        before = self.verdicts.get(kind, (0, 0))
        self.verdicts[kind] = (before[0] + right, before[1] + 1)
        passage = match.entry.passage
        change = self.changes.setdefault(passage.digest, Change(passage))
        change.uses += right / len(passage.body)
        yes, no = change.verdicts.get(match.offset, (0, 0))
        change.verdicts[match.offset] = (yes + right, no + (not right))

    def distrusted(self, verdicts: Mapping[str, tuple[int, int]]) -> None:
        """Drop all verdicts on classes but these."""
        self.anew, self.verdicts = True, dict(verdicts)


Tell = Callable[[Callable[[Delta], None]], None]
"""Takes a function that notes a change in a :class:`Delta`."""


class Memory:
    """The passages of a scope. Use it in one thread at a time.

    Learned passages are indexed at the next :meth:`refresh`, so the proposals of a request depend on earlier
    requests and the committed text alone. ``tallies`` has what became of proposals, by kind.

    Beyond ``max_tokens`` the least useful passages go. ``clock`` counts the tokens learned so far.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        max_tokens: int,
        tell: Tell = lambda note: None,
    ) -> None:
        self._entries = {entry.passage.digest: entry for entry in snapshot.entries}
        self.tallies = dict(snapshot.tallies)
        self._unproved: dict[str, tuple[int, int]] = {}  # verdicts since proposals last proved their worth
        self.clock, self._tell = snapshot.clock, tell
        self._max_tokens = max_tokens
        self._fresh: dict[bytes, Entry] = {}  # entries that are not in the large index
        self._new = False  # whether some are not in the small index either
        self._sort()

    def __len__(self) -> int:
        return total_tokens(self._entries.values())

    @property
    def entries(self) -> list[Entry]:
        """The passages, in no order."""
        return list(self._entries.values())

    def learn(self, passages: Iterable[Passage]) -> None:
        """Remember that these passages were written."""
        for passage in passages:
            self.clock += len(passage.body)
            entry = self._entries.get(passage.digest)
            if entry is None:
                entry = self._entries[passage.digest] = self._fresh[passage.digest] = Entry(passage)
                self._new = True
            entry.use(1.0, self.clock)
            self._tell(partial(Delta.wrote, passage=passage))

    def keep(self, turn: Turn) -> None:
        """Keep a whole turn in the file."""
        self._tell(lambda delta: delta.turns.append(turn))

    def refresh(self) -> None:
        """Index what was learned, and keep the bound."""
        if not self._new:
            return
        if total_tokens(self._fresh.values()) > _FRESH or len(self) > self._max_tokens:
            self._sort()
        else:
            self._recent = Index(list(self._fresh.values()), self.clock)
            self._new = False

    def find(self, context: Sequence[int]) -> Match | None:
        """What followed the longest known context with which ``context`` ends; see :class:`Match`."""
        match, recent = self._index.find(context), self._recent.find(context)
        if match is None or recent is None:
            return match or recent
        return max(recent, match, key=lambda match: (match.length, match.share * match.count))

    def estimate(self, match: Match) -> float:
        """The probability that ``match.token`` is right, by its class and its own record."""
        mean = self.tallies.get(match.kind, Rate()).share(match.prior, _CLASS_PRIOR)
        right, wrong = match.entry.right[match.offset], match.entry.wrong[match.offset]
        return (right + _TOKEN_PRIOR * mean) / (right + wrong + _TOKEN_PRIOR)

    def judge(self, match: Match, right: bool) -> None:
        """Judge ``match.token`` by the token that came."""
        kind = match.kind
        self.tallies.setdefault(kind, Rate()).add(right, 1)
        before = self._unproved.get(kind, (0, 0))
        self._unproved[kind] = (before[0] + right, before[1] + 1)
        match.entry.judge(match.offset, right=int(right), wrong=int(not right))
        if right:
            match.entry.use(1.0 / len(match.entry.passage.body), self.clock)
        self._tell(partial(Delta.judged, kind=kind, match=match, right=right))

    def trust(self) -> None:
        """Proposals gained: keep the present statistics of classes, to return to them later."""
        self._unproved = {}

    def distrust(self) -> None:
        """Proposals lost: drop the statistics gathered before the last :meth:`trust`."""
        self.tallies = {kind: Rate() for kind in self._unproved}
        for kind, (right, judged) in self._unproved.items():
            self.tallies[kind].add(right, judged)
        self._tell(partial(Delta.distrusted, verdicts=dict(self._unproved)))

    def _sort(self) -> None:
        if len(self) > self._max_tokens:
            most = int(ROOM * self._max_tokens)
            kept = keep_best(self._entries.values(), most, self.clock)
            self._entries = {entry.passage.digest: entry for entry in kept}
        self._index = Index(sorted(self._entries.values(), key=lambda entry: entry.at), self.clock)
        self._recent = Index([], self.clock)
        self._fresh, self._new = {}, False


def keep_best(entries: Iterable[Entry], max_tokens: int, clock: int) -> list[Entry]:
    """The most useful entries that fit; the latest of equals."""
    kept, used = [], 0
    for entry in sorted(entries, key=lambda entry: (entry.worth(clock), entry.at), reverse=True):
        used += len(entry.passage)
        if used > max_tokens:
            break
        kept.append(entry)
    return kept


def _keys(
    tokens: npt.NDArray[np.uint32], positions: npt.NDArray[np.int64], place: npt.NDArray[np.int64]
) -> npt.NDArray[np.bytes_]:
    """The tokens before each position, the last first, as big-endian bytes, which sort like the tokens.

    Ids are raised by one, so that 0 is no token.
    """
    keys = np.zeros((len(positions), MAX_N), ">u4")
    for back in range(MAX_N):
        there = place > back
        keys[there, back] = tokens[positions[there] - back - 1] + 1
    return keys.view(f"S{_KEY}").reshape(-1)


def _shared(stored: bytes, key: bytes) -> int:
    """The number of tokens that a stored context and a key share, from the last one on."""
    padded = stored.ljust(_KEY, b"\0")  # NumPy strips zeros from the end
    length = 0
    while length < len(key) and padded[length : length + 4] == key[length : length + 4]:
        length += 4
    return length // 4
