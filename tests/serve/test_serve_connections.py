"""Clients that hold connections: how long, how many, and what of it others notice."""

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from time import monotonic, sleep
from urllib.parse import urlsplit

import pytest

from edgespec.serve import connections
from edgespec.serve.options import ServeOptions
from tests.kit.machines import LINUX
from tests.kit.serving import ServedModel, ask, question, said, serving

CHAT = "/v1/chat/completions"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
SOON = ServeOptions(port=0, body_timeout_s=0.3)
FEW = 16
Patch = pytest.MonkeyPatch


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=10)


def post(length: int) -> bytes:
    return f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def is_open(connection: socket.socket) -> bool:
    """Whether the server has neither closed it nor answered."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def rest(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    data = bytearray()
    try:
        while part := connection.recv(1 << 20):
            data += part
    except ConnectionError:
        pass
    return bytes(data)


def answer(connection: socket.socket) -> bytes:
    """The next answer, whole."""
    connection.settimeout(10)
    data = bytearray()
    while b"\r\n\r\n" not in data:
        data += connection.recv(4096)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split()[0])
    while len(body) < length:
        body += connection.recv(4096)
    return bytes(head + body)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(ServedModel(pause_s=0.2).as_model(), SOON) as url:
        yield url


BEGINNINGS = {
    "nothing": b"",
    "half a head": GET,
    "half a head behind an answer": GET,
    "half a line": b"GET /hea",
    "half a body": post(100) + b"{",
}
UNREAD = {
    "half a body that nobody reads": GET + b"Content-Length: 99\r\n\r\n",
    "a body that is refused": post(2**40),
}
"""Half of a body behind a head that is answered. Without more of it the connection is idle."""


@pytest.mark.parametrize(("name", "slowly"), [*product(BEGINNINGS, [False, True]), *product(UNREAD, [True])])
def test_a_request_that_does_not_arrive_ends_its_connection(url: str, name: str, slowly: bool) -> None:
    """Also one that goes on arriving, byte by byte."""
    started = monotonic()
    with connect(url) as connection:
        if name.endswith("answer"):
            connection.sendall(GET + b"\r\n")
            answer(connection)
        connection.sendall((BEGINNINGS | UNREAD)[name])
        while slowly and monotonic() - started < 5:
            sleep(0.05)
            try:
                connection.sendall(b"A")
                connection.setblocking(False)
                if not connection.recv(4096):
                    break
            except BlockingIOError:
                pass
            except OSError:
                break
            finally:
                connection.settimeout(10)
        rest(connection)
    assert 0.2 < monotonic() - started < 4


def test_an_answer_may_take_longer_than_a_request(url: str) -> None:
    assert said(ask(url, CHAT, question("a long question"))) == "re: a long question"


def test_idle_connections_may_be_used_again(url: str) -> None:
    with connect(url) as connection:
        for _ in range(2):
            connection.sendall(GET + b"\r\n")
            assert b"keep-alive: timeout=115" in answer(connection)
            sleep(0.6)
        assert is_open(connection)


def test_an_answer_that_nobody_reads_ends(url: str) -> None:
    page = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(url) as connection:
        connection.setblocking(False)
        whole = len(ask(url, "/page.js").body) * 800
        with suppress(BlockingIOError):  # the server reads no more
            connection.sendall(page * 800)
        sleep(1.5)
        connection.settimeout(10)
        assert len(rest(connection)) < whole
    assert ask(url, "/health").status == 200


@contextmanager
def crowd(url: str, count: int, beginning: bytes) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [crowded(stack.enter_context(connect(url)), beginning) for _ in range(count)]


def crowded(connection: socket.socket, beginning: bytes) -> socket.socket:
    connection.sendall(beginning)
    return connection


def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    end = monotonic() + 10
    while not holds():
        assert monotonic() < end
        sleep(0.01)


@pytest.mark.parametrize("name", ["nothing", "half a head", "half a body"])
def test_a_crowd_of_silent_clients_keeps_nobody_out(
    name: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has half of the handles, and the log has a line about it."""
    monkeypatch.setattr(connections, "handles", lambda: FEW)
    with serving(ServedModel().as_model()) as url, caplog.at_level(logging.WARNING):
        with crowd(url, 5 * FEW, BEGINNINGS[name]) as silent:
            assert said(ask(url, CHAT, question("hello"))) == "re: hello"
            until(lambda: sum(map(is_open, silent)) <= FEW // 2)
            assert is_open(silent[-1])
            assert ask(url, "/health").status == 200
        assert caplog.messages == [
            f"more than {FEW // 2} connections are open; those that wait longest for their client are closed"
        ]


def test_who_is_being_answered_is_not_closed_for_a_crowd(monkeypatch: Patch) -> None:
    monkeypatch.setattr(connections, "handles", lambda: FEW)
    with serving(ServedModel(pause_s=0.2).as_model()) as url, connect(url) as asking:
        body = json.dumps(question("hello there")).encode()
        asking.sendall(post(len(body)) + body)
        sleep(0.1)
        with crowd(url, 5 * FEW, b""):
            assert b"re: hello there" in answer(asking)


@LINUX
def test_where_no_handle_is_left_the_log_has_one_line(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.02)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(ServedModel().as_model()) as url, socket.socket() as client:
        address = urlsplit(url)
        silent = connect(url)
        silent.sendall(GET + b"\r\n")
        answer(silent)  # it is accepted, and idle
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
            client.connect((address.hostname, address.port))
            until(lambda: bool(caplog.messages))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with silent:
            assert rest(silent) == b""  # it had to make room
        client.settimeout(10)
        client.sendall(GET + b"Connection: close\r\n\r\n")
        assert b"200 OK" in rest(client)
    assert [message for message in caplog.messages if "handle" in message or "open" in message] == [
        "no further connection can be opened (Too many open files); those that wait longest for their client "
        "are closed"
    ]


def test_bodies_that_arrive_have_a_common_bound() -> None:
    """The oldest ones make room for others."""
    options = ServeOptions(port=0, max_request_bytes=2000)
    body = json.dumps(question("x" * 1800)).encode()
    with serving(ServedModel().as_model(), options) as url:
        with crowd(url, 30, post(len(body)) + body[:-1]) as halves:
            until(lambda: sum(map(is_open, halves)) * len(body) <= 8 * 2000)
            halves[0].setblocking(True)
            assert b" 408 " in rest(halves[0])
            last = halves[-1]
            last.setblocking(True)
            last.sendall(body[-1:])
            assert b" 200 OK" in answer(last)
        assert ask(url, CHAT, question()).status == 200


def test_more_texts_than_anybody_writes_are_refused_before_they_are_read() -> None:
    model = ServedModel()
    with serving(model.as_model()) as url:
        many = question() | {"messages": [{"role": "user", "content": "hi"}] * 60_000}
        started = monotonic()
        reply = ask(url, CHAT, many)
        assert (reply.status, reply.json["error"]["code"]) == (413, "request_too_large")
        assert "240,003 texts" in reply.error and monotonic() - started < 5
        assert model.calls == []
        assert ask(url, CHAT, question(json.dumps(many)[:300_000])).status == 200  # marks within a text


def test_errors_of_other_kinds_are_reported_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    connections.Limits(1.0).on_error([], loop, {"message": "something else", "exception": OSError(5, "x")})
    loop.close()
    assert caplog.messages == ["something else"]
