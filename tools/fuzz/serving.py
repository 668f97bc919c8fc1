"""Target: requests to the server, in process: method, path, headers and body of one after another."""

import asyncio
import json
import weakref
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from edgespec.history.manage import History
from edgespec.serve.app import App
from edgespec.serve.options import ServeOptions
from edgespec_models.text.chat_template import ChatTemplate
from tools.fuzz.forms import JSON, as_bytes
from tools.fuzz.rules import Rule, Target, table, text_of
from tools.fuzz.trees import Tree

__all__ = ["TARGETS"]

_KEY: Final = "a-key-of-the-server"
_HEADERS: Final = [
    ["host", "127.0.0.1:8642"],
    ["content-type", "application/json"],
    ["authorization", f"Bearer {_KEY}"],
]
_SLOWEST_S: Final = 10.0
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


def _visible(tree: Tree) -> str:
    """What a request's first line, and names of headers, may consist of; servers refuse all else."""
    return "".join(letter for letter in text_of(tree) if "!" <= letter <= "~")


def _field(tree: Tree) -> bytes:
    """What a header's value may be."""
    return bytes(byte for byte in as_bytes(tree) if byte == 9 or 32 <= byte != 127).strip()


class _Exchange:
    """One request and what came back, as ASGI has it."""

    def __init__(self, tree: Tree) -> None:
        request = table(tree)
        body = request.get("body")
        self._chunks = [as_bytes(body) if isinstance(body, str) else JSON.write(body)]
        if isinstance(request.get("cut"), int):
            at = request["cut"] % (len(self._chunks[0]) + 1)
            self._chunks = [self._chunks[0][:at], self._chunks[0][at:]]
        path, query = _visible(request.get("path")), _field(request.get("query"))
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1",
            "scheme": "http", "root_path": "", "raw_path": path.encode(),
            "method": _visible(request.get("method")) or "POST", "path": unquote(path),
            "query_string": query.replace(b" ", b""),
            "server": ("127.0.0.1", 8642), "client": ("127.0.0.1", 1),
            "headers": self._headers(request.get("headers")),
        }  # fmt: skip
        self.sent = list[dict[str, Any]]()

    def _headers(self, tree: Tree) -> list[tuple[bytes, bytes]]:
        given = tree if isinstance(tree, list) else []
        pairs = [each for each in given if isinstance(each, list) and len(each) == 2]
        return [(_visible(name).lower().encode(), _field(value)) for name, value in pairs or _HEADERS]

    async def receive(self) -> dict[str, Any]:
        if not self._chunks:
            await asyncio.sleep(3600)  # the client waits for the answer
        body = self._chunks.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self._chunks)}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def check(self) -> None:
        """One whole response, which is no fault of the server's."""
        start, *rest = self.sent
        assert start["type"] == "http.response.start"
        assert all(each["type"] == "http.response.body" for each in rest)
        assert rest, "there is no body"
        assert [each.get("more_body", False) for each in rest] == [True] * (len(rest) - 1) + [False]
        status, headers = start["status"], dict(start["headers"])
        assert 200 <= status < 500 or status == 503, f"status {status}"
        body = b"".join(each.get("body", b"") for each in rest)
        kind = headers.get(b"content-type", b"")
        if kind.startswith(b"text/event-stream"):
            self._check_events(body.decode())
        elif kind.startswith(b"application/json"):
            value = json.loads(body.decode())
            assert status < 400 or value["error"]["message"]

    @staticmethod
    def _check_events(text: str) -> None:
        *events, end = text.split("\n\n")
        assert end == ""
        values = [event.removeprefix("data: ") for event in events]
        assert all(isinstance(json.loads(value), dict) for value in values if value != "[DONE]")
        assert values[-1] == "[DONE]" or "error" in json.loads(values[-1])


def _server(folder: Path) -> Rule:
    from tests.models_for_tests import toy_model, toy_session
    from tests.templates_for_tests import HERMES

    model = toy_model(toy_session(context=1024), toy_session(seed=1, context=1024))
    model.target.chat_template = ChatTemplate(HERMES)
    options = ServeOptions(
        api_key=_KEY,
        timeout_s=0.2,
        max_new_tokens=6,
        allow_origins=("https://a.example",),
        max_request_bytes=1 << 16,
    )
    app = App(model, options, History(folder / "served.history"))
    loop = asyncio.new_event_loop()

    def rule(data: bytes) -> None:
        exchange = _Exchange(table(data))
        answering = app.asgi(exchange.scope, exchange.receive, exchange.send)
        loop.run_until_complete(asyncio.wait_for(answering, _SLOWEST_S))
        exchange.check()

    weakref.finalize(rule, loop.close)
    return rule


def _server_seeds() -> list[bytes]:
    from tests.templates_for_tests import TOOLS

    chat: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    asked: list[Any] = [
        chat
        | {
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
            "seed": 1,
            "logprobs": True,
            "top_logprobs": 2,
        },
        chat | {"n": 2, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["a", "b"], "logit_bias": {"5": 1.5}},
        chat
        | {
            "response_format": schema,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
        },
        chat | {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        chat | {"tools": TOOLS, "tool_choice": "required", "stream": True},
        chat
        | {
            "chat_template_kwargs": {"enable_thinking": False},
            "speculate": False,
            "user": "me",
            "max_completion_tokens": 2,
        },
    ]
    texts: list[Any] = [
        {"model": "toy", "prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1},
        {"model": "toy", "prompt": "a", "stream": True, "echo": False},
    ]
    requests = [{"path": _CHAT, "body": body} for body in asked] + [
        {"path": _TEXT, "body": body} for body in texts
    ]
    requests += [
        {"path": "/edgespec/history/forget", "body": {"text": "a"}},
        {"path": "/edgespec/history/forget", "body": {"everything": True}},
    ]
    for path in (
        "/",
        "/page.js",
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/models/toy",
        "/edgespec/history",
        "/nothing",
    ):
        requests.append({"method": "GET", "path": path, "query": "a=b", "body": ""})
    origin = [["origin", "https://a.example"], ["access-control-request-method", "POST"]]
    requests.append({"method": "OPTIONS", "path": _CHAT, "headers": [*_HEADERS, *origin], "body": ""})
    return [JSON.write({"method": "POST", "headers": _HEADERS, "cut": 9, **request}) for request in requests]


TARGETS: Final = {
    "server": Target(
        form=JSON,
        seeds=_server_seeds,
        rule=_server,
        words=("localhost", "[::1]", "Bearer ", "application/json; charset=x", "\r\n"),
    ),
}
