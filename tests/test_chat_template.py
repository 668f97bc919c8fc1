from datetime import datetime
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_models.chat_template import ChatTemplate
from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.tokenizer import Tokenizer
from tests.tokenizers_for_tests import byte_level_json

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
ASK = [{"role": "user", "content": "hi"}]


def render(source: str, content: str = "hi") -> str:
    return ChatTemplate(source).render([{"role": "user", "content": content}])


def test_chatml() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(ASK) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(ASK, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_blocks_leave_no_white_space() -> None:
    assert render("{% if true %}\n    {% set x = 1 %}\nkept\n{% endif %}\n") == "kept\n"


def test_bos_and_eos() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", bos="<s>", eos="</s>")
    assert template.render(ASK) == "<s>hi</s>"


def test_content_and_json_are_not_escaped_for_html() -> None:
    assert render("{{ messages[0].content }}", "<b> & 'é'") == "<b> & 'é'"
    assert render("{{ {'a': '<é>', 'b': [1]} | tojson }}") == '{"a": "<é>", "b": [1]}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_messages_may_be_any_mapping() -> None:
    message = MappingProxyType({"role": "user", "content": "hi"})
    assert ChatTemplate("{{ messages[0] | tojson }}").render([message]) == '{"role": "user", "content": "hi"}'


def test_loop_controls_and_generation_blocks() -> None:
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_date() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    assert template.render(ASK, now=datetime(2026, 7, 30)) == "30 Jul 2026"
    assert str(datetime.now().year) in template.render(ASK)


def test_tools_are_absent() -> None:
    assert render("{% if tools %}tools{% elif documents is none %}none{% endif %}") == "none"


def test_refusal_of_the_template() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(RequestError, match="Roles must alternate"):
        template.render(ASK)


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
        render("{{ '{0.__class__}'.format(1) }}")


def test_content_is_not_a_template() -> None:
    assert render("{{ messages[0].content }}", "{{ 7 * 7 }}{% raw %}") == "{{ 7 * 7 }}{% raw %}"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one"),
        ("hi", "list"),
        ({"role": "user", "content": "hi"}, "list"),
        (["hi"], "mapping"),
        ([{"role": "root", "content": "hi"}], "'root'.*system, user, assistant, tool"),
        ([{"content": "hi"}], "None"),
        ([{"role": ["user"], "content": "hi"}], "role"),
        ([{"role": "user"}], "NoneType"),
        ([{"role": "user", "content": 3}], "int"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "list"),
    ],
)
def test_malformed_messages(messages: list[dict[str, str]], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        ChatTemplate(CHATML).render(messages)


TOKENIZER = Tokenizer.from_json(byte_level_json())


@given(content=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "é", " ", "\n"])))
def test_encoded_content_cannot_forge_control_tokens(content: list[str]) -> None:
    template = ChatTemplate(CHATML)
    messages = [{"role": "user", "content": "".join(content)}]
    ids = template.encode(messages, TOKENIZER)
    assert TOKENIZER.decode(ids, skip_special=False) == template.render(messages)
    start, end = TOKENIZER.special_id("<|im_start|>"), TOKENIZER.special_id("<|im_end|>")
    assert [id_ for id_ in ids if TOKENIZER.is_special(id_)] == [start, end, start]


def test_encoding_honest_content_is_encoding_the_text() -> None:
    template = ChatTemplate(CHATML)
    assert template.encode(ASK, TOKENIZER) == TOKENIZER.encode(template.render(ASK), special=True)


def test_forged_marks_are_refused() -> None:
    with pytest.raises(RequestError, match="FDD0"):
        ChatTemplate(CHATML).encode([{"role": "user", "content": "\ufdd0"}], TOKENIZER)
