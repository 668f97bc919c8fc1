"""Tool calls: how a model writes them, and how they are read out of its answer.

The tools go into the prompt through the model's own chat template. What the template tells the model to
write, and shows of earlier calls, says which of these forms its answers have:

- ``hermes`` (Qwen, Hermes and many more): ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``, any
  number of them, with text before, between and behind;
- ``mistral``: ``[TOOL_CALLS]`` and a list of such objects, or ``name[ARGS]{..}`` for each call;
- ``llama3``: the whole answer is ``{"name": .., "parameters": {..}}``, or several with ``;`` between them,
  behind ``<|python_tag|>`` or nothing. Only tools that were given count, for the answer may be other JSON.

What has not one of these forms stays text.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from edgespec.decoding.grammar import SPACING
from edgespec.requests.results import ToolCall
from edgespec_models.errors import RequestError
from edgespec_models.schema import shown
from edgespec_models.text.tokenizer import Tokenizer

_ID_LETTERS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH: Final = 9  # letters and digits, which is what Mistral's templates insist on
_PYTHON_TAG: Final = "<|python_tag|>"
_JSON: Final = json.JSONDecoder()
_HALF: Final = re.compile("[\ud800-\udfff]")
_HERMES_TAG, _HERMES_END = re.compile("<tool_call>"), re.compile(r"\s*</tool_call>")
_MISTRAL_NAME: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")

Call = tuple[str, Mapping[str, Any]]
"""The name of a function, and its arguments."""
Read = Callable[[str, Collection[str]], tuple[str, list[Call]]]
"""Takes an answer and the names of the tools; returns the text around the calls, and the calls."""
ReadAnswer = Callable[[Sequence[int], Sequence[int]], tuple[str, tuple[ToolCall, ...]]]
"""Takes the tokens of prompt and answer, and those of the answer; returns what it says around its calls, and
the calls."""


def tool_reader(
    source: str, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, eos: Collection[int]
) -> ReadAnswer:
    """A function that reads the calls out of the answers of one request.

    ``source`` is a chat template of a known form (:func:`format_of`). Some models begin calls with control
    tokens, which no text shows.
    """
    read = _READERS[format_of(source) or "hermes"]
    names, ends = {tool["function"]["name"] for tool in tools}, frozenset(eos)

    def read_answer(text: Sequence[int], answer: Sequence[int]) -> tuple[str, tuple[ToolCall, ...]]:
        kept = [token for token in answer if token not in ends]
        content, calls = read(tokenizer.decode(kept, skip_special=False), names)
        seed = repr(list(text))
        return content.strip(), tuple(ToolCall(_call_id(seed, at), *call) for at, call in enumerate(calls))

    return read_answer


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """See that ``tools`` are functions as OpenAI's chat API has them."""
    for at, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str) or not name:
            raise RequestError(
                f"tools[{at}] is {shown(tool)}; allowed: {{'type': 'function', 'function': {{'name': a text, "
                "'description': a text, 'parameters': a JSON schema}}"
            )


def must_call(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    """The tools one of which an answer has to call by ``choice``, in the form of OpenAI's chat API."""
    if choice in ("auto", "none"):
        return ()
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    found = [tool for tool in tools if choice == "required" or tool["function"]["name"] == name]
    if not found:
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none here"
        raise RequestError(
            f"tool_choice is {shown(choice)}; allowed: 'auto', 'none', 'required' with tools, or "
            f"{{'type': 'function', 'function': {{'name': one of the tools, {names}}}}}"
        )
    return found


def calls_grammar(source: str, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> str:
    """A grammar, as :class:`edgespec.decoding.grammar.Lark` takes it, of one call of one of ``tools``.

    ``source`` is a chat template of a known form. Arguments fit the parameters of ``tools``; control tokens
    are written as such.
    """
    form = format_of(source)
    key = "parameters" if form == "llama3" else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                key: tool["function"].get("parameters") or {"type": "object", "properties": {}},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    call = f"%json {json.dumps({'x-guidance': SPACING, 'anyOf': calls})}"
    tag, before, after = _AROUND[form or "hermes"]
    control = tokenizer.special_id(tag)
    begin = json.dumps(tag + before) if control is None else f"<[{control}]> {json.dumps(before)}"
    return f"start: {begin} {call} {json.dumps(after)}"


def format_of(source: str) -> str | None:
    """The form in which the model of the chat template ``source`` writes calls; None if it is not known."""
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source and "<function=" not in source:  # which would be calls in XML
        return "hermes"
    if _PYTHON_TAG in source or re.search(r'\{"name": [^}]*"parameters": ', source):
        return "llama3"
    return None


def _read_hermes(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    at, content, calls = 0, "", list[Call]()
    for tag in _HERMES_TAG.finditer(text):
        call, end = _call_at(text, tag.end(), "arguments")
        if call is not None and tag.start() >= at:  # not within the call before
            content += text[at : tag.start()]
            calls.append(call)
            closed = _HERMES_END.match(text, end)
            at = end if closed is None else closed.end()
    return content + text[at:], calls


def _read_mistral(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    content, *parts = text.split("[TOOL_CALLS]")
    calls = list[Call]()
    for part in parts:
        named = _MISTRAL_NAME.match(part)
        if named is None:
            found = list(_calls_in(_value_at(part)[0], "arguments"))
        else:
            arguments = {"name": named[1], "arguments": _value_at(part, named.end())[0]}
            found = list(_calls_in([arguments], "arguments"))
        content += "" if found else f"[TOOL_CALLS]{part}"
        calls += found
    return content, calls


def _read_llama3(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    rest, calls = text.strip().removeprefix(_PYTHON_TAG), list[Call]()
    while rest := rest.lstrip(" \n;"):
        call, end = _call_at(rest, 0, "parameters")
        if call is None or call[0] not in names:
            return text, []
        calls.append(call)
        rest = rest[end:]
    return "", calls


_AROUND: Final[Mapping[str, tuple[str, str, str]]] = {
    "hermes": ("<tool_call>", "\n", "\n</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[", "]"),
    "llama3": ("", "", ""),
}
"""What stands around a call: the tag, what follows it, and what follows the call."""

_READERS: Final[Mapping[str, Read]] = {
    "hermes": _read_hermes,
    "mistral": _read_mistral,
    "llama3": _read_llama3,
}


def _call_at(text: str, start: int, key: str) -> tuple[Call | None, int]:
    """The call that stands at ``start``, its arguments under ``key``, and where it ends."""
    value, end = _value_at(text, start)
    return next(_calls_in([value], key), None), end


def _calls_in(value: object, key: str) -> Iterator[Call]:
    """The calls in a list of objects; arguments may be missing, or written as JSON within JSON."""
    for each in value if isinstance(value, list) else []:
        name = each.get("name") if isinstance(each, dict) else None
        if isinstance(name, str) and name:
            arguments = each.get(key, {})
            if isinstance(arguments, str):
                arguments = _value_at(arguments)[0]
            if isinstance(arguments, dict):
                yield name, arguments


def _value_at(text: str, start: int = 0) -> tuple[object, int]:
    """The JSON value at ``start``, and where it ends; None if there is none."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _JSON.raw_decode(text, start)
        return _without_halves(value), end
    except (ValueError, RecursionError):
        return None, start


def _without_halves(value: Any) -> Any:
    """Without halves of characters, which JSON can spell and no answer in UTF-8 can hold."""
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_halves(each) for each in value]
    if isinstance(value, dict):
        return {_without_halves(key): _without_halves(each) for key, each in value.items()}
    return value


def _call_id(seed: str, at: int) -> str:
    number, letters = int.from_bytes(hashlib.sha256(f"{at} {seed}".encode()).digest()), list[str]()
    for _ in range(_ID_LENGTH):
        number, place = divmod(number, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[place])
    return "".join(letters)
