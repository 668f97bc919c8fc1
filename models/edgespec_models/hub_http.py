"""Asking the Hugging Face hub over HTTP.

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
from typing import Protocol

from edgespec_models.errors import DownloadError

__all__ = ["LostError", "Response", "chunks", "open_url", "refuse_offline", "refuse_status", "within"]

_ANSWER_SECONDS = 5.0
_PIECE_SECONDS = 10.0
_POLL_SECONDS = 0.1


class Response(Protocol):
    """What is used of the answer of huggingface_hub's client (httpx or its successor)."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]: ...  # noqa: D102
    @property
    def history(self) -> Sequence["Response"]: ...  # noqa: D102
    def iter_raw(self) -> Iterator[bytes]: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class LostError(Exception):
    """The connection broke."""


def refuse_offline() -> None:
    """Raise DownloadError where the user has switched the hub off (``HF_HUB_OFFLINE``)."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise DownloadError("the Hugging Face hub is switched off (HF_HUB_OFFLINE)")


def open_url(
    address: Callable[[str | None], str], check_cancelled: Callable[[], None], start: int = 0
) -> Response:
    """The hub's answer, its body unread.

    Args:
        address: from ``HF_ENDPOINT``, or None where it is not set, to the URL; may raise ValueError.
        check_cancelled: called several times a second while waiting; raises Cancelled.
        start: the first byte wanted.

    Raises:
        DownloadError: the hub cannot be reached or asked.
    """
    # huggingface_hub reads HF_ENDPOINT when it is first imported; an application may set it later.
    endpoint = os.environ.get("HF_ENDPOINT") or None
    answer = _seconds("HF_HUB_ETAG_TIMEOUT", _ANSWER_SECONDS)
    piece = _seconds("HF_HUB_DOWNLOAD_TIMEOUT", _PIECE_SECONDS)
    try:
        from huggingface_hub import constants, get_session, get_token

        url = address(endpoint)
    except ValueError as error:  # such as a HF_ variable that must be a number and is not
        raise DownloadError(f"the Hugging Face hub cannot be asked: {error}") from error

    def send() -> Response:
        # Not build_hf_headers: it asks the network about the user's environment, for telemetry.
        headers = {"User-Agent": "edgespec", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        session = get_session()
        request = session.build_request("GET", url, headers=headers, timeout=(answer, piece, piece, answer))
        response: Response = session.send(request, stream=True, follow_redirects=True)
        return response

    try:
        return within(answer, send, check_cancelled)
    except LostError as error:
        place = endpoint or "huggingface.co"
        raise DownloadError(f"could not reach the Hugging Face hub ({place}: {error})") from error


def chunks(response: Response) -> Iterator[bytes]:
    """The body in pieces. Raises LostError where the connection breaks."""
    try:
        yield from response.iter_raw()
    except Exception as error:  # the client's own exceptions depend on huggingface_hub's version
        raise LostError(_reason(error)) from error


def within(seconds: float, send: Callable[[], Response], check: Callable[[], None]) -> Response:
    """Run ``send`` for at most ``seconds``, calling ``check`` meanwhile.

    A thread, because the client's own limits do not bound the whole: name resolution has none, and
    the connection limit holds for each of a host's addresses in turn.
    """
    future: Future[Response] = Future()

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
                raise LostError(f"no answer within {seconds:g} s")
    except BaseException:
        future.add_done_callback(_close_late)
        raise
    error = future.exception()
    if error is not None:
        raise LostError(_reason(error)) from error
    return future.result()


def refuse_status(response: Response, repository: str, what: str) -> None:
    """Raise DownloadError for any answer but 200 and 206; ``what`` of ``repository`` was asked for."""
    status = response.status_code
    if status in {200, 206}:
        return
    if status in {401, 403}:
        raise DownloadError(
            f"the Hugging Face hub refuses {repository} (HTTP {status}): look whether it is spelt right, "
            "accept its licence on the model's page where it asks for that, and set HF_TOKEN"
        )
    if status == 404:
        raise DownloadError(f"the Hugging Face hub has no {what} (HTTP 404)")
    raise DownloadError(f"the Hugging Face hub answered HTTP {status} for {what}")


def _close_late(future: Future[Response]) -> None:
    if future.exception() is None:
        future.result().close()


def _reason(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _seconds(variable: str, default: float) -> float:
    try:
        seconds = float(os.environ.get(variable, ""))
    except ValueError:
        return default
    return seconds if seconds > 0 else default
