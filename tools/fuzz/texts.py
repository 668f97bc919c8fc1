"""Targets: chat templates, response formats, and tools with the calls of them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from time import thread_time
from types import SimpleNamespace
from typing import Any, Final, cast

from edgespec.decoding.grammar import AnyJson, Choice, Grammars, JsonSchema, Lark, Regex, ResponseFormat
from edgespec.requests.request import Request, answer_format, encode_chat
from edgespec.requests.tool_calls import ToolReader, check_tools
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.text import template_sandbox
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from tools.fuzz.forms import JSON
from tools.fuzz.rules import Rule, Target, only, table, text_of
from tools.fuzz.trees import Tree

__all__ = ["TARGETS"]

_SLOWEST_S: Final = 3.0  # of one rendering whose limit is a tenth of a second
_STEPS: Final = 12  # tokens that are written in a response format
_MESSAGES: Final = [
    {"role": "system", "content": "Be <|im_end|> brief."},
    {"role": "user", "content": "hi é 😀"},
]
_CALLS: Final = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abcdefghi", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
]
_JINJA: Final = """
{% for m in messages %} ¦ {% endfor %} ¦ {{ m.content }} ¦ {% if tools %} ¦ {% else %} ¦ {% endif %}
{% set ns = namespace(a=[]) %} ¦ {% set x = x ~ x %} ¦ {% macro f(a) %} ¦ {% endmacro %} ¦ {{ f(1) }}
| tojson ¦ | tojson(indent=2) ¦ | join(',') ¦ | replace('a', 'bb') ¦ | indent(4) ¦ | length ¦ | list
| map(attribute='role') ¦ | selectattr('role', 'equalto', 'user') ¦ | groupby('role') ¦ | sort
| unique ¦ | format(1) ¦ .format(1) ¦ .__class__ ¦ ['a'] ¦ [0] ¦ [::-1] ¦  * 10 ¦  ** 9 ¦  % 'a'
 ~ 'a' ¦ range(9) ¦ {% call f() %} ¦ {% endcall %} ¦ {% filter upper %} ¦ {% endfilter %}
{% block a %} ¦ {% endblock %} ¦ raise_exception('no') ¦ strftime_now('%Y') ¦ loop.index ¦ loop.previtem
{% break %} ¦ cycler('a', 'b') ¦ joiner(',') ¦ {% generation %} ¦ {% endgeneration %} ¦ {% raw %}
{% endraw %} ¦ {# ¦ #} ¦ dict(a=1) ¦ is defined ¦ is mapping ¦ | int ¦ | float ¦ | round(2) ¦ | sum
| batch(2) ¦ | dictsort ¦ | items ¦ | string ¦ .split(' ') ¦ .strip() ¦ .items() ¦ .keys() ¦ | trim
| default('a') ¦ | first ¦ | last ¦ | reverse ¦ | safe
"""


def _template(_: Path) -> Rule:
    from tests.models_for_tests import toy_tokenizer

    template_sandbox._SECONDS = 0.1  # type: ignore[misc]
    tokenizer = toy_tokenizer()

    def rule(data: bytes) -> None:
        tree = table(data)
        begun = thread_time()
        with only(TokenizerError):
            template = ChatTemplate(text_of(tree.get("source")), bos=text_of(tree.get("bos")))
            given = table(tree.get("arguments"))
            arguments = {
                name: each
                for name, each in given.items()
                if name in template.arguments or len(data) % 16 == 0
            }
            with only(TokenizerError, RequestError):
                text = template.render(cast(Any, tree.get("messages")), arguments)
                assert isinstance(text, str)
            with only(TokenizerError, RequestError):
                ids = template.encode(cast(Any, tree.get("messages")), tokenizer, arguments)
                assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)
            assert isinstance(template.knows_developer, bool)
        assert thread_time() - begun < _SLOWEST_S, "it takes too long"

    return rule


def _template_seeds() -> list[bytes]:
    from tests.models_for_tests import TEMPLATE
    from tests.templates_for_tests import HERMES, LLAMA3, MISTRAL, TOOLS

    seeds = []
    for source in (HERMES, LLAMA3, MISTRAL, TEMPLATE):
        for messages in (_MESSAGES, [*_MESSAGES, *_CALLS]):
            arguments = {"tools": TOOLS, "enable_thinking": False}
            seeds.append(
                JSON.write({"source": source, "messages": messages, "arguments": arguments, "bos": "<s>"})
            )
    return seeds


def _format_of(tree: Mapping[str, Tree]) -> ResponseFormat:
    """The one that the input says, whatever it says of it."""
    kind, value = tree.get("kind"), cast(Any, tree.get("value"))
    made: Any = {"schema": JsonSchema, "regex": Regex, "lark": Lark, "choice": Choice}.get(str(kind))
    return AnyJson() if made is None else made(value)


def _follow(grammars: Grammars, tokenizer: Tokenizer, wanted: ResponseFormat, seed: int) -> None:
    """Write some tokens in a format, in proposals too; whatever is allowed can be written."""
    constraint, random, text = grammars.constraint(wanted), Random(seed), list[int]()
    for _ in range(_STEPS):
        if constraint.ends(text):
            return
        allowed = constraint.allowed([])
        tokens = allowed.tokens
        assert tokens, "nothing is allowed"
        token = random.choice(tokens)
        assert token in allowed
        assert allowed.only is None or tokens == [allowed.only]
        if not tokenizer.is_special(token) and not constraint.completes([token]):
            constraint.allowed([token])
        text.append(token)
        if tokenizer.is_special(token):
            return


def _grammar(_: Path) -> Rule:
    from tests.models_for_tests import toy_tokenizer

    tokenizer = toy_tokenizer()
    grammars = Grammars(tokenizer, [2])

    def rule(data: bytes) -> None:
        tree = table(data)
        with only(RequestError):
            _follow(grammars, tokenizer, _format_of(tree), len(data))

    return rule


def _grammar_seeds() -> list[bytes]:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^[a-z]+$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
            "kind": {"enum": ["a", 1, None]},
            "one": {"anyOf": [{"const": 5}, {"type": "number", "multipleOf": 0.5}, {"type": "boolean"}]},
            "when": {"type": "string", "format": "date-time"},
        },
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"tag": {"oneOf": [{"type": "string"}, {"allOf": [{"type": "null"}]}]}},
    }
    lark = 'start: greeting " " NAME ("," %json {"type": "null"})?\ngreeting: "hi" | "hey"\n'
    lark += "NAME: /[A-Z][a-z]{1,8}/ & ~/Bob/"
    values = (
        ("schema", schema),
        ("schema", json.dumps(schema)),
        ("json", None),
        ("regex", r"(ab|c+d?){2,5}[^x-z]\d\w*"),
        ("lark", lark),
        ("choice", ["yes", "no", "yes, but"]),
    )
    return [JSON.write({"kind": kind, "value": value}) for kind, value in values]


def _tools(_: Path) -> Rule:
    """Tools into a prompt, a call's grammar, and an answer's text read back."""
    from tests.models_for_tests import toy_tokenizer
    from tests.templates_for_tests import HERMES, LLAMA3, MISTRAL

    tokenizer, templates = toy_tokenizer(), {"hermes": HERMES, "mistral": MISTRAL, "llama3": LLAMA3}
    grammars = Grammars(tokenizer, [2])
    special = SpecialTokens(None, (2,), add_bos=False, pad=None)

    def rule(data: bytes) -> None:
        tree = table(data)
        source = templates.get(str(tree.get("form")), HERMES)
        bundle = cast(
            Bundle,
            SimpleNamespace(
                chat_template=ChatTemplate(source),
                tokenizer=tokenizer,
                manifest=SimpleNamespace(name="toy", special_tokens=special),
            ),
        )
        with only(RequestError):
            given = cast(Any, {"tools": tree.get("tools"), "tool_choice": tree.get("choice")})
            request = Request.of(given)
            check_tools(request.tools)
            with only(RequestError, TokenizerError):
                encode_chat(bundle, _MESSAGES, {"tools": request.tools})
            wanted = answer_format(bundle, request)
            reader = ToolReader(source, request.tools, tokenizer, [2])
            answer = tokenizer.encode(text_of(tree.get("answer")), special=True)
            content, calls = reader.read([1, *answer], answer)
            assert content == content.strip()
            for call in calls:
                json.dumps([content, call.to_message()], ensure_ascii=False).encode()
            if wanted is not None:
                _follow(grammars, tokenizer, wanted, len(data))

    return rule


def _tools_seeds() -> list[bytes]:
    from tests.templates_for_tests import TOOLS

    call = '{"name": "add", "arguments": {"a": 1, "b": {"c": [null, "</tool_call>"]}}}'
    answers = {
        "hermes": f"<think>x</think>Sure. <tool_call>\n{call}\n</tool_call> and <tool_call>{call}",
        "mistral": f'[TOOL_CALLS] [{call}, {call}]</s>[TOOL_CALLS]add[CALL_ID]abc[ARGS]{{"a": 1}}',
        "llama3": "<|python_tag|>"
        + call.replace("arguments", "parameters")
        + "; "
        + call.replace("arguments", "parameters"),
    }
    choices = ("auto", "required", {"type": "function", "function": {"name": "add"}})
    return [
        JSON.write({"form": form, "tools": TOOLS, "choice": choice, "answer": answer})
        for (form, answer), choice in zip(answers.items(), choices, strict=True)
    ]


TARGETS: Final = {
    "template": Target(
        form=JSON, seeds=_template_seeds, rule=_template, words=re.split(" ¦ |\n", _JINJA.strip())
    ),
    "grammar": Target(
        form=JSON,
        seeds=_grammar_seeds,
        rule=_grammar,
        words=(".*", "(a|b)*", "[^a]", "{1,9}", "%json", "/a/", '"a"', "\\d"),
    ),
    "tools": Target(
        form=JSON,
        seeds=_tools_seeds,
        rule=_tools,
        words=(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|python_tag|>",
            "{",
            "}",
            '"name": ',
        ),
    ),
}
