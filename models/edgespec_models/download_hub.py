"""The Hugging Face hub as a source: one file, streamed over HTTP, resumed where it broke off.

``hf_hub_download`` is not used: it reports progress only through tqdm, retries an unreachable host
for longer than a user with a second source should wait, and keeps the file in a cache of its own.
"""

from contextlib import closing
from pathlib import Path

from edgespec_models.catalog import HubFile
from edgespec_models.download_job import Job, Wanted, length
from edgespec_models.errors import DownloadError
from edgespec_models.hub_http import LostError, Response, chunks, open_url, refuse_offline, refuse_status

__all__ = ["fetch_hub"]

_FRUITLESS_ATTEMPTS = 2


def fetch_hub(job: Job[Wanted], source: HubFile) -> Path:
    """Download ``source`` next to the target; return the file, of the right size, digest unchecked.

    Raises:
        DownloadError: the hub cannot be reached, is switched off (``HF_HUB_OFFLINE``), refuses, or
            holds another file; or the connection broke twice without one more byte.
        Cancelled: the caller asked to stop.
    """
    refuse_offline()
    target = job.unfinished("hub")
    size = job.entry.size_bytes
    if length(target) > size:
        target.unlink()
    if size == 0:
        target.touch()
    fruitless = 0
    while (before := length(target)) < size:
        reason = _receive(job, source, target)
        fruitless = 0 if length(target) > before else fruitless + 1
        if fruitless == _FRUITLESS_ATTEMPTS:
            raise DownloadError(
                f"the connection to the Hugging Face hub broke at byte {length(target):,} of {size:,} "
                f"({reason})"
            )
    return target


def _receive(job: Job[Wanted], source: HubFile, target: Path) -> str:
    """Append what one connection brings; return why it ended."""
    size = job.entry.size_bytes
    start = length(target)
    with closing(_open(job, source, start)) as response:
        refuse_status(response, source.repository, _place(source))
        _refuse_other_file(response, job, source)
        if response.status_code != 206:  # the server does not resume: begin again
            start = 0
        with target.open("r+b" if target.exists() else "wb") as file:
            file.truncate(start)
            file.seek(start)
            try:
                for chunk in chunks(response):
                    start += len(chunk)
                    if start > size:
                        file.truncate(0)
                        raise DownloadError(f"{_place(source)} sent more than {size:,} bytes")
                    file.write(chunk)
                    job.report(start)
            except LostError as lost:
                return str(lost)
    return "the server closed it early"


def _open(job: Job[Wanted], source: HubFile, start: int) -> Response:
    """The hub's answer to a request for the file from byte ``start`` on, its body unread."""

    def address(endpoint: str | None) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(source.repository, source.filename, revision=source.revision, endpoint=endpoint)

    return open_url(address, job.check_cancelled, start)


def _refuse_other_file(response: Response, job: Job[Wanted], source: HubFile) -> None:
    """Refuse by what the headers announce, before hundreds of megabytes tell the same.

    The hub announces a large file's SHA-256 as ``X-Linked-ETag``, on the answer that redirects to
    its storage.
    """
    entry = job.entry
    size = _announced_size(response)
    if size is not None and size != entry.size_bytes:
        job.unfinished("hub").unlink(missing_ok=True)
        raise DownloadError(f"{_place(source)} is another file now: {size:,} bytes, not {entry.size_bytes:,}")
    for answer in (*response.history, response):
        digest = answer.headers.get("x-linked-etag", "").removeprefix("W/").strip('"').lower()
        if len(digest) == 64 and entry.sha256 and digest != entry.sha256:
            job.unfinished("hub").unlink(missing_ok=True)
            raise DownloadError(
                f"{_place(source)} is another file now: SHA-256 {digest[:12]}…, not {entry.sha256[:12]}…"
            )


def _announced_size(response: Response) -> int | None:
    if response.status_code == 206:
        text = response.headers.get("content-range", "").rpartition("/")[2]
    else:
        text = response.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _place(source: HubFile) -> str:
    return f"{source.repository}/{source.filename} (revision {source.revision})"
