"""Writing a text file so that it is there whole or not at all."""

import os
import tempfile
from pathlib import Path

from edgespec_models.errors import RequestError

__all__ = ["check_writable", "write_text"]


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
    check_writable(path)
    try:
        _replace(path, text)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error}") from error


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if os.name == "posix":  # mkstemp makes private files; a report is an ordinary one
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
