"""Pulling a catalogue model: right bytes at the right place, or nothing there.

Sources are tried in the catalogue's order; whatever one delivers must have the entry's SHA-256. The
file is gathered under another name in the same folder and moved into place when it is whole and
checked; what an interrupted pull gathered is kept and continued. Next to the file lies its digest
as ``FILE.sha256`` (in the form of sha256sum), the record that it was checked.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from edgespec_models.catalog import CatalogueEntry, HubFile, Source
from edgespec_models.download_hub import fetch_hub
from edgespec_models.download_index import fetch_index
from edgespec_models.download_job import Job, alone, digest_of, file_errors, length, require_space
from edgespec_models.errors import DownloadError
from edgespec_models.paths import models_dir
from edgespec_models.progress import ProgressCallback, ignore_progress

__all__ = ["check", "is_pulled", "model_path", "pull"]


def _say_nothing(message: str) -> None:
    """Notify nobody."""


def _never() -> bool:
    return False


def model_path(entry: CatalogueEntry) -> Path:
    """Where the model's file lies once it is pulled."""
    return models_dir() / entry.filename


def is_pulled(entry: CatalogueEntry) -> bool:
    """Whether the file is in place: the right size, and recorded as having the right digest."""
    path = model_path(entry)
    try:
        recorded = _record(path).read_text(encoding="utf-8").split(maxsplit=1)[:1]
    except (OSError, UnicodeDecodeError):
        return False
    return recorded == [entry.sha256] and length(path) == entry.size_bytes


def check(
    entry: CatalogueEntry,
    *,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = _never,
) -> bool:
    """Read the pulled file again: whether it is there and has the right digest.

    A damaged file loses its record, so that the next :func:`pull` replaces it.

    Raises:
        DownloadError: the file cannot be read.
        Cancelled: the caller asked to stop.
    """
    job = Job(entry, models_dir(), progress, _say_nothing, cancelled)
    with file_errors(job):
        return _certify(job)


def pull(
    entry: CatalogueEntry,
    *,
    progress: ProgressCallback = ignore_progress,
    notify: Callable[[str], None] = _say_nothing,
    cancelled: Callable[[], bool] = _never,
) -> Path:
    """Make sure that the model's file is in place, and return its path.

    Args:
        entry: what to pull.
        progress: receives bytes done, first downloading, then checking.
        notify: receives what a user should know, such as that a source was given up.
        cancelled: asked several times a second; true stops the pull, keeping what has arrived.

    Raises:
        DownloadError: no source delivered the file (the message gives each one's reason), the disk
            is too full, or the folder cannot be written.
        Cancelled: ``cancelled`` said so.
    """
    path = model_path(entry)
    if is_pulled(entry):
        return path
    job = Job(entry, path.parent, progress, notify, cancelled)
    with file_errors(job):
        job.folder.mkdir(parents=True, exist_ok=True)
        with alone(job):
            # Another process may have pulled it meanwhile; or the user put the file there.
            if not is_pulled(entry) and not _certify(job):
                _fetch(job)
    return path


def _fetch(job: Job[CatalogueEntry]) -> None:
    """Try source after source until one delivers the right file; put that in place."""
    reasons: list[str] = []
    for i, source in enumerate(job.entry.sources):
        try:
            _require_space(job, source)
            _place(job, _from_source(job, source))
            return
        except DownloadError as error:
            reasons.append(str(error))
            following = job.entry.sources[i + 1 : i + 2]
            if following:
                job.notify(f"{error}; trying {_title(following[0])}")
    raise DownloadError(
        f"no source could deliver {job.entry.name}: {'; '.join(reasons)}. What has arrived is kept: "
        "when a source can be reached, pull again to go on"
    )


def _from_source(job: Job[CatalogueEntry], source: Source) -> Path:
    """Gather the file from ``source``; return it, its digest checked."""
    gathered = fetch_hub(job, source) if isinstance(source, HubFile) else fetch_index(job, source)
    digest = digest_of(job, gathered)
    if digest != job.entry.sha256:
        gathered.unlink()
        raise DownloadError(
            f"{_title(source)} delivered another file for {job.entry.name}: SHA-256 {digest}, not "
            f"{job.entry.sha256}; it was deleted"
        )
    return gathered


def _place(job: Job[CatalogueEntry], gathered: Path) -> None:
    with gathered.open("r+b") as file:
        os.fsync(file.fileno())
    path = model_path(job.entry)
    # Without its record a file counts as unchecked, whenever this is interrupted.
    _record(path).unlink(missing_ok=True)
    gathered.replace(path)
    _write_record(job.entry, path)
    for source in ("hub", "index"):
        job.unfinished(source).unlink(missing_ok=True)
    shutil.rmtree(job.parts, ignore_errors=True)


def _certify(job: Job[CatalogueEntry]) -> bool:
    """Whether the file in place has the right size and digest; write or remove its record accordingly."""
    path = model_path(job.entry)
    if length(path) == job.entry.size_bytes and digest_of(job, path) == job.entry.sha256:
        if not is_pulled(job.entry):
            _write_record(job.entry, path)
        return True
    _record(path).unlink(missing_ok=True)
    if path.exists():
        job.notify(f"{path} is not {job.entry.name} as the catalogue knows it; it will be replaced")
    return False


def _record(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _write_record(entry: CatalogueEntry, path: Path) -> None:
    record = _record(path)
    fresh = record.with_name(record.name + ".new")
    fresh.write_text(f"{entry.sha256}  {entry.filename}\n", encoding="utf-8", newline="\n")
    fresh.replace(record)


def _title(source: Source) -> str:
    return "the Hugging Face hub" if isinstance(source, HubFile) else "the package index"


def _require_space(job: Job[CatalogueEntry], source: Source) -> None:
    """Refuse before the first byte what the disk could not hold."""
    name = "hub" if isinstance(source, HubFile) else "index"
    missing = job.entry.size_bytes - length(job.unfinished(name))
    # A part is on the disk twice while it is unpacked.
    extra = 0 if isinstance(source, HubFile) else max(part.size_bytes for part in source.parts)
    require_space(job.folder, missing + extra, f"{job.entry.name} from {_title(source)}")
