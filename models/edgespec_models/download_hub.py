"""The Hugging Face hub as a source: one file, streamed over HTTP, resumed where it broke off.

``hf_hub_download`` is not used: it reports progress only through tqdm, retries an unreachable host
for longer than a user with a second source should wait, and keeps the file in a cache of its own.
Addresses, the token and the HTTP client are huggingface_hub's, so that ``HF_ENDPOINT``, ``HF_TOKEN``,
a stored login, proxies and a client factory set by the application hold here too.

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

from edgespec_models.catalog import HubFile
from edgespec_models.download_job import Job, length
from edgespec_models.errors import DownloadError

__all__ = ["fetch_hub"]

_ANSWER_SECONDS = 5.0
_PIECE_SECONDS = 10.0
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


class _LostError(Exception):
    """The connection broke while the body was read."""


def fetch_hub(job: Job, source: HubFile) -> Path:
    """Download ``source`` next to the target; return the file, of the right size, digest unchecked.

    Raises:
        DownloadError: the hub cannot be reached, is switched off (``HF_HUB_OFFLINE``), refuses, or
            holds another file; or the connection broke twice without one more byte.
        Cancelled: the caller asked to stop.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise DownloadError("the Hugging Face hub is switched off (HF_HUB_OFFLINE)")
    target = job.unfinished("hub")
    size = job.entry.size_bytes
    if length(target) > size:
        target.unlink()
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


def _receive(job: Job, source: HubFile, target: Path) -> str:
    """Append what one connection brings; return why it ended."""
    size = job.entry.size_bytes
    start = length(target)
    with closing(_open(job, source, start)) as response:
        _refuse_status(response, source)
        _refuse_other_file(response, job, source)
        if response.status_code != 206:  # the server does not resume: begin again
            start = 0
        with target.open("r+b" if target.exists() else "wb") as file:
            file.truncate(start)
            file.seek(start)
            try:
                for chunk in _chunks(response):
                    start += len(chunk)
                    if start > size:
                        file.truncate(0)
                        raise DownloadError(f"{_place(source)} sent more than {size:,} bytes")
                    file.write(chunk)
                    job.report(start)
            except _LostError as lost:
                return str(lost)
    return "the server closed it early"


def _chunks(response: _Response) -> Iterator[bytes]:
    try:
        yield from response.iter_raw()
    except Exception as error:  # the client's own exceptions depend on huggingface_hub's version
        raise _LostError(_reason(error)) from error


def _open(job: Job, source: HubFile, start: int) -> _Response:
    """The hub's answer to a request for the file from byte ``start`` on, its body unread."""
    # huggingface_hub reads HF_ENDPOINT when it is first imported; an application may set it later.
    endpoint = os.environ.get("HF_ENDPOINT") or None
    answer = _seconds("HF_HUB_ETAG_TIMEOUT", _ANSWER_SECONDS)
    piece = _seconds("HF_HUB_DOWNLOAD_TIMEOUT", _PIECE_SECONDS)
    try:
        from huggingface_hub import constants, get_session, get_token, hf_hub_url

        url = hf_hub_url(source.repository, source.filename, revision=source.revision, endpoint=endpoint)
    except ValueError as error:  # such as a HF_ variable that must be a number and is not
        raise DownloadError(f"the Hugging Face hub cannot be asked: {error}") from error

    def send() -> _Response:
        # Not build_hf_headers: it asks the network about the user's environment, for telemetry.
        headers = {"User-Agent": "edgespec", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        session = get_session()
        request = session.build_request("GET", url, headers=headers, timeout=(answer, piece, piece, answer))
        response: _Response = session.send(request, stream=True, follow_redirects=True)
        return response

    try:
        return _within(answer, send, job.check_cancelled)
    except _LostError as error:
        place = endpoint or "huggingface.co"
        raise DownloadError(f"could not reach the Hugging Face hub ({place}: {error})") from error


def _within(seconds: float, send: Callable[[], _Response], check: Callable[[], None]) -> _Response:
    """Run ``send`` for at most ``seconds``, calling ``check`` meanwhile.

    A thread, because the client's own limits do not bound the whole: name resolution has none, and
    the connection limit holds for each of a host's addresses in turn.
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
            check()
            if time.monotonic() >= deadline:
                raise _LostError(f"no answer within {seconds:g} s")
    except BaseException:
        future.add_done_callback(_close_late)
        raise
    error = future.exception()
    if error is not None:
        raise _LostError(_reason(error)) from error
    return future.result()


def _close_late(future: Future[_Response]) -> None:
    if future.exception() is None:
        future.result().close()


def _refuse_status(response: _Response, source: HubFile) -> None:
    status = response.status_code
    if status in {200, 206}:
        return
    if status in {401, 403}:
        raise DownloadError(
            f"the Hugging Face hub refuses {source.repository} (HTTP {status}): accept its licence on "
            "the model's page where it asks for that, and set HF_TOKEN"
        )
    if status == 404:
        raise DownloadError(f"the Hugging Face hub has no {_place(source)} (HTTP 404)")
    raise DownloadError(f"the Hugging Face hub answered HTTP {status} for {_place(source)}")


def _refuse_other_file(response: _Response, job: Job, source: HubFile) -> None:
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
        if len(digest) == 64 and digest != entry.sha256:
            job.unfinished("hub").unlink(missing_ok=True)
            raise DownloadError(
                f"{_place(source)} is another file now: SHA-256 {digest[:12]}…, not {entry.sha256[:12]}…"
            )


def _announced_size(response: _Response) -> int | None:
    if response.status_code == 206:
        text = response.headers.get("content-range", "").rpartition("/")[2]
    else:
        text = response.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _place(source: HubFile) -> str:
    return f"{source.repository}/{source.filename} (revision {source.revision})"


def _reason(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _seconds(variable: str, default: float) -> float:
    try:
        seconds = float(os.environ.get(variable, ""))
    except ValueError:
        return default
    return seconds if seconds > 0 else default
