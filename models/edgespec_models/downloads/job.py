"""A file during its download: its size and digest, its unfinished part, and its reports."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgespec_models.errors import DownloadError
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.storage import alone, move

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """A file to download to ``path``.

    ``name`` is its name in messages. ``digest`` is its SHA-256, or git's SHA-1, in hex. ``progress`` receives
    bytes done; an error in it stops the download. ``notify`` receives messages for the user.
    """

    name: str
    path: Path
    size_bytes: int
    digest: str
    progress: ProgressCallback
    notify: Callable[[str], None]

    def unfinished(self, source: str) -> Path:
        """The file in which ``source`` gathers its bytes.

        Each source has its own, because two sources may have different files of one name.
        """
        return self.path.with_name(f"{self.path.name}.{source}.part")

    @property
    def parts(self) -> Path:
        """A folder for wheels on their way into the unfinished file."""
        return self.path.with_name(f"{self.path.name}.parts")

    def alone(self) -> AbstractContextManager[None]:
        """Hold the lock of this file, waiting for another process that is pulling it."""
        lock = self.path.with_name(f"{self.path.name}.lock")
        return alone(lock, f"pulling {self.name}", self.notify)

    def tidy(self) -> None:
        """Delete gathered bytes, once the file is in place."""
        for source in ("hub", "index"):
            self.unfinished(source).unlink(missing_ok=True)
        shutil.rmtree(self.parts, ignore_errors=True)

    def report(self, done: int, *, stage: str = "Downloading") -> None:
        """Report that ``done`` bytes of the file are through ``stage``."""
        self.progress(Progress(f"{stage} {self.name}", min(done, self.size_bytes), self.size_bytes))

    def is_right(self) -> bool:
        """Whether the file in place has the right size and digest. Reads the file."""
        return length(self.path) == self.size_bytes and self._digest_of(self.path) == self.digest

    def put_in_place(self, gathered: Path, what: str) -> None:
        """Move ``gathered`` to its place.

        With another digest delete it and raise DownloadError about ``what``.
        """
        digest = self._digest_of(gathered)
        if digest != self.digest:
            gathered.unlink()
            raise DownloadError(
                f"{what} arrived damaged or is another file: its digest is {digest}, not {self.digest}. It "
                "was deleted; pull again"
            )
        with gathered.open("r+b") as file:
            os.fsync(file.fileno())
        move(gathered, self.path)
        self.tidy()

    def _digest_of(self, path: Path) -> str:
        git = hashlib.sha1(b"blob %d\0" % length(path), usedforsecurity=False)
        digest = git if len(self.digest) == 40 else hashlib.sha256()
        done = 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                self.report(done, stage="Checking")
        return digest.hexdigest()


def length(path: Path) -> int:
    """The file's size in bytes; 0 without a file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def file_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into DownloadError."""
    try:
        yield
    except OSError as error:
        raise DownloadError(
            f"cannot read or write below {folder}: {error}. Free some space, mend its permissions, or set "
            "EDGESPEC_HOME to another folder"
        ) from error


def require_space(folder: Path, missing: int, what: str) -> None:
    """Raise DownloadError if the disk has no room for ``missing`` bytes and 5 % to spare."""
    needed, free = int(missing * 1.05), shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{folder} has {free:,} bytes free, but {what} needs {needed:,}: free some space, or set "
            "EDGESPEC_HOME to a folder on a larger disk"
        )
