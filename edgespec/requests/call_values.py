"""Values of arguments: their types by JSON Schema, and JSON of what a model writes as such."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgespec.decoding.schemas import pointed

_MOST_PARTS: Final = 64  # of one schema
_COMBINING: Final = ("allOf", "anyOf", "oneOf")
_DEEPEST: Final = 64  # lists and tables within each other, as in messages
_STRING: Final = r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+'"""
_TOKEN: Final = re.compile(rf"""{_STRING}|[][{{}}(),:;"']""", re.DOTALL)
_PAIR: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES: Final = "\\\"'abfnrtuUvx0\n"  # what may stand behind a backslash in Python; else it is one
_HALF: Final = re.compile("[\ud800-\udfff]")
_TAIL: Final = 5  # characters of an escape that lacks its last


class MoreError(Exception):
    """What follows decides."""


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a JSON schema names."""
    named = schema.get("type")
    return {kind for kind in listed(named) or [named] if isinstance(kind, str)}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether it allows any text, and nothing else; so does a schema that says nothing."""
    return kinds_of(schema) <= {"string"} and not allowed_values(schema)


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The schemas of a function's arguments, by name; also those that its schema refers to."""
    tables = (table(part.get("properties")) for part in _parts(parameters, parameters, ("allOf",)))
    return {name: table(schema) for properties in tables for name, schema in properties.items()}


def required_of(parameters: Mapping[str, Any]) -> set[str]:
    """The arguments that have to be there."""
    parts = _parts(parameters, parameters, ("allOf",))
    return {name for part in parts for name in listed(part.get("required"))}


def summary(parameters: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The types of an argument with that ``schema``, and its values if they are few, references followed."""
    parts = _parts(parameters, schema, _COMBINING)
    narrow = [part for part in parts if kinds_of(part) or allowed_values(part)]
    values = [
        value for part in narrow for value in allowed_values(part) or [None] * (kinds_of(part) == {"null"})
    ]
    few = all(allowed_values(part) or kinds_of(part) == {"null"} for part in narrow)
    kinds = {kind for part in narrow for kind in kinds_of(part)}
    return {"type": sorted(kinds), "enum": values if few and values != [None] else []}


def keywords_of(
    parameters: Mapping[str, Any], schema: Mapping[str, Any], keywords: Sequence[str]
) -> dict[str, Any]:
    """Those of ``keywords`` that the ``schema`` of an argument has, references followed."""
    parts = _parts(parameters, schema, _COMBINING)
    return {key: part[key] for part in parts for key in keywords if key in part}


def _parts(
    parameters: Mapping[str, Any], schema: Mapping[str, Any], combining: Sequence[str]
) -> list[Mapping[str, Any]]:
    """A schema, what it refers to, and the schemas that it combines."""
    parts, left = list[Mapping[str, Any]](), [schema]
    while left and len(parts) < _MOST_PARTS:
        part = pointed(parameters, left.pop(0))
        if not any(part is known for known in parts):
            parts.append(part)
            left += [table(schema) for key in combining for schema in listed(part.get(key))]
    return parts


def allowed_values(schema: Mapping[str, Any]) -> Sequence[Any]:
    """What ``enum`` or ``const`` allow; nothing without them."""
    return [schema["const"]] if "const" in schema else listed(schema.get("enum"))


def table(value: object) -> Mapping[str, Any]:
    """A table of a schema; empty where something else stands there."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[Any]:
    """A list of a schema, the same way."""
    return value if isinstance(value, list | tuple) else ()


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """What ``text`` says as a value that a schema allows; where it may be a text it is one, but for null."""
    for value in allowed_values(schema):
        if text == plain(value):
            return value
    kinds = kinds_of(schema)
    if not kinds or ("string" in kinds and (text != "null" or "null" not in kinds)):
        return text
    try:
        value_end(f"{text},", 0)
        return literal(text)
    except (ValueError, MoreError):
        return text


def plain(value: object) -> str:
    """A value as it stands between tags: texts without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def value_end(text: str, start: int) -> int:
    """Where a value of JSON or Python ends: a string at its quote, others before a comma or a bracket.

    Raises:
        MoreError: the text ends before.
        ValueError: the value is too deep.
    """
    depth = 0
    for token in _TOKEN.finditer(text, start):
        first = token[0][0]
        if first in "[{(":
            depth += 1
        elif first in "\"'":
            if len(token[0]) == 1:
                break
            if token.start() == start:
                return token.end()
        elif depth == 0:
            return token.start()
        elif first in "]})":
            depth -= 1
        if depth > _DEEPEST:
            raise ValueError("too deep")
    raise MoreError


def dumped(value: object) -> str:
    """As JSON, without halves of characters, which JSON can spell and no answer in UTF-8 can hold."""
    return _HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False, allow_nan=False))


def begun_string(text: str) -> str:
    """What is certain of the JSON that a string becomes that has no end yet; nothing of other values."""
    sure = text[:-_TAIL] + text[-_TAIL:].partition("\\")[0]
    try:
        begun = json.loads(sure + '"') if text.startswith('"') else ""
    except ValueError:
        begun = ""
    if begun and "\ud800" <= begun[-1] <= "\udbff":  # the other half may follow
        begun = begun[:-1]
    return dumped(begun)[:-1] if begun else ""


def literal(text: str) -> Any:
    """The value of a literal of JSON, or of Python; ValueError where it is neither."""
    try:
        return json.loads(text)
    except ValueError:
        plain = _PAIR.sub(lambda pair: pair[0] if pair[1] in _ESCAPES else f"\\{pair[0]}", text)
    try:
        return json.loads(json.dumps(ast.literal_eval(plain), allow_nan=False))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("no literal") from error
