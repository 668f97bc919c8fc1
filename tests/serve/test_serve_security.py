"""Who may ask a server, and how much: names, origins, keys, sizes, times."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from edgespec.cli import serve as serve_command
from edgespec.serve.options import ServeOptions, bound_socket
from edgespec.serve.security import SCRIPTS
from edgespec_models.errors import EdgespecError, RequestError
from tests.kit.serving import ServedModel, ask, question, serving

CHAT = "/v1/chat/completions"
KEY = "a-key-of-this-test"
POST = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
PATHS = ("/", "/v1/models", "/health", "/metrics", "/edgespec/history", "/v1/embeddings", CHAT)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel()


@pytest.fixture(scope="module")
def url(model: ServedModel) -> Iterator[str]:
    names: Any = {"allow_hosts": ("box.lan",), "allow_origins": ("https://app.example",)}
    options = ServeOptions(port=0, max_request_bytes=2000, **names)
    with serving(model.as_model(), options) as url:
        yield url


FOREIGN = (
    *("evil.example:8642", "127.0.0.1.evil.example", "localhost.evil.example", "", "10.0.0.9"),
    *(
        "[::1]evil.example",
        "[127.0.0.1]",
        "[localhost]",
        "127.0.0.1:80:evil.example",
        "localhost:evil.example",
    ),
    *("localhost@evil.example", "evil.example,localhost", "[::1", "::1", "localhost:123456"),
)
OWN = ("localhost", "LOCALHOST:1", "127.0.0.1", "127.1.2.3:80", "[::1]:9", "box.lan:80")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_is_refused_everywhere(url: str, path: str, host: str) -> None:
    """As a page has whose name was made to point here."""
    reply = ask(url, path, headers={"Host": host})
    assert (reply.status, reply.json["error"]["code"]) == (421, "host_not_allowed")


@pytest.mark.parametrize("host", OWN)
def test_own_names_are_answered_at_any_port(url: str, host: str) -> None:
    """A port may be forwarded."""
    assert ask(url, "/v1/models", headers={"Host": host}).status == 200


def answered(url: str, data: bytes) -> bytes:
    """The status that raw bytes are answered with; empty without an answer."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=5) as connection:
        connection.sendall(data)
        return connection.recv(4096)[9:12]


@pytest.mark.parametrize("second", ["https://evil.example", "https://app.example"])
def test_two_origins_are_refused_whatever_they_are(url: str, second: str) -> None:
    heads = f"Origin: {url}\r\nOrigin: {second}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    assert answered(url, POST.replace(b"localhost", urlsplit(url).netloc.encode()) + heads) == b"403"


def test_headers_of_proxies_change_nothing(url: str) -> None:
    """A page could send them, and none of them is asked for."""
    origin = url.replace("http:", "https:")
    reply = ask(url, CHAT, question(), headers={"Origin": origin, "X-Forwarded-Proto": "https"})
    assert (reply.status, reply.json["error"]["code"]) == (403, "origin_not_allowed")


def test_a_body_has_one_length(url: str) -> None:
    """A proxy before the server might read the other one, and take the rest for a request."""
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=5) as connection:
        connection.sendall(POST + both)
        data = b"".join(iter(lambda: connection.recv(4096), b""))
    assert data[9:12] == b"400" and b"not both" in data


def test_several_names_in_one_request_and_none_are_refused(url: str) -> None:
    both = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert answered(url, both) in (b"400", b"421")
    assert answered(url, b"GET /health HTTP/1.0\r\n\r\n") == b"421"  # and none


ORIGINS = ("https://evil.example", "null", "http://localhost.evil.example", "http://app.example")


@pytest.mark.parametrize("origin", ORIGINS)
def test_pages_of_other_origins_are_refused(model: ServedModel, url: str, origin: str) -> None:
    before = len(model.calls)
    for path, body in ((CHAT, question()), ("/v1/models", None)):
        reply = ask(url, path, body, headers={"Origin": origin})
        assert (reply.status, reply.json["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in reply.headers
    assert len(model.calls) == before


ALLOWED = {
    "tauri://localhost": ("tauri://localhost", "tauri://localhos", "xtauri://localhost"),
    "app://obsidian.md": ("app://obsidian.md", "app://obsidianxmd", "app://obsidian.md.evil"),
    "chrome-extension://abc": ("chrome-extension://abc", "chrome-extension://abcd", "moz-extension://abc"),
    "vscode-webview://*": ("vscode-webview://1abc", "vscode-webview://", "vscode-webviewx://1"),
    "file://": ("file://", "file:///x", "null"),
    "null": ("null", "nulll", "file://"),
    "https://*.example.com": ("https://a.b.example.com", "https://example.com", "https://evilexample.com"),
    "http://localhost:*": (
        "http://localhost:3000",
        "http://localhost:3000.evil.example",
        "http://localhost.x",
    ),
    "http://[::1]:*": ("http://[::1]", "http://[::2]", "http://::1"),
    "https://APP.example:443": ("https://app.example", "https://app.example:444", "http://app.example"),
}


@pytest.mark.parametrize("origin", ALLOWED)
def test_origins_of_every_scheme_are_allowed_as_they_are_written(origin: str) -> None:
    allowed, *others = ALLOWED[origin]
    options: Any = ServeOptions(port=0, allow_origins=(origin,))
    with serving(ServedModel().as_model(), options) as url:
        reply = ask(url, CHAT, question(), headers={"Origin": allowed})
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, allowed)
        for other in others:
            reply = ask(url, CHAT, question(), headers={"Origin": other})
            assert reply.status == 403 and f"start the server with --allow-origin {other}" in reply.error


WRONG_ORIGINS = ("*", "https://*", "http://*:80", "https://", "https://a/", "https://x*.com", "a b://c", "")


@pytest.mark.parametrize("origin", [*WRONG_ORIGINS, "https://bücher.example", "https://a.*.com", "localhost"])
def test_origins_that_would_match_nothing_or_all_are_refused(origin: str) -> None:
    with pytest.raises(
        RequestError, match=r"allow_origins\[0\] is .*; allowed: a text null, or SCHEME://HOST"
    ):
        ServeOptions(allow_origins=(origin,))


def test_pages_that_are_allowed_can_read_every_error() -> None:
    """A wrong key, a name, a body, a fault of the server's own; and Chromium may ask for private networks."""
    page = {"Origin": "tauri://localhost"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    model = ServedModel()
    with serving(model.as_model(), ServeOptions(port=0, api_key=KEY, allow_origins=(*page.values(),))) as url:
        before = ask(url, CHAT, method="OPTIONS", headers=page | asks)
        assert (before.status, before.headers["access-control-allow-private-network"]) == (200, "true")
        foreign = ask(url, CHAT, method="OPTIONS", headers=asks | {"Origin": "https://evil.example"})
        assert foreign.status == 403 and "access-control-allow-private-network" not in foreign.headers
        own = {"Authorization": f"Bearer {KEY}"}
        model.calls = None  # type: ignore[assignment]
        for status, body, more in (
            (401, question(), {}),
            (401, question(), {"Authorization": "Bearer x"}),
            (421, question(), own | {"Host": "evil.example"}),
            (400, b"{", own),
            (404, question(model="other"), own),
            (500, question(), own),
        ):
            reply = ask(url, CHAT, body, headers=page | more)
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == "tauri://localhost"
            assert "origin" in reply.headers["vary"].lower()


def test_the_own_page_and_allowed_ones_are_answered(url: str) -> None:
    own = ask(url, CHAT, question(), headers={"Origin": url})
    assert own.status == 200 and "access-control-allow-origin" not in own.headers
    other = ask(url, CHAT, question(), headers={"Origin": "https://app.example"})
    assert other.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize(("origin", "status"), [("https://app.example", 200), ("https://evil.example", 403)])
def test_browsers_are_told_beforehand_whether_they_may_ask(url: str, origin: str, status: int) -> None:
    headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    reply = ask(url, CHAT, method="OPTIONS", headers={"Origin": origin, **headers})
    assert (reply.status, "access-control-allow-credentials" in reply.headers) == (status, False)
    allowed = reply.headers.get("access-control-allow-origin")
    assert allowed == (origin if status == 200 else None)
    if allowed:
        assert "authorization" in reply.headers["access-control-allow-headers"].lower()


def test_kinds_that_pages_send_without_asking_are_refused(url: str) -> None:
    for page in ({"Origin": url}, {"Sec-Fetch-Site": "cross-site"}):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            assert ask(url, CHAT, question(), headers={"Content-Type": kind, **page}).status == 415, kind


def test_programs_may_leave_out_what_kind_a_body_is(url: str) -> None:
    """As litellm does for Ollama, and ``curl -d``."""
    for kind, status in {"application/x-www-form-urlencoded": 200, "": 200, "text/plain": 415}.items():
        assert ask(url, CHAT, question(), headers={"Content-Type": kind}).status == status, kind


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"3", b'"text"', b"\xff\xfe{}", b'{"model": NaN}', b'{"a": 1e999999',
        b"[" * 1900, b'{"model": ' + b"1" * 1900 + b"}", "{\"model\": \"\u00e9\"}".encode("utf-16"),
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(url: str, body: bytes) -> None:
    reply = ask(url, CHAT, body)
    assert reply.status == 400 and reply.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "more", "place"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "ab\ud800c"}]}, "messages[0].content"),
        (CHAT, {"tools": [{"function": {"name": "ab\ud800"}}]}, "tools[0].function.name"),
        (CHAT, {"tools": [{"ab\ud800": 1}]}, "tools[0].ab\\ud800"),
        (CHAT, {"model": "ab\ud800"}, "model"),
        (CHAT, {"stop": ["x", "ab\ud800"]}, "stop[1]"),
        ("/v1/completions", {"prompt": ["x", "ab\ud800"]}, "prompt[1]"),
        ("/v1/completions", {"prompt": "x", "suffix": "ab\ud800"}, "suffix"),
        ("/v1/responses", {"input": [{"role": "user", "content": "ab\ud800"}]}, "input[0].content"),
        ("/v1/messages", {"system": "ab\ud800"}, "system"),
        ("/edgespec/history/forget", {"text": "ab\ud800"}, "text"),
    ],
)
def test_a_lone_surrogate_is_told_with_its_field(
    url: str, path: str, more: dict[str, Any], place: str
) -> None:
    reply = ask(url, path, {"model": "served"} | more)
    assert reply.status == 400
    assert reply.error.startswith(f"{place} has a lone surrogate, U+D800, at position 2: half of a character")
    assert path.startswith("/v1/messages") or reply.json["error"]["param"] == place


def test_whole_characters_may_be_spelled_by_halves(url: str) -> None:
    assert ask(url, CHAT, json.dumps(question("\ud83d\ude00")).encode()).status == 200


def test_long_requests_are_refused_whether_they_say_so_or_not(model: ServedModel, url: str) -> None:
    before = len(model.calls)
    reply = ask(url, CHAT, question("x" * 2000))
    assert (reply.status, reply.json["error"]["code"]) == (413, "request_too_large")
    data = json.dumps(question("x" * 4000)).encode()
    chunk = f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n"
    assert answered(url, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk) == b"413"
    assert len(model.calls) == before


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("kind", "status"), [("application/json", 413), ("text/plain", 415)])
def test_who_sends_all_before_reading_is_told_of_a_refusal(
    url: str, kind: str, status: int, chunked: bool
) -> None:
    """The connection holds less than the body, and goes on with the next request."""
    body = b"x" * 2**24
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)) as client:
        client.request("POST", CHAT, iter([body]) if chunked else body, {"Content-Type": kind})
        response, connected = client.getresponse(), client.sock
        assert response.status == status and response.read().startswith(b'{"error"')
        client.request("GET", "/health")
        assert client.getresponse().read() == b'{"status":"ok"}' and client.sock is connected


def test_a_request_that_trickles_in_is_ended(model: ServedModel) -> None:
    with serving(model.as_model(), ServeOptions(port=0, body_timeout_s=0.3)) as url:
        assert answered(url, POST + b"Content-Length: 100\r\n\r\n{") == b"408"


def test_with_a_key_only_who_has_it_is_answered() -> None:
    model = ServedModel()
    with serving(model.as_model(), ServeOptions(port=0, api_key=KEY)) as url:
        wrong = ("Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer ü")
        for given in (None, *wrong):
            headers = {} if given is None else {"Authorization": given.encode().decode("latin-1")}
            reply = ask(url, CHAT, question(), headers=headers)
            assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer" and KEY not in reply.error
            for path in ("/v1/models", "/metrics", "/edgespec/history"):
                assert ask(url, path, headers=headers).status == 401
        assert model.calls == []
        assert ask(url, CHAT, question(), headers={"Authorization": f"Bearer {KEY}"}).status == 200
        for path in ("/", "/page.css", "/health", *map("/".__add__, SCRIPTS)):  # the page asks for it
            assert ask(url, path).status == 200


def test_the_page_loads_nothing_from_elsewhere_and_runs_nothing_inline(url: str) -> None:
    page = ask(url, "/", headers={"Accept": "text/html"})
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    scripts = ((f"/{name}", "text/javascript") for name in SCRIPTS)
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), *scripts):
        reply = ask(url, path, headers={"Accept": kind})
        assert reply.headers["content-type"].startswith(kind)
        assert b"http://" not in reply.body and b"https://" not in reply.body
    assert b" style=" not in page.body and b" onclick=" not in page.body


WRONG: tuple[tuple[str, Any], ...] = (
    *(("api_key", "short"), ("api_key", "with space in it"), ("port", 70000), ("max_request_bytes", 3)),
    *(("allow_origins", ("https://a/b",)), ("allow_origins", ("*",)), ("allow_hosts", ("a:80",))),
    *(("host", "no such name"), ("timeout_s", 0)),
)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_options_that_cannot_be_meant_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError):
        ServeOptions(**{name: value})


def test_a_port_that_is_taken_is_said_to_be() -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(EdgespecError, match=r"cannot listen at 127\.0\.0\.1, port .*--port"):
            bound_socket("127.0.0.1", taken.getsockname()[1])


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve_command.KEY_VARIABLE, raising=False)
    assert serve_command.read_key(None) is None
    monkeypatch.setenv(serve_command.KEY_VARIABLE, KEY)
    assert serve_command.read_key(None) == KEY
    file = tmp_path / "key"
    file.write_bytes(b"\xef\xbb\xbf from-a-file \r\n")  # as editors on Windows begin and end it
    assert serve_command.read_key(file) == "from-a-file"
    with pytest.raises(RequestError, match="cannot be read"):
        serve_command.read_key(tmp_path / "missing")


def test_garbage_is_no_request(url: str) -> None:
    for data in (b"\x00" * 500, b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"A" * 70_000):
        assert answered(url, data) == b"400"
    assert ask(url, CHAT, question()).status == 200
