"""JSON schemas as generators write them: what a grammar holds, what is checked behind it, what is refused."""

import json
import logging
import time
from typing import Any

import pytest

from edgespec.decoding.grammar import GrammarConstraint, JsonSchema
from edgespec.decoding.schemas import PreparedSchema
from edgespec_models.errors import RequestError
from tests.decoding.test_grammar import BYTE, END, GRAMMARS, spelled

Schema = dict[str, Any]
BESIDE: Schema = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": "^[ab]$"}},
        "b": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        "c": {"type": "string", "pattern": "(?=x).y?"},
    },
    "patternProperties": {"^x": {"type": "null"}},
    "additionalProperties": False,
}
UNIQUE: Schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
NUMBER: Schema = {"type": "number"}
CONDITION: Schema = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}},
    "if": {"properties": {"a": {"const": True}}, "required": ["a"]},
    "then": {"required": ["b"]},
}
OVERLAPPING: Schema = {
    "type": "object",
    "patternProperties": {"^x-": {"type": "string"}, "_id$": {"type": "integer"}},
    "additionalProperties": False,
}


def made(schema: Schema, **options: Any) -> GrammarConstraint:
    return GRAMMARS.constraint(JsonSchema(schema, **options))


def writes(schema: Schema, value: object) -> bool:
    return spelled(made(schema), BYTE, json.dumps(value, ensure_ascii=False))


def problems(schema: Schema, value: object) -> list[str]:
    return [*made(schema).schemas[""].problems(value)]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "nanoid", "pattern": "^[a-z]{3}$"}, "abc", "ab"),
        ({"type": "string", "format": "path"}, "a/b", 1),
        ({"type": "integer", "x-order": 1, "example": 3, "discriminator": {}}, 1, "a"),
        ({"propertyNames": {"type": "string"}, "additionalProperties": NUMBER}, {"a": 1}, {"a": ""}),
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER}, {"b": 1}, {"c": 1}),
        ({"propertyNames": {"pattern": "^x-"}}, {"x-a": 1}, {"a": 1}),
        ({"propertyNames": {"$ref": "#/$defs/N"}, "$defs": {"N": {"const": "a"}}}, {"a": 1}, {"b": 1}),
        ({"properties": {"a": {"not": {}}}}, {"b": 1}, {"a": 1}),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, -5, 10**19),
        ({"type": "number", "minimum": 1e-7, "maximum": 1e22}, 0.5, -1),
        ({"type": "string", "pattern": r"^\bfoo\b$"}, "foo", "foe"),
        ({"type": "string", "pattern": "^(?=.*[0-9])(?!.*x(a|b)).{2,3}$"}, "a1", "a"),
        ({"type": "string", "pattern": r"^(?>a|b)\Z"}, "a", "c"),
        ({"type": "string", "pattern": r"^{[^}]*}$"}, "{a}", "a"),
        ({"type": "string", "pattern": r"^\ud83d\ude00$"}, "😀", "a"),
        ({"type": "string", "pattern": r"^[^\\]+$"}, 'a"é\n', "\\"),
        ({"type": "string", "pattern": r"^[^\\/:*?\"<>|]+$"}, "a.txt", "a|b"),
        ({"type": "string", "pattern": r"^[^\\/:*?\"<>|]+$"}, "a\nb", 'a"'),
        ({"type": "string", "pattern": r"^(?!x)[^\"\t]+$"}, "a\\", 'a"'),
        ({"type": "string", "pattern": r"^[\x00-!#-~\x{80}-\x{10ffff}]+$"}, "a", 'a"'),
        ({"patternProperties": {'^[^"]+$': NUMBER}, "additionalProperties": False}, {"a": 1}, {'a"': 1}),
        ({"patternProperties": {"^(a|b)$": NUMBER}, "required": ["a", "b"], "additionalProperties": False},
         {"a": 1, "b": 2}, {"a": 1}),
        ({"patternProperties": {"^a": NUMBER}, "required": ["c"], "additionalProperties": {"const": 1}},
         {"c": 1, "a": 2}, {"c": 2}),
        ({"type": "string", "format": "date"}, "2000-02-29", "2021-02-29"),
        ({"type": "string", "format": "date", "pattern": "^2"}, "2024-02-29", "1900-02-29"),
        ({"type": "string", "format": "date-time"}, "2024-12-31T00:00:00Z", "2023-02-29T00:00:00Z"),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, [1], [1, 2, 3]),
        ({"type": "string", "const": "a\0b"}, "a\0b", "ab"),
        ({"type": "string", "pattern": r"^\cI?\p{L}{2}(?=)$"}, "né", "1"),
        ({"patternProperties": {"^(?!y)x": NUMBER}, "additionalProperties": False}, {"x": 1}, {"x": ""}),
        ({"items": {"$ref": "#", "nullable": True}, "type": "array"}, [[[]]], [1]),
        ({"type": "array", "$ref": "#/components/schemas/A", "components": {"schemas": {
            "A": {"type": "array", "items": {"$ref": "#/components/schemas/B"}, "uniqueItems": True},
            "B": {"type": "integer"}}}}, [1], [""]),
    ],
)  # fmt: skip
def test_grammars_hold_what_they_can(schema: Schema, right: object, wrong: object) -> None:
    whole = {"type": "object"} | schema if "type" not in schema else schema
    assert writes(whole, right) and not writes(whole, wrong)


@pytest.mark.parametrize(
    ("schema", "right", "wrong", "broken"),
    [
        (UNIQUE, [1, 2], [1, 2, 1], "uniqueItems at #"),
        ({"type": "object", "properties": {"a": UNIQUE}}, {"a": [1]}, {"a": [1, 1]},
         "uniqueItems at #/properties/a"),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, [1, 2], [2], "contains at #"),
        ({"type": "integer", "not": {"multipleOf": 2}}, 3, 4, "not at #"),
        (CONDITION, {"a": True, "b": 1}, {"a": True}, "required at #/then"),
        (CONDITION | {"then": {"properties": {"b": {"minimum": 2}}}},
         {"a": True, "b": 2}, {"a": True, "b": 1}, "minimum at #/then/properties/b"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"b": 1}, {"a": 1}, "dependentRequired at #"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, {"b": 1}, {"a": 1}, "dependencies at #"),
        ({"type": "object", "minProperties": 1, "properties": {"a": {}}}, {"a": 1}, {}, "minProperties at #"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, 1, 4, "oneOf at #"),
        ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, {"b": 1}, {"a": 1},
         "not at #/propertyNames"),
        ({"type": "object", "propertyNames": {"minLength": 2}}, {"ab": 1}, {"a": 1},
         "minLength at #/propertyNames"),
        (CONDITION | {"then": False}, {"b": 1}, {"a": True}, "then at #"),
        (CONDITION | {"then": True, "else": False}, {"a": True}, {}, "else at #"),
        (CONDITION | {"then": {"properties": {"b": False}}}, {"a": True}, {"a": True, "b": 1},
         "False at #/then/properties"),
        ({"type": "object", "additionalProperties": UNIQUE}, {"a": [1]}, {"a": [1, 1]},
         "uniqueItems at #/additionalProperties"),
        ({"type": "object", "patternProperties": {"^a": UNIQUE}}, {"a": [1], "b": [1, 1]}, {"a": [1, 1]},
         "uniqueItems at #/patternProperties/^a"),
        ({"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": {"not": {"const": 1}}},
         {"a": 1, "b": 2}, {"b": 1}, "not at #/additionalProperties"),
        (OVERLAPPING, {"x-a": "", "a_id": 1}, {"x-_id": 1}, "type at #/patternProperties/^x-"),
        (OVERLAPPING, {"x-a": ""}, {"b": 1}, "additionalProperties at #"),
        ({"type": "array", "items": {"$ref": "#", "maxItems": 1}}, [[], [], [[]]], [[[], []]],
         "maxItems at #/items"),
        ({"type": "string", "not": {"pattern": "^(a+)+$"}}, "a" * 64 + "b", "a", "not at #"),
        ({"type": "object", "allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
         {"a": 1}, {"b": 1}, "unevaluatedProperties at #"),
    ],
)  # fmt: skip
def test_what_no_grammar_holds_is_checked_behind_the_answer(
    schema: Schema, right: object, wrong: object, broken: str
) -> None:
    assert writes(schema, right) and writes(schema, wrong)
    assert problems(schema, right) == []
    assert problems(schema, wrong) == [f"the answer breaks {broken}"]


def test_names_have_a_single_spelling() -> None:
    named: Schema = {"type": "object", "properties": {"a": NUMBER}}
    assert spelled(made(named), BYTE, '{"b": "\\n"}') and not spelled(made(named), BYTE, '{"\\u0061": ""}')


def test_what_cannot_be_followed_to_the_end_ends_there() -> None:
    """The text up to there is not lost; a form that cannot begin is refused."""
    words = "^$|(^(?:\\S+\\s+){0,99}\\S+$)"  # of which llguidance makes too many expressions
    constraint, written = made({"type": "string", "maxLength": 5000, "pattern": words}), list[int]()
    constraint.begin(())
    while not constraint.broken:
        assert len(written) < 1000
        written += BYTE.encode_bytes(b"a " if written else b'"')
        constraint.begin(written)
        allowed = constraint.allowed(()).tokens
    assert "the answer ends early: response_format cannot be followed" in constraint.broken
    assert allowed == [END] and constraint.ends(written) and constraint.completes(())


def test_a_check_says_nothing_of_what_the_grammar_holds() -> None:
    coins: Schema = {"type": "array", "items": {"type": "number", "multipleOf": 0.01}, "uniqueItems": True}
    assert writes(coins, [0.07]) and problems(coins, [0.07]) == []
    value = {"a": ["a", "b"], "b": 0.5, "c": "x", "x": None}
    assert writes(BESIDE, value)
    named = "pattern at #/properties/c is not enforced"
    assert problems(BESIDE, value) == [named]
    assert problems(BESIDE, value | {"a": ["b", "b"]}) == [
        named,
        "the answer breaks uniqueItems at #/properties/a",
    ]


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ({"type": "string", "pattern": "(?=(a+)+$)a+b?"}, "a" * 64 + "b", "pattern at # is not enforced"),
        ({"type": "string", "not": {"format": "email"}}, "a", "not at # is not enforced"),
        ({"type": "string", "not": {"pattern": "(?=a)"}}, "a", "not at # could not be checked"),
        ({"type": "object", "not": {"$ref": "https://example.com/"}}, {}, "not at # could not be checked"),
        ({"type": "integer", "not": {"multipleOf": 0}}, 1, "not at # could not be checked"),
    ],
)
def test_what_cannot_be_checked_is_named(schema: Schema, value: object, said: str) -> None:
    """Nothing is fetched, and no pattern runs that could take forever."""
    assert problems(schema, value) == [said]


def test_a_check_of_a_hostile_schema_ends() -> None:
    levels: Schema = {f"l{at}": {"allOf": [{"$ref": f"#/$defs/l{at + 1}"}] * 2} for at in range(40)}
    schema = {"type": "integer", "not": {"$ref": "#/$defs/l0"}, "$defs": {**levels, "l40": {"const": 1}}}
    assert problems(schema, 1) == ["not at # could not be checked"]
    many: Schema = {"type": "array", "uniqueItems": True}
    assert problems(many, [*range(50_000), *map(str, range(50_000))]) == []
    values = [-value for value in range(9000)]
    for either in ({"anyOf": [{"const": value} for value in values]}, {"enum": values}):
        schema = {"type": "array", "not": {"contains": either}}
        assert problems(schema, [*range(1, 2000)]) == ["not at # could not be checked"]


@pytest.mark.parametrize("part", ["[", r"\p{", "(?=", "{1", r"[\["])
def test_a_hostile_pattern_is_read_soon(part: str) -> None:
    start = time.monotonic()
    PreparedSchema({"type": "string", "pattern": part * 50_000})
    assert time.monotonic() - start < 10  # it would be minutes


def test_names_are_free_where_no_part_of_their_pattern_is_left() -> None:
    twice = r"^(a|b)\1$"
    named: Schema = {"type": "object", "patternProperties": {twice: NUMBER}, "additionalProperties": False}
    for schema in (named, {"type": "object", "propertyNames": {"pattern": twice}}):
        assert writes(schema, {"aa": 1})
        assert problems(schema, {"aa": 1}) == ["patternProperties at # is not enforced"]


def test_a_format_that_distinguishes_is_not_mistaken() -> None:
    either: Schema = {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]}
    assert problems(either, "abc") in ([], ["oneOf at # is not enforced"])
    assert problems({"type": "array", "items": either, "uniqueItems": True}, ["a", "a"])[-1].startswith(
        "the answer"
    )


@pytest.mark.parametrize("schema", [UNIQUE, CONDITION, {"oneOf": [{"type": "integer"}, {"minimum": 3}]}])
def test_strict_schemas_are_held_whole_or_refused(schema: Schema) -> None:
    whole: Schema = {"type": "object", "properties": {"a": schema}}
    told = r"strictly: no grammar holds .* at #/properties/a.*; leave it out, or strict"
    with pytest.raises(RequestError, match=told):
        made(whole, strict=True)
    assert made({"type": "string", "format": "nanoid", "title": "t"}, strict=True)


@pytest.mark.parametrize("schema", [{"not": {}}, {"enum": []}, {"$ref": "https://example.com/x"}])
def test_what_nothing_fits_is_refused(schema: Schema) -> None:
    with pytest.raises(RequestError, match="response_format cannot be followed"):
        made({"type": "object", "properties": {"a": schema}, "required": ["a"]})


def test_the_log_names_keywords_once_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    grammars = type(GRAMMARS)(BYTE, ())
    with caplog.at_level(logging.WARNING, "edgespec"):
        for _ in range(2):
            grammars.constraint(JsonSchema({"properties": {"secret": UNIQUE}}))
    (line,) = caplog.messages
    assert "uniqueItems" in line and "secret" not in line


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 3},
        {"properties": [1], "required": 3},
        {"propertyNames": {"enum": 3}},
        {"propertyNames": {"$ref": "#/$defs/x/1/2"}, "$defs": {"x": [1]}},
        {"$ref": 3},
        {"allOf": {}},
        {"pattern": 3},
        {"properties": {"a": {"pattern": r"(?=a)\ud8zz\udczz"}}},
        {"patternProperties": {"[": {}}},
    ],
)
def test_malformed_schemas_are_refused_or_taken(schema: Schema) -> None:
    try:
        assert made({"type": "object", **schema})
    except RequestError as error:
        assert len(str(error)) < 1200


def test_a_schema_is_not_changed() -> None:
    text = json.dumps(
        schema := {"properties": {"a": UNIQUE, "b": CONDITION}, "propertyNames": {"type": "string"}}
    )
    [*PreparedSchema(schema).problems({"a": [1, 1]})]
    assert json.dumps(schema) == text
