"""Writing a file so that it is there whole or not at all."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from edgespec_models.errors import StorageError
from edgespec_models.files.leftovers import leftovers, own_name
from edgespec_models.files.moving import move

__all__ = ["replacing", "writing"]

_TEMPORARY = ".edgespec-"


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when all is written and on the disk.

    What killed programs left in the folder is deleted.

    Raises:
        OSError: it cannot be written; what was there is untouched.
    """
    # Not tempfile's: what it makes is private, and to open that up the umask would have to be read, which
    # sets it, for a moment and for all threads. A mode that is asked for is narrowed by the system.
    folder = path.absolute().parent
    for stale in leftovers(folder, _TEMPORARY):
        with suppress(OSError):  # another user's
            stale.unlink()
    temporary = folder / f"{own_name(_TEMPORARY)}{secrets.token_hex(8)}"
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        move(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into StorageError."""
    try:
        yield
    except OSError as error:
        full = error.errno == errno.ENOSPC
        why = "the disk is full; free space and run the command again" if full else str(error)
        raise StorageError(f"cannot write {path}: {why}") from error
