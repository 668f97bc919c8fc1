"""Messages and other values for a chat template, checked and in the form that templates are written for.

Applications write messages as OpenAI's chat API has them. Templates are written for what the
``transformers`` library gives them: contents that are texts, arguments of tool calls that are mappings.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgespec_models.errors import RequestError
from edgespec_models.schema import shown

__all__ = ["ROLES", "plain", "plain_messages"]

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
"""The roles a message may have. A template may know fewer and refuse the others."""

_DEEPEST: Final = 64  # lists and mappings within each other


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of ``messages`` as templates take them.

    A content's parts of type text become one text, a line each. The content of an assistant's message with
    tool calls may be None and becomes "". Arguments of tool calls may be JSON and become mappings. Further
    keys, such as ``name`` and ``tool_call_id``, stay as they are.

    Raises:
        RequestError: a message is malformed.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {shown(messages)}; allowed: a list of at least one message")
    return [_message(message, f"message {number}") for number, message in enumerate(messages)]


def plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy of ``value`` if it is what JSON can say, mappings as dictionaries and sequences as lists.

    Raises:
        RequestError: it is not; ``where`` says which value is meant.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if depth < _DEEPEST:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: plain(each, f"{where}.{shown(key)}", depth + 1) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each, f"{where}[{at}]", depth + 1) for at, each in enumerate(value)]
    raise RequestError(
        f"{where} is {shown(value)}; allowed: what JSON can say (texts, numbers, True, False, None, lists, "
        f"tables with texts as keys), at most {_DEEPEST} levels deep"
    )


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {shown(message)}; allowed: a mapping with 'role' and 'content'")
    copy: dict[str, Any] = plain(message, where)
    role = copy.get("role")
    if role not in ROLES:
        raise RequestError(f"{where} has the role {shown(role)}; allowed: {', '.join(ROLES)}")
    calls = copy.pop("tool_calls", None)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise RequestError(f"{where} has tool_calls {shown(calls)}; allowed: a list, of an assistant")
        copy["tool_calls"] = [_call(call, f"{where}: tool_calls[{at}]") for at, call in enumerate(calls)]
    copy["content"] = "" if calls and copy.get("content") is None else _text(copy.get("content"), where)
    return copy


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} has the content {shown(content)}; allowed: a text, or text parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where} has the part {shown(part)}; allowed: {{'type': 'text', 'text': a text}}, "
                "for the models read nothing but text"
            )
        texts.append(text)
    return "\n".join(texts)


def _call(call: object, where: str) -> dict[str, Any]:
    """One of a message's tool calls, its arguments as a mapping."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError(f"{where} is {shown(call)}; allowed: a table with a 'function'")
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where} calls {shown(name)}; allowed: the name of a function")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} has arguments that are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} has the arguments {shown(arguments)}; allowed: a table, or its JSON")
    arguments = plain(arguments, f"{where}.arguments")
    return call | {"type": "function", "function": function | {"arguments": arguments}}
