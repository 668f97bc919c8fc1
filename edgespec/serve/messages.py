"""``/v1/messages``, Anthropic's Messages API: its requests as chats, and its events."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
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
    image_of,
    text_of,
)
from edgespec.serve.bodies import Body, ChatBody, Effort
from edgespec.serve.completions import Completions, Job
from edgespec.serve.replies import Json
from edgespec_models.errors import RequestError
from edgespec_models.schema import length, within

_BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_HOSTED = re.compile(r"(server|mcp)_tool_use|\w+_tool_result|redacted_thinking")  # what ran at Anthropic's
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPPED = {"stop": "end_turn", "tool_calls": "tool_use"}  # other reasons are limits of tokens or time
_PIECES = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """``tool_choice``."""

    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """``thinking``. Without a ``type`` the model decides. ``display`` is ignored: thoughts come whole."""

    type: Literal["enabled", "adaptive", "disabled"] | None = None
    budget_tokens: Annotated[int, within(0)] | None = None
    display: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig(Output):
    """``output_config``. The effort bounds the thoughts of a model that thinks."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextManagement:
    """``context_management``, for earlier thoughts only: templates drop them anyway."""

    edits: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        for at, edit in enumerate(self.edits):
            field_of(edit, "type", f"edits[{at}]", ("clear_thinking_20251015",))


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesBody(Body):
    """Body of ``POST /v1/messages`` and of ``POST /v1/messages/count_tokens``."""

    messages: Annotated[Sequence[Mapping[str, Any]], length(1)]
    system: str | Sequence[Mapping[str, Any]] = ""
    max_tokens: Annotated[int, within(1, 2**31 - 1)] | None = None
    stop_sequences: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: Thinking = field(default_factory=Thinking)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    context_management: ContextManagement = field(default_factory=ContextManagement)

    def chat(self) -> ChatBody:
        """The same request as a chat."""
        choice, single = self.tool_choice, self.tool_choice.disable_parallel_tool_use
        named = {"type": "function", "function": {"name": choice.name}}
        return ChatBody(
            **self.of(Body),
            messages=self.chat_messages(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
            tools=functions_of(self.tools, "custom", "input_schema"),
            tool_choice=_CHOICES.get(choice.type, named),
            parallel_tool_calls=None if single is None else not single,
            reasoning_effort=self._effort(),
            thinking_budget=self.thinking.budget_tokens,
            response_format=self.output_config.format,
        )

    def _effort(self) -> Effort | bool | None:
        """The chat's ``reasoning_effort``. None leaves it to the model's template."""
        if self.thinking.type == "disabled":
            return False
        return self.output_config.effort or (self.thinking.type and True)

    def job(self) -> Job:
        """The request's job: a model must think only if ``thinking`` is ``enabled``."""
        thinking = "output_config.effort" if self.output_config.effort else "thinking"
        if self.thinking.budget_tokens is not None:
            thinking = "thinking.budget_tokens"
        names = {"thinking": thinking, "response_format": "output_config.format", "stop": "stop_sequences"}
        chat, may_think = self.chat(), self.thinking.type != "enabled"
        return Job(chat, [chat.conversation()], MessageReply(self.model), names, may_think)

    def chat_messages(self) -> list[Json]:
        """The system's text and the messages, as messages of a chat."""
        system = text_of(self.system, "system", ("text",))
        messages: list[Json] = [{"role": "system", "content": system}] if system else []
        for at in self._order():
            _add_message(messages, self.messages[at], f"messages[{at}]")
        if messages and messages[-1]["role"] == "assistant":
            raise RequestError(
                "is 'assistant'; allowed for the last message: 'user', because edgespec does not continue a "
                "begun answer",
                f"messages[{at}].role",
            )
        return messages

    def _order(self) -> list[int]:
        """The order in which messages are read: a system message behind a question goes before it.

        Agents describe their surroundings there, and models go on with what comes last.
        """
        order = [*range(len(self.messages))]
        roles = [*(message.get("role") for message in self.messages), "assistant"]
        for at, message in enumerate(self.messages[:-1]):
            if _is_question(message) and roles[at + 1 : at + 3] == ["system", "assistant"]:
                order[at : at + 2] = [at + 1, at]
        return order


def _is_question(message: Mapping[str, Any]) -> bool:
    """Whether a message is the user's and has no results of tools, which must follow their calls."""
    content = message.get("content")
    blocks = content if isinstance(content, list | tuple) else ()
    results = (isinstance(block, Mapping) and block.get("type") == "tool_result" for block in blocks)
    return message.get("role") == "user" and not any(results)


def _add_message(messages: list[Json], message: Mapping[str, Any], where: str) -> None:
    """Append a message to ``messages``. In a chat, results of tools are messages of their own."""
    role, content = field_of(message, "role", where, [*_BLOCKS]), message.get("content")
    if not isinstance(content, list | tuple):
        content = [{"type": "text", "text": text_of(content, f"{where}.content", ())}]
    for at, block in enumerate(content):
        place = f"{where}.content[{at}]"
        kind = str(block.get("type") if isinstance(block, Mapping) else None)
        if role != "assistant" or not _HOSTED.fullmatch(kind):
            kind = field_of(block, "type", place, _BLOCKS[role])
        if kind == "redacted_thinking":
            continue
        if kind.endswith("tool_result"):
            kinds = ("text", "image") if kind == "tool_result" else None
            result = content_of(block.get("content") or "", f"{place}.content", kinds)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind == "image":
            add(messages, role, [image_of(block, place)])
        elif kind.endswith("tool_use"):
            add_call(messages, block.get("id"), block.get("name"), block.get("input"))
        else:
            text = text_of(block.get(kind), f"{place}.{kind}", ())
            add(messages, role, text, "content" if kind == "text" else "reasoning_content")


class MessageReply(BlockReply):
    """A ``message`` and its events."""

    __slots__ = ()

    def whole(self, answers: Sequence[Generation]) -> Json:
        self.take_whole(answers[0])
        return self._message([*map(_content, self.blocks)]) | _ended(answers[0]) | self._cost(answers[0])

    def begin(self) -> list[Json]:
        """The message without content, with the number of prompt tokens."""
        counts = {"usage": _prompt_counts(*self.prompt) | {"output_tokens": 0}}
        return [{"type": "message_start", "message": self._message([]) | counts}]

    def end(self, answer: Generation) -> list[Json]:
        delta = {"type": "message_delta", "delta": _ended(answer), **self._cost(answer)}
        return [*self.close(), delta, {"type": "message_stop"}]

    def _opened(self, block: Block) -> list[Json]:
        return [{"type": "content_block_start", "index": block.index, "content_block": _content(block)}]

    def _added(self, block: Block, piece: str) -> Json:
        kind, name = _PIECES[block.kind]
        delta = {"type": kind, name: piece}
        return {"type": "content_block_delta", "index": block.index, "delta": delta}

    def _closed(self, block: Block) -> list[Json]:
        stop = {"type": "content_block_stop", "index": block.index}
        if block.kind != "thinking":
            return [stop]
        delta = {"type": "signature_delta", "signature": _signature(block)}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}, stop]

    def _message(self, content: list[Json]) -> Json:
        head = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None}

    def _cost(self, answer: Generation) -> Json:
        stats = answer.stats
        details = {"thinking_tokens": stats.reasoning_tokens}
        counts = {"output_tokens": len(answer.tokens), "output_tokens_details": details}
        prompt_counts = _prompt_counts(stats.prompt_tokens, stats.cached_tokens)
        return {"usage": prompt_counts | counts, "edgespec": self._extension(answer)}


def _prompt_counts(prompt: int, cached: int) -> Json:
    """Count input tokens as Anthropic does, without cached tokens."""
    counts = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
    return {"input_tokens": prompt - cached, **counts}


def _signature(block: Block) -> str:
    """The digest of thoughts: clients do not send thoughts back that lack a signature."""
    return sha256(block.text.encode()).hexdigest() if block.text else ""


def _content(block: Block) -> Json:
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": _signature(block)}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {
        "type": "tool_use",
        "id": block.call_id,
        "name": block.name,
        "input": json.loads(block.text or "{}"),
    }


def _ended(answer: Generation) -> Json:
    reason = _STOPPED.get(answer.finish_reason, "max_tokens")
    stopped = answer.stop is not None and reason == "end_turn"
    return {"stop_reason": "stop_sequence" if stopped else reason, "stop_sequence": answer.stop}


async def create_message(completions: Completions, request: Request) -> Response:
    """``POST /v1/messages``."""
    body = await completions.read(MessagesBody, request)
    return await completions.respond(request, body.job())


async def count_message_tokens(completions: Completions, request: Request) -> Response:
    """``POST /v1/messages/count_tokens``."""
    body = await completions.read(MessagesBody, request)
    count = await completions.count_tokens(request, body.job())
    return JSONResponse({"input_tokens": count})
