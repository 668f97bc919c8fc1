"""Calls of tools, written as models write them, one writer for each form."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from edgespec.answering.call_reading import CallReader
from edgespec.answering.results import ToolCall
from edgespec.asking.tool_calls import format_of
from tests.kit.templates import SHOWN

Call = tuple[str, dict[str, Any]]
Write = Callable[[Sequence[Call]], str]

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "items": {"type": "array"},
        "table": {"$ref": "#/$defs/Table"},
        "size": {"enum": ["big", 1]},
        "note": {"type": ["string", "null"]},
    },
    "additionalProperties": False,
    "$defs": {"Table": {"type": "object"}},
}
DO: dict[str, Any] = {"type": "function", "function": {"name": "do_it", "parameters": PARAMETERS}}
REST: dict[str, Any] = {"type": "function", "function": {"name": "rest"}}

PIECES = (
    "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "functools[", "<function=",
    "</parameter", "</function>", "<code>", '"', "'", "\\", "\\u", "\n", "{", "}", "[", "]", "(", ")", ", ",
    ";", "é", "日", "😀", " word", "  ",
)  # fmt: skip
texts = (st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(max_size=8)).map(
    lambda text: text.replace("</parameter>", "")
)
_numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_values = st.recursive(
    st.none() | st.booleans() | _numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "number": _numbers,
        "maybe": st.booleans() | st.none(),
        "items": st.lists(_values, max_size=3),
        "table": st.dictionaries(texts, _values, max_size=3),
    },
)
calls: st.SearchStrategy[list[Call]] = st.lists(
    st.tuples(st.just("do_it"), _arguments) | st.just(("rest", dict[str, Any]())), min_size=1, max_size=3
)
"""What is called in one answer."""


def _object(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=len(str(call[1])) % 2 == 0)


def _tagged(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _xml(calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f"<parameter={key}>\n{text}\n</parameter>\n"

    blocks = (
        f"<function={name}>\n{''.join(map(parameter, args, args.values()))}</function>"
        for name, args in calls
    )
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def _pairs(calls: Sequence[Call], between: str = "") -> str:
    def pair(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f"<arg_key>{key}</arg_key>{between}<arg_value>{text}</arg_value>{between}"

    return "\n".join(
        f"<tool_call>{name}{between}{''.join(map(pair, args, args.values()))}</tool_call>"
        for name, args in calls
    )


def _python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def _python_of_json(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={json.dumps(value)}' for key, value in call[1].items())})"


def _list(before: str, after: str, one: Callable[[Call], str] = _object) -> Write:
    return lambda calls: f"{before}[{', '.join(map(one, calls))}]{after}"


def _marked(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{_marked(key)}:{_marked(inner)}" for key, inner in value.items()) + "}"
    return f"[{','.join(map(_marked, value))}]" if isinstance(value, list) else json.dumps(value)


def _in_marks(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        return ",".join(f"{key}:{_marked(value)}" for key, value in sorted(call[1].items()))

    return "".join(f"<|tool_call>call:{call[0]}{{{one(call)}}}<tool_call|>" for call in calls)


WRITERS: Sequence[tuple[str, Write]] = (
    ("hermes", _tagged),
    ("hermes", lambda calls: "\n".join(f"<tool_call>{_object(call)}" for call in calls)),
    ("smollm3", _tagged),
    ("smollm3", lambda calls: "<code>\n" + "".join(f"x = {_python(call)}\n" for call in calls) + "</code>"),
    ("xml", _xml),
    ("xml", lambda calls: _xml(calls).replace("<tool_call>\n<function=", "<function=")),
    ("mistral", _list("[TOOL_CALLS]", "")),
    ("args", lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)),
    ("granite", _list("<|tool_call|>", "")),
    ("phi", _list("<|tool_call|>", "<|/tool_call|>")),
    ("phi", _list("functools", "")),
    ("functools", _list("functools", "")),
    ("llama3", _list("", "", _python)),
    ("llama3", lambda calls: "; ".join(_object(call, "parameters") for call in calls)),
    ("llama3", lambda calls: "\n".join(_object(call, "parameters") for call in calls)),
    ("llama3", lambda calls: "<|python_tag|>" + "; ".join(_object(call, "parameters") for call in calls)),
    ("lfm2", _list("<|tool_call_start|>", "<|tool_call_end|>", _python)),
    ("lfm2", _list("<|tool_call_start|>", "<|tool_call_end|>", _python_of_json)),
    ("gemma4", _in_marks),
    ("glm", _pairs),
    ("glm", lambda calls: _pairs(calls, "\n")),
    ("nemotron", _list("<TOOLCALL>", "</TOOLCALL>")),
)
"""Names of forms, and ways to write calls in them."""


def fenced(calls: Sequence[Call]) -> str:
    """Calls as models write them in any form."""
    return "```json\n" + "\n".join(map(_object, calls)) + "\n```"


def bare(calls: Sequence[Call]) -> str:
    """The same without a fence."""
    return _list("\n", "\n")(calls)


def reader_of(source: str, tools: Sequence[dict[str, Any]] = (DO, REST), **options: Any) -> CallReader:
    form = format_of(source)
    assert form is not None
    given = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return CallReader(form, given, [1, 2], **options)


def read(form: str, pieces: Sequence[str], **options: Any) -> tuple[str, list[ToolCall]]:
    """What is text of an answer that comes in ``pieces``, and its calls as they came."""
    reader, shown, came = reader_of(SHOWN[form], **options), "", list[ToolCall]()
    for at, piece in enumerate([*pieces, ""]):
        more, new = reader.push(piece, final=at == len(pieces))
        shown, came = shown + more, came + new
    assert came == reader.calls
    return shown, reader.calls


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """A text in pieces."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
