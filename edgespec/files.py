"""Writing a text file so that it is there whole or not at all."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from edgespec_models.errors import RequestError
from edgespec_models.leftovers import leftovers, own_name
from edgespec_models.moving import move

__all__ = ["check_writable", "write_private_text", "write_text"]

_TEMPORARY = ".edgespec-"


def check_writable(path: Path) -> None:
    """Find out before hours of work that ``path`` cannot be written.

    Raises:
        RequestError: it is a directory, or its directory does not exist.
    """
    if path.is_dir():
        raise RequestError(f"cannot write {path}: it is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"cannot write {path}: the directory {path.absolute().parent} does not exist")


def write_text(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` as UTF-8, replacing what was there only when all is written.

    Raises:
        RequestError: it cannot be written; what was there is untouched.
    """
    _write(path, text, 0o666)


def write_private_text(path: Path, text: str) -> None:
    """Like :func:`write_text`, for nobody but the user to read (mode 0600)."""
    _write(path, text, 0o600)


def _write(path: Path, text: str, mode: int) -> None:
    check_writable(path)
    try:
        _replace(path, text, mode)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror or error}") from error


def _replace(path: Path, text: str, mode: int) -> None:
    # Not tempfile's: what it makes is private, and to open that up the umask would have to be read, which
    # sets it, for a moment and for all threads. A mode that is asked for is narrowed by the system.
    folder = path.absolute().parent
    for stale in leftovers(folder, _TEMPORARY):
        with suppress(OSError):  # another user's
            stale.unlink()
    temporary = folder / f"{own_name(_TEMPORARY)}{secrets.token_hex(8)}"
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        move(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
