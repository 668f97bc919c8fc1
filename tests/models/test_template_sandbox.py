"""Chat templates that take time and memory without bound end in an error, soon; honest ones do not notice."""

import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import sleep, thread_time
from unittest.mock import patch

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_models.downloads.catalog import entries, find
from edgespec_models.downloads.download import pull
from edgespec_models.errors import Closed, EdgespecError, TokenizerError
from edgespec_models.text import template_sandbox
from edgespec_models.text.chat_template import ChatTemplate

ASK = [{"role": "user", "content": "hi"}]
BIG = "{% set big = 'a' * 12500 %}"
DOUBLING = "{% set ns = namespace(x='ab', l=['ab'], n=3) %}{% for i in range(60) %}"
ATTACKS = [
    '{{ "a"*3000000000 }}',
    '{{ 3000000000 * "a" }}',
    '{% set x = "a"*3000000000 %}',
    '{{ "a"|center(3000000000) }}',
    *(f'{{{{ "\t".{name}(3000000000) }}}}' for name in ("center", "ljust", "zfill", "expandtabs")),
    '{{ "%999999999d"|format(1) }}',
    '{{ "%999999999d" % 1 }}',
    '{{ "%*d" % (999999999, 1) }}',
    '{{ "%(a(b)c)999999999d" % {"a(b)c": 1} }}',
    '{{ "{:999999999}".format(1) }}',
    '{{ "{:{w}}".format(1, w=999999999) }}',
    '{{ "{0:{1}}{0:{1}}".format(1, 999999999) }}',
    '{% set f = "{0:999999999}".format %}{{ f(1) }}',
    "{{ 9 ** (9 ** 9) }}",
    "{{ 10 ** 100000000 }}",
    "{{ (10 ** 1000) * (10 ** 1000) }}",
    "{{ 1.5|round(1000000000, 'ceil') }}",
    "{{ (1).to_bytes(3000000000) }}",
    "{{ [0] * 3000000000 }}",
    "{{ (0,) * 3000000000 }}",
    "{{ 'a'|indent(3000000000, true) }}",
    "{{ [1]|tojson(indent=3000000000) }}",
    "{{ range(100000000)|list }}",
    "{{ [1]|batch(3000000000, 0)|list }}",
    "{{ [1]|slice(3000000000)|list }}",
    "{{ lipsum(100000000) }}",
    "{{ strftime_now('%999999999d') * 1000000 }}",
    BIG + "{{ big.replace('a', big) }}",
    BIG + "{{ big|replace('a', big) }}",
    BIG + "{{ big|replace('', big) }}",
    BIG + "{{ big.join(big) }}",
    BIG + "{{ big|join(big) }}",
    BIG + "{{ big|map('replace', 'a', big)|join }}",
    BIG + "{{ big|map('upper')|map('indent', big, true)|join }}",
    BIG + "{{ [big] * 100000 }}",
    BIG + "{{ ([big] * 100000)|tojson }}",
    BIG + "{{ '%s' * 30000 % ((big,) * 30000) }}",
    BIG + "{{ ('{0}' * 30000).format(big) }}",
    BIG + "{{ " + "big ~ " * 5000 + "big }}",
    BIG + "{{ big" + " ~ big" * 20 + " }}",
    BIG + "{% for i in range(100000) %}{{ big }}{% endfor %}",
    BIG + "{% set x %}{% for i in range(100000) %}{{ big }}{% endfor %}{% endset %}",
    BIG + "{% macro m() %}{{ big }}{{ big }}{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    BIG
    + "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = n.l + [big[i:]] %}{% endfor %}",
    "{% set x %}{% for i in range(100000) %}" + "a" * 50_000 + "{% endfor %}{% endset %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}x{% else %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% if range(99999)|list|length %}{% endif %}{% endfor %}",
    "{% for i in range(99999) %}{% if range(99999)|select('odd')|list %}{% endif %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% macro m(n) %}{{ m(n - 1) }}{{ m(n - 1) }}{% endmacro %}{{ m(40) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% block b %}{{ self.b() }}{% endblock %}",
    DOUBLING + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    DOUBLING + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    DOUBLING + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    DOUBLING + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    DOUBLING + "{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l|string }}",
    DOUBLING + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l|tojson }}",
    DOUBLING + "{% set ns.l = namespace(a=[ns.l, ns.l]) %}{% endfor %}{{ ns.l }}",
    "{% set n = namespace() %}{% set l = [n] * 9 %}{% set n.x = [l, l] %}{{ l|string }}{{ l * 99999 }}",
    "{{ (range(50000)|map('string')|map('list')|list)|sum(start=[]) }}",
    "{% set a, b = namespace(), namespace() %}{% set a.x = b %}{% set a.y = b %}{{ a|string }}",
    "{% macro a() %}{{ varargs|string }}{% endmacro %}"
    "{% macro b() %}{{ a(*[varargs] * 99999) }}{% endmacro %}{{ b(1, 2, 3) }}",
    "{{ ('{a}' * 30000).format_map({'a': 'a' * 12500}) }}",
    "{{ ('<!--x-->' * 20000)|striptags }}",
    "{{ ('a ' * 50000)|wordwrap(1)|wordwrap(1) }}",
    "{% set b, n = [0] * 16000, namespace() %}"
    "{% for i in range(9999) %}{% set n.l = [n.l, b[:]] %}{% endfor %}",
    BIG + "{{ big * big }}",
    *(
        "{% set m = 2**61 - 1 %}" + made
        for made in (
            "{{ {}.fromkeys(range(0, m * 99999, m)) }}",
            "{{ range(0, m * 99999, m)|unique|list }}",
            "{{ [{'a': m}]|unique(attribute='a')|list }}",
            "{{ {m: 1} }}",
            "{{ {(-1, -2): 1, (-2, -1): 1} }}",
            "{{ dict([[m, 1]]) }}",
            "{{ namespace([(range(m, m + 1), 1)]) }}",
            "{{ {1: m}.items() - [] }}",
        )
    ),
    BIG + "{{ big.rfind(big[1:6000] ~ 'b' ~ big[1:6000]) }}",
    BIG + "{{ big.strip('b' * 10000 ~ 'a') }}",
    BIG + "{{ big|trim('b' * 10000 ~ 'a') }}",
    BIG + "{{ big|list|select('in', big|list ~ 'b')|map('in')|list }}",
    "{% set l = range(99999)|list %}{{ range(99999)|select('in', l[50000:])|list }}",
    "{{ range(99999)|map('string')|map(attribute='0.' * 9999 ~ '0')|list }}",
    "{% macro m" + "a" * 9999 + "() %}{% endmacro %}{{ [m" + "a" * 9999 + "] * 9999 }}",
    "{% set l = range(16000)|list %}" + "{% if -1 in l %}{% endif %}" * 1000,
]


def outcome(source: str) -> TokenizerError:
    with pytest.raises(TokenizerError, match="chat template") as caught:
        ChatTemplate(source).render(ASK)
    return caught.value


@pytest.fixture
def eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the limits, so that what ends in the time of all of them has an eighth of it."""
    for name, value in {"_LARGEST": 1 << 15, "_SECONDS": 0.125}.items():
        monkeypatch.setattr(template_sandbox, name, value)


REASONS = {
    "{{ 'a' * 99999999 }}": "a value has more than [0-9,]+ characters or items, the limit",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "more than 0.1 s, the",
    "{% for i in range(99999) %}" + "a" * 5000 + "{% endfor %}": "more than [0-9,]+ characters, the most it",
    "{{ 9 ** 9999 }}": "a number of 39,996 bits; allowed: at most 4096",
    "{{ '%9999d' % 1 }}": "the format '%9999d' has a width that is no number below 1,000",
    "{{ '{:9999}'.format(1) }}": "the format '{:9999}' has a width that is no number",
    "{{ [[1]]|sum(start=[]) }}": r"sum starts at \[\]; allowed: a number",
    "{{ {1: 2}.keys() - [1] }}": "it subtracts from dict_keys.*; allowed: from numbers",
    "{{ [1]|tojson(indent=101) }}": "tojson has the indent 101; allowed: none, or at most 100",
    "{{ 'a'.strip('b' * 65) }}": "65 characters; allowed: at most 64",
    "{{ 'a'|trim('b' * 65) }}": "65 characters; allowed: at most 64",
    "{% set n = namespace() %}{{ [n] }}": "a namespace into another value; allowed: into a variable",
}


@pytest.mark.parametrize(("source", "reason"), REASONS.items(), ids=range(len(REASONS)))
@pytest.mark.usefixtures("eighth")
def test_a_limit_is_said_and_what_to_do(source: str, reason: str) -> None:
    assert re.search(
        f"failed: SecurityError: .*{reason}.*; use the model's original template", str(outcome(source))
    )


def test_closing_ends_a_rendering() -> None:
    """Within moments, not after the seconds that a template has."""
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    slow = ChatTemplate(endless, named={"rag": endless})
    with ThreadPoolExecutor(1) as thread:
        rendering = thread.submit(slow.render, ASK, {})
        sleep(0.1)
        slow.close()
        with pytest.raises(Closed, match="closed while its chat template ran"):
            rendering.result(1.0)
    with pytest.raises(Closed):
        slow.render(ASK)


ATTACK = pytest.mark.parametrize("source", ATTACKS, ids=range(len(ATTACKS)))


@ATTACK
@pytest.mark.usefixtures("eighth")
def test_attacks_end_soon(source: str) -> None:
    started = thread_time()
    outcome(source)
    assert thread_time() - started < 3.0  # in which Python may collect the memory of all tests


@ATTACK
@pytest.mark.usefixtures("eighth")
def test_attacks_take_little_memory(source: str) -> None:
    tracemalloc.start()  # which makes everything slower
    try:
        outcome(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64e6  # the longest source takes some 50 to compile, and other tests' threads some


@pytest.mark.parametrize("number", [45, 52, 64])
def test_under_the_limits_that_all_have(number: int) -> None:
    """Those that end by what they make in all, by what a value may be, and by the time; in any thread."""

    def attack() -> float:
        outcome(ATTACKS[number])
        return thread_time()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(attack).result() < 20.0


FILTERS, TESTS = sorted(template_sandbox.Sandbox().filters), sorted(template_sandbox.Sandbox().tests)
PYTHONS: tuple[object, ...] = ("", 1, 0.5, [], (), {}, {}.items(), range(1))
METHODS = sorted({name for value in PYTHONS for name in dir(value)})
VALUES = {
    "number": "-5",
    "large": "2 ** 61 - 1",
    "text": "('a' * 100) * 2400",
    "middle": "('a' * 100) * 500 ~ 'b' ~ ('a' * 100) * 500",
    "behind": "('b' * 100) * 1000 ~ 'a'",
    "path": "('0.' * 100) * 500 ~ '0'",
    "fields": "('{0[0]}' * 100) * 100",
    "texts": "(('ab ' * 100) * 300).split()",
    "alike": "range(0, (2 ** 61 - 1) * 30000, 2 ** 61 - 1)",
    "pairs": "([(0, -1)] * 100) * 300",
    "tables": "[{'a': 1, 'b': [1]}] * 20000",
    "nested": "[[['a'] * 9] * 9] * 300",
}
"""Values near the limit of one, for which a step that takes the product of two sizes takes minutes."""
ARGUMENTS = st.lists(
    st.sampled_from([*VALUES, "'in'", "'join'", "1", "attribute=path", "attribute='0'"]),
    max_size=2,
    unique=True,
)
STEPS = st.one_of(
    st.builds("{}|{}(".format, st.sampled_from([*VALUES]), st.sampled_from(FILTERS)),
    st.builds("{}.{}(".format, st.sampled_from([*VALUES]), st.sampled_from(METHODS)),
    st.builds("{}|map('{}', ".format, st.sampled_from([*VALUES]), st.sampled_from(FILTERS)),
    st.builds("{}|select('{}', ".format, st.sampled_from([*VALUES]), st.sampled_from(TESTS)),
)


@settings(max_examples=60, deadline=None)
@given(STEPS, ARGUMENTS)
def test_every_step_is_short(step: str, arguments: list[str]) -> None:
    """Whatever a template names, with whatever it gives: it is rendered or refused, soon."""
    source = "".join(f"{{% set {name} = {value} %}}" for name, value in VALUES.items())
    listed = "|list" if "('" in step else ""
    last = ", ".join(sorted(arguments, key=lambda argument: "=" in argument))
    source += f"{{{{ ({step}{last}){listed}|string|length }}}}"
    started = thread_time()
    with patch.object(template_sandbox, "_SECONDS", 0.125), suppress(EdgespecError):
        ChatTemplate(source).render(ASK)
    assert thread_time() - started < 5.0


def test_no_template_names_more_than_jinjas_filters_and_tests() -> None:
    """Whatever takes a name, such as ``map``, could call the sandbox's own."""
    assert {*FILTERS} <= jinja2.Environment().filters.keys()
    assert {*TESTS} <= jinja2.Environment().tests.keys()


def test_long_conversations_have_time_for_each_pair_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "_SECONDS", 0.0)
    pairs = "{% for m in messages %}{% for n in messages %}{{ n.role[0] == m }}{% endfor %}{% endfor %}"
    assert ChatTemplate(pairs).render(ASK * 300) == "False" * 300**2
    outcome(pairs.replace("messages", "range(99999)"))


UNCOMPILABLE = [
    "x" * 200_000,
    "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    *("{{ " + value + " }}" for value in ("9" * 5000, "(" * 5000 + "1" + ")" * 5000, "1" + " + 1" * 30_000)),
]


@pytest.mark.parametrize("source", UNCOMPILABLE, ids=range(5))
def test_sources_that_cannot_be_compiled(source: str) -> None:
    outcome(source)


def test_honest_templates_are_as_before() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] if m.role != 'tool' %}"
        "{{ loop.index }}/{{ loop.length }}{{ ', ' if not loop.last }}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}|{{ '%s-%02d'|format('a', 3) }}|{{ '{:>4}'.format(7) }}|{{ 'a' * 3 }}|{{ 'x' ~ 1 ~ none }}"
        "|{{ ['b', 'a']|sort|join(', ') }}|{{ 'a-b'.replace('-', '+') }}|{{ 'a b'.split() }}|{{ [1, 2][1:] }}"
        "|{{ 'a\\nb'|indent(2) }}|{{ {'a': [1]}|tojson(indent=2) }}|{{ [1, 2]|sum }}|{{ 2 ** 10 }}"
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('y') }}{{ ', '.join(['a', 'b']) }}"
        "{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    )
    text = "1/2, 2/22|a-03|   7|aaa|x1None|a, b|a+b|['a', 'b']|[2]|a\n  b|"
    assert ChatTemplate(source).render(ASK * 2) == text + '{\n  "a": [\n    1\n  ]\n}|3|1024<y>a, b12'


@pytest.mark.models
@pytest.mark.parametrize("name", entries())
def test_the_catalogues_templates_are_as_before(name: str) -> None:
    with GGUFCheckpoint(pull(find(name))) as checkpoint:
        source = checkpoint.chat_templates().get("default")
    if source is None:
        pytest.skip("a model without a template")
    texts = {"system": "Be é.", "user": " a\n<|im_end|> ", "assistant": "b"}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    messages.append({"role": "user", "content": "c"})
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    facts = {"tools": None, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    for count in (1, 2, 4):
        before = plain.render(messages=messages[-count:], **facts)
        assert ChatTemplate(source, bos="<s>", eos="</s>").render(messages[-count:]) == before


def test_long_conversations() -> None:
    chatml = (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}x{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(ChatTemplate(chatml).render(messages)) == 1 + 2000 * (1000 + 28)
    one = [{"role": "user", "content": "x" * 10_000_000}]
    assert len(ChatTemplate(chatml).render(one)) == 10_000_000 + 29
