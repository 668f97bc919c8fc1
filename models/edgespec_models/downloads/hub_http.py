"""The Hugging Face hub over HTTP: answers, and files of known size, with resumed downloads.

``hf_hub_download`` is not used: from huggingface_hub 1.18 on it deletes what a stopped download had
gathered. The token and the HTTP client are huggingface_hub's, so that ``HF_TOKEN``, a stored login,
proxies and a client factory set by the application hold here too.

Waiting is bounded: ``HF_HUB_ETAG_TIMEOUT`` seconds (default 5) until the server answers,
``HF_HUB_DOWNLOAD_TIMEOUT`` seconds (default 10) for each further piece.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edgespec_models.downloads.catalog import HubFile
from edgespec_models.downloads.job import Job, length, require_space
from edgespec_models.errors import DownloadError

_FRUITLESS_ATTEMPTS = 2


def fetch_hub(job: Job, source: HubFile) -> Path:
    """Download ``source`` next to the job's path; return the file, of the right size, digest unchecked.

    Raises:
        DownloadError: the hub cannot be reached, is switched off (``HF_HUB_OFFLINE``), refuses, or has
            another file; the connection broke twice without a further byte; the disk is too full.
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
    """The hub's answer to ``path``, which is ``what`` of ``repository``; DownloadError without an answer."""
    try:
        with _answer(path, repository, what) as response:
            return b"".join(_chunks(response))
    except ConnectionError as error:
        raise DownloadError(f"the connection to the Hugging Face hub broke ({error})") from error


def _receive(job: Job, source: HubFile, target: Path) -> str:
    """Append the bytes of one connection, and return why it ended."""
    what = f"{source.repository}/{source.filename} (revision {source.revision})"
    path = f"/{source.repository}/resolve/{quote(source.revision, safe='')}/{quote(source.filename)}"
    done = length(target)
    with _answer(path, source.repository, what, done) as response, target.open("ab") as file:
        resumed = response.status_code == 206
        size = response.headers.get("content-range" if resumed else "content-length", "").rpartition("/")[2]
        done = done if resumed else 0  # a server that does not resume begins again
        file.truncate(done)
        try:
            if size.isdecimal() and int(size) != job.size_bytes:
                file.truncate(0)
                raise DownloadError(f"{what} has changed and has now {int(size):,} bytes")
            for chunk in _chunks(response):
                done += len(chunk)
                if done > job.size_bytes:
                    file.truncate(0)
                    raise DownloadError(f"{what} sent more than {job.size_bytes:,} bytes")
                file.write(chunk)
                file.flush()  # a kill loses no byte that has arrived
                job.report(done)
        except ConnectionError as lost:
            return str(lost)
    return "the server closed it early"


@contextmanager
def _answer(path: str, repository: str, what: str, start: int = 0) -> Iterator[Any]:
    """The hub's answer to ``path``, which is ``what`` of ``repository``, from byte ``start`` on."""
    with closing(_ask(path, start)) as response:
        status = response.status_code
        if status in {401, 403}:
            raise DownloadError(
                f"the Hugging Face hub refuses {repository} (HTTP {status}): check its spelling, accept its "
                "licence on the model's page if it has one, and set HF_TOKEN"
            )
        if status == 404:
            raise DownloadError(f"the Hugging Face hub has no {what} (HTTP 404)")
        if status not in {200, 206}:
            raise DownloadError(f"the Hugging Face hub answered HTTP {status} for {what}")
        yield response


def _ask(path: str, start: int) -> Any:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise DownloadError("the Hugging Face hub is switched off (HF_HUB_OFFLINE)")
    try:
        from huggingface_hub import constants, get_session, get_token

        answer = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 0) or 5.0
        piece = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 0) or 10.0
    except ValueError as error:  # such as a HF_ variable that must be a number and is not
        raise DownloadError(f"the Hugging Face hub cannot be reached: {error}") from error
    constants.HF_HUB_DISABLE_TELEMETRY = True  # get_token may ask the hub, in huggingface_hub's own way
    # huggingface_hub reads HF_ENDPOINT when it is first imported; an application may set it later.
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")

    def send() -> Any:
        # Not build_hf_headers, whose User-Agent tells about the user's environment.
        headers = {"User-Agent": "edgespec", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        session, limits = get_session(), (answer, piece, piece, answer)
        request = session.build_request("GET", endpoint + path, headers=headers, timeout=limits)
        return session.send(request, stream=True, follow_redirects=True)

    try:
        return within(answer, send)
    except ConnectionError as error:
        raise DownloadError(f"could not reach the Hugging Face hub ({endpoint}: {error})") from error


def within(seconds: float, send: Callable[[], Any]) -> Any:
    """What ``send`` returns, within so many seconds; ConnectionError if it fails or takes longer.

    It runs in a thread, because the client's own limits do not bound the whole: name resolution has none, and
    the connection limit holds for each of a host's addresses in turn. Ctrl-C would wait for both.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(send())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            future.set_exception(error)

    def close(late: Future[Any]) -> None:
        if late.exception() is None:
            late.result().close()

    threading.Thread(target=run, name="edgespec-hub", daemon=True).start()
    try:
        return future.result(seconds)
    except BaseException as error:
        slow = not future.done()
        future.add_done_callback(close)
        if not isinstance(error, Exception):  # Ctrl-C
            raise
        raise _lost(f"no answer within {seconds:g} s" if slow else error) from error


def _chunks(response: Any) -> Iterator[bytes]:
    """The body in pieces; ConnectionError where the connection breaks."""
    try:
        yield from response.iter_raw()
    except Exception as error:  # the client's own exceptions depend on huggingface_hub's version
        raise _lost(error) from error


def _lost(error: Exception | str) -> ConnectionError:
    return ConnectionError(str(error).strip() or type(error).__name__)
