"""Calls as models write them, with slips: what leaves no doubt is read, and never anything else."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.answering.call_reading import CallReader
from edgespec.asking.tool_calls import FORMS, BegunCalls, Calls, Form, format_of, marks_of
from edgespec.decoding.draft import NO_DRAFT
from edgespec.decoding.grammar import Grammars
from edgespec.running.begun import BegunParts
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.templates import SHOWN
from tests.kit.tokenizers import byte_level_json

TEXT = {"type": "string"}


def table(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


TOOLS: dict[str, Any] = {
    "sh": table(line=TEXT),
    "save": table(file=TEXT, body=TEXT),
    "move": table(to=TEXT, by={"type": "number"}),
    "pick": table(ids={"type": "array"}, how={"type": "object"}),
    "count": table(**{"from": {"type": "integer"}}),
    "mail.send": table(subject=TEXT),
}
BY_NAME = {form.name: form for form in FORMS}
Called = list[tuple[str, dict[str, Any]]]


def read(form: str, pieces: list[str], *, cut: bool = False) -> tuple[str, Called]:
    reader, shown = CallReader(BY_NAME[form], TOOLS, [1]), ""
    for at, piece in enumerate([*pieces, ""]):
        reader.cut = cut
        shown += reader.push(piece, final=at == len(pieces))[0]
    return shown, [(call.name, dict(call.arguments)) for call in reader.calls]


def hermes(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def lfm2(text: str) -> str:
    return f"<|tool_call_start|>[{text}]<|tool_call_end|>"


def gemma(text: str) -> str:
    return f"<|tool_call>call:{text}<tool_call|>"


def xml(name: str, inner: str) -> str:
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


SH, SAVE = (
    '{"name": "sh", "arguments": {"line": %s}}',
    '{"name": "save", "arguments": {"file": "f", "body": %s}}',
)
SLIPS: list[tuple[str, str, Called]] = [
    ("hermes", hermes(SH % '"a\n\tb"'), [("sh", {"line": "a\n\tb"})]),
    ("hermes", hermes(SH % r'"cd C:\Users\new\Work"'), [("sh", {"line": r"cd C:\Users\new\Work"})]),
    ("hermes", hermes(SH % r'"grep \d+\n \w"'), [("sh", {"line": "grep \\d+\n \\w"})]),
    ("hermes", hermes(SH % r'"say \'so\'"'), [("sh", {"line": "say 'so'"})]),
    ("hermes", hermes((SH % '"ls"')[:-1]), [("sh", {"line": "ls"})]),
    ("hermes", hermes((SH % '"ls"')[:-2]), [("sh", {"line": "ls"})]),
    ("hermes", hermes(SH % '"ls"' + "}}"), [("sh", {"line": "ls"})]),
    ("hermes", hermes(SH % '"ls",,'), [("sh", {"line": "ls"})]),
    ("hermes", hermes('{"name": "pick", "arguments": {"ids": [1, 2]], "how": {},}}'),
     [("pick", {"ids": [1, 2], "how": {}})]),
    ("hermes", hermes('{{"name": "sh", "arguments": {{"line": "ls"}}}}'), [("sh", {"line": "ls"})]),
    ("hermes", hermes(SAVE % '"say("x", "y")"'), [("save", {"file": "f", "body": 'say("x", "y")'})]),
    ("hermes", hermes(SAVE % '"d = {"file": "b"}"'), [("save", {"file": "f", "body": 'd = {"file": "b"}'})]),
    ("hermes", hermes(SAVE % '"""one "two" three"""'), [("save", {"file": "f", "body": 'one "two" three'})]),
    ("hermes", hermes(SAVE % '"def f():\\n    """Adds."""\\n"'),
     [("save", {"file": "f", "body": 'def f():\n    """Adds."""\n'})]),
    ("hermes", hermes("{'name': 'pick', 'arguments': {'ids': (1, None, True)}}"),
     [("pick", {"ids": [1, None, True]})]),
    ("hermes", hermes('{"name": "sh", "line": "ls"}'), [("sh", {"line": "ls"})]),
    ("hermes", hermes('{"name": "sh", "arguments": {}, "line": "ls"}'), [("sh", {"line": "ls"})]),
    ("hermes", hermes('{"name": "sh", "word": "ls"}'), []),
    ("hermes", hermes('{"name": "functions.sh", "arguments": {}}'), [("sh", {})]),
    ("hermes", hermes('{"name": "send", "arguments": {}}'), [("mail.send", {})]),
    ("hermes", hermes('{"name": "post.send", "arguments": {}}'), [("post.send", {})]),
    ("hermes", hermes('{"tool_calls": [{"id": "1", "function": {"name": "sh", "arguments": "{}"}}]}'),
     [("sh", {})]),
    ("hermes", hermes(SH % '"cat </tool_call> {"'), [("sh", {"line": "cat </tool_call> {"})]),
    ("hermes", f"So.\n\n{SH % '1'}", [("sh", {"line": 1})]),
    ("hermes", f"So.\n\n{SH % '1'}\n\nThat would do it.", []),
    ("hermes", f"<tools>\n{SH % '1'}\n</tools>", [("sh", {"line": 1})]),
    ("hermes", hermes(SH % '"ls'), []),
    ("hermes", hermes('{"name": "pick", "arguments": {"ids": 1+2j}}'), []),
    ("hermes", hermes('{"name": "pick", "arguments": {"ids": [NaN]}}'), []),
    ("hermes", hermes(SH % "open('f')"), []),
    ("llama3", '{"name": "sh", "parameters": {"line": None}}', [("sh", {"line": None})]),
    ("llama3", '{"name": "sh", "parameters": {"line": "ls"}', [("sh", {"line": "ls"})]),
    ("llama3", '{"name": "sh", "parameters": {"line": "ls"', []),
    ("args", '[TOOL_CALLS]sh[ARGS]{"line": "a\nb"}', [("sh", {"line": "a\nb"})]),
    ("args", '[TOOL_CALLS]sh[ARGS]{"line": "a"', []),
    ("lfm2", lfm2("save(file='f', body=\"a\nb\")"), [("save", {"file": "f", "body": "a\nb"})]),
    ("lfm2", lfm2(r"sh(line=r'C:\t\n')"), [("sh", {"line": r"C:\t\n"})]),
    ("lfm2", lfm2("sh(line=f'a'), sh(line=f'{a}')"), []),
    ("lfm2", lfm2("pick(how={'a': true, 'b': None})"), [("pick", {"how": {"a": True, "b": None}})]),
    ("lfm2", "So.\n[count(from=-3)]", [("count", {"from": -3})]),
    ("lfm2", "So [count, 3].\n[count, 3]", []),
    ("lfm2.5", lfm2(r"""sh(line='it's \"so\"\n')"""), [("sh", {"line": r"it's \"so\"\n"})]),
    ("lfm2.5", lfm2("save(file='f', body='x('a', n='b')')"),
     [("save", {"file": "f", "body": "x('a', n='b')"})]),
    ("lfm2.5", lfm2(r"sh(line='\"'), sh(line=''')"), [("sh", {"line": r"\""}), ("sh", {"line": "'"})]),
    ("lfm2.5", lfm2("save(file='f', body='a(1), b('c', n='d'), e('')"), []),
    ("gemma4", gemma('sh{"line": "ls"}'), [("sh", {"line": "ls"})]),
    ("gemma4", gemma("move{to:home,by:2}"), [("move", {"to": "home", "by": 2})]),
    ("gemma4", gemma('move(to=<|"|>a"b<|"|> by=2)'), [("move", {"to": 'a"b', "by": 2})]),
    ("gemma4", gemma("pick{ids:['a]', \"b}\"]}"), [("pick", {"ids": ["a]", "b}"]})]),
    ("gemma4", gemma("move{by:home}"), []),
    ("xml", xml("save", "<parameter=file>\nf\n</parameter>\n<parameter=body>\n</parameter>x\n</parameter>\n"),
     [("save", {"file": "f", "body": "</parameter>x"})]),
    ("xml", xml("save", "<parameter=file>\nf\n<parameter=body>\nx\n"),
     [("save", {"file": "f", "body": "x"})]),
    ("xml", xml("save", "<parameter=file>\nf\n</parameter></parameter>\n"), [("save", {"file": "f"})]),
    ("xml", '<function name="count"><parameter name="from">3.0</parameter></function>',
     [("count", {"from": 3})]),
    ("xml", "<function=save>\n<parameter=body>\nx", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "calls"), SLIPS)
def test_slips_are_read_as_they_are_meant(form: str, text: str, calls: Called) -> None:
    whole, single = read(form, [text]), read(form, [*text])
    assert whole == single
    assert whole[1] == calls
    assert whole[0].strip() == (text if not calls else "So." if text.startswith("So.") else "").strip()


@pytest.mark.parametrize("text", [text for _, text, calls in SLIPS if calls])
def test_a_call_that_was_cut_is_none(text: str) -> None:
    """Wherever a limit of tokens cuts it, no arguments are shorter than those of the whole text."""
    for form in ("hermes", "lfm2", "gemma4", "xml"):
        whole = read(form, [text])[1]
        for end in range(len(text)):
            assert all(call in whole for call in read(form, [text[:end]], cut=True)[1])


PIECES = (
    "<tool_call>", "</tool_call>", '{"name": "save", "arguments": {', '"file": ', '"body": ', '"', "'", '"""',
    "{", "}", "}}", "[", "]", ", ", ": ", "\n", "x", "a b", "1", "true", "[save(", "file=", "body=", ")",
    "```", "<function=save>", "<parameter=body>", "</parameter>", "</function>", "call:save{", "file:",
    '<|"|>',
)  # fmt: skip


def leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (key, *leaves(inner))]
    if isinstance(value, list):
        return [text for inner in value for text in leaves(inner)]
    return [value] if isinstance(value, str) else [json.dumps(value)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.sampled_from([*BY_NAME]), st.data())
def test_arguments_are_contained_in_the_text_as_they_are_written(
    text: str, form: str, data: st.DataObject
) -> None:
    text = data.draw(st.sampled_from(["", form_mark(BY_NAME[form])])) + text
    shown, found = read(form, [text])
    assert found or shown == text
    for name, arguments in found:
        assert name in text
        assert all(leaf in text for leaf in leaves(arguments))


def form_mark(form: Form) -> str:
    return form.around[0] or form.tags[0]


# ---- a grammar from the mark on --------------------------------------------------------------------------

CONTROL = (
    "<|endoftext|>",
    "<|im_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call|>",
    "<|message|>",
    "<|constrain|>",
)
TOKENIZER = Tokenizer.from_json(byte_level_json(specials=CONTROL))
MAKE = {**table(text=TEXT, many={"type": "integer", "maximum": 9}), "required": ["text", "many"]}
MADE: dict[str, Any] = {"type": "function", "function": {"name": "make", "parameters": MAKE}}
REST: dict[str, Any] = {"type": "function", "function": {"name": "rest"}}


def holding(form: str, *tools: dict[str, Any]) -> BegunParts:
    shown = format_of(SHOWN[form])
    assert shown is not None
    grammars, names = Grammars(TOKENIZER, [1]), [tool["function"]["name"] for tool in tools]
    constraint = BegunParts(
        TOKENIZER,
        marks_of(shown, names, TOKENIZER),
        lambda name: grammars.constraint(BegunCalls(shown, tools, TOKENIZER, name)),
    )
    constraint.begin([5])
    return constraint


def held(form: str, text: str, *tools: dict[str, Any]) -> tuple[str, str | None]:
    """What the grammar holds of a text: the text before, and the text up to what it forbids, if anything."""
    constraint = holding(form, *(tools or (MADE, REST)))
    tokens, free = TOKENIZER.encode(text, special=True), None
    for at, token in enumerate(tokens):
        allowed = constraint.allowed(tokens[:at])
        if free is None and 0 not in allowed:
            free = TOKENIZER.decode(tokens[:at], skip_special=False)
        if token not in allowed:
            return free or "", TOKENIZER.decode(tokens[:at], skip_special=False)
    assert 0 in constraint.allowed(tokens)
    return text if free is None else free, None


JSON = '{"name": "make", "arguments": {"many": %s,"text": "a"}}'
ARGS = '{"many": %s, "text": "a"}'
TAGGED = (
    "<tool_call>\n<function=make>\n<parameter=many>\n%s\n</parameter>\n<parameter=text>\n</x>\n</parameter>\n"
)


@pytest.mark.parametrize(
    ("form", "before", "text"),
    [
        ("hermes", "So. <tool_call>\n{", f'"name"{JSON[7:]}\n</tool_call>\n'),
        (
            "hermes",
            '```json\n{\n  "name": "make",\n  "arguments":',
            ' {\n "many": %s, "text": "a"\n  }\n}\n```',
        ),
        ("hermes", '{{"name": "make", "arguments":', f"{ARGS}}}}}"),
        ("xml", "<tool_call>\n<", f"{TAGGED[13:]}</function>\n</tool_call>"),
        ("xml", "<function=make>", f"{TAGGED[27:]}</function>"),
        ("mistral", "[TOOL_CALLS]", f" [{JSON}, {JSON % 2}]"),
        ("args", "[TOOL_CALLS]", f"make[ARGS]{ARGS}[TOOL_CALLS]make[ARGS]{ARGS % 1}"),
        ("args", '{"name": "make", "arguments":', f"{ARGS}}}"),
        ("granite", "<|tool_call|>", f"[{JSON}]"),
        ("nemotron", "<TOOLCALL>[", f"{JSON}, {JSON % 2}]</TOOLCALL>"),
        ("functools", "functools[", f"{JSON}]"),
        ("llama3", '{"name": "make", "parameters":', f"{ARGS}}}"),
        ("harmony", "commentary to=functions.make <|constrain|>json<|message|>", ARGS),
    ],
)
def test_a_begun_call_is_held_to_its_schema_in_any_order(form: str, before: str, text: str) -> None:
    assert held(form, f"{before}{text % 3} so.") == (before, None)
    begun = before + re.split("%s", text)[0]
    assert held(form, f"{before}{text % 30}")[1] == f"{begun}3"


@pytest.mark.parametrize(
    "text",
    ["the mark <tool_call> begins", '{"name": "other", "arguments": {}}', "", "{", "<tool_call>make()"],
)
def test_other_texts_are_free(text: str) -> None:
    assert held("hermes", text) == (text, None)


def test_a_begun_call_has_all_that_is_required() -> None:
    begun = '{"name": "make", "arguments": {"many": 3'
    assert held("hermes", begun + "}}")[1] == begun


def test_what_a_held_call_has_to_say_is_drafted() -> None:
    constraint = holding("args", MADE, REST)
    constraint.begin([5, *TOKENIZER.encode("So. [TOOL_CALLS]m", special=True)])
    draft = constraint.fit(NO_DRAFT, NO_DRAFT, 9)
    assert TOKENIZER.decode(draft.tokens).startswith("ake") and {*draft.sources} == {"grammar"}


def test_a_call_that_no_grammar_follows_to_its_end_is_free_from_there() -> None:
    words = "^$|(^(?:\\S+\\s+){0,99}\\S+$)"  # of which llguidance makes too many expressions
    long = {"type": "string", "maxLength": 5000, "pattern": words}
    tool = {"type": "function", "function": {"name": "make", "parameters": table(text=long)}}
    constraint, begun = holding("hermes", tool), '{"name": "make", "arguments": {"text": "'
    tokens = [5, *TOKENIZER.encode(begun)]
    constraint.begin(tokens)
    assert 0 not in constraint.allowed(())
    for _ in range(1000):
        tokens += TOKENIZER.encode("a ")
        constraint.begin(tokens)
        if 0 in constraint.allowed(()):
            break
    assert 0 in constraint.allowed(()) and not constraint.ends(tokens)


@pytest.mark.parametrize("form", ["hermes", "xml", "args", "harmony"])
def test_rules_beside_a_circular_reference_do_not_free_a_call(form: str) -> None:
    node = {"$ref": "#/$defs/Node", "type": "object", "title": "a node"}
    nodes = {"Node": table(below={"type": "array", "items": node})}
    parameters = {**table(tree=node, many={"type": "integer", "maximum": 9}), "$defs": nodes}
    tool = {"type": "function", "function": {"name": "make", "parameters": parameters}}
    begun = {
        "hermes": '{"name": "make", "arguments": {"many": 3',
        "xml": "<function=make>\n<parameter=many>\n3",
        "args": '[TOOL_CALLS]make[ARGS]{"many": 3',
        "harmony": 'commentary to=functions.make <|constrain|>json<|message|>{"many": 3',
    }[form]
    assert held(form, f"{begun}0", tool)[1] == begun
    forced = Calls(BY_NAME[form], [tool], TOKENIZER)
    assert 0 not in Grammars(TOKENIZER, [1]).constraint(forced).allowed(())


def test_a_held_call_may_have_arguments_that_its_schema_does_not_name() -> None:
    begun = '{"name": "make", "arguments": {"text": "a", "many": 3, "more": [1]}} so'
    assert held("hermes", begun)[1] is None
    begun = TAGGED % 3 + "<parameter=more>\nx\n</parameter>\n</function>\n</tool_call>"
    assert held("xml", begun)[1] is None
