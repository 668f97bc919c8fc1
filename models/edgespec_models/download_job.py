"""What every source of a download is handed: the file, where its unfinished part lies, whom to tell."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from edgespec_models.errors import Cancelled, DownloadError
from edgespec_models.progress import Progress, ProgressCallback

__all__ = ["CHUNK_BYTES", "Job", "Wanted", "alone", "digest_of", "file_errors", "length", "require_space"]

CHUNK_BYTES = 1 << 20
_LOCK_POLL_SECONDS = 0.2


class Wanted(Protocol):
    """A file to download: what to call it in messages, what it is called on disk, and what it is."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def filename(self) -> str: ...  # noqa: D102
    @property
    def size_bytes(self) -> int: ...  # noqa: D102
    @property
    def sha256(self) -> str:
        """In lower-case hex; empty where it is not known beforehand."""


WantedT = TypeVar("WantedT", bound=Wanted, covariant=True)


@dataclass(frozen=True, slots=True)
class Job(Generic[WantedT]):
    """One file being pulled into ``folder``."""

    entry: WantedT
    folder: Path
    progress: ProgressCallback
    notify: Callable[[str], None]
    cancelled: Callable[[], bool]

    def unfinished(self, source: str) -> Path:
        """Where ``source`` gathers its bytes.

        One file a source: two sources may hold different files under one name, and a file begun
        with the bytes of one must not be finished with those of the other.
        """
        return self.folder / f"{self.entry.filename}.{source}.part"

    @property
    def parts(self) -> Path:
        """A folder for wheels on their way into the unfinished file."""
        return self.folder / f"{self.entry.filename}.parts"

    def check_cancelled(self) -> None:
        """Raise :class:`Cancelled` where the caller asked to stop."""
        if self.cancelled():
            raise Cancelled(f"stopped pulling {self.entry.name}; what has arrived is kept for the next pull")

    def report(self, done: int, *, stage: str = "Downloading") -> None:
        """Tell that ``done`` bytes of the file are through ``stage``; stop here where asked to.

        Raises:
            Cancelled: the caller asked to stop.
        """
        self.check_cancelled()
        total = self.entry.size_bytes
        self.progress(Progress(f"{stage} {self.entry.name}", min(done, total), total))


def length(path: Path) -> int:
    """The file's size in bytes; 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def digest_of(job: Job[Wanted], path: Path) -> str:
    """The file's SHA-256 in lower-case hex."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            job.report(done, stage="Checking")
    return digest.hexdigest()


@contextmanager
def alone(job: Job[Wanted]) -> Iterator[None]:
    """Hold the lock of this file, waiting for another process that is pulling it."""
    import filelock

    lock = filelock.FileLock(job.folder / f"{job.entry.filename}.lock")
    waiting = False
    while True:
        try:
            lock.acquire(timeout=_LOCK_POLL_SECONDS)
            break
        except filelock.Timeout:
            job.check_cancelled()
            if not waiting:
                job.notify(f"another process is pulling {job.entry.name}; waiting for it")
                waiting = True
    try:
        yield
    finally:
        lock.release()


@contextmanager
def file_errors(job: Job[Wanted]) -> Iterator[None]:
    """Turn errors of the file system into DownloadError."""
    try:
        yield
    except OSError as error:
        raise DownloadError(
            f"cannot read or write below {job.folder}: {error}. Free some space, mend its "
            "permissions, or set EDGESPEC_HOME to another folder"
        ) from error


def require_space(folder: Path, missing: int, what: str) -> None:
    """Refuse what the disk could not hold: ``missing`` bytes, and 5 % to spare.

    Raises:
        DownloadError: naming ``what`` needs the space.
    """
    needed, free = int(missing * 1.05), shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{folder} has {free:,} bytes free, but {what} needs {needed:,}: free some space, or set "
            "EDGESPEC_HOME to a folder on a larger disk"
        )
