"""Requests of every kind to a server without a socket, and what it may answer."""

import asyncio
import json
import re
from typing import Any

from edgespec.serve.app import App
from tests.kit.templates import TOOLS

CHATS: list[dict[str, Any]] = [
    {"stream": True, "temperature": 0.7, "seed": 1, "logprobs": True, "top_logprobs": 2},
    {"n": 2, "top_p": 0.9, "min_p": 0.1, "stop": ["a", "b"], "logit_bias": {"5": 1.5}},
    {"response_format": {"type": "json_object"}, "presence_penalty": 0.5},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True},
]
COMPLETION = {"prompt": ["a"], "max_tokens": 2}
HOLE = {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c", "filename": "d"}]}
_CALLED = {"call_id": "c", "name": "add", "arguments": "{}"}
_USED = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
RESPONSES: list[dict[str, Any]] = [
    {"input": "hi", "instructions": "be brief", "stream": True, "reasoning": {"effort": "low"}},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
     "tool_choice": "required", "tools": [{"type": "function", **TOOLS[0]["function"]}], "store": True},
    {"input": [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
               {"type": "function_call", **_CALLED},
               {"type": "function_call_output", "call_id": "c", "output": "3"}],
     "text": {"format": {"type": "json_object"}}, "max_output_tokens": 3},
]  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}], "system": [{"type": "text", "text": "s"}],
     "stream": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                  {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, _USED]},
                  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]}],
     "tools": [{"name": "add", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
     "thinking": {"type": "disabled"}, "stop_sequences": ["x"], "max_tokens": 3},
]  # fmt: skip


def requests() -> list[dict[str, Any]]:
    """Sound ones, of every path."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    bodies = {
        "/v1/chat/completions": [chat | more for more in CHATS],
        "/v1/completions": [COMPLETION, COMPLETION | {"suffix": "b"}],
        "/infill": [HOLE | {"n_predict": 2, "prompt": "e"}],
        "/v1/responses": RESPONSES,
        "/v1/messages": MESSAGES,
    }
    posts = [(path, body) for path in bodies for body in bodies[path]]
    made = [{"method": "POST", "path": path, "body": {"model": "toy", **body}} for path, body in posts]
    return made + [
        {"method": "GET", "path": path, "query": "a=b", "body": ""} for path in ("/", "/v1/models")
    ]


def check_answer(app: App, request: dict[str, Any]) -> None:
    """Whatever is asked, it is answered, in time, and errors say what is wrong."""
    sent = list[dict[str, Any]]()
    asyncio.run(asyncio.wait_for(app.asgi(*exchange_of(request, sent)), 10.0))
    start, *rest = sent
    assert 200 <= start["status"] < 500 or start["status"] == 503
    body = b"".join(each.get("body", b"") for each in rest)
    if dict(start["headers"]).get(b"content-type", b"").startswith(b"application/json"):
        assert start["status"] < 400 or json.loads(body)["error"]["message"]


def exchange_of(request: dict[str, Any], sent: list[dict[str, Any]]) -> tuple[Any, Any, Any]:
    """A request as ASGI has it."""
    # Servers refuse a first line of anything else before an application sees it.
    path, method = (re.sub("[^!-~]", "", str(request.get(key, "POST"))) for key in ("path", "method"))
    body = request.get("body")
    chunks = [body.encode("utf-8", "replace") if isinstance(body, str) else json.dumps(body).encode()]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "method": method, "path": path, "raw_path": path.encode(),
        "query_string": str(request.get("query", "")).encode("latin-1", "replace"),
        "server": ("127.0.0.1", 8642), "client": ("127.0.0.1", 1),
        "headers": [(b"host", b"127.0.0.1:8642"), (b"content-type", b"application/json")],
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        if not chunks:
            await asyncio.sleep(3600)  # the client waits for the answer
        return {"type": "http.request", "body": chunks.pop(0), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    return scope, receive, send
