"""Models on the Hugging Face hub: ``hf:OWNER/REPO`` to a directory, ``hf:OWNER/REPO/FILE.gguf`` to a file.

Fetched are the files an export reads, known by their names: configuration, tokenizer, chat template,
safetensors. Never code, never pickles. Every file has the digest that the hub's listing announced: SHA-256
for large files, git's SHA-1 for small ones. A snapshot lies under ``EDGESPEC_HOME`` in
``hub/models--OWNER--REPO/snapshots/COMMIT``; ``pulled/`` beside it records what is complete, and from then
on no network is needed.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import quote

from edgespec_models.catalog import HubFile
from edgespec_models.download_hub import fetch_hub
from edgespec_models.download_job import Job, alone, digest_of, file_errors, length, require_space
from edgespec_models.errors import DownloadError, ModelFileError, RequestError
from edgespec_models.facts import Facts
from edgespec_models.hub_listing import CONFIG, INDEX, SINGLE, Listing, RemoteFile, read_listing
from edgespec_models.paths import home
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress

__all__ = ["PREFIX", "HubReference", "pull_hub", "pulled_hub"]

PREFIX = "hf:"
"""What names of models on the hub begin with."""

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]*"
_REFERENCE = re.compile(
    rf"{PREFIX}(?P<repository>{_PART}/{_PART})(?:/(?P<filename>(?:{_PART}/)*{_PART}\.gguf))?"
    rf"(?:@(?P<revision>{_REVISION}))?"
)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository, or one GGUF file of it, at a branch, tag or commit.

    Attributes:
        repository: ``OWNER/REPO``.
        revision: as the user gave it.
        filename: the file's path in the repository; None for its safetensors checkpoint.
    """

    repository: str
    revision: str = "main"
    filename: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``hf:OWNER/REPO[/FILE.gguf][@REVISION]``.

        Raises:
            RequestError: of another form.
        """
        found = _REFERENCE.fullmatch(text)
        if found is None or ".." in text or "--" in found["repository"]:
            raise RequestError(
                f"{text!r} names no model on the hub; write {PREFIX}OWNER/REPO or "
                f"{PREFIX}OWNER/REPO/FILE.gguf, either with @REVISION behind it"
            )
        return cls(found["repository"], found["revision"] or "main", found["filename"])

    def __str__(self) -> str:
        file = "" if self.filename is None else f"/{self.filename}"
        return f"{PREFIX}{self.repository}{file}@{self.revision}"

    @property
    def folder(self) -> Path:
        """Where everything of the repository lies; it need not exist yet."""
        return home() / "hub" / f"models--{self.repository.replace('/', '--')}"

    @property
    def record(self) -> Path:
        """The file that says what of this reference is complete."""
        return self.folder / "pulled" / f"{quote(str(self).removeprefix(PREFIX), safe='')}.json"

    def place(self, commit: str) -> Path:
        """The directory, or the GGUF file, of a commit."""
        snapshot = self.folder / "snapshots" / commit
        return snapshot if self.filename is None else snapshot / self.filename


def pulled_hub(reference: HubReference) -> Path | None:
    """Where the model lies if an earlier pull completed it and its files are all there; asks nobody."""
    try:
        record = json.loads(reference.record.read_text(encoding="utf-8"))
        snapshot, sizes = reference.folder / "snapshots" / record["commit"], dict(record["sizes"])
        complete = bool(sizes) and all(length(snapshot / name) == size for name, size in sizes.items())
        return reference.place(record["commit"]) if complete else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never pulled, or the record is damaged: pulled again


def pull_hub(
    reference: HubReference,
    *,
    check: Callable[[Path], object] | None = None,
    progress: ProgressCallback = ignore_progress,
    notify: Callable[[str], None] = lambda message: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Ask the hub for the newest files of that revision; fetch those that are not here, check those that are.

    Args:
        reference: what to pull.
        check: called with the directory when all but the weights is there; what it raises ends the pull.
        progress: receives bytes done of the weights, first downloading, then checking.
        notify: receives what a user should know.
        cancelled: asked several times a second; true stops the pull, keeping what has arrived.

    Returns:
        The directory, or the GGUF file.

    Raises:
        DownloadError: the hub cannot be reached and the model is not here, or it has no such model; the
            disk is too full, or the folder cannot be written.
        ModelFileError: the repository holds no checkpoint in safetensors.
        Cancelled: ``cancelled`` said so.
    """
    job = Job(RemoteFile(str(reference), "pull", 0), reference.folder, progress, notify, cancelled)
    with file_errors(job):
        reference.record.parent.mkdir(parents=True, exist_ok=True)
        try:
            listing = read_listing(reference.repository, reference.revision, job.check_cancelled)
        except DownloadError as error:
            raise _unreachable(reference, error) from error
        with alone(job):
            files = list(_fetch_all(job, reference, listing, check))
            record = {"commit": listing.commit, "sizes": {file.filename: file.size_bytes for file in files}}
            reference.record.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return reference.place(listing.commit)


def _unreachable(reference: HubReference, error: DownloadError) -> DownloadError:
    download = f"hf download {reference.repository} --revision {reference.revision}"
    file = "" if reference.filename is None else f" {reference.filename}"
    what = "the directory" if reference.filename is None else "the file"
    return DownloadError(
        f"{reference} cannot be pulled: {error}. Once pulled, a model needs no network; or download it "
        f"elsewhere ({download}{file} --local-dir DIR), copy it here and give {what} instead of the name"
    )


def _fetch_all(
    job: Job[RemoteFile], reference: HubReference, listing: Listing, check: Callable[[Path], object] | None
) -> Iterator[RemoteFile]:
    """Fetch what is missing; yields every file of the model."""
    job = replace(job, folder=reference.folder / "snapshots" / listing.commit)
    job.folder.mkdir(parents=True, exist_ok=True)
    if reference.filename is not None:
        weights = [listing.file(reference.filename)]
    else:
        for file in listing.texts:
            _fetch(replace(job, progress=ignore_progress), file, listing)
            yield file
        if check is not None:
            check(job.folder)
        weights = _weights(job.folder, listing)
    absent = [file for file in weights if length(job.folder / file.filename) != file.size_bytes]
    begun = sum(length(replace(job, entry=file).unfinished("hub")) for file in absent)
    require_space(job.folder, sum(file.size_bytes for file in absent) - begun, str(reference))
    done, total = 0, sum(file.size_bytes for file in weights)
    for file in weights:
        _fetch(replace(job, progress=_within(job.progress, done, total)), file, listing)
        done += file.size_bytes
    yield from weights


def _weights(folder: Path, listing: Listing) -> list[RemoteFile]:
    """``model.safetensors``, or the shards that the index names."""
    if listing.has(SINGLE):
        return [listing.file(SINGLE)]
    if not listing.has(INDEX):
        raise ModelFileError(
            f"{listing.where} has neither {SINGLE} nor {INDEX}; edgespec exports {CONFIG} with safetensors"
            f"{listing.hint}"
        )
    weight_map = Facts.read(folder / INDEX).section("weight_map")
    return [listing.file(name) for name in sorted({weight_map.text(key) for key in weight_map.keys})]


def _fetch(job: Job[RemoteFile], file: RemoteFile, listing: Listing) -> None:
    """Put one file in place, unless it is there with the right digest."""
    job, path = replace(job, entry=file), job.folder / file.filename
    if path.is_file() and length(path) == file.size_bytes and file.is_right(path, digest_of(job, path)):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    gathered = fetch_hub(job, HubFile(listing.repository, file.filename, listing.commit))
    if not file.is_right(gathered, digest_of(job, gathered)):
        gathered.unlink()
        raise DownloadError(
            f"{file.filename} of {listing.where} arrived damaged: its digest is not the one the hub "
            "announces. It was deleted; pull again"
        )
    gathered.replace(path)


def _within(progress: ProgressCallback, done: int, total: int) -> ProgressCallback:
    """Bytes of one file as bytes of all."""

    def report(one: Progress) -> None:
        progress(replace(one, done=done + one.done, total=total))

    return report
