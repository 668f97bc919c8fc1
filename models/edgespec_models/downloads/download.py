"""Pulls of catalogue models: the right bytes at the right place, or nothing.

Sources are tried in the catalogue's order; every file must have the entry's SHA-256. The file is gathered
under another name in the same folder and moved into place when it is complete and checked; an interrupted
pull is continued. The digest lies next to the file as ``FILE.sha256`` (in the form of sha256sum), the record
that it was checked.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

from edgespec_models.downloads.catalog import CatalogueEntry, HubFile, Source, entries
from edgespec_models.downloads.hub import on_hub, pulled_hub
from edgespec_models.downloads.hub_http import fetch_hub
from edgespec_models.downloads.index import fetch_index
from edgespec_models.downloads.job import Job, file_errors, length
from edgespec_models.errors import DownloadError
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.storage import models_dir, read_text, replacing


def model_path(entry: CatalogueEntry) -> Path:
    """The path of the model's file once it is pulled."""
    return models_dir() / entry.filename


def is_pulled(entry: CatalogueEntry) -> bool:
    """Whether the file is in place, with the right size and a record of the right digest."""
    path = model_path(entry)
    try:
        recorded = read_text(record_of(path)).split(maxsplit=1)[:1]
    except (OSError, UnicodeDecodeError):
        return False
    return recorded == [entry.sha256] and length(path) == entry.size_bytes


def pulled_path(name: str) -> Path | None:
    """The path of the model of that name, of the catalogue or of the hub; None if it was not pulled."""
    reference, entry = on_hub(name), entries().get(name)
    if reference is not None:
        return pulled_hub(reference)
    return model_path(entry) if entry is not None and is_pulled(entry) else None


def check(entry: CatalogueEntry, *, progress: ProgressCallback = ignore_progress) -> bool:
    """Read the pulled file again, and return whether it exists with the right digest.

    A damaged file loses its record, so that the next :func:`pull` replaces it.

    Raises:
        DownloadError: the file cannot be read.
    """
    job = _job(entry, progress, lambda message: None)
    with file_errors(job.path.parent):
        return _certify(job)


def pull(
    entry: CatalogueEntry,
    *,
    progress: ProgressCallback = ignore_progress,
    notify: Callable[[str], None] = lambda message: None,
) -> Path:
    """Make sure that the model's file is in place, and return its path.

    ``progress`` receives bytes done, first of the download, then of the check. An error in it stops the pull,
    which keeps the bytes so far. ``notify`` receives messages for the user, such as that a source failed.

    Raises:
        DownloadError: no source delivered the file (the message gives each one's reason), the disk
            is too full, or the folder cannot be written.
    """
    job = _job(entry, progress, notify)
    if is_pulled(entry):
        return job.path
    with file_errors(job.path.parent):
        job.path.parent.mkdir(parents=True, exist_ok=True)
        with job.alone():
            # Another process may have pulled it meanwhile; or the user put the file there.
            if not is_pulled(entry) and not _certify(job):
                _fetch(job, entry.sources)
                _write_record(job)
            job.tidy()  # leftovers of a killed pull
    return job.path


def _job(entry: CatalogueEntry, progress: ProgressCallback, notify: Callable[[str], None]) -> Job:
    return Job(entry.name, model_path(entry), entry.size_bytes, entry.sha256, progress, notify)


def _fetch(job: Job, sources: Sequence[Source]) -> None:
    """Try source after source until the right file arrives, and put it in place."""
    reasons: list[str] = []
    for source, following in zip_longest(sources, sources[1:]):
        try:
            gathered = fetch_hub(job, source) if isinstance(source, HubFile) else fetch_index(job, source)
            job.put_in_place(gathered, f"{job.name} from {source.title}")
            return
        except DownloadError as error:
            reasons.append(str(error))
            if following is not None:
                job.notify(f"{error}; trying {following.title}")
    raise DownloadError(
        f"no source could deliver {job.name}: {'; '.join(reasons)}. The part that arrived is kept; "
        "pull again later to go on"
    )


def _certify(job: Job) -> bool:
    """Whether the right file is in place; write or remove its record accordingly."""
    if job.is_right():
        _write_record(job)
        return True
    record_of(job.path).unlink(missing_ok=True)
    if job.path.exists():
        job.notify(f"{job.path} is not {job.name} as the catalogue knows it; it will be replaced")
    return False


def record_of(path: Path) -> Path:
    """The path of the record that the pulled file at ``path`` was checked."""
    return path.with_name(path.name + ".sha256")


def _write_record(job: Job) -> None:
    with replacing(record_of(job.path)) as file:
        file.write(f"{job.digest}  {job.path.name}\n".encode())
