"""Values of arguments: their types by JSON Schema, and one grammar for all ways to write them.

JSON, Python's literals and Gemma's marks share strings, numbers, lists and tables, and models mix them.
:class:`ValueReader` reads all of them, with the mistakes that leave no doubt what was written.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from edgespec.decoding.schemas import pointed

_MOST_PARTS: Final = 64  # parts of one schema that are looked at
_COMBINING: Final = ("allOf", "anyOf", "oneOf")
DEEPEST: Final = 64  # lists and tables within each other
_HALF: Final = re.compile("[\ud800-\udfff]")

QUOTE: Final = '<|"|>'
"""Gemma 4's marks around texts."""
ARGUMENTS: Final = ("arguments", "parameters")
"""The keys of a call's arguments."""
_NAME: Final = re.compile(r"[\w.$-]*")
_QUOTED: Final = re.compile(r"""([fFrRbBuU]{0,2}(?=["']))("{3}|'{3}|["'])|(<\|"\|>)""")
_ENDS: Final = {
    quote: re.compile(rf"[^{quote[0]}\\]*+(?:(?:\\.|{others})[^{quote[0]}\\]*+)*+{quote}", re.DOTALL)
    for quote, others in (('"', "(?!)"), ("'", "(?!)"), ('"""', '"(?!"")'), ("'''", "'(?!'')"))
}
_TOKEN: Final = re.compile(r"[\w.+-]+", re.ASCII)
_FLOAT: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_CONSTANTS: Final = {
    **dict.fromkeys(("true", "True"), True),
    **dict.fromkeys(("false", "False"), False),
    **dict.fromkeys(("null", "None"), None),
}
_BARE: Final = re.compile(r"""[^\s,:=()"'<{}\\\[\]][^,:=()"'<{}\\\[\]\n]*""")
_OF_JSON: Final = re.compile(r"""\\(["\\/bfnrt']|u[0-9a-fA-F]{4})""")
_OF_PYTHON: Final = re.compile(
    r"""\\(["\\abfnrtv'\n]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"""
)
_ESCAPES: Final = dict(zip("abfnrtv\n", "\a\b\f\n\r\t\v ", strict=True)) | {"\n": ""}
_PATH: Final = re.compile(r"""\b[A-Za-z]:(?:\\[^\\/:*?"'<>|\s]+)+""")


Schemas = Mapping[str, Mapping[str, Any]]


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a JSON schema names."""
    named = schema.get("type")
    return {kind for kind in listed(named) or [named] if isinstance(kind, str)}


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
        reader = ValueReader(text, is_python=True)
        value = reader.value()
        if kinds == {"integer"} and isinstance(value, float) and value.is_integer():
            value = int(value)
        return text if reader.peek() else value
    except (ValueError, RecursionError):
        return text


def plain(value: object) -> str:
    """A value as models write it between tags: texts have no quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def dumped(value: object) -> str:
    """A value as JSON, without lone surrogates: JSON can spell them, but UTF-8 cannot hold them."""
    return _HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False, allow_nan=False))


class ValueReader:
    """Reads values out of ``text`` from ``at`` on, in any of the notations.

    With ``is_python`` strings in double quotes have Python's escapes.
    ``schemas_of`` has the schemas of a function's arguments by its name; None for other names.

    These slips are read: line breaks in strings, backslashes that begin no escape, commas too many, commas
    that are missing in tables, doubled braces. A ``lenient`` reader also takes brackets that are missing or
    too many, and quotes within the text of an argument: the text ends where another argument follows, or
    nothing but brackets. With ``raw`` such texts in single quotes have no escapes.

    Methods raise ValueError for what is no value, and for the beginning of one.
    """

    def __init__(
        self,
        text: str,
        at: int = 0,
        *,
        is_python: bool = False,
        lenient: bool = False,
        raw: bool = False,
        schemas_of: Callable[[object], Schemas | None] = lambda _: None,
    ) -> None:
        self.text, self.at, self._schemas_of = text, at, schemas_of
        self.is_python, self._lenient, self._raw = is_python, lenient, raw
        self.missing = 0  # brackets
        self._ends = list[str]()  # of the lists and tables around

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, literal: str) -> bool:
        """Read ``literal`` if it comes next, and return whether it did."""
        self.peek()
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        return False

    def need(self, literal: str) -> None:
        """Read ``literal``. ValueError if something else comes."""
        if not self.take(literal):
            raise ValueError(f"{literal} is missing")

    def word(self) -> str:
        """Read a name, which may be empty."""
        self.peek()
        return self._match(_NAME) or ""

    def value(self) -> Any:
        """Read a value."""
        following = self.peek()
        if following == "{":
            return self.table()
        if following and following in "[(":
            return self._list()
        if self._is_quoted():
            return self._string()
        return _literal(self._match(_TOKEN) or "")

    def table(self, schemas: Schemas | None = None) -> dict[str, Any]:
        """Read a table in braces or parentheses. ``schemas`` are there if it has a function's arguments."""
        end, table = self.enter(("{}", "()")), dict[str, Any]()
        if end == "}" and self.peek() == "{":  # some templates show doubled braces, and models copy them
            table = self.table(schemas)
            self.take("}")
            self._ends.pop()
            return table
        while not self.is_over():
            if self.take(","):
                continue
            is_quoted = self._is_quoted()
            key = self._string() if is_quoted else self.word()
            if not ((key or is_quoted) and (self.take(":") or self.take("="))):
                raise ValueError("no key")
            schemas = schemas or self._schemas_of(table.get("name"))
            if key in ARGUMENTS and self.peek() == "{":
                table[key] = self.table(schemas)
            else:
                table[key] = self.value() if schemas is None else self._argument(key, schemas, table)
        return table

    def _argument(self, key: str, schemas: Schemas, before: Collection[str]) -> Any:
        """Read an argument, whose schema may allow a text without quotes."""
        start, others = self.at, schemas.keys() - {*before, key}
        quoted = _QUOTED.match(self.text, self.at if self.peek() else start) if self._lenient else None
        if quoted is not None and (quoted[0][0] == "'" if self._raw else quoted[0] in "'\""):
            return self._open_string(others)
        try:
            return self.value()
        except ValueError:
            self.at = start
            if "string" not in kinds_of(schemas.get(key, {})) or not self.peek():
                raise
            if (bare := self._match(_BARE)) is None:
                raise
            return bare.strip()

    def _list(self) -> Any:
        end, items, is_tuple = self.enter(("[]", "()")), list[Any](), False
        while not self.is_over():
            if self.take(","):
                is_tuple = True
            else:
                items.append(self.value())
                if self.peek() not in ",]})[{":
                    raise ValueError("a comma is missing")
        return items[0] if end == ")" and len(items) == 1 and not is_tuple else items

    def enter(self, pairs: Sequence[str]) -> str:
        """Read a bracket, one that begins a pair, and return the one that ends it."""
        following = self.peek()
        end = next((pair[1] for pair in pairs if pair[0] == following), None)
        if end is None or len(self._ends) == DEEPEST:
            raise ValueError("no bracket, or too many")
        self.at += 1
        self._ends.append(end)
        return end

    def is_over(self) -> bool:
        """Read the end of the innermost list or table if it comes, and return whether it did."""
        end = self._ends[-1]
        while (following := self.peek()) != end:
            if following not in "]})":
                return False
            if not self._lenient or following not in "".join(self._ends):
                if not self._lenient or self.text[: self.at].rstrip()[-1:] != following:
                    raise ValueError(f"{end} is missing")
                self.at += 1  # it is doubled
                continue
            self.missing += 1
            break  # it ends what is around
        self.at += following == end
        self._ends.pop()
        return True

    def _is_quoted(self) -> bool:
        """Whether a string comes next."""
        self.peek()
        return _QUOTED.match(self.text, self.at) is not None

    def _string(self) -> str:
        """Read a string. Python joins those that stand side by side."""
        quoted = _QUOTED.match(self.text, self.at)
        assert quoted is not None
        prefix, quote, start = (quoted[1] or "").lower(), quoted[2], quoted.end()
        if quoted[3]:
            end = self.text.find(QUOTE, start)
            if end < 0:
                raise ValueError("a text without an end")
            self.at = end + len(QUOTE)
            return self.text[start:end]
        whole = _ENDS[quote].match(self.text, start)
        if whole is None:
            raise ValueError("a text without an end")
        self.at, inside = whole.end(), whole[0].removesuffix(quote)
        if "f" in prefix and re.search("[{}]", inside):
            raise ValueError("a string with fields")
        text = inside if "r" in prefix else unescaped(inside, is_json=quote == '"' and not self.is_python)
        return text + self._string() if self.is_python and self._is_quoted() else text

    def _open_string(self, others: Collection[str]) -> str:
        """Read the text of an argument that may contain its quote. ``others`` may follow it."""
        quote, start = self.text[self.at], self.at + 1
        names = "|".join(map(re.escape, others)) or "(?!)"
        following = rf"""(["'])(?:{names})\1\s*:|(?:{names})\s*="""
        last = r"\)\s*(?:,\s*[\w.]+\(|[\s\]]*\Z)" if self._raw else r"[\s\]}),]*\Z"  # or another call
        behind = rf"(?=\s*(?:,\s*(?:{following})|{last}))"
        ends = [match.start() for match in re.compile(quote + behind).finditer(self.text, start)]
        if not ends:
            raise ValueError("a string without an end")
        plain = [end for end in ends if (end - len(self.text[:end].rstrip("\\"))) % 2 == 0]
        end = (plain or ends)[0]
        self.at, inside = end + 1, self.text[start:end]
        return inside if self._raw else unescaped(inside, is_json=quote == '"' and not self.is_python)

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        """Read what ``pattern`` matches; None if it does not."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]


def unescaped(inside: str, *, is_json: bool) -> str:
    """The text of a string's inside. Backslashes that begin no escape are text.

    If a backslash of a path with a drive begins none, then no other one of this path does.
    """
    escape = _OF_JSON if is_json else _OF_PYTHON

    def path(match: re.Match[str]) -> str:
        return match[0].replace("\\", "\\\\") if "\\" in escape.sub("", match[0]) else match[0]

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU" and len(code) > 1:
            return chr(int(code[1:], 16))
        return chr(int(code, 8)) if code.isdigit() else _ESCAPES.get(code, code)

    text = escape.sub(character, _PATH.sub(path, inside))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _literal(token: str) -> Any:
    """The value of a constant or a number."""
    if token in _CONSTANTS:
        return _CONSTANTS[token]
    if _FLOAT.fullmatch(token) and not token.lstrip("+-").isdigit():
        value = float(token)
        if not isfinite(value):
            raise ValueError("a number that is too large")
        return value
    return int(token, 0)
