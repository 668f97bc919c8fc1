"""The history's file: one SQLite database, private to its user.

A user may name any file as a history, so it is checked before anything changes. A file is edgespec's if it is
a SQLite database whose header, its first 100 bytes, has edgespec's application id. The header is written once
and first, so it outlives most damage. A file with a damaged header cannot be told from somebody else's, and
is left alone.
"""

import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote_from_bytes

from edgespec_models.errors import StorageError

APPLICATION: Final = 0x65647370  # "edsp"
SUFFIX: Final = ".history"
_MAGIC: Final = b"SQLite format 3\0"
_ID_AT: Final = 68  # place of the application id in the header
_LEAST_FREE: Final = 1 << 16  # the index of a write-ahead log takes half of it
_BUSY_S: Final = 5.0
_PAUSE_S: Final = 0.02
_LOOKS: Final = 4  # a database whose size another process is changing looks damaged for a moment
_VERSION: Final = 5  # of the tables
_TABLES: Final = (
    """CREATE TABLE IF NOT EXISTS scope (
        id INTEGER PRIMARY KEY,
        target TEXT NOT NULL,
        tokenizer TEXT NOT NULL,
        namespace TEXT NOT NULL,
        clock INTEGER NOT NULL DEFAULT 0,
        tokens INTEGER NOT NULL DEFAULT 0,
        used_on REAL NOT NULL,
        UNIQUE (target, tokenizer, namespace)
    )""",
    """CREATE TABLE IF NOT EXISTS passage (
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
    ) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS tally (
        scope INTEGER NOT NULL REFERENCES scope (id) ON DELETE CASCADE,
        class TEXT NOT NULL,
        accepted REAL NOT NULL,
        judged REAL NOT NULL,
        PRIMARY KEY (scope, class)
    ) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS turn (
        scope INTEGER NOT NULL REFERENCES scope (id) ON DELETE CASCADE,
        digest BLOB NOT NULL,
        prompt BLOB NOT NULL,
        answer BLOB NOT NULL,
        ended INTEGER NOT NULL,
        written_on REAL NOT NULL,
        PRIMARY KEY (scope, digest)
    ) WITHOUT ROWID""",
    """CREATE TRIGGER IF NOT EXISTS passage_in AFTER INSERT ON passage BEGIN
        UPDATE scope SET tokens = tokens + (length(NEW.lead) + length(NEW.body)) / 4 WHERE id = NEW.scope;
    END""",
    """CREATE TRIGGER IF NOT EXISTS passage_out AFTER DELETE ON passage BEGIN
        UPDATE scope SET tokens = tokens - (length(OLD.lead) + length(OLD.body)) / 4 WHERE id = OLD.scope;
    END""",
)


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for reading and writing. Make it, and its folder, if they do not exist.

    Files of other programs are not touched. New folders (0700) and the file (0600) are the user's alone;
    SQLite gives its companions (``-wal``, ``-shm``) the same mode. The connection commits automatically and
    may change threads.

    Raises:
        OSError: the file cannot be made.
        sqlite3.Error: the file cannot be opened, or is damaged (:func:`is_damage`).
        StorageError: another version of edgespec, or another program, made the file.
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
        _make_tables(connection, path)
        _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a file that cannot be written, without changing it.

    Raises:
        sqlite3.Error: the file cannot be read, or is damaged.
        StorageError: see :func:`connect`.
    """
    look(path)
    connection = _open_unlocked(path)
    try:
        _version(connection, path)
        _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Within the block all statements take effect together, or none."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def set_aside(path: Path) -> Path | None:
    """Rename a damaged file with its companions, so that a new one can begin.

    If several processes find the damage at once, one of them renames.

    Returns:
        The new name, or None if the file is sound now.

    Raises:
        OSError: the file cannot be renamed, for example if another program has it open on Windows.
        StorageError: another program made the file, and it is left alone.
    """
    look(path)  # before a lock is made beside it
    from filelock import FileLock, Timeout  # its import takes as long as this whole package

    lock = path.with_name(f".{path.name}.lock")
    try:
        with FileLock(lock, timeout=_BUSY_S):
            if not _is_damaged(path):
                return None
            first = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
            names = (first, *(first.with_name(f"{first.name}-{number}") for number in range(2, 1000)))
            aside = next(name for name in names if not name.exists())
            if not path.is_symlink():  # of a link only the link would be renamed
                for file, new in zip(companions(path), companions(aside), strict=True):
                    with suppress(FileNotFoundError):
                        file.replace(new)
            path.replace(aside)
            return aside
    except Timeout as error:
        raise OSError(f"another process holds {lock}") from error


def look(path: Path) -> os.stat_result | None:
    """Check that a file may be used as a history: it is edgespec's, damaged or not, or empty.

    The file is only read, and nothing is made beside it.

    Returns:
        The file's status, or None if there is no file.

    Raises:
        OSError, sqlite3.Error: the file cannot be read.
        StorageError: the file is something else.
    """
    # Before the file itself: while a history is being made, its header is there before its log is.
    logged = _is_filled(companions(path)[0])
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait, and a device may do anything
        raise StorageError(f"{path} cannot be used as a history: it is not a regular file. Name a file")
    if _application(path) == APPLICATION:
        return status
    if status.st_size == 0 and not logged:  # SQLite would drop the log that another program left
        return status
    raise _foreign(path)


def companions(path: Path) -> list[Path]:
    """The files that SQLite keeps beside a database, whether they exist or not."""
    real = Path(os.path.realpath(path))  # a link's companions are beside what it names
    return [real.with_name(real.name + ending) for ending in ("-wal", "-shm", "-journal")]


def is_damage(error: BaseException) -> bool:
    """Whether an error says that the file is damaged, or no database at all."""
    return _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def reason(path: Path, error: Exception) -> str:
    """The reason of an error. SQLite reports a full disk without room for its index as a disk I/O error."""
    with suppress(OSError):
        if _code(error) == sqlite3.SQLITE_IOERR and shutil.disk_usage(path.parent).free < _LEAST_FREE:
            return f"{error}: the disk is full"
    return str(error)


def _code(error: BaseException) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _foreign(path: Path) -> StorageError:
    return StorageError(
        f"{path} cannot be used as a history: another program made it, or it is damaged beyond recognition. "
        "It was not changed. Name another file; if this was a history, delete it"
    )


def _open_unlocked(path: Path) -> sqlite3.Connection:
    """Open a database for reading, without its log, so that no lock is taken and no file made."""
    name = quote_from_bytes(os.fsencode(path.absolute().as_posix()), safe="/:")
    uri = f"file://{name if name.startswith('/') else '/' + name}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def _application(path: Path) -> int | None:
    """The application id of a database, damaged or not; None for other files."""
    # On POSIX, locks on a file are the process's and go when it closes any descriptor of the file. So a
    # database, which the application may have open, is left to SQLite, which knows of that.
    for _ in range(_LOOKS):
        try:
            with closing(_open_unlocked(path)) as connection:
                return _pragma(connection, "application_id")
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            if _code(error) == sqlite3.SQLITE_NOTADB:
                break
        time.sleep(_PAUSE_S)
    header = _beginning(path, _ID_AT + 4)
    if len(header) < _ID_AT + 4 or not header.startswith(_MAGIC):
        return None
    return int.from_bytes(header[_ID_AT:], "big")


def _beginning(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _is_filled(log: Path) -> bool:
    try:
        status = log.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _is_damaged(path: Path) -> bool:
    try:
        connect(path).close()
    except sqlite3.Error as error:
        return is_damage(error)
    return False


def _make_private(path: Path, status: os.stat_result | None) -> None:
    """Restrict the file that :func:`look` found to the user, or create it."""
    if status is None:
        if not path.parent.is_dir():
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            return
        except FileExistsError:  # made just now, by whomever, or a link to nothing
            status = look(path)
            if status is None:
                raise
    if os.name == "posix" and status.st_mode & 0o077:
        if not os.path.samestat(path.stat(), status):
            raise OSError(f"{path} was replaced by another file just now")
        path.chmod(0o600)


def _mark(connection: sqlite3.Connection, path: Path) -> None:
    """Write the application id into the file's first page, and not only into its log."""
    if _pragma(connection, "application_id") == APPLICATION:
        return
    with transaction(connection, "BEGIN"):
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # makes the first page, so it comes first
        _version(connection, path)  # by now another process may have made something of it
        connection.execute(f"PRAGMA application_id = {APPLICATION}")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to a write-ahead log, and wait for other connections, which SQLite does not do."""
    end = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return
        except sqlite3.OperationalError as error:
            if _code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or time.monotonic() > end:
                raise
        time.sleep(_PAUSE_S)


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    if _version(connection, path) == _VERSION:
        return
    with transaction(connection):
        _version(connection, path)  # by now another process may have made them
        for statement in _TABLES:  # ``executescript`` would commit in between
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {_VERSION}")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the tables; 0 without tables.

    Raises:
        StorageError: another program made the file, or another version of edgespec.
    """
    own = not connection.in_transaction
    if own:  # another process may be making the tables: look before it or after it, not between
        connection.execute("BEGIN")
    try:
        version, application = _pragma(connection, "user_version"), _pragma(connection, "application_id")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    except UnicodeDecodeError as error:  # in SQLite's message, which quotes the tables' names
        raise _damage("a table's name is not text") from error
    finally:
        if own and connection.in_transaction:
            connection.execute("COMMIT")
    is_own = application == APPLICATION and ("scope" in tables if version else not tables)
    if not is_own and (tables or version):
        raise _foreign(path)
    if version not in (0, _VERSION):
        raise StorageError(
            f"{path} has format version {version}; this edgespec reads {_VERSION} alone. Use "
            "the edgespec that made it, or name another history"
        )
    return version


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _check(connection: sqlite3.Connection) -> None:
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise _damage(f"quick_check: {verdict}")
    # A value of another type than its column's passes SQLite's own check.
    for table in ("scope", "passage", "tally"):
        columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
        wrong = " OR ".join(f"typeof({name}) <> '{kind.lower()}'" for _, name, kind, *_ in columns)
        if connection.execute(f"SELECT 1 FROM {table} WHERE {wrong} LIMIT 1").fetchone():
            raise _damage(f"a value in the table {table} is of a wrong type")


def _damage(what: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(what)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
