"""Response formats at random, and whether a text is what they ask for, told without llguidance."""

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
from hypothesis import strategies as st

from edgespec.decoding.draft import Round
from edgespec.decoding.grammar import AnyJson, Choice, Constraint, JsonSchema, Lark, Regex, ResponseFormat
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.policy import Policy
from edgespec.drafting.source import Source
from edgespec.running.verifier import Verifier
from tests.kit.toy import ToySession, decode

_WORDS = ("name", "age", "the lazy dog", "na\u00efve", 'a "quote"', "\u65e5\u672c", "\U0001f600", "x\ny")

_leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-50, 50),
        st.integers(0, 500),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.builds(lambda words: {"enum": words}, st.lists(st.sampled_from(_WORDS), min_size=1, unique=True)),
    st.builds(lambda word: {"const": word}, st.sampled_from(_WORDS)),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}[0-9]?$"}),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], optional: set[str]) -> dict[str, Any]:
        required = [name for name in properties if name not in optional]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    names = st.sampled_from(_WORDS)
    return st.builds(build, st.dictionaries(names, inner, max_size=3), st.sets(names, max_size=2))


def _lists(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)
    )


schemas = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        _objects(inner), _lists(inner), st.builds(lambda *each: {"anyOf": [*each]}, inner, inner)
    ),
    max_leaves=4,
)
"""JSON schemas whose texts are short."""

patterns = st.recursive(
    st.sampled_from(["a", "the", "[a-f]", "[0-9]{2}", "[0-5]", r"\.", "\u65e5", "[^x\n]", " "]),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["?", "{0,3}", "{1,2}", "*"])),
    ),
    max_leaves=5,
)
"""Regular expressions that mean the same to Python."""

choices = st.lists(st.text(max_size=8), min_size=1, max_size=4)
"""What to choose from."""

formats = st.one_of(
    schemas.map(JsonSchema),
    patterns.map(Regex),
    choices.map(Choice),
    st.just(AnyJson()),
    st.just(Lark('start: item ("," item)*\nitem: "(" item ")" | WORD\nWORD: /[a-z]{1,4}/')),
)


PROMPT = (40, 41, 42)
NEW = 60


def written(
    target: ToySession,
    source: Source | Policy,
    constraint: Constraint,
    params: SamplingParams,
    stop: Sequence[int],
) -> tuple[list[int], list[Round]]:
    """What ``target`` writes behind the prompt under a constraint: its answer, and the rounds."""
    tokens, rounds, verify = [*PROMPT], list[Round](), Verifier(params, [constraint])
    for round_ in decode(target, source, verify, tokens, max_new_tokens=NEW, max_draft=6, stop=stop):
        rounds.append(round_)
        if constraint.ends(tokens):
            break
    source.close()
    assert target.cache == tokens[:-1]
    return tokens[len(PROMPT) :], rounds


def accepts(wanted: ResponseFormat, text: str) -> bool:
    """Whether ``text`` is what ``wanted`` asks for."""
    if isinstance(wanted, Regex):
        return re.fullmatch(wanted.pattern, text) is not None
    if isinstance(wanted, Choice):
        return text in wanted.texts
    if isinstance(wanted, Lark):
        return re.fullmatch(r"\(*[a-z]{1,4}\)*(,\(*[a-z]{1,4}\)*)*", text) is not None
    schema = {"type": "object"} if isinstance(wanted, AnyJson) else wanted.schema
    jsonschema.validate(json.loads(text), json.loads(schema) if isinstance(schema, str) else schema)
    return True
