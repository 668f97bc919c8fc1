"""Writing a text file so that it is there whole or not at all."""

from pathlib import Path

from edgespec_models.errors import RequestError
from edgespec_models.files.replacing import replacing

__all__ = ["check_writable", "write_private_text", "write_text"]


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
        with replacing(path, mode) as file:
            file.write(text.encode())
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror or error}") from error
