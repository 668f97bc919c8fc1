"""Reads and writes a history's file. Every change is one transaction that adds to what is there.

So several processes may write at once, and none overwrites what another learned. A killed process leaves its
last whole transaction.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Self

from edgespec.drafting.rates import Rate
from edgespec.history.database import connect, transaction
from edgespec.history.memory import ROOM, Change, Delta, Snapshot, keep_best
from edgespec.history.passages import Entry, Passage, Turn, pack_tokens, unpack_tokens
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.forks import kept_in_forks
from edgespec_models.schema import matching

MAX_TOKENS: Final = 262_144
"""The most tokens of one scope."""
MAX_BYTES: Final = 64 * 2**20
"""The most bytes of the file."""
MAX_TURN_BYTES: Final = 8 * 2**20
"""The most bytes of the turns of one scope, and a hundred times the most of one turn."""

Name = Annotated[str, matching(r"[^\ud800-\udfff]*", "without lone surrogates")]
"""A text that SQLite can store."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A target, its tokenizer and a namespace. Scopes share nothing.

    ``tokenizer`` is the digest of the target's tokenizer. ``namespace`` is the application's own name for an
    app, a task or a language.
    """

    target: Name
    tokenizer: Name
    namespace: Name = ""

    @classmethod
    def of(cls, target: Bundle, namespace: str) -> "Scope":
        """The scope of a model's answers."""
        return cls(target.manifest.name, target.tokenizer.digest, namespace)


@dataclass(frozen=True, slots=True)
class Learned:
    """A stored passage, with the bytes of its lead (``before``) and of its body (``text``).

    The bytes may begin or end within a character. ``learned_on`` is when the passage was first written, in
    seconds since 1970. ``worth`` decides whether it stays.
    """

    scope: Scope
    entry: Entry
    before: bytes
    text: bytes
    learned_on: float
    worth: float


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A stored turn. ``written_on`` is when it was answered last, in seconds since 1970."""

    scope: Scope
    turn: Turn
    written_on: float


class Store:
    """One connection to a history's file, which keeps its bounds. Use it in one thread at a time.

    :func:`edgespec.history.database.connect` opens the ``connection``. A scope is bounded by
    ``max_tokens``, the file by ``max_bytes``.
    """

    def __init__(
        self, connection: sqlite3.Connection, *, max_tokens: int = MAX_TOKENS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._connection, self._max_tokens, self._max_bytes = connection, max_tokens, max_bytes
        kept_in_forks(self)  # SQLite's connections must not be closed there

    @classmethod
    def open(cls, path: Path, **bounds: int) -> Self:
        """Open or make the file; raises as :func:`~edgespec.history.database.connect` does."""
        return cls(connect(path), **bounds)

    def close(self) -> None:
        """Close the connection. Merged changes stay."""
        self._connection.close()

    def scopes(self) -> dict[Scope, int]:
        """All scopes, with the number of tokens of each."""
        return {scope: tokens for scope, _, _, tokens in self._rows()}

    def read(self, scope: Scope) -> Snapshot:
        """The state of a scope; empty if there is none."""
        row = self._find(scope)
        if row is None:
            return Snapshot()
        key, clock = row
        entries = [_entry(*values) for values in self._connection.execute(_ENTRIES, (key,))]
        tallies = self._connection.execute(
            "SELECT class, accepted, judged FROM tally WHERE scope = ?", (key,)
        )
        return Snapshot(clock, entries, {kind: Rate(right, judged) for kind, right, judged in tallies})

    def learned(self) -> Iterator[Learned]:
        """All passages with their text."""
        for scope, key, clock, _ in self._rows():
            for *values, before, text, learned_on in self._connection.execute(_PASSAGES, (key,)).fetchall():
                entry = _entry(*values)
                yield Learned(scope, entry, before, text, learned_on, entry.worth(clock))

    def turns(self) -> Iterator[StoredTurn]:
        """All turns, the oldest of a scope first."""
        for scope, key, _, _ in self._rows():
            for prompt, answer, ended, written_on in self._connection.execute(_TURNS, (key,)).fetchall():
                yield StoredTurn(scope, Turn(prompt, answer, bool(ended)), written_on)

    def merge(self, scope: Scope, delta: Delta, text_of: Callable[[Sequence[int]], bytes]) -> None:
        """Add changes to the file and keep its bounds. On an error nothing is changed.

        Raises:
            sqlite3.Error: the file cannot be written, and nothing was.
        """
        with transaction(self._connection):
            self._believe_the_clock()
            key, clock = self._advance(scope, delta.tokens)
            for change in delta.changes.values():
                self._apply(key, clock, change, text_of)
            if delta.anew:
                self._connection.execute("DELETE FROM tally WHERE scope = ?", (key,))
            for kind, (right, judged) in delta.verdicts.items():
                self._count(key, kind, right, judged)
            for turn in delta.turns:
                self._keep_turn(key, turn, time.time())
            self._trim(key, clock)
            self._shrink(key, clock)
        # The delta is stored: an error now would have it added once more. The next merge gives back more.
        with suppress(sqlite3.OperationalError):
            self._vacuum()

    def put(self, learned: Iterable[Learned], turns: Iterable[StoredTurn] = ()) -> int:
        """Add passages with their statistics, and turns, all or none, and keep the bounds.

        Returns how many of the passages are stored then.
        """
        clocks, digests = {}, set()
        with transaction(self._connection):
            self._believe_the_clock()
            for passage in learned:
                key, clock = self._put(passage)
                clocks[key] = clock
                digests.add((key, passage.entry.passage.digest))
            for member in turns:
                key, clock = self._advance(member.scope, 0)
                self._keep_turn(key, member.turn, member.written_on)
                clocks[key] = clock
            for key, clock in clocks.items():
                self._trim(key, clock)
            if clocks:  # it may delete other scopes, of these too
                self._shrink(*clocks.popitem())
            stored = [self._connection.execute(_ENTRY, which).fetchone() for which in digests]
            return len(stored) - stored.count(None)

    def _put(self, learned: Learned) -> tuple[int, int]:
        """Add the passages of one scope, and return its row and clock."""
        key, clock = self._advance(learned.scope, 0)
        known = self._connection.execute(_ENTRY, (key, learned.entry.passage.digest)).fetchone()
        entry = learned.entry if known is None else _entry(*known)
        if known is not None:
            entry.use(learned.entry.uses, clock)
        entry.at = clock
        self._save(key, entry, (learned.before, learned.text), learned.learned_on)
        return key, clock

    def remove(self, passages: Sequence[Learned], turns: Sequence[StoredTurn] = ()) -> None:
        """Delete and overwrite passages and turns."""
        with transaction(self._connection):
            for stored in turns:
                row = self._find(stored.scope)
                if row is not None:
                    self._connection.execute(_FORGET, (row[0], stored.turn.digest))
            for learned in passages:
                row = self._find(learned.scope)
                if row is not None:
                    self._delete(row[0], [learned.entry])
        self._overwrite()

    def remove_namespace(self, namespace: str) -> None:
        """Delete and overwrite a namespace, for all targets."""
        with transaction(self._connection):
            self._connection.execute("DELETE FROM scope WHERE namespace = ?", (namespace,))
        self._overwrite()

    def _overwrite(self) -> None:
        """Overwrite deleted text in the file and its log."""
        self._vacuum()
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _rows(self) -> list[tuple[Scope, int, int, int]]:
        """Every scope, with its row's id, its clock and its tokens."""
        query = "SELECT target, tokenizer, namespace, id, clock, tokens FROM scope ORDER BY 1, 3"
        return [(Scope(*row[:3]), *row[3:]) for row in self._connection.execute(query)]

    def _find(self, scope: Scope) -> tuple[int, int] | None:
        """The row's id and the clock of a scope."""
        return next(((key, clock) for known, key, clock, _ in self._rows() if known == scope), None)

    def _believe_the_clock(self) -> None:
        """Reset times of use that lie in the future: a clock that was wrong would keep all else out."""
        now = time.time()
        self._connection.execute("UPDATE scope SET used_on = ? WHERE used_on > ?", (now - 1.0, now))

    def _advance(self, scope: Scope, tokens: int) -> tuple[int, int]:
        values = (scope.target, scope.tokenizer, scope.namespace, tokens, time.time())
        row = self._connection.execute(_ADVANCE, values).fetchone()
        return int(row[0]), int(row[1])

    def _apply(self, key: int, clock: int, change: Change, text_of: Callable[[Sequence[int]], bytes]) -> None:
        passage = change.passage
        known = self._connection.execute(_ENTRY, (key, passage.digest)).fetchone()
        if known is None and not change.written:
            return  # evicted or forgotten meanwhile
        entry = Entry(passage, at=clock) if known is None else _entry(*known)
        entry.use(change.uses, clock)
        for offset, (right, wrong) in change.verdicts.items():
            entry.judge(offset, right=right, wrong=wrong)
        if known is None:
            self._save(key, entry, (text_of(passage.lead), text_of(passage.body)), time.time())
        else:
            verdicts = bytes(entry.right + entry.wrong)
            self._connection.execute(_UPDATE, (entry.uses, entry.at, verdicts, key, passage.digest))

    def _save(self, key: int, entry: Entry, texts: tuple[bytes, bytes], learned_on: float) -> None:
        passage = entry.passage
        tokens = (pack_tokens(passage.lead), pack_tokens(passage.body))
        history = (entry.uses, entry.at, learned_on, bytes(entry.right + entry.wrong))
        self._connection.execute("DELETE FROM passage WHERE scope = ? AND digest = ?", (key, passage.digest))
        self._connection.execute(_INSERT, (key, passage.digest, *tokens, *texts, *history))

    def _count(self, key: int, kind: str, right: int, judged: int) -> None:
        query = "SELECT accepted, judged FROM tally WHERE scope = ? AND class = ?"
        tally = Rate(*(self._connection.execute(query, (key, kind)).fetchone() or (0.0, 0.0)))
        tally.add(right, judged)
        values = (key, kind, tally.right, tally.judged)
        self._connection.execute("INSERT OR REPLACE INTO tally VALUES (?, ?, ?, ?)", values)

    def _keep_turn(self, key: int, turn: Turn, written_on: float) -> None:
        if len(turn.prompt) + len(turn.answer) <= MAX_TURN_BYTES // 100:
            values = (key, turn.digest, turn.prompt, turn.answer, turn.ended, written_on)
            self._connection.execute("INSERT OR REPLACE INTO turn VALUES (?, ?, ?, ?, ?, ?)", values)

    def _trim(self, key: int, clock: int) -> None:
        """Keep the scope within its tokens, and its turns within their bytes."""
        self._connection.execute(_TRIM_TURNS, (key, MAX_TURN_BYTES))
        if self._tokens(key) > self._max_tokens:
            self._keep(key, clock, int(ROOM * self._max_tokens))

    def _tokens(self, key: int) -> int:
        return int(self._connection.execute("SELECT tokens FROM scope WHERE id = ?", (key,)).fetchone()[0])

    def _keep(self, key: int, clock: int, tokens: int) -> None:
        entries = [_entry(*values) for values in self._connection.execute(_ENTRIES, (key,))]
        kept = {entry.passage.digest for entry in keep_best(entries, tokens, clock)}
        self._delete(key, [entry for entry in entries if entry.passage.digest not in kept])

    def _delete(self, key: int, entries: Sequence[Entry]) -> None:
        rows = [(key, entry.passage.digest) for entry in entries]
        self._connection.executemany("DELETE FROM passage WHERE scope = ? AND digest = ?", rows)

    def _shrink(self, key: int, clock: int) -> None:
        """Keep the file within its bytes. Other scopes go first, the least recently used before others."""
        while self._size() > self._max_bytes:
            query = "SELECT id FROM scope WHERE id <> ? ORDER BY used_on LIMIT 1"
            other = self._connection.execute(query, (key,)).fetchone()
            if other is not None:
                self._connection.execute("DELETE FROM scope WHERE id = ?", other)
                continue
            tokens = self._tokens(key)
            if tokens == 0:
                break
            self._keep(key, clock, int(ROOM * tokens))

    def _vacuum(self) -> None:
        """Give free pages back to the disk."""
        if self._pragma("freelist_count"):
            # The statement frees a page at each step, and ``execute`` stops where no rows come.
            self._connection.executescript("PRAGMA incremental_vacuum")

    def _size(self) -> int:
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])


def _entry(lead: bytes, body: bytes, uses: float, at: int, verdicts: bytes) -> Entry:
    middle = len(body) // 4
    if len(lead) % 4 or len(body) % 4 or not middle or len(verdicts) != 2 * middle:
        raise sqlite3.DataError("a passage is not as edgespec writes it")
    passage = Passage(unpack_tokens(lead), unpack_tokens(body))
    return Entry(passage, uses, at, bytearray(verdicts[:middle]), bytearray(verdicts[middle:]))


_COLUMNS: Final = "lead, body, uses, used_at, verdicts"
_ENTRIES: Final = f"SELECT {_COLUMNS} FROM passage WHERE scope = ?"
_ENTRY: Final = f"SELECT {_COLUMNS} FROM passage WHERE scope = ? AND digest = ?"
_PASSAGES: Final = f"SELECT {_COLUMNS}, before, text, learned_on FROM passage WHERE scope = ?"
_INSERT: Final = "INSERT INTO passage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_UPDATE: Final = "UPDATE passage SET uses = ?, used_at = ?, verdicts = ? WHERE scope = ? AND digest = ?"
_TURNS: Final = "SELECT prompt, answer, ended, written_on FROM turn WHERE scope = ? ORDER BY written_on"
_FORGET: Final = "DELETE FROM turn WHERE scope = ? AND digest = ?"
_TRIM_TURNS: Final = """
DELETE FROM turn WHERE scope = ?1 AND digest IN (SELECT digest FROM (
    SELECT digest, SUM(length(prompt) + length(answer)) OVER (ORDER BY written_on DESC, digest) AS bytes
    FROM turn WHERE scope = ?1
) WHERE bytes > ?2)
"""
_ADVANCE: Final = """
INSERT INTO scope (target, tokenizer, namespace, clock, used_on) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (target, tokenizer, namespace)
DO UPDATE SET clock = clock + excluded.clock, used_on = excluded.used_on
RETURNING id, clock
"""
