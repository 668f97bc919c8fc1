"""The history's file: one SQLite database, private to its user, brought up to date as it is opened."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from edgespec.history.ownership import APPLICATION, companions, foreign, is_damage, look, open_unlocked
from edgespec_models.errors import StorageError

__all__ = ["SUFFIX", "connect", "connect_read_only", "set_aside"]

SUFFIX: Final = ".history"
_BUSY_S: Final = 5.0
_FIRST: Final = """
CREATE TABLE scope (
    id INTEGER PRIMARY KEY,
    target TEXT NOT NULL,
    tokenizer TEXT NOT NULL,
    namespace TEXT NOT NULL,
    clock INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0,
    used_on REAL NOT NULL,
    UNIQUE (target, tokenizer, namespace)
);
CREATE TABLE passage (
    scope INTEGER NOT NULL REFERENCES scope (id) ON DELETE CASCADE,
    digest BLOB NOT NULL,
    lead BLOB NOT NULL,
    body BLOB NOT NULL,
    before BLOB NOT NULL,
    text BLOB NOT NULL,
    uses REAL NOT NULL,
    used_at INTEGER NOT NULL,
    learned_on REAL NOT NULL,
    verdicts BLOB NOT NULL,
    PRIMARY KEY (scope, digest)
) WITHOUT ROWID;
CREATE TABLE tally (
    scope INTEGER NOT NULL REFERENCES scope (id) ON DELETE CASCADE,
    class TEXT NOT NULL,
    accepted REAL NOT NULL,
    judged REAL NOT NULL,
    PRIMARY KEY (scope, class)
) WITHOUT ROWID;
CREATE TRIGGER passage_in AFTER INSERT ON passage BEGIN
    UPDATE scope SET tokens = tokens + (length(NEW.lead) + length(NEW.body)) / 4 WHERE id = NEW.scope;
END;
CREATE TRIGGER passage_out AFTER DELETE ON passage BEGIN
    UPDATE scope SET tokens = tokens - (length(OLD.lead) + length(OLD.body)) / 4 WHERE id = OLD.scope;
END;
"""
_SECOND: Final = """
CREATE TABLE beginning (
    scope INTEGER NOT NULL REFERENCES scope (id) ON DELETE CASCADE,
    drafter TEXT NOT NULL,
    digest BLOB NOT NULL,
    gain REAL NOT NULL,
    count REAL NOT NULL,
    used_on REAL NOT NULL,
    PRIMARY KEY (scope, drafter, digest)
) WITHOUT ROWID;
"""
_THIRD: Final = """
CREATE TABLE correction (
    scope INTEGER NOT NULL REFERENCES scope (id) ON DELETE CASCADE,
    drafter TEXT NOT NULL,
    name TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    used_on REAL NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (scope, drafter)
);
"""
_MIGRATIONS: Final = (_FIRST, _SECOND, _THIRD)
"""Script number n takes a file from schema version n to n + 1."""
_TABLES: Final = ("scope", "passage", "tally", "beginning", "correction")


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for reading and writing; make it, and its folder, if need be.

    What is not edgespec's is not touched (:mod:`edgespec.history.ownership`). New folders are the user's
    alone (0700), the file always is (0600); SQLite gives its companions (``-wal``, ``-shm``) the same mode.
    The connection commits by itself and may change threads.

    Raises:
        OSError: it cannot be made.
        sqlite3.Error: it cannot be opened, or it is damaged (:func:`is_damage`).
        StorageError: a later version of edgespec made it, or something else did.
    """
    _make_private(path, look(path))
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _version(connection, path)  # before anything is written
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # forgotten text is overwritten
        _mark(connection, path)
        _use_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 1048576")
        _migrate(connection, path)
        _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a file that cannot be written, as it is.

    Raises:
        sqlite3.Error: it cannot be read, or it is damaged.
        StorageError: see :func:`connect`.
    """
    look(path)
    connection = open_unlocked(path)
    try:
        if _version(connection, path) != len(_MIGRATIONS):
            raise StorageError(f"{path} is of another format version and cannot be written; nothing is read")
        _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def set_aside(path: Path) -> Path | None:
    """Rename a damaged file with its companions, so that a new one can begin.

    Of several processes that meet the damage at once, one renames.

    Returns:
        The new name; None if the file is sound now.

    Raises:
        OSError: it cannot be renamed, as where another program has it open on Windows.
        StorageError: something else made it, and it is left alone.
    """
    look(path)  # before a lock is made beside it
    from filelock import FileLock, Timeout  # takes as long to import as all of this package

    lock = path.with_name(f".{path.name}.lock")
    try:
        with FileLock(lock, timeout=_BUSY_S):
            if not _is_damaged(path):
                return None
            aside = _unused(path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"))
            if not path.is_symlink():  # else all stays but the link
                for file, new in zip(companions(path), companions(aside), strict=True):
                    with suppress(FileNotFoundError):
                        file.replace(new)
            path.replace(aside)
            return aside
    except Timeout as error:
        raise OSError(f"another process holds {lock}") from error


def _unused(path: Path) -> Path:
    """``path``, or where it is there, a name like it."""
    names = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000)))
    return next(name for name in names if not name.exists())


def _is_damaged(path: Path) -> bool:
    try:
        connect(path).close()
    except sqlite3.Error as error:
        return is_damage(error)
    return False


def _make_private(path: Path, found: os.stat_result | None) -> None:
    """Let nobody but the user read the file that :func:`look` found; make it where it found none."""
    if found is None:
        if not path.parent.is_dir():
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            return
        except FileExistsError:  # made just now, by whomever, or a link to nothing
            found = look(path)
            if found is None:
                raise
    if os.name == "posix" and found.st_mode & 0o077:
        if not os.path.samestat(path.stat(), found):
            raise OSError(f"{path} was replaced by another file just now")
        path.chmod(0o600)


def _mark(connection: sqlite3.Connection, path: Path) -> None:
    """Have the file itself, and not only its log, say from its first page on whose it is."""
    if _pragma(connection, "application_id") == APPLICATION:
        return
    with _transaction(connection, "BEGIN"):
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # makes the first page, so it comes first
        _version(connection, path)  # by now another process may have made something of it
        connection.execute(f"PRAGMA application_id = {APPLICATION}")


@contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switching does not wait for other connections by itself."""
    end = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() > end:
                raise
        time.sleep(0.02)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    if _version(connection, path) == len(_MIGRATIONS):
        return
    with _transaction(connection, "BEGIN IMMEDIATE"):
        for number in range(_version(connection, path), len(_MIGRATIONS)):
            for statement in _statements(_MIGRATIONS[number]):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(_MIGRATIONS)}")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    own = not connection.in_transaction
    if own:  # another process may be making the tables: look before it or after it, not between
        connection.execute("BEGIN")
    try:
        version, application = _pragma(connection, "user_version"), _pragma(connection, "application_id")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    finally:
        if own and connection.in_transaction:
            connection.execute("COMMIT")
    if application != APPLICATION and (tables or version):
        raise foreign(path)
    if version > len(_MIGRATIONS):
        raise StorageError(
            f"{path} has format version {version}; this edgespec knows up to {len(_MIGRATIONS)}. "
            "Update edgespec, or name another history"
        )
    if not ("scope" in tables if version else not tables):
        raise foreign(path)
    return version


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _statements(script: str) -> list[str]:
    """The statements of a script; ``executescript`` would commit between them."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements


def _check(connection: sqlite3.Connection) -> None:
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise _damage(f"quick_check: {found}")
    for table in _TABLES:  # a value of another type than its column's passes SQLite's own check
        columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
        wrong = " OR ".join(f"typeof({name}) <> '{kind.lower()}'" for _, name, kind, *_ in columns)
        if connection.execute(f"SELECT 1 FROM {table} WHERE {wrong} LIMIT 1").fetchone():
            raise _damage(f"a value in the table {table} is of a wrong type")


def _damage(what: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(what)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
