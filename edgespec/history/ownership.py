"""Whose file is it? Any file may be named as a history, so it is looked at before anything is changed.

A file is edgespec's if it is a SQLite database whose header, its first 100 bytes, has edgespec's application
id. The header is written once, before all else, so it outlives most damage. Where damage took it too, nothing
tells the file from somebody else's, and it is left alone.
"""

import glob
import os
import re
import shutil
import sqlite3
import stat
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote_from_bytes

from edgespec_models.errors import StorageError

__all__ = [
    "APPLICATION",
    "companions",
    "file_indexes",
    "foreign",
    "is_damage",
    "look",
    "open_unlocked",
    "reason",
]

APPLICATION: Final = 0x65647370  # "edsp"
_MAGIC: Final = b"SQLite format 3\0"
_ID_AT: Final = 68  # of the application id in the header
_LEAST_FREE: Final = 1 << 16  # the index of a write-ahead log takes half of it
_LOOKS: Final = 4  # a database whose size another process is changing looks damaged for a moment
_PAUSE_S: Final = 0.02
_LOG_HEADER: Final = 32  # bytes of a write-ahead log, before its frames
_FRAME_HEADER: Final = 24
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def look(path: Path) -> os.stat_result | None:
    """Make sure that a file may be used as a history: it is edgespec's, damaged or not, or empty.

    It is only read, and nothing is made beside it.

    Returns:
        What the system says of it; None where there is no file.

    Raises:
        OSError, sqlite3.Error: it cannot be read.
        StorageError: it is something else.
    """
    # Before the file itself: while a history is being made, its header is there before its log is.
    logged = _is_filled(_log_of(path))
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait, and a device may do anything
        kind = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), "no file")
        raise StorageError(f"{path} cannot be used as a history: it is {kind}. Name a file")
    application = _application(path)
    if application == APPLICATION or (application == 0 and logged and _is_our_log(_log_of(path))):
        return found
    if found.st_size == 0 and not logged:  # SQLite would drop the log that another program left
        return found
    raise foreign(path)


def foreign(path: Path) -> StorageError:
    """The error that says a file is not edgespec's."""
    return StorageError(
        f"{path} cannot be used as a history: another program made it, or damage left nothing that tells it "
        "is a history. It was left as it was. Name another file; if this was a history, delete it yourself"
    )


def companions(path: Path) -> list[Path]:
    """The files that SQLite keeps beside a database, whether they exist or not."""
    real = Path(os.path.realpath(path))  # a link's companions are beside what it names
    return [real.with_name(real.name + ending) for ending in ("-wal", "-shm", "-journal")]


def file_indexes(path: Path) -> list[Path]:
    """The indexes of added files that earlier versions of edgespec left beside a history."""
    real = Path(os.path.realpath(path))
    beside = real.parent.glob(f"{glob.escape(real.name)}-files*")
    return [
        each
        for each in beside
        if re.fullmatch(r"-files(-[0-9a-f]{16})?(\.new|\.lock)?", each.name.removeprefix(real.name))
        and each.is_file()
        and (each.suffix in (".new", ".lock") or _begins(each, b"edgespec files "))
    ]


def open_unlocked(path: Path) -> sqlite3.Connection:
    """Open a database for reading, without its log, so that no lock is taken and no file made."""
    name = quote_from_bytes(os.fsencode(path.absolute().as_posix()), safe="/:")
    uri = f"file://{name if name.startswith('/') else '/' + name}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def is_damage(error: BaseException) -> bool:
    """Whether an error says that the file is damaged, or no database at all."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def reason(path: Path, error: Exception) -> str:
    """What an error says; SQLite calls it a disk I/O error where a full disk has no room for its index."""
    code = getattr(error, "sqlite_errorcode", 0)
    with suppress(OSError):
        if code & 0xFF == sqlite3.SQLITE_IOERR and shutil.disk_usage(path.parent).free < _LEAST_FREE:
            return f"{error}: the disk is full"
    return str(error)


def _application(path: Path) -> int | None:
    """The application id of a database, damaged or not; None of any other file."""
    # On POSIX, locks on a file are the process's and go when it closes any descriptor of the file. So a
    # database, which the application may have open, is left to SQLite, which knows of that.
    for _ in range(_LOOKS):
        try:
            with closing(open_unlocked(path)) as connection:
                return int(connection.execute("PRAGMA application_id").fetchone()[0])
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_NOTADB:
                break
        time.sleep(_PAUSE_S)
    with path.open("rb") as file:
        header = file.read(_ID_AT + 4)
    if len(header) < _ID_AT + 4 or not header.startswith(_MAGIC):
        return None
    return int.from_bytes(header[_ID_AT:], "big")


def _begins(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


def _log_of(path: Path) -> Path:
    return companions(path)[0]


def _is_filled(log: Path) -> bool:
    try:
        found = log.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


def _is_our_log(log: Path) -> bool:
    """Whether a database whose own header says nothing yet is ours by its write-ahead log.

    Histories of the first edgespec that wrote some are, until their log is first copied into the file.
    """
    mark = APPLICATION.to_bytes(4, "big")
    with log.open("rb") as file:
        page = int.from_bytes(file.read(_LOG_HEADER)[8:12], "big")
        while page and len(frame := file.read(_FRAME_HEADER + page)) == _FRAME_HEADER + page:
            header = frame[_FRAME_HEADER:]
            if int.from_bytes(frame[:4], "big") == 1 and header[_ID_AT : _ID_AT + 4] == mark:
                return True
    return False
