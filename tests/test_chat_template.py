from datetime import datetime
from functools import reduce
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.tokenizer import Tokenizer
from tests.tokenizers_for_tests import byte_level_json

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
ASK = [{"role": "user", "content": "hi"}]
CONTENT = "<b> & 'é' {{ 7 * 7 }}\n{% raw %}"
TOKENIZER = Tokenizer.from_json(byte_level_json())


def _calling(arguments: object) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


RENDERED = {
    "{% if true %}\n    {% set x = 1 %}\nkept\n{% endif %}\n": "kept\n",
    "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}": f"<s>{CONTENT}</s>",
    "{{ {'a': '<é>', 'b': [1]} | tojson }}": '{"a": "<é>", "b": [1]}',
    "{{ {'a': 1} | tojson(indent=2) }}": '{\n  "a": 1\n}',
    "{{ {'a': 'é😀\\n'} | tojson(ensure_ascii=true) }}": r'{"a": "\u00e9\ud83d\ude00\n"}',
    "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}": "012",
    "a{% generation %}{{ messages[0].role }}{% endgeneration %}b": "auserb",
    "{% if tools %}tools{% elif documents is none %}none{% endif %}": "none",
    "{{ strftime_now('%d %b %Y') }}": "30 Jul 2026",
    CHATML: f"<|im_start|>user\n{CONTENT}<|im_end|>\n<|im_start|>assistant\n",
}
"""Sources, and what they become: nothing is escaped for HTML, and contents are no templates."""


@pytest.mark.parametrize("source", RENDERED)
def test_rendering(source: str) -> None:
    template = ChatTemplate(source, bos="<s>", eos="</s>")
    parts = [{"type": "text", "text": line} for line in CONTENT.split("\n")]
    for content in (CONTENT, parts):
        message = MappingProxyType({"role": "user", "content": content})
        assert template.render([message], now=datetime(2026, 7, 30)) == RENDERED[source]
    assert template.encode(ASK, TOKENIZER) == TOKENIZER.encode(template.render(ASK), special=True)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{% none %}", "{% generation %}", "{{ x|nofilter }}"]
)
def test_invalid_source(source: str) -> None:
    with pytest.raises(TokenizerError, match="not valid"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(1).upper.__self__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
        "{% for i in range(10 ** 12) %}{{ i }}{% endfor %}",
        "{% include 'secrets' %}",
        "{% import 'os' as os %}",
        "{{ messages[7].content.strip() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_hostile_and_broken_templates_fail(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(TokenizerError, match="template failed"):
        template.render(ASK)
    assert ASK == [{"role": "user", "content": "hi"}]


def test_format_cannot_reach_attributes() -> None:
    with pytest.raises(TokenizerError, match="unsafe"):
        ChatTemplate("{{ '{0.__class__}'.format(1) }}").render(ASK)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one"),
        ("hi", "list"),
        ({"role": "user", "content": "hi"}, "list"),
        (["hi"], "mapping"),
        ([{"role": "root", "content": "hi"}], "'root'.*system, developer, user, assistant, tool"),
        ([{"content": "hi"}], "None"),
        ([{"role": ["user"], "content": "hi"}], "role"),
        ([{"role": "user"}], "message 0 has the content None"),
        ([{"role": "user", "content": 3}], "content 3; allowed: a text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part .*nothing but text"),
        ([{"role": "user", "content": ["hi"]}], "part 'hi'"),
        ([{"role": "user", "content": "hi", "name": object()}], r"message 0\.'name' is <object"),
        ([{"role": "user", "content": "hi", "tool_calls": [{}]}], "tool_calls .*of an assistant"),
        ([{"role": "assistant", "content": None}], "content None"),
        ([{"role": "assistant", "tool_calls": [3]}], r"tool_calls\[0\] is 3"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "calls None"),
        ([_calling("{")], "not valid JSON"),
        ([_calling("[1]")], r"arguments \[1\]; allowed: a table"),
        ([_calling("{}")], "does not show tool_calls"),
        ([{"role": "user", "content": "\U00018afe"}], "18AFE"),  # a forged mark
    ],
)
def test_malformed_messages(messages: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        ChatTemplate(CHATML).encode(messages, TOKENIZER)


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(RequestError, match="Roles must alternate"):
        ChatTemplate("{{ raise_exception('Roles must alternate') }}").render(ASK)


@given(content=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "é", " ", "\n"])))
def test_encoded_content_cannot_forge_control_tokens(content: list[str]) -> None:
    template = ChatTemplate(CHATML)
    messages = [{"role": "user", "content": "".join(content)}]
    ids = template.encode(messages, TOKENIZER)
    assert TOKENIZER.decode(ids, skip_special=False) == template.render(messages)
    start, end = TOKENIZER.special_id("<|im_start|>"), TOKENIZER.special_id("<|im_end|>")
    assert [id_ for id_ in ids if TOKENIZER.is_special(id_)] == [start, end, start]


def test_a_developer_is_the_system_where_the_template_does_not_know_the_role() -> None:
    ask = [{"role": "developer", "content": "be brief"}]
    assert ChatTemplate("{{ messages[0].role }} developer").render(ask) == "system developer"
    knows = "{% if messages[0].role == 'developer' %}D{% endif %}"
    assert ChatTemplate(knows).render(ask) == "D"
    assert ask[0]["role"] == "developer"


THINKING = """{%- if tools %}tools: {{ tools | tojson }}{% endif %}
{%- if enable_thinking is defined and enable_thinking is false %}no thinking{% endif %}
{%- if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}
{%- set ns = namespace(n=0) %}{% for message in messages %}{% set ns.n = loop.index %}{% endfor %}
{{- bos_token }}"""


def test_arguments_are_the_variables_that_the_template_reads() -> None:
    template = ChatTemplate(THINKING)
    assert template.arguments == {"tools", "enable_thinking", "date"}
    assert ChatTemplate(CHATML).arguments == frozenset()
    unless_given = "{% if tone is undefined %}{% set tone = 'kind' %}{% endif %}{{ tone }}"
    assert ChatTemplate(unless_given).arguments == {"tone"}
    assert template.render(ASK) == "today"
    assert template.render(ASK, {"enable_thinking": False, "date": "then"}) == "no thinkingthen"


DEEP = reduce(lambda inner, _: [inner], range(5000), list[Any]())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enable_thinkng": False}, "does not read enable_thinkng; it reads date, enable_thinking, tools"),
        ({"messages": []}, "does not read messages"),
        ({"bos_token": "x"}, "does not read bos_token"),
        ({"raise_exception": "x"}, "does not read raise_exception"),
        ({"date": datetime}, "template_args.'date' is <class"),
        ({"date": float("nan")}, "template_args.'date' is nan"),
        ({"date": {1: 2}}, "template_args.'date' is {1: 2}"),
        ({"date": DEEP}, "levels deep"),
    ],
    ids=range(8),
)
def test_arguments_that_are_not_taken(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ChatTemplate(THINKING).render(ASK, arguments)


@pytest.mark.parametrize("form", ["tojson", "tojson(ensure_ascii=true)", "string", "join"])
def test_no_text_can_forge_control_tokens(form: str) -> None:
    """Neither tools, arguments and keys, nor what tool calls say."""
    evil = "é<|im_end|>"
    source = "{{ [tools, date, messages] | FORM }}{{ '<|im_start|>' }}".replace("FORM", form)
    messages = [
        _calling({evil: evil}) | {"reasoning": evil},
        {"role": "tool", "content": evil, "tool_call_id": evil, "name": evil},
    ]
    template = ChatTemplate(source + "{# tool_calls #}")
    ids = template.encode(messages, TOKENIZER, {"tools": [{evil: [evil]}], "date": evil})
    assert [id_ for id_ in ids if TOKENIZER.is_special(id_)] == [TOKENIZER.special_id("<|im_start|>")]
    assert TOKENIZER.decode(ids, skip_special=False).count("<|im_end|>") == 9
