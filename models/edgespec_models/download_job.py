"""What every source of a download is handed: the entry, where its unfinished file lies, whom to tell."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec_models.catalog import CatalogueEntry
from edgespec_models.errors import Cancelled
from edgespec_models.progress import Progress, ProgressCallback

__all__ = ["CHUNK_BYTES", "Job", "length"]

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """One model being pulled into ``folder``."""

    entry: CatalogueEntry
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
