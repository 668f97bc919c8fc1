"""The Hugging Face hub over HTTP: answers, and files of known size, resumed where they broke off.

``hf_hub_download`` is not used: from huggingface_hub 1.18 on it deletes what a stopped download had
gathered. The token and the HTTP client are huggingface_hub's, so that ``HF_TOKEN``, a stored login,
proxies and a client factory set by the application hold here too.

Waiting is bounded: ``HF_HUB_ETAG_TIMEOUT`` seconds (default 5) until the server answers,
``HF_HUB_DOWNLOAD_TIMEOUT`` seconds (default 10) for each further piece.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from edgespec_models.downloads.catalog import HubFile
from edgespec_models.downloads.job import Job, length, require_space
from edgespec_models.errors import DownloadError

__all__ = ["LostError", "fetch_hub", "read_hub", "within"]

_FRUITLESS_ATTEMPTS = 2
_POLL_SECONDS = 0.1


class _Response(Protocol):
    """What is used of the answer of huggingface_hub's client (httpx or its successor)."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def history(self) -> Sequence["_Response"]: ...
    def iter_raw(self) -> Iterator[bytes]: ...
    def close(self) -> None: ...


class LostError(Exception):
    """The connection broke."""


def fetch_hub(job: Job, source: HubFile) -> Path:
    """Download ``source`` next to the job's path; return the file, of the right size, digest unchecked.

    Raises:
        DownloadError: the hub cannot be reached, is switched off (``HF_HUB_OFFLINE``), refuses, or
            holds another file; the connection broke twice without one more byte; the disk is too full.
    """
    target, size = job.unfinished("hub"), job.size_bytes
    if length(target) > size:
        target.unlink()
    require_space(target.parent, size - length(target), f"{job.name} from the Hugging Face hub")
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


def read_hub(path: str, repository: str, what: str) -> bytes:
    """The hub's answer to ``path``, in which ``what`` of ``repository`` is asked for.

    Raises:
        DownloadError: the hub cannot be reached, is switched off, or refuses.
    """
    with closing(_ask(path)) as response:
        _refuse_status(response, repository, what)
        try:
            return b"".join(_chunks(response))
        except LostError as error:
            raise DownloadError(f"the connection to the Hugging Face hub broke ({error})") from error


def _receive(job: Job, source: HubFile, target: Path) -> str:
    """Append what one connection brings; return why it ended."""
    what = f"{source.repository}/{source.filename} (revision {source.revision})"
    path = f"/{source.repository}/resolve/{quote(source.revision, safe='')}/{quote(source.filename)}"
    done = length(target)
    with closing(_ask(path, done)) as response:
        _refuse_status(response, source.repository, what)
        _refuse_other_file(response, job, what)
        if response.status_code != 206:  # the server does not resume: begin again
            done = 0
        with target.open("ab") as file:
            file.truncate(done)
            try:
                for chunk in _chunks(response):
                    done += len(chunk)
                    if done > job.size_bytes:
                        file.truncate(0)
                        raise DownloadError(f"{what} sent more than {job.size_bytes:,} bytes")
                    file.write(chunk)
                    file.flush()  # a kill loses no byte that has arrived
                    job.report(done)
            except LostError as lost:
                return str(lost)
    return "the server closed it early"


def _ask(path: str, start: int = 0) -> _Response:
    """The hub's answer to a request for ``path`` from byte ``start`` on, its body unread."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise DownloadError("the Hugging Face hub is switched off (HF_HUB_OFFLINE)")
    try:
        from huggingface_hub import constants, get_session, get_token

        answer = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 0) or 5.0
        piece = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 0) or 10.0
    except ValueError as error:  # such as a HF_ variable that must be a number and is not
        raise DownloadError(f"the Hugging Face hub cannot be asked: {error}") from error
    constants.HF_HUB_DISABLE_TELEMETRY = True  # get_token may ask the hub, in huggingface_hub's own way
    # huggingface_hub reads HF_ENDPOINT when it is first imported; an application may set it later.
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")

    def send() -> _Response:
        # Not build_hf_headers, whose User-Agent tells about the user's environment.
        headers = {"User-Agent": "edgespec", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        session, limits = get_session(), (answer, piece, piece, answer)
        request = session.build_request("GET", endpoint + path, headers=headers, timeout=limits)
        response: _Response = session.send(request, stream=True, follow_redirects=True)
        return response

    try:
        return within(answer, send)
    except LostError as error:
        raise DownloadError(f"could not reach the Hugging Face hub ({endpoint}: {error})") from error


def within(seconds: float, send: Callable[[], _Response]) -> _Response:
    """Run ``send`` for at most ``seconds``. Raises LostError if it fails.

    A thread, because the client's own limits do not bound the whole: name resolution has none, and
    the connection limit holds for each of a host's addresses in turn. Ctrl-C would wait for both; on
    Windows it would wait for a lock too, hence short waits.
    """
    future: Future[_Response] = Future()

    def run() -> None:
        try:
            future.set_result(send())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            future.set_exception(error)

    threading.Thread(target=run, name="edgespec-hub", daemon=True).start()
    deadline = time.monotonic() + seconds
    try:
        while not wait([future], timeout=_POLL_SECONDS).done:
            if time.monotonic() >= deadline:
                raise LostError(f"no answer within {seconds:g} s")
    except BaseException:
        future.add_done_callback(_close_late)
        raise
    error = future.exception()
    if error is not None:
        raise _lost(error)
    return future.result()


def _close_late(future: Future[_Response]) -> None:
    if future.exception() is None:
        future.result().close()


def _chunks(response: _Response) -> Iterator[bytes]:
    """The body in pieces. Raises LostError where the connection breaks."""
    try:
        yield from response.iter_raw()
    except Exception as error:  # the client's own exceptions depend on huggingface_hub's version
        raise _lost(error) from error


def _lost(error: BaseException) -> LostError:
    return LostError(str(error).strip() or type(error).__name__)


def _refuse_status(response: _Response, repository: str, what: str) -> None:
    """Raise DownloadError for any answer but 200 and 206; ``what`` of ``repository`` was asked for."""
    status = response.status_code
    if status in {401, 403}:
        raise DownloadError(
            f"the Hugging Face hub refuses {repository} (HTTP {status}): look whether it is spelt right, "
            "accept its licence on the model's page where it asks for that, and set HF_TOKEN"
        )
    if status == 404:
        raise DownloadError(f"the Hugging Face hub has no {what} (HTTP 404)")
    if status not in {200, 206}:
        raise DownloadError(f"the Hugging Face hub answered HTTP {status} for {what}")


def _refuse_other_file(response: _Response, job: Job, what: str) -> None:
    """Refuse by what the headers announce, before hundreds of megabytes tell the same.

    The hub announces a large file's SHA-256 as ``X-Linked-ETag``, on the answer that redirects to
    its storage.
    """
    whole = "content-range" if response.status_code == 206 else "content-length"
    size = response.headers.get(whole, "").rpartition("/")[2]
    found = []
    if size.isdecimal() and int(size) != job.size_bytes:
        found.append(f"{int(size):,} bytes, not {job.size_bytes:,}")
    for answer in (*response.history, response):
        digest = answer.headers.get("x-linked-etag", "").removeprefix("W/").strip('"').lower()
        if len(digest) == len(job.digest) == 64 and digest != job.digest:
            found.append(f"SHA-256 {digest[:12]}…, not {job.digest[:12]}…")
    if found:
        job.unfinished("hub").unlink(missing_ok=True)
        raise DownloadError(f"{what} is another file now: {found[0]}")
