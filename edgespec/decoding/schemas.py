"""JSON schemas as generators write them: the part that a grammar holds, and a check of the rest.

llguidance holds most of JSON Schema. The keywords that it lacks only narrow what JSON may be, so its grammar
leaves them out. They are checked when the answer is complete, where that is possible.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from edgespec_models.errors import RequestError

LONGEST: Final = 262_144
"""The most characters of a format."""
Schema = dict[str, Any]
SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spacing of ``json.dumps``. Models know it well, and unlike free whitespace it has an end."""
_LENIENT: Final = {"lenient": True, "coerce_one_of": True}  # llguidance then warns of what it leaves out
_ESCAPES: Final = {"json_allowed_escapes": 'nrbtf\\"'}  # by \u0061 a name is spelled around its schema
_CONTROLS: Final = re.compile(r"\\u00[01]")  # which no other escape spells
_TABLES: Final = ("properties", "patternProperties", "$defs", "definitions", "schemas")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_WITHIN: Final = ("items", "additionalProperties", "additionalItems", "components")
_IDLE: Final[Mapping[str, Sequence[object]]] = {
    **dict.fromkeys(("contains", "minContains", "maxContains", "if"), ()),
    **dict.fromkeys(("then", "else", "propertyNames"), (True, {})),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("uniqueItems", "not"), (False,)),
}
"""Keywords that no grammar holds, each with the values that have no effect."""
_RULES: Final = {
    *("allOf", "anyOf", "oneOf"),
    *("type", "enum", "const", "format", "pattern", "minLength", "maxLength", "multipleOf", "minimum"),
    *("maximum", "exclusiveMinimum", "exclusiveMaximum", "properties", "patternProperties", "required"),
    *("additionalProperties", "minProperties", "maxProperties", "items", "prefixItems", "additionalItems"),
    *("minItems", "maxItems"),
}
_KEYWORDS: Final = {
    *("$anchor", "$defs", "$id", "$ref", "$schema", "definitions", "components", "x-guidance"),
    *(*_RULES, *_IDLE),
}
_COUNTS: Final = ("minProperties", "maxProperties")
_WHOLE: Final = (*_COUNTS, "minItems", "maxItems", "minLength", "maxLength")
_COMBINING: Final = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}
_ANNOTATIONS: Final = {*("type", "format", "title", "description", "default", "examples")}
"""The schema of a property's name."""
_BOUNDS: Final = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_FARTHEST: Final = 9 * 10**18
"""llguidance compiles no bound beyond it. This bound replaces such a bound, and is narrower."""
_MOST_STEPS: Final = 30_000  # half a second of a check; a hostile schema can ask for any number of steps
_UNSURE: Final = re.compile(r'"(?:format|patternProperties)": ')
_DATE: Final = (
    "^(?:[0-9]{4}-(?:[0-9]{2}-(?:[01][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_DATES: Final = {"date": f"{_DATE}$", "date-time": f"{_DATE}[Tt ]"}
"""Formats of which llguidance also allows February 29 in all years."""
_REGEX: Final = re.compile(
    r"\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\c(?P<control>[a-zA-Z])"
    r"|\\[pPux]\{[^}]*\}?|\\.|\[\^?\]?(?:\\.|[^]\\])*\]?|\(\?(?P<look><?[=!])|\(\?>|[()]|\{\d+(?:,\d*)?\}|.",
    re.DOTALL,
)
_SPELLED: Final = {r"\b": "", r"\B": "", "(?>": "(?:", r"\Z": r"\z", r"\0": r"\x00", "{": r"\{"}
_WIDER: Final = (r"\b", r"\B", "(?>")


def check_length(characters: int) -> None:
    """Refuse a format, or schemas of tools, of more than :data:`LONGEST` characters, with a RequestError."""
    if characters > LONGEST:
        raise RequestError(
            f"the response_format, or the tools' schemas, have {characters} characters; allowed: {LONGEST}; "
            "give shorter ones"
        )


class Unheld(NamedTuple):
    """A keyword that the grammar does not hold, and its place in the schema."""

    place: str
    keyword: str
    value: object = None

    def __str__(self) -> str:
        return f"{self.keyword} at {self.place}"


class PreparedSchema:
    """A schema, prepared for llguidance.

    ``root`` is its place in the schema that llguidance gets; its references are changed to lead there. There
    ``is_alone`` says whether rules beside references have to be left out.

    Attributes:
        grammar: the schema for llguidance.
        strict: whether a schema that is not enforced whole is refused.
        is_alone: whether rules beside references are left out, because llguidance refuses them beside a
            circular one.
        unheld: keywords that the grammar does not hold.

    Raises:
        TypeError, ValueError, RecursionError: the schema is not JSON.
    """

    def __init__(
        self, schema: Mapping[str, Any], *, strict: bool = False, root: str = "#", is_alone: bool = False
    ) -> None:
        text = json.dumps(schema, allow_nan=False, default=_plain)
        self._schema: Schema = json.loads(text)
        self._root, self.strict, self._is_unsure = root, strict, bool(_UNSURE.search(text))
        self.unheld, self._has_beside, self.is_alone = list[Unheld](), False, is_alone
        is_short = len(text) <= LONGEST  # longer ones are refused anyway
        held = rewritten(self._schema, "#", self._held) if is_short else self._schema
        if self._has_beside and root == "#" and not _takes(held):
            self.unheld, self.is_alone = [], True
            held = rewritten(self._schema, "#", self._held)
        self.grammar: Schema = held if isinstance(held, dict) else {"enum": []}
        options = self.grammar.get("x-guidance", SPACING)
        if root != "#":
            self.grammar.pop("$id", None)  # references would be led into it
        escapes = {} if _CONTROLS.search(text) else _ESCAPES
        self.grammar["x-guidance"] = _LENIENT | escapes | options if isinstance(options, dict) else options

    def warned(self, warnings: Sequence[str]) -> None:
        """Note the keywords that llguidance says it leaves out."""
        for warning in warnings:
            if warning.startswith("oneOf"):
                rewritten(self._schema, "#", self._note_one_of)
            elif not warning.startswith("Unknown format"):  # formats are annotations
                self.unheld.append(Unheld("#", warning))

    def problems(self, value: object) -> Iterator[str]:
        """Keywords that the grammar does not hold, and that ``value`` breaks or that cannot be checked."""
        unsure = {part.keyword for part in self.unheld if not self._can_check(part)}
        yield from (f"{part} is not enforced" for part in self.unheld if part.keyword in unsure)
        sure = [part for part in self.unheld if part.keyword not in unsure]
        if sure:
            try:
                broken = _broken(self._schema, value, unsure, {part.keyword for part in sure})
                yield from [f"the answer breaks {rule}" for rule in broken]
            except Exception:  # noqa: BLE001 - schemas come from elsewhere, and no answer is lost for them
                yield from (f"{part} could not be checked" for part in sure)

    def _held(self, schema: Schema, place: str) -> Schema | bool:
        """The part of one schema that a grammar holds. Its subschemas are prepared already."""
        if schema.get("not") in (True, {}):
            return False
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.partition("/")[0] == "#":
            schema["$ref"] = self._root + reference[1:]
        if reference is not None:  # beside which llguidance minds what it does not know
            schema = {key: value for key, value in schema.items() if key in _KEYWORDS}
            beside = [key for key in schema if key in _RULES]
            self._has_beside |= bool(beside)
            if self.is_alone:
                self.unheld += [Unheld(place, key, schema.pop(key)) for key in beside]
        if schema.get("unevaluatedProperties") is False and not _COMBINING & schema.keys():
            schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
        if isinstance(names := schema.get("propertyNames"), dict):
            _name_properties(schema, pointed(self._schema, names))
        optional = {*(schema.get("properties") or ())} - {*(schema.get("required") or ())}
        uncounted = _COUNTS if optional else ()
        for key in [key for key in schema if key in _IDLE or key in uncounted]:
            other = key in ("then", "else") and "if" not in schema
            idle = other or (key == "if" and not {"then", "else"} & schema.keys())
            if not idle and schema[key] not in _IDLE.get(key, ()):
                self.unheld.append(Unheld(place, key, schema[key]))
        schema = {key: value for key, value in schema.items() if key not in _IDLE and key not in uncounted}
        for key in _WHOLE:
            if isinstance(count := schema.get(key), float) and count.is_integer():
                schema[key] = int(count)
        for key, sign in _BOUNDS.items():
            bound = schema.get(key)
            if isinstance(bound, int | float) and sign * bound > _FARTHEST:
                schema[key] = sign * _FARTHEST
        if isinstance(schema.get("pattern"), str):
            self._hold_pattern(schema, place)
        if isinstance(schema.get("format"), str) and (date := _DATES.get(schema["format"])):
            schema = (
                {"allOf": [schema, {"pattern": date}]} if "pattern" in schema else schema | {"pattern": date}
            )
        if isinstance(patterns := schema.get("patternProperties"), dict):
            self._hold_names(schema, patterns, place)
        return schema

    def _hold_names(self, schema: Schema, patterns: Schema, place: str) -> None:
        groups = [(*_regex(pattern), part) for pattern, part in patterns.items()]
        held = {pattern: part for pattern, _, part in groups if pattern is not None}
        if not all(is_same for _, is_same, _ in groups):
            self.unheld.append(Unheld(place, "patternProperties"))
        if not _takes({"type": "object", "patternProperties": dict.fromkeys(held, True)}):  # they overlap
            self.unheld.append(Unheld(place, "patternProperties", patterns))
            if schema.get("additionalProperties", True) not in (True, {}):
                self.unheld.append(Unheld(place, "additionalProperties", schema["additionalProperties"]))
            held = {}
        if len(held) < len(groups):
            schema.pop("additionalProperties", None)  # it would forbid properties that a pattern allows
        schema["patternProperties"], matches = held, _matcher()
        names, others = schema.get("required"), schema.get("additionalProperties", True)
        for name in names if isinstance(names, list) else ():  # llguidance may end where one must follow
            if name not in schema.setdefault("properties", {}) and isinstance(name, str):
                is_matched = any(matches(pattern, name) for pattern in held)
                schema["properties"][name] = True if is_matched else others

    def _hold_pattern(self, schema: Schema, place: str) -> None:
        pattern, is_same = _regex(schema.pop("pattern"))
        if not is_same:
            self.unheld.append(Unheld(place, "pattern"))
        if pattern is not None:
            schema["pattern"] = pattern

    def _note_one_of(self, schema: Schema, place: str) -> Schema:
        if "oneOf" in schema:
            self.unheld.append(Unheld(place, "oneOf", schema["oneOf"]))
        return schema

    def _can_check(self, part: Unheld) -> bool:
        """Whether the keyword can be checked, which formats and some patterns cannot."""
        text = json.dumps({part.keyword: part.value})
        depends = '"$ref"' in text or part.keyword.startswith("unevaluated")
        return part.value is not None and not ('"format": ' in text or (depends and self._is_unsure))


def pointed(root: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a JSON pointer leads to within ``root``, or itself; empty if there is none."""
    from urllib.parse import unquote

    for _ in range(32):  # references to references
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        at: Any = root
        for part in unquote(reference).split("/")[1:]:
            at = _step(at, part.replace("~1", "/").replace("~0", "~"))
        if not reference.startswith("#") or not isinstance(at, Mapping):
            break
        schema = at
    return {}


def _step(at: object, name: str) -> object:
    if isinstance(at, list | tuple) and name.isdecimal() and int(name) < len(at):
        return at[int(name)]
    return at.get(name) if isinstance(at, Mapping) else None


def escaped(name: str) -> str:
    """A property's name, escaped for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def rewritten(schema: Any, place: str, change: Callable[[Schema, str], Any]) -> Any:
    """A copy in which ``change`` has replaced each subschema, but not within ``not`` and ``if``."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key, value in schema.items():
        if key in _TABLES and isinstance(value, dict):
            copy[key] = {k: rewritten(v, f"{place}/{key}/{escaped(k)}", change) for k, v in value.items()}
        elif key in _LISTS and isinstance(value, list):
            copy[key] = [rewritten(item, f"{place}/{key}/{at}", change) for at, item in enumerate(value)]
        elif key in _WITHIN:
            copy[key] = rewritten(value, f"{place}/{key}", change)
    return change(copy, place)


def _name_properties(schema: Schema, names: Mapping[str, Any]) -> None:
    """Replace ``propertyNames`` by keywords that a grammar holds, if that is possible."""
    rules = {key: value for key, value in names.items() if key not in _ANNOTATIONS}
    others = schema.get("additionalProperties", True)
    named: Schema = {}
    if names.get("type", "string") != "string":
        return
    if rules.keys() == {"pattern"}:
        named = {"patternProperties": {rules["pattern"]: others}}
    elif rules.keys() in ({"enum"}, {"const"}):
        named = {"properties": dict.fromkeys(map(str, rules.get("enum") or [rules.get("const")]), others)}
    if bool(named) == bool(rules) and not (named and {"properties", "patternProperties"} & schema.keys()):
        del schema["propertyNames"]
        schema |= named and {**named, "additionalProperties": False}


def _regex(pattern: str) -> tuple[str | None, bool]:
    """A pattern in llguidance's dialect (None if nothing remains), and whether it is equivalent.

    Assertions such as look-ahead and edges of words are left out, so the result may allow more. Classes lose
    NUL, because llguidance adds quotes and backslashes to a class that has all control characters.
    """
    narrow = "".join(_without_nul(token[0]) for token in _REGEX.finditer(pattern))
    if _compiles(narrow):
        return narrow, True
    parts, groups, is_same = list[str](), list[int | None](), True
    for token in _REGEX.finditer(pattern):
        text = token[0]
        is_same = is_same and text not in _WIDER and not token["look"]
        if text.startswith("("):
            groups.append(len(parts) if token["look"] else None)
        elif text == ")" and groups and (start := groups.pop()) is not None:
            del parts[start:]
            continue
        if token["high"]:
            text = f"\\u{{{ord(json.loads(chr(34) + text + chr(34))):x}}}"
        elif token["control"]:
            text = f"\\x{ord(token['control']) % 32:02x}"
        parts.append(_without_nul(_SPELLED.get(text, text)))
    spelled = "".join(parts)
    return (spelled, is_same) if _compiles(spelled) else (None, False)


def _without_nul(token: str) -> str:
    is_class = token.startswith("[") and token.endswith("]")
    is_nested = "[" in re.sub(r"\\.", "", token[1:], flags=re.DOTALL)
    return rf"[{token}&&[^\x00]]" if is_class and not is_nested else token


def _compiles(pattern: str) -> bool:
    return _takes({"type": "string", "pattern": pattern})


def _takes(schema: Schema) -> bool:
    """Whether llguidance compiles a schema."""
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


def _matcher() -> Callable[[str, str], bool]:
    """The function that says whether a pattern matches a text, in time that is linear in the text.

    It raises a ValueError for patterns that llguidance lacks. Python's own could take forever.
    """
    from llguidance import LLMatcher, LLTokenizer

    vocabulary: Any = _Bytes()
    tokenizer, matchers = LLTokenizer(vocabulary), dict[str, LLMatcher]()

    def matches(pattern: str, text: str) -> bool:
        if pattern not in matchers:
            spelled, is_same = _regex(pattern)
            if not is_same:
                raise ValueError(f"the pattern {pattern!r:.80} cannot be checked")
            grammar = {"grammars": [{"json_schema": {"type": "string", "pattern": spelled}}]}
            matchers[pattern] = LLMatcher(tokenizer, json.dumps(grammar), log_level=0)
        matcher, data = matchers[pattern], json.dumps(text, ensure_ascii=False).encode()
        matcher.reset()
        is_whole = matcher.try_consume_tokens([*data]) == len(data) and matcher.is_accepting()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return is_whole

    return matches


class _Bytes:
    """A vocabulary of bytes, with the interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids: Final = (256,)
    tokens: Final = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text."""
        return [*text.encode()]


def _broken(schema: Schema, value: object, unsure: Collection[str], sure: set[str]) -> list[str]:
    """The keywords in ``sure``, or within them, that a value breaks, with their places in the schema.

    Keywords in ``unsure`` and keywords of the grammar are left out, because the grammar may decide otherwise.
    """
    from jsonschema import Draft7Validator, Draft202012Validator, ValidationError, validators
    from referencing.jsonschema import EMPTY_REGISTRY  # nothing is fetched

    kind, left = validators.validator_for(schema, default=Draft202012Validator), _MOST_STEPS

    def counted(check: Any) -> Any:
        def step(validator: Any, wanted: Any, value: Any, schema: Any) -> Any:
            nonlocal left
            left -= 1 + sum(len(part) for part in (wanted, value) if isinstance(part, list | dict)) // 8
            if left < 0:
                raise RecursionError
            return check(validator, wanted, value, schema)

        return step

    def unique(_: Any, wanted: object, items: Any, __: Any) -> Iterator[ValidationError]:
        texts = [json.dumps(item, sort_keys=True) for item in items] if isinstance(items, list) else []
        if wanted is True and len({*texts}) < len(texts):  # jsonschema's own check may take quadratic time
            yield ValidationError("not unique")

    def conditional(validator: Any, wanted: object, value: object, schema: Any) -> Iterator[ValidationError]:
        branch = "then" if validator.evolve(schema=wanted).is_valid(value) else "else"
        if schema.get(branch) is False:  # jsonschema's own check loses its place
            yield ValidationError("nothing fits", validator=branch, schema_path=[branch])
        elif branch in schema:
            yield from validator.descend(value, schema[branch], schema_path=branch)

    def pattern(_: Any, wanted: str, value: object, __: Any) -> Iterator[ValidationError]:
        if isinstance(value, str) and not matches(wanted, value):
            yield ValidationError("no match")

    def pattern_properties(validator: Any, wanted: Schema, value: Any, _: Any) -> Iterator[ValidationError]:
        for expression, part in wanted.items():
            for name in value if isinstance(value, dict) else ():
                if matches(expression, name):
                    yield from validator.descend(value[name], part, path=name, schema_path=expression)

    def additional(validator: Any, wanted: Any, value: Any, schema: Schema) -> Iterator[ValidationError]:
        known, expressions = schema.get("properties", ()), schema.get("patternProperties", ())
        for name in value if isinstance(value, dict) else ():
            if name in known or any(matches(expression, name) for expression in expressions):
                continue
            if wanted is False:
                yield ValidationError("not allowed")
            else:
                yield from validator.descend(value[name], wanted, path=name)

    matches, lost = _matcher(), {*unsure, "$dynamicRef"}
    if "patternProperties" in lost:
        lost.add("additionalProperties")
    known = {
        "dependencies": Draft7Validator.VALIDATORS["dependencies"],  # generators write what later drafts lack
        **Draft202012Validator.VALIDATORS,
        **kind.VALIDATORS,
        "uniqueItems": unique,
        "if": conditional,
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional,
        **dict.fromkeys(lost, lambda *_: ()),
    }
    own = {keyword: counted(check) for keyword, check in known.items()}
    validator = validators.extend(kind, own)(schema, registry=EMPTY_REGISTRY)

    def message(error: ValidationError) -> str:
        path = [*error.absolute_schema_path]
        place = "".join(f"/{escaped(str(part))}" for part in (path[:-1] if error.validator else path))
        return f"{error.validator or 'False'} at #{place}"

    sure = sure | {"anyOf", "oneOf"}  # sure keywords may stand in their parts
    return sorted(
        {message(error) for error in validator.iter_errors(value) if sure & {*error.absolute_schema_path}}
    )


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no type of JSON")
