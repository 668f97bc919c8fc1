"""What drafters learned of a user, in the history's file: tables of weights, kept by scope and drafter."""

import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import Final, NamedTuple

import numpy as np
from numpy.lib import format as npy

from edgespec.learning.lesson import ROWS, Lesson, Table

__all__ = ["MOST_DRAFTERS", "Corrections", "DrafterKey", "Kept", "unpack"]

MOST_DRAFTERS: Final = 4
"""Drafters of one scope whose corrections are kept, those used last."""
_MOST_BYTES: Final = 4 << 20  # of a table with its header


class DrafterKey(NamedTuple):
    """A drafter: the digest of its bundle tells it apart, its name is for people."""

    digest: str
    name: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A correction as it is stored.

    Attributes:
        drafter: whose guesses it corrects.
        tokens: committed tokens that it was learned from.
        used_on: when it was last added to, seconds since 1970.
        data: the table, packed.
    """

    drafter: DrafterKey
    tokens: int
    used_on: float
    data: bytes


class Corrections:
    """The corrections in a history's file, each a sum of what several programs learned.

    One that cannot be read, or whose table has another shape (another version of edgespec wrote it), counts
    as none and is replaced. A scope is named by its row's id.

    Args:
        connection: a connection within a transaction, where something is written.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def tables(self, scope: int) -> dict[str, Table]:
        """The tables of a scope, by the drafter's digest."""
        tables = ((kept.drafter.digest, _table(kept)) for kept in self.of(scope))
        return {digest: table for digest, table in tables if table is not None}

    def of(self, scope: int) -> Iterator[Kept]:
        """The corrections of a scope, the one used last first."""
        for digest, name, *values in self._connection.execute(_ALL, (scope,)).fetchall():
            yield Kept(DrafterKey(digest, name), *values)

    def add(self, scope: int, drafter: DrafterKey, lesson: Lesson) -> None:
        """Add what was learned to what is known."""
        known = None if lesson.anew else self._find(scope, drafter)
        table = None if known is None else _table(known)
        if known is None or table is None or table.shape != lesson.change.shape:
            table, tokens = lesson.change, lesson.tokens
        else:
            table, tokens = table + lesson.change, known.tokens + lesson.tokens
        self._save(scope, Kept(drafter, tokens, time.time(), _pack(table)))

    def put(self, scope: int, kept: Kept) -> None:
        """Keep this one, unless there is one that was learned from more."""
        known = self._find(scope, kept.drafter)
        if known is None or known.tokens < kept.tokens or _table(known) is None:
            self._save(scope, kept)

    def forget(self) -> int:
        """Delete all of them, of every scope; returns how many there were."""
        return self._connection.execute("DELETE FROM correction").rowcount

    def _find(self, scope: int, drafter: DrafterKey) -> Kept | None:
        return next((kept for kept in self.of(scope) if kept.drafter.digest == drafter.digest), None)

    def _save(self, scope: int, kept: Kept) -> None:
        values = (scope, *kept.drafter, kept.tokens, kept.used_on, kept.data)
        self._connection.execute("INSERT OR REPLACE INTO correction VALUES (?, ?, ?, ?, ?, ?)", values)
        for each in list(self.of(scope))[MOST_DRAFTERS:]:
            self._connection.execute(_DELETE, (scope, each.drafter.digest))


def unpack(data: bytes) -> Table | None:
    """The table in ``data``; None if it has another shape.

    Raises:
        ValueError: there is no table in it.
    """
    reading = zlib.decompressobj()
    try:
        raw = reading.decompress(data, _MOST_BYTES)
        file = BytesIO(raw)
        version = npy.read_magic(file)
        if reading.unconsumed_tail or version != (1, 0):
            return None
        shape, by_column, kind = npy.read_array_header_1_0(file)
        if (len(shape), shape[:1], by_column, kind) != (2, (ROWS,), False, np.dtype("<f4")):
            return None
        table: Table = np.frombuffer(raw, "<f4", prod(shape), file.tell()).reshape(shape)
    except Exception as error:  # NumPy reads the header as Python, and raises whatever that does
        raise ValueError(f"no table of weights: {error}") from error
    return table if np.isfinite(table).all() else None


def _pack(table: Table) -> bytes:
    file = BytesIO()
    npy.write_array(file, np.ascontiguousarray(table, "<f4"), version=(1, 0), allow_pickle=False)
    return zlib.compress(file.getvalue(), 1)


def _table(kept: Kept) -> Table | None:
    with suppress(ValueError):
        return unpack(kept.data)
    return None


_ALL: Final = """
SELECT drafter, name, tokens, used_on, data FROM correction WHERE scope = ? ORDER BY used_on DESC, drafter
"""
_DELETE: Final = "DELETE FROM correction WHERE scope = ? AND drafter = ?"
