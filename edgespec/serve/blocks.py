"""Parts that Responses and Messages share: answers as rows of blocks, and the translation to chats."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from edgespec.answering.results import Generation, Record, ToolCall
from edgespec.asking.call_values import table
from edgespec.serve.bodies import response_format, without_foreign
from edgespec.serve.replies import Json, Reply
from edgespec_models.errors import RequestError
from edgespec_models.schema import shown

Kind = Literal["thinking", "text", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """``format`` of Responses' ``text`` and of Messages' ``output_config``."""

    format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.format is not None:
            response_format(self.format, "format")


@dataclass(slots=True)
class Block:
    """Thoughts, a text, or a call of a tool, whose ``text`` are the arguments."""

    kind: Kind
    index: int
    call_id: str | None = None
    name: str | None = None
    text: str = ""


@dataclass(slots=True)
class BlockReply(Reply):
    """An answer as blocks. Each ends where the next begins."""

    blocks: list[Block] = field(default_factory=list, kw_only=True)

    @abstractmethod
    def _opened(self, block: Block) -> list[Json]: ...

    @abstractmethod
    def _added(self, block: Block, piece: str) -> Json: ...

    @abstractmethod
    def _closed(self, block: Block) -> list[Json]: ...

    def chunk(self, record: Record, shown: list[Json]) -> list[Json]:
        """The events of a piece."""
        events = self._take("thinking", record.reasoning) + self._take("text", record.content)
        for call in record.calls:
            events += self._take("call", call.arguments_json, call)
        return events

    def take_whole(self, answer: Generation) -> None:
        """Take a complete answer."""
        thoughts = answer.thoughts
        self.chunk(Record("", (), content=answer.content, calls=answer.tool_calls, thoughts=thoughts), [])

    def close(self) -> list[Json]:
        """The events that end the last block, if there is one."""
        return self._closed(self.blocks[-1]) if self.blocks else []

    def _take(self, kind: Kind, piece: str, call: ToolCall | None = None) -> list[Json]:
        events = list[Json]()
        goes_on = bool(self.blocks) and self.blocks[-1].kind == kind
        if call is not None or (piece and not goes_on):
            events += self.close()
            named = () if call is None else (call.id, call.name)
            self.blocks.append(Block(kind, len(self.blocks), *named))
            events += self._opened(self.blocks[-1])
        if piece:
            self.blocks[-1].text += piece
            events.append(self._added(self.blocks[-1], piece))
        return events


def field_of(part: object, name: str, where: str, allowed: Sequence[str], usual: str | None = None) -> str:
    """A field of a part: one of ``allowed``, or ``usual`` if it is missing. RequestError for others."""
    value = part.get(name) if isinstance(part, Mapping) else None
    value = value.lower() if name == "role" and isinstance(value, str) else value  # some capitalize it
    value = usual if value is None else value
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"is {shown(value)}; allowed: {', '.join(map(repr, allowed))}", f"{where}.{name}")
    return value


def text_of(content: Any, where: str, kinds: Sequence[str] | None) -> str:
    """A text, or the texts of parts of these kinds, a line each. RequestError for anything else.

    If the kinds are None, anything else is JSON.
    """
    return cast(str, content_of(content, where, kinds))


def content_of(content: Any, where: str, kinds: Sequence[str] | None) -> str | list[Json]:
    """Like :func:`text_of`. The kinds may include pictures; with these it is a list of a chat's parts."""
    if isinstance(content, str):
        return content
    if kinds is None:
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, list | tuple):
        raise RequestError(f"is {shown(content)}; allowed: a text, or a list of parts with texts", where)
    parts = list[Json]()
    for at, part in enumerate(content):
        place = f"{where}[{at}]"
        if field_of(part, "type", place, kinds) in ("image", "input_image"):
            parts.append(image_of(part, place))
        elif isinstance(text := part.get("text"), str):
            _append_text(parts, text)
        else:
            raise RequestError(f"is {shown(text)}; allowed: a text", f"{place}.text")
    has_images = any(part["type"] != "text" for part in parts)
    return parts if has_images else "".join(part["text"] for part in parts)


def _append_text(parts: list[Json], text: str) -> None:
    """Append a text, which begins a line behind another one."""
    begin = "\n" if parts and parts[-1]["type"] == "text" else ""
    parts.append({"type": "text", "text": begin + text})


def image_of(part: Mapping[str, Any], where: str) -> Json:
    """A picture of Responses or Messages as a chat's part."""
    if part["type"] == "input_image":
        return image_part(part.get("image_url"), f"{where}.image_url", part.get("detail"))
    source, where = part.get("source"), f"{where}.source"
    name = {"base64": "data", "url": "url"}[field_of(source, "type", where, ("base64", "url"))]
    return image_part(table(source).get(name), f"{where}.{name}")


def image_part(url: object, where: str, detail: object = None) -> Json:
    """A chat's part for a picture that the client's request has at ``where``."""
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}, "where": where}


def add(messages: list[Json], role: str, more: str | list[Json], name: str = "content") -> Json:
    """Append a text or parts to ``messages``. Templates want one message for texts of one role in a row."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    content = messages[-1].pop(name, None) or ""  # there is no other reference, so that it grows in place
    if isinstance(content, str) and isinstance(more, str):
        content += f"\n{more}" if content and more else more
    else:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        if isinstance(more, list):
            parts += more
        elif more:
            _append_text(parts, more)
        content = parts
    messages[-1][name] = content
    return messages[-1]


def add_call(messages: list[Json], call_id: object, name: object, arguments: object) -> None:
    """Append a call to ``messages``, to the assistant's message."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    add(messages, "assistant", "").setdefault("tool_calls", []).append(call)


def functions_of(tools: Sequence[Mapping[str, Any]], kind: str, parameters: str) -> list[Json]:
    """Tools of the type ``kind``, in the form of chats: their schemas are called ``parameters``."""
    functions = list[Json]()
    for tool in without_foreign(tools, kind):
        names = {**{key: key for key in ("name", "description", "strict")}, parameters: "parameters"}
        function = {new: tool[old] for old, new in names.items() if tool.get(old) is not None}
        functions.append({"type": "function", "function": function})
    return functions
