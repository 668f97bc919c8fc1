"""``/v1/responses``, OpenAI's Responses API: its requests as chats, and its events.

The last responses are kept in memory, so that a request may continue one.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec.answering.results import Generation
from edgespec.serve.blocks import (
    Block,
    BlockReply,
    Output,
    add,
    add_call,
    content_of,
    field_of,
    functions_of,
    text_of,
)
from edgespec.serve.bodies import UNUSED, Body, ChatBody, Effort
from edgespec.serve.completions import Completions, Job
from edgespec.serve.problems import Problem
from edgespec.serve.replies import Json, usage
from edgespec_models.schema import length, matching, shown, within

KEPT_BYTES, KEPT_S = 64 * 2**20, 3600.0
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_HOSTED = re.compile(r"\w+_call(_output)?|mcp_\w+|compaction")  # items of tools that are no functions
_PARTS = ("input_text", "output_text", "text", "input_image")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_OF_CALLS = ("type", "id", "status", "call_id", "name")
_ROLES = ("user", "assistant", "system", "developer")
_INCLUDED = matching(
    r"reasoning\.encrypted_content|\w+_call\.\w.*", "'reasoning.encrypted_content', or of a call"
)
_NAMES = {"thinking": "reasoning.effort", "response_format": "text.format"}
_STEMS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}
_SAID_AGAIN = (
    *("instructions", "max_output_tokens", "metadata", "previous_response_id", "store"),
    *("temperature", "tool_choice", "tools", "top_p"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """``reasoning``. ``summary`` is ignored: thoughts come whole."""

    effort: Effort | None = None
    summary: Any = None
    generate_summary: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Output):
    """``text``, with the one verbosity that changes nothing."""

    verbosity: Literal["medium"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesBody(Body):
    """Body of ``POST /v1/responses``."""

    input: str | Annotated[Sequence[Mapping[str, Any]], length(1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, within(1, 2**31 - 1)] | None = None
    previous_response_id: str | None = None
    store: bool = True
    text: Text = field(default_factory=Text)
    reasoning: Reasoning = field(default_factory=Reasoning)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool | None = None
    include: Sequence[Annotated[str, _INCLUDED]] = ()  # thoughts come as text

    def chat(self, messages: Sequence[Json]) -> ChatBody:
        """The same request as a chat about ``messages``."""
        if isinstance(self.tool_choice, Mapping):
            field_of(self.tool_choice, "type", "tool_choice", ("function", "allowed_tools"))
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatBody(
            **self.of(Body),
            messages=[*system, *messages],
            max_tokens=self.max_output_tokens,
            tools=functions_of(self.tools, "function", "parameters"),
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.text.format,
            reasoning_effort=self.reasoning.effort,
        )

    def chat_messages(self, kept: "ResponseStore") -> list[Json]:
        """The input as messages of a chat. References lead to items of ``kept`` responses."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages = list[Json]()
        for at, item in enumerate(self.input):
            where, is_kept = f"input[{at}]", item.get("type") == "item_reference"
            _add_item(messages, kept.item(item.get("id"), f"{where}.id") if is_kept else item, where)
        return messages


def _add_item(messages: list[Json], item: Mapping[str, Any], where: str) -> None:
    if _HOSTED.fullmatch(str(item.get("type"))):
        _add_call(messages, item, where)
        return
    kind = field_of(item, "type", where, _ITEMS, "message")
    if kind == "reasoning":
        thoughts = text_of(item.get("content") or [], f"{where}.content", ("reasoning_text",))
        add(messages, "assistant", thoughts, "reasoning_content")
    else:
        content = content_of(item.get("content"), f"{where}.content", _PARTS)
        add(messages, field_of(item, "role", where, _ROLES), content)


def _add_call(messages: list[Json], item: Mapping[str, Any], where: str) -> None:
    """Append a call or its result. Calls without an identifier are answered elsewhere, and left out."""
    kind, call_id = item["type"], item.get("call_id")
    if kind.endswith("_output"):
        result = content_of(item.get("output"), f"{where}.output", _PARTS if kind in _RESULTS else None)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    elif kind == "function_call":
        add_call(messages, call_id, item.get("name"), item.get("arguments"))
    elif call_id is not None:
        arguments = {key: value for key, value in item.items() if key not in _OF_CALLS}
        add_call(messages, call_id, item.get("name") or kind.removesuffix("_call"), arguments)
    else:
        UNUSED.info("requests have items of the type %s, which no model here is shown", shown(kind))


class ResponseStore:
    """Responses with their chats, kept for a number of seconds and bytes of JSON. The oldest go first."""

    def __init__(
        self, most: int = KEPT_BYTES, seconds: float = KEPT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._seconds, self._clock = most, seconds, clock
        self._kept: dict[str, tuple[float, int, Json, list[Json]]] = {}

    def put(self, response: Json, messages: list[Json]) -> None:
        """Keep a response and its whole chat."""
        size = len(json.dumps([response, messages]))
        self._kept[response["id"]] = (self._clock(), size, response, messages)
        self._drop()

    def get(self, id_: str, where: str) -> tuple[Json, list[Json]]:
        """A response and its chat, whose time begins anew. Problem (404) with the reason if they are gone."""
        self._drop()
        if id_ not in self._kept:
            raise self._missing(id_, where)
        self._kept[id_] = (self._clock(), *self._kept.pop(id_)[1:])
        return self._kept[id_][2:]

    def item(self, id_: object, where: str) -> Json:
        """An item of a response, whose time begins anew. Raises like :meth:`get`."""
        self._drop()
        of = f"resp_{str(id_).rpartition('_')[2][:-4]}"  # see ResponseReply._id
        if of in self._kept:
            self._kept[of] = (self._clock(), *self._kept.pop(of)[1:])
            for item in self._kept[of][2]["output"]:
                if item["id"] == id_:
                    return dict(item)
        raise self._missing(id_, where)

    def _missing(self, id_: object, where: str) -> Problem:
        return Problem(
            404,
            f"{where} is {shown(id_)}, which is not kept: responses are kept for {self._seconds:g} s, "
            f"{self._most:,} bytes of them, unless store is false, and until the server ends; send the "
            "whole conversation as input",
            "response_not_found",
        )

    def delete(self, id_: str) -> None:
        """Forget a response."""
        del self._kept[id_]

    def _drop(self) -> None:
        held, since = sum(size for _, size, *_ in self._kept.values()), self._clock() - self._seconds
        for id_, (at, size, *_) in [*self._kept.items()]:
            if at > since and held <= self._most:
                return
            del self._kept[id_]
            held -= size


@dataclass(slots=True)
class ResponseReply(BlockReply):
    """A ``response`` and its numbered events. ``messages`` are the chat that it answers."""

    body: ResponsesBody
    messages: list[Json]
    kept: ResponseStore
    sent: int = 0
    is_cut: bool = False  # the last block

    def whole(self, answers: Sequence[Generation]) -> Json:
        self.take_whole(answers[0])
        return self._ended(answers[0])

    def begin(self) -> list[Json]:
        """The response without output."""
        response = self._response("in_progress", [])
        return [self._event(name, response=response) for name in ("created", "in_progress")]

    def end(self, answer: Generation) -> list[Json]:
        response = self._ended(answer)
        return [*self.close(), self._event(response["status"], response=response)]

    def failed(self, problem: Problem, path: str) -> Json:
        """An error as an event. OpenAI's client raises events with the field ``error``."""
        error = {"code": problem.code, "message": problem.message, "param": problem.field}
        return self._event("error", **error, **problem.to_json()) | {"type": "error"}

    def _opened(self, block: Block) -> list[Json]:
        item = self._item(block, "in_progress")
        empty: Json = {} if block.kind == "call" else {"content": []}
        added = self._event("output_item.added", output_index=block.index, item=item | empty)
        return [added, *self._parts(block, "added", item)]

    def _added(self, block: Block, piece: str) -> Json:
        return self._within(block, f"{_STEMS[block.kind]}.delta", delta=piece)

    def _closed(self, block: Block) -> list[Json]:
        item = self._item(block, self._state(block))
        text = {"arguments" if block.kind == "call" else "text": block.text}
        done = self._within(block, f"{_STEMS[block.kind]}.done", **text)
        parts = self._parts(block, "done", item)
        return [done, *parts, self._event("output_item.done", output_index=block.index, item=item)]

    def _event(self, name: str, **more: Any) -> Json:
        self.sent += 1
        return {"type": f"response.{name}", "sequence_number": self.sent - 1, **more}

    def _within(self, block: Block, name: str, **more: Any) -> Json:
        """An event of an item, or of a part of one."""
        part = {} if block.kind == "call" else {"content_index": 0}
        logprobs: Json = {"logprobs": []} if name.startswith("output_text") else {}
        place = {"item_id": self._id(block), "output_index": block.index}
        return self._event(name, **place, **part, **more, **logprobs)

    def _parts(self, block: Block, what: str, item: Json) -> list[Json]:
        return [self._within(block, f"content_part.{what}", part=part) for part in item.get("content", ())]

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self.id}{block.index:04x}"

    def _item(self, block: Block, status: str) -> Json:
        head: Json = {"id": self._id(block), "status": status}
        if block.kind == "call":
            called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **head, **called}
        part: Json = {"type": _STEMS[block.kind], "text": block.text}
        if block.kind == "thinking":
            return {"type": "reasoning", **head, "summary": [], "content": [part]}
        part |= {"annotations": [], "logprobs": []}
        return {"type": "message", **head, "role": "assistant", "content": [part]}

    def _ended(self, answer: Generation) -> Json:
        """The complete response, which is kept."""
        self.is_cut = answer.finish_reason not in ("stop", "tool_calls")
        output = [self._item(block, self._state(block)) for block in self.blocks]
        response = self._response("incomplete" if self.is_cut else "completed", output)
        if self.is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response |= {"usage": _usage(answer), "edgespec": self._extension(answer)}
        if self.body.store:
            self.kept.put(response, [*self.messages, answer.message])
        return response

    def _state(self, block: Block) -> str:
        """The status of an item. Calls come whole."""
        is_cut = self.is_cut and block is self.blocks[-1] and block.kind != "call"
        return "incomplete" if is_cut else "completed"

    def _response(self, status: str, output: list[Json]) -> Json:
        head = {"id": f"resp_{self.id}", "object": "response", "created_at": self.created}
        state = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": None}
        again = {name: getattr(self.body, name) for name in _SAID_AGAIN}
        parallel = self.body.parallel_tool_calls is not False
        return {**head, "model": self.model, **state, **again, "parallel_tool_calls": parallel}


def _usage(answer: Generation) -> Json:
    count = usage([answer])
    return {
        "input_tokens": count["prompt_tokens"],
        "input_tokens_details": count["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": count["completion_tokens"],
        "output_tokens_details": count["completion_tokens_details"],
        "total_tokens": count["total_tokens"],
    }


class Responses:
    """The paths below ``/v1/responses``; ``completions`` asks the model."""

    def __init__(self, completions: Completions) -> None:
        self._completions, self.kept = completions, ResponseStore()

    async def create(self, request: Request) -> Response:
        """``POST /v1/responses``."""
        body = await self._completions.read(ResponsesBody, request)
        before, previous = list[Json](), body.previous_response_id
        if previous is not None:
            _, before = self.kept.get(previous, "previous_response_id")
        messages = [*before, *body.chat_messages(self.kept)]
        chat, reply = body.chat(messages), ResponseReply(body.model, body, messages, self.kept)
        job = Job(chat, [chat.conversation()], reply, _NAMES, may_think=True)
        return await self._completions.respond(request, job)

    async def kept_response(self, request: Request) -> Response:
        """``GET`` and ``DELETE /v1/responses/ID``."""
        id_ = request.path_params["id"]
        response, _ = self.kept.get(id_, "the response")
        if request.method == "DELETE":
            self.kept.delete(id_)
            response = {"id": id_, "object": "response", "deleted": True}
        return JSONResponse(response)
