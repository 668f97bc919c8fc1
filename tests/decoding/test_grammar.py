"""Response formats: what they compile to, what is refused and how, what may come next."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.grammar import (
    Allowed,
    AnyJson,
    Choice,
    Constraint,
    Grammars,
    JsonSchema,
    Lark,
    Regex,
    ResponseFormat,
)
from edgespec_models.errors import RequestError
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.tokenizers import byte_level_json, sentencepiece_json

BYTE = Tokenizer.from_json(byte_level_json(), vocab_size=410)
PIECES = Tokenizer.from_json(sentencepiece_json())
END = BYTE.special_id("<|im_end|>") or 0
GRAMMARS = Grammars(BYTE, (END,))
TOKENIZERS = [(BYTE, GRAMMARS), (PIECES, Grammars(PIECES, (PIECES.special_id("<eos>") or 0,)))]


def spelled(constraint: Constraint, tokenizer: Tokenizer, text: str) -> bool:
    """Whether ``text`` is a whole answer, written token by token as the masks allow."""
    written: list[int] = []
    rest = text.encode()
    while rest:
        mask = constraint.allowed(written)
        fitting = [
            token
            for token in range(tokenizer.vocab_size)
            if token in mask and tokenizer.token_bytes(token) and not tokenizer.is_special(token)
            if rest.startswith(tokenizer.token_bytes(token))
        ]
        if not fitting:
            return False
        written.append(max(fitting, key=lambda token: len(tokenizer.token_bytes(token))))
        rest = rest[len(tokenizer.token_bytes(written[-1])) :]
    return constraint.completes(written) or any(
        tokenizer.is_special(token) and token in constraint.allowed(written)
        for token in range(tokenizer.vocab_size)
    )


NEEDS_A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ACCEPTED: list[tuple[ResponseFormat, str]] = [
    (Choice(["yes", "no"]), "no"),
    (Choice(["a", "ab", "abc"]), "ab"),
    (Choice(['"quoted"\n\\', "\U0001f600"]), "\U0001f600"),
    (Choice(['"quoted"\n\\', "\U0001f600"]), '"quoted"\n\\'),
    (Regex("[0-9]{4}-[0-9]{2}"), "2026-11"),
    (Regex("a/b|c"), "a/b"),
    (Regex(r"\w+ \w+"), "na\u00efve \u65e5\u672c"),
    (Lark('start: "x" start | "y"'), "xxy"),
    (Lark('start: "<" %json {"type": "boolean"} ">"'), "<true>"),
    (AnyJson(), '{"a": [1, {"b": null}]}'),
    (JsonSchema({"type": "array", "items": {"type": "integer"}}), "[1, 20, 300]"),
    (JsonSchema('{"enum": ["the fox", 7]}'), "7"),
    (JsonSchema({}), '"any"'),
    (JsonSchema(NEEDS_A), '{"a": 3}'),
    (JsonSchema({"type": "array", "x-guidance": {"whitespace_flexible": True}}), "[ 1 ,2\n]"),
]
REFUSED: list[tuple[ResponseFormat, str]] = [
    (Choice(["yes", "no"]), "maybe"),
    (Regex("[0-9]{4}"), "26"),
    (AnyJson(), "[1]"),
    (AnyJson(), '{"a":  1}'),  # one space at most
    (JsonSchema({"type": "integer", "minimum": 5}), "4"),
    (JsonSchema(json.dumps(NEEDS_A)), "{}"),
    (Lark('start: "x" start | "y"'), "x"),
]


@pytest.mark.parametrize("tokenizer, grammars", TOKENIZERS, ids=["byte level", "sentencepiece"])
@pytest.mark.parametrize("wanted, text", ACCEPTED)
def test_what_fits_the_format_can_be_written(
    wanted: ResponseFormat, text: str, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    assert spelled(grammars.constraint(wanted), tokenizer, text)


@pytest.mark.parametrize("wanted, text", REFUSED)
def test_what_does_not_fit_cannot(wanted: ResponseFormat, text: str) -> None:
    assert not spelled(GRAMMARS.constraint(wanted), BYTE, text)


BAD: list[tuple[Callable[[], ResponseFormat], str]] = [
    (lambda: JsonSchema('{"type": '), "no JSON object"),
    (lambda: JsonSchema("[1]"), "no JSON object.*list"),
    (lambda: JsonSchema({"const": float("nan")}), "no JSON object"),
    (lambda: JsonSchema({"const": {1, 2}}), "no JSON object.*set"),
    (lambda: JsonSchema({"type": "nonsense"}), "nonsense"),
    (lambda: JsonSchema({"$ref": "https://example.com/schema"}), "example.com"),
    (lambda: JsonSchema({"x-guidance": 3}), "cannot be followed"),
    (lambda: JsonSchema({"type": "integer", "minimum": 3, "maximum": 1}), "cannot be followed"),
    (lambda: JsonSchema({"pattern": "(?=a)", "type": "string"}, strict=True), "strictly: .*pattern at #;"),
    (lambda: Regex("(a"), "cannot be followed"),
    (lambda: Regex("(?<=a)b"), "cannot be followed"),
    (lambda: Lark("begin: 1"), "cannot be followed"),
    (lambda: Lark(""), "cannot be followed"),
    (lambda: Lark("{"), "cannot be followed"),
    (lambda: Lark("start: other"), "other"),
    (lambda: Lark("start[max_tokens=3]: /.*/"), "rollback not supported"),
    (lambda: Lark('start: item "b"\nitem[stop="b"]: /.*/'), "rollback not supported"),
]


@pytest.mark.parametrize("make, said", BAD)
def test_a_bad_format_is_refused_at_once_with_the_reason(
    make: Callable[[], ResponseFormat], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        GRAMMARS.constraint(make())


def _any(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: JsonSchema(_any(3)), "schema is 3; allowed: a table"),
        (lambda: Regex(_any(b"a")), "pattern is b'a'; allowed: a text"),
        (lambda: Regex("\ud800"), "lone surrogates"),
        (lambda: Choice([]), "texts is .*of length 1 or more"),
        (lambda: Choice(_any(["a", 3])), r"texts\[1\] is 3; allowed: a text"),
    ],
)
def test_what_is_no_format_is_refused_when_it_is_made(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        make()


@given(st.text(max_size=40), st.sampled_from([JsonSchema, Regex, Lark]))
def test_any_text_compiles_or_is_refused(text: str, kind: Callable[[str], ResponseFormat]) -> None:
    try:
        constraint = GRAMMARS.constraint(kind(text))
    except RequestError:
        return
    assert constraint.allowed(()).tokens


def _deep(opening: str, closing: str, depth: int) -> str:
    return opening * depth + closing * depth


def _string(*names: str) -> dict[str, Any]:
    return {"properties": {name: {"type": "string"} for name in names}}


HOSTILE = {
    "long": lambda: Regex("a" * 300_000),
    "brackets": lambda: Regex(_deep("(", ")", 50_000)),
    "repeats": lambda: Regex("((((a{1,99}){1,99}){1,99}){1,99}){1,99}"),
    "deep lark": lambda: Lark("start: " + _deep("(", ")", 100_000)),
    "deep json": lambda: JsonSchema('{"a":' * 50_000 + "1" + "}" * 50_000),
    "deep schema": lambda: JsonSchema('{"items":' * 5_000 + "{}" + "}" * 5_000),
    "many branches": lambda: JsonSchema(
        {"allOf": [{"anyOf": [_string(f"{i}{j}") for j in range(8)]} for i in range(12)]}
    ),
    "many optional": lambda: JsonSchema({"type": "object"} | _string(*(f"p{i}" for i in range(5_000)))),
    "endless": lambda: JsonSchema({"$ref": "#"}),
    "in circles": lambda: JsonSchema({"allOf": [{"$ref": "#"}, {"type": "object"}]}),
    "left recursion": lambda: Lark("start: start start | start"),
}
"""Formats of somebody who means harm."""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_formats_end_soon_and_leave_the_process_whole(name: str) -> None:
    """Each in a process of its own, since an overflown stack would end this one."""
    script = (
        "import sys\n"
        "from tests.decoding.test_grammar import GRAMMARS, HOSTILE\n"
        "from edgespec_models.errors import RequestError\n"
        "try:\n"
        "    GRAMMARS.constraint(HOSTILE[sys.argv[1]]()).allowed(())\n"
        "except RequestError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, name], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r'pip install "edgespec\[structured\]"'):
        GRAMMARS.constraint(AnyJson())


def test_nothing_loads_the_package_before_a_format_asks_for_it() -> None:
    script = "import sys, edgespec; edgespec.JsonSchema({}); assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@given(st.sets(st.integers(0, 99), min_size=1), st.integers(0, 140))
def test_masks(tokens: set[int], width: int) -> None:
    words = np.zeros(4, "<u4")
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    mask = Allowed(words.tobytes())
    assert {token for token in range(128) if token in mask} == tokens
    assert mask.tokens == sorted(tokens)
    assert mask.only == (min(tokens) if len(tokens) == 1 else None)
    row = np.ones(width, np.float32)
    mask.forbid_others(row)
    left = {token for token in tokens if token < width} or {*range(width)}
    assert row.tolist() == [1.0 if at in left else -np.inf for at in range(width)]


def test_special_tokens_and_padding_are_never_allowed_but_the_end() -> None:
    mask = GRAMMARS.constraint(Regex("(?s).*")).allowed(())
    assert {token for token in mask.tokens if BYTE.is_special(token) or not BYTE.token_bytes(token)} == {END}
    assert len(mask.tokens) > 300


def test_what_spells_a_special_token_is_text() -> None:
    constraint = GRAMMARS.constraint(Choice(["<|im_start|>"]))
    tokens: list[int] = []
    while (only := constraint.allowed(tokens).only) is not None and not constraint.completes([*tokens, only]):
        tokens.append(only)
    assert not any(map(BYTE.is_special, tokens)) and BYTE.bytes_of(tokens).startswith(b"<|im_star")


def test_a_model_without_an_end_ends_where_the_grammar_does() -> None:
    constraint = Grammars(BYTE, ()).constraint(Choice(["a"]))
    (a,) = BYTE.encode("a")
    constraint.begin([5])
    assert constraint.allowed(()).only == a
    assert not constraint.ends([5]) and constraint.ends([5, a])


def test_an_answer_ends_with_the_token_that_ends_texts() -> None:
    constraint = GRAMMARS.constraint(Regex("a+"))
    (a,) = BYTE.encode("a")
    constraint.begin([5])
    assert not constraint.ends([5, a, a]) and constraint.ends([5, a, a, END])
    assert constraint.completes([END]) and not constraint.ends([5, a])
    constraint.begin([5, *BYTE.encode("b")])
    assert "cannot be followed" in constraint.broken


def test_masks_are_computed_once_where_nothing_changed() -> None:
    constraint = GRAMMARS.constraint(Choice(["the quick brown fox", "the quick red fox"]))
    matcher: Any = constraint._matcher
    constraint._matcher = counting = Mock(wraps=matcher)
    counting.is_error.return_value = False
    tokens, row = BYTE.encode("the quick "), np.zeros(410, np.float32)
    for count in range(len(tokens)):
        constraint.allowed(tokens[:count])
    constraint.begin([])
    for count in range(len(tokens)):
        constraint.apply(row, tokens[:count])
    # The first is known since it was tried out.
    assert counting.compute_bitmask.call_count == len(tokens) - 1


def test_a_row_without_any_allowed_token_stays() -> None:
    """A model without an end is not made to write a token that its logits do not want."""
    row = np.arange(BYTE.vocab_size, dtype=np.float32)
    constraint = Grammars(BYTE, ()).constraint(Choice(["a"]))
    constraint.begin(())
    constraint.apply(row, BYTE.encode_bytes(b"a"))
    assert row.tolist() == [*range(BYTE.vocab_size)]
    constraint.apply(row, ())
    assert row.argmax() == BYTE.encode_bytes(b"a")[0] and row.min() == -np.inf
