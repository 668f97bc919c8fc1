"""Values of arguments: their types by JSON Schema, and their JSON."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgespec.decoding.schemas import pointed

_MOST_PARTS: Final = 64  # parts of one schema that are looked at
_COMBINING: Final = ("allOf", "anyOf", "oneOf")
DEEPEST: Final = 64  # lists and tables within each other
_STRING: Final = r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+'"""
_TOKEN: Final = re.compile(rf"""{_STRING}|[][{{}}(),:;"']""", re.DOTALL)
_PAIR: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES: Final = "\\\"'abfnrtuUvx0\n"  # characters of Python's escapes; elsewhere a backslash is itself
_HALF: Final = re.compile("[\ud800-\udfff]")
_TAIL: Final = 5  # characters of an escape without its last one


QUOTE: Final = '<|"|>'
"""Gemma 4's marks around texts."""


class MoreError(Exception):
    """The text ends too early to decide."""


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a JSON schema names."""
    named = schema.get("type")
    return {kind for kind in listed(named) or [named] if isinstance(kind, str)}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a schema allows any text and nothing else. An empty schema does."""
    return kinds_of(schema) <= {"string"} and not allowed_values(schema)


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The schemas of a function's arguments by name, references included."""
    tables = (table(part.get("properties")) for part in _parts(parameters, parameters, ("allOf",)))
    return {name: table(schema) for properties in tables for name, schema in properties.items()}


def required_of(parameters: Mapping[str, Any]) -> set[str]:
    """The names of required arguments."""
    parts = _parts(parameters, parameters, ("allOf",))
    return {name for part in parts for name in listed(part.get("required"))}


def summary(parameters: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The types that ``schema`` allows, and its values if they are few. References are followed."""
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
    """The ``keywords`` that occur in ``schema``. References are followed."""
    parts = _parts(parameters, schema, _COMBINING)
    return {key: part[key] for part in parts for key in keywords if key in part}


def _parts(
    parameters: Mapping[str, Any], schema: Mapping[str, Any], combining: Sequence[str]
) -> list[Mapping[str, Any]]:
    """A schema, with the schemas that it refers to and combines."""
    parts, left = list[Mapping[str, Any]](), [schema]
    while left and len(parts) < _MOST_PARTS:
        part = pointed(parameters, left.pop(0))
        if not any(part is known for known in parts):
            parts.append(part)
            left += [table(schema) for key in combining for schema in listed(part.get(key))]
    return parts


def allowed_values(schema: Mapping[str, Any]) -> Sequence[Any]:
    """The values of ``enum`` or ``const``; empty without them."""
    return [schema["const"]] if "const" in schema else listed(schema.get("enum"))


def table(value: object) -> Mapping[str, Any]:
    """``value`` if it is a table, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[Any]:
    """``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list | tuple) else ()


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """``text`` as a value that the schema allows. A schema that allows texts gets the text, except null."""
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
    """A value as models write it between tags: texts have no quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def value_end(text: str, start: int) -> int:
    """The end of a value of JSON or Python: a string's quote, else the next comma or bracket.

    Raises:
        MoreError: the text ends before the value does.
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
        if depth > DEEPEST:
            raise ValueError("too deep")
    raise MoreError


def dumped(value: object) -> str:
    """A value as JSON, without lone surrogates: JSON can spell them, but UTF-8 cannot hold them."""
    return _HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False, allow_nan=False))


def begun_string(text: str) -> str:
    """The certain JSON of an unfinished string; empty for other values."""
    sure = text[:-_TAIL] + text[-_TAIL:].partition("\\")[0]
    try:
        begun = json.loads(sure + '"') if text.startswith('"') else ""
    except ValueError:
        begun = ""
    if begun and "\ud800" <= begun[-1] <= "\udbff":  # the other surrogate may follow
        begun = begun[:-1]
    return dumped(begun)[:-1] if begun else ""


def literal(text: str) -> Any:
    """The value of a literal of JSON or Python. ValueError if it is neither."""
    try:
        return json.loads(text)
    except ValueError:
        plain = _PAIR.sub(lambda pair: pair[0] if pair[1] in _ESCAPES else f"\\{pair[0]}", text)
    try:
        return json.loads(json.dumps(ast.literal_eval(plain), allow_nan=False))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("no literal") from error
