"""Tools through the model's template, and calls read out of answers, in each form that models write."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.answering.answer_reading import AnswerReader
from edgespec.asking.tool_calls import Calls, check_tools, format_of
from edgespec.decoding.grammar import AnyJson, Choice, Compilable, Grammars, JsonSchema, Lark, Regex
from edgespec_models.errors import RequestError
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.thoughts import Tags, ThoughtState
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.calls import (
    DO,
    PIECES,
    REST,
    WRITERS,
    Call,
    Write,
    bare,
    calls,
    cut,
    fenced,
    read,
    reader_of,
    texts,
)
from tests.kit.templates import HERMES, LLAMA3, MISTRAL, SHOWN, TOOLS
from tests.kit.tokenizers import byte_level_json

CONTROL = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>"
TOKENIZER = Tokenizer.from_json(byte_level_json(specials=CONTROL))
(END,) = TOKENIZER.encode("<|im_end|>", special=True)
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'
BARE = '{"name": "do_it", "arguments": {"number": 1}}'
DONE = ("do_it", {"number": 1})
ASK = [{"role": "user", "content": "1 + 2?"}]

TAGS = "<tool_call></tool_call>"
HALVES = (
    r'{"a\ud800": ["\ud83d\ude00", "\udc00b"], "b": "0123456789\ud83d\ude00\ud83d"}'  # of characters are none
)
HALVED = {"a\ufffd": ["😀", "\ufffdb"], "b": "0123456789😀\ufffd"}
Called = list[tuple[str, Any]]


def called(arguments: str) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'


def xml(*parameters: str) -> str:
    inner = "".join(f"<parameter={parameter}</parameter>\n" for parameter in parameters)
    return f"<tool_call>\n<function=do_it>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize("form", SHOWN)
def test_a_template_tells_its_form(form: str) -> None:
    found = format_of(SHOWN[form])
    assert found is not None and found.name == form


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", {"a": 1, "b": [2, "x"]})]),
        ("hermes", f" See.\n<tool_call>{ADD}</tool_call>\nDone.\n", " See.\n\nDone.", 1),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": 3, "name": "now"}', "", [("now", {"a": 1})]),
        ("hermes", called(r'"{\"a\": 1}"'), "", [("f", {"a": 1})]),
        ("hermes", called(f'{{"a": "{TAGS}"}}') + "!", "!", [("f", {"a": TAGS})]),
        ("hermes", called(HALVES), "", [("f", HALVED)]),
        ("hermes", called('{"a": 1, "a": 2}'), "", [("f", {"a": 2})]),
        ("hermes", f"<tool_call>[{ADD}]</tool_call>", "", 1),
        ("hermes", f"{called('{]')} then {called('{}')}", f"{called('{]')} then", [("f", {})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', None, []),
        ("hermes", "<tool_call>add(1, 2)</tool_call>", None, []),
        ("hermes", "<tool_call>[]</tool_call>", None, []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
        ("hermes", called("[1]"), None, []),
        ("hermes", called('{"a": NaN}'), None, []),
        ("hermes", called('{"a": 1e999}'), None, []),
        ("hermes", called('"[1]"'), None, []),
        ("hermes", called('{"a": ' + "[" * 99 + "]" * 99 + "}"), None, []),
        ("hermes", ADD, None, []),  # no tool of that name
        ("hermes", BARE, "", [DONE]),
        ("hermes", f"\n{BARE}\n", "", [DONE]),
        ("hermes", f"{{{BARE}}}", "", [DONE]),
        ("hermes", f"<tool_call>\n{{{BARE}}}\n</tool_call>", "", [DONE]),
        ("hermes", f"```json\n{BARE}\n```", "", [DONE]),
        ("hermes", f"I call:\n```\n[{BARE}, {BARE}]\n```\nso.", "I call:\nso.", [DONE, DONE]),
        ("hermes", f"```json\n{BARE}\n{BARE}\n```", "", [DONE, DONE]),
        ("hermes", f"```json\n{BARE}", "", [DONE]),
        ("hermes", f"See:\n{BARE}\n", "See:", [DONE]),
        ("hermes", f"See:\n{BARE}\nSo.", None, []),
        ("hermes", f"See {BARE}", None, []),
        ("hermes", f"see ```{BARE}```", None, []),
        ("hermes", '{"name": "rest"}', None, []),
        ("hermes", '{"name": "rest", "arguments": [1]}', None, []),
        ("hermes", '{"name": "rest", "arguments": {}, "why": 1}', None, []),
        ("hermes", '{"type": "function", "name": "rest", "arguments": {}}', "", [("rest", {})]),
        ("hermes", '{"name": "Ada", "age": 36}', None, []),
        ("hermes", f"```python\nx = {BARE}\n```", None, []),
        ("hermes", f"{called('{}')}\n```json\n{BARE}\n```", f"```json\n{BARE}\n```", [("f", {})]),
        ("llama3", f"```json\n{BARE}\n```", "", [DONE]),
        ("smollm3", "<code>\n</code>", None, []),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}', "", [("add", {"a": 1})]),
        ("mistral", f"[TOOL_CALLS] [{ADD}, {{", None, []),
        ("mistral", "[TOOL_CALLS] [1, 2", None, []),
        ("mistral", "[TOOL_CALLS] are what I write", None, []),
        ("args", '[TOOL_CALLS]now{}[TOOL_CALLS]add[ARGS]{"a": 1}.', ".", [("now", {}), ("add", {"a": 1})]),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
        ("llama3", '{"name": "rest", "parameters": {}} is what I call.', "is what I call.", 1),
        ("llama3", '{"name": "Ada", "parameters": {"age": 36}}', None, []),
        ("llama3", "[1, 2]", None, []),
        ("llama3", '{"answer": {"name": "rest"}}', None, []),
        ("llama3", ' Three. {"name": "rest", "parameters": {}}', None, []),
        ("llama3", r"""[do_it(text='it\'s \x41\d "q"', items=(1, True, None,))]""", "",
         [("do_it", {"text": "it's A\\d \"q\"", "items": [1, True, None]})]),
        ("llama3", "[do_it(number=1+2j)]", None, []),
        ("llama3", "[do_it(number=float('nan'))]", None, []),
        ("llama3", "[do_it({'number': 1})]", None, []),
        ("llama3", "[" * 100_000, None, []),
        ("smollm3", "<code>x = do_it(number=1)\nprint(x)</code>", None, []),
        ("phi", "the functools module", None, []),
        ("xml", xml("text>7\n", "number>7.0", "items>[1]\n"), "",
         [("do_it", {"text": "7", "number": 7.0, "items": [1]})]),
        ("xml", xml("maybe>False\n", "maybe>null\n"), "", [("do_it", {"maybe": None})]),
        ("xml", xml("number>many\n", "other>7\n"), "", [("do_it", {"number": "many", "other": "7"})]),
        ("xml", xml("size>1\n", "note>null\n", "items>[1\n"), "",
         [("do_it", {"size": 1, "note": None, "items": "[1"})]),
        ("xml", xml("size>2\n", "note>7\n"), "", [("do_it", {"size": "2", "note": "7"})]),
        ("xml", "<tool_call>\n<function=do_it>\n<parameter=text>\nx", None, []),
        ("xml", "<tool_call>\n<function=do_it>\n<param=text>\nx", None, []),
    ],
)  # fmt: skip
def test_calls_are_read(form: str, text: str, content: str | None, calls: Called | int) -> None:
    said, found = read(form, [text])
    assert said == (text if content is None else content)
    assert len(found) == calls if isinstance(calls, int) else [(c.name, c.arguments) for c in found] == calls


def assert_the_same_in_pieces(form: str, text: str, pieces: list[str]) -> None:
    said, found = read(form, [text])
    assert read(form, pieces) == (said, found)
    assert found or said == text


around = st.sampled_from(["", "Let me see. ", "é\n", "I say:\n\n"])


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize(("form", "write"), WRITERS)
@given(calls, around, st.sampled_from(["", " Done.", "\nso "]), st.data())
def test_what_a_model_writes_is_read_as_it_comes(
    form: str, write: Write, given: Called, before: str, behind: str, data: st.DataObject
) -> None:
    before = "" if form == "llama3" else before
    text = before + write(given) + behind
    shown, found = read(form, data.draw(cut(text)))
    assert [(call.name, call.arguments) for call in found] == given
    assert "".join(shown.split()) == "".join((before + behind).split()) and shown == shown.rstrip()
    assert_the_same_in_pieces(form, text, data.draw(cut(text)))


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("form", [*SHOWN])
@given(calls, st.sampled_from([bare, fenced]), st.sampled_from(["", " Done.", "\nso "]), st.data())
def test_calls_without_a_tag_are_read_in_every_form(
    form: str, given: Called, write: Write, behind: str, data: st.DataObject
) -> None:
    text = write(given) + behind
    shown, found = read(form, data.draw(cut(text)))
    assert [(call.name, call.arguments) for call in found] == given
    assert shown.strip() == behind.strip()
    assert_the_same_in_pieces(form, text, data.draw(cut(text)))
    damaged = text[: data.draw(st.integers(0, len(text)))]
    assert_the_same_in_pieces(form, damaged, data.draw(cut(damaged)))


@pytest.mark.parametrize("form", [*SHOWN])
def test_a_fence_is_held_until_what_is_in_it_is_known(form: str) -> None:
    """Also where the bracket behind it may begin a tag; only JSON in it is a call, a program is not."""
    for text in (f"See:\n```[{BARE}]\n```", f"See:\n```json\n[{BARE}]"):
        assert_the_same_in_pieces(form, text, list(text))
        assert [(call.name, call.arguments) for call in read(form, list(text))[1]] == [DONE]
    text = "See:\n```python\n[do_it(number=1)]\n```"
    assert read(form, list(text)) == (text, [])


@pytest.mark.parametrize("text", [f"See. <tool_call>{ADD}"[:-1], f"```json\n{BARE}"[:-1]])
def test_what_is_missing_is_not_supplied_where_the_answer_was_cut(text: str) -> None:
    for cut_off in (False, True):
        reader = reader_of(HERMES)
        reader.cut = cut_off
        shown, parts = reader.push(text, final=True)
        assert (shown == text, len(parts), len(reader.calls)) == ((True, 0, 0) if cut_off else (False, 1, 1))


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize(("form", "write"), WRITERS)
@given(calls, texts, st.data())
def test_what_is_damaged_is_text_and_comes_the_same_in_pieces(
    form: str, write: Write, given: Called, noise: str, data: st.DataObject
) -> None:
    text = write(given)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    damaged = data.draw(st.sampled_from([text[:start], text[:start] + noise + text[end:]]))
    assert_the_same_in_pieces(form, damaged, data.draw(cut(damaged)))


marks = st.sampled_from(
    [*PIECES, "[do_it(", "text=", '{"name": "rest"', ', "arguments": {}', "<parameter=text>", "</parameter>"]
)


@settings(max_examples=40, deadline=None)
@given(st.lists(marks, max_size=9).map("".join) | st.text(), st.sampled_from([*SHOWN]), st.data())
def test_no_answer_makes_reading_fail(text: str, form: str, data: st.DataObject) -> None:
    assert_the_same_in_pieces(form, text, data.draw(cut(text)))


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize(("form", "write"), [WRITERS[0], WRITERS[7], WRITERS[8], WRITERS[13]])
@given(
    calls, st.sampled_from(["<think>or so </think>", "<think>or so", "<think>or so </think>\n\n"]), st.data()
)
def test_calls_behind_and_within_thoughts_are_read(
    form: str, write: Write, given: Called, thoughts: str, data: st.DataObject
) -> None:
    """The mark of a call ends thoughts; marks that are control tokens do so too."""
    written, is_open = write(given).replace("</think>", ""), not thoughts.rstrip().endswith(">")
    tag = next((each for each in CONTROL if written.startswith(each)), "")
    if is_open and not (tag or written.startswith("<tool_call>")):
        return
    tokens = TOKENIZER.encode(thoughts) + TOKENIZER.encode(tag, special=True)
    tokens += TOKENIZER.encode(written.removeprefix(tag) + "\n</think>" * is_open)
    reader = AnswerReader(TOKENIZER, ThoughtState(Tags("<think>", "</think>")), reader_of(SHOWN[form]))
    places = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=9)))
    cuts = zip([0, *places], [*places, len(tokens)], strict=True)
    pieces = [reader.push(tokens[start:stop]) for start, stop in cuts]
    pieces.append(reader.push([END], final=True))
    assert [(call.name, call.arguments) for call in reader.called] == given
    assert "".join(piece.content for piece in pieces).strip() == ""
    assert [part for piece in pieces for part in piece.calls] == reader.called
    assert "".join(thought for piece in pieces for thought in piece.thoughts) == "or so"
    assert "".join(reader.thoughts) == "or so"


def test_a_mark_in_thoughts_that_begins_no_call_is_a_thought() -> None:
    text = "<think>a <tool_call> is what? </think>So."
    for size in (1, 99):
        reader = AnswerReader(TOKENIZER, ThoughtState(Tags("<think>", "</think>")), reader_of(HERMES))
        tokens = TOKENIZER.encode(text)
        pieces = [reader.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        pieces.append(reader.push([END], final=True))
        assert "".join(thought for piece in pieces for thought in piece.thoughts) == text[7:30].rstrip()
        assert "".join(piece.content for piece in pieces) == "So."


def test_text_is_held_only_where_a_call_may_begin() -> None:
    reader = reader_of(HERMES)
    pieces = ["see <", "b> <tool", "_", "box> ", "<tool_call> ", "is ", "a mark", " on"]
    shown = [reader.push(piece)[0] for piece in pieces]
    assert shown == ["see", " <b>", "", " <tool_box>", "", "", " <tool_call> is a mark", " on"]


@pytest.mark.parametrize(
    "text", ['{"name": "Ada", ', '```json\n{"name": "Ada", ', "```json\n[1, ", "So:\n[1, "]
)
def test_json_that_names_no_tool_is_shown_at_once(text: str) -> None:
    reader = reader_of(HERMES)
    assert (reader.push(text)[0] + reader.push("2")[0]).endswith(", 2")


def test_behind_a_single_call_nothing_is_read() -> None:
    text = f"{called('{}')} {called('{}')} and"
    for pieces in ([text], list(text)):
        shown, found = read("hermes", pieces, single=True)
        assert (shown, len(found)) == ("", 1)


def test_other_forms_are_not_taken_for_one_of_them() -> None:
    for source in (
        "{% if tools %}{{ tools }}{% endif %}",
        '{"name": "{{ tool.name }}", "description": "", "parameters": {}}',
        "<function=f>{...}</function>",
    ):
        assert format_of(source) is None


def test_ids_tell_calls_apart_and_are_the_same_again() -> None:
    form = format_of(MISTRAL)
    assert form is not None
    ids = []
    for prompt in ([1], [1], [2]):
        reader = type(reader_of(MISTRAL))(form, {}, prompt)
        reader.push(f"[TOOL_CALLS] [{ADD}, {ADD}]", final=True)
        ids.append([call.id for call in reader.calls])
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 4
    assert all(len(each) == 9 and each.isalnum() for each in ids[0])


FORCED = [
    ("hermes", WRITERS[0][1]),
    ("xml", WRITERS[4][1]),
    ("mistral", WRITERS[6][1]),
    ("args", WRITERS[7][1]),
    ("granite", WRITERS[8][1]),
    ("phi", WRITERS[9][1]),
    ("functools", WRITERS[11][1]),
    ("llama3", WRITERS[13][1]),
    ("lfm2", WRITERS[17][1]),
    ("nemotron", WRITERS[21][1]),
    ("gemma4", WRITERS[18][1]),
]


def follows(wanted: Compilable, text: str) -> bool:
    """Whether a text is what a grammar wants, and may end."""
    constraint, read = Grammars(TOKENIZER, [END]).constraint(wanted), list[int]()
    constraint.begin([])
    for token in TOKENIZER.encode(text, special=True):
        if constraint.completes(read) or token not in constraint.allowed(read):
            return False
        read.append(token)
    return constraint.completes(read) or END in constraint.allowed(read)


@pytest.mark.parametrize(("form", "write"), FORCED)
def test_grammars_want_calls_whose_arguments_fit(form: str, write: Write) -> None:
    shown = format_of(SHOWN[form])
    assert shown is not None
    parameters = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "size": {"$ref": "#/$defs/Size"},
            "many": {"type": "integer", "maximum": 9},
        },
        "required": ["text", "many"],
        "additionalProperties": False,
        "$defs": {"Size": {"enum": ["big", 1]}},
    }
    made: dict[str, Any] = {"type": "function", "function": {"name": "make", "parameters": parameters}}
    one, more = (Calls(shown, [made, REST], TOKENIZER, several=each) for each in (False, True))
    right: list[Call] = [
        ("make", {"text": 'a <b> "c" </param\n', "many": 3}),
        ("make", {"text": "", "size": "big", "many": -1}),
        ("make", {"text": "e", "size": 1, "many": 9}),
        ("rest", {}),
    ]
    wrong: list[Call] = [
        ("make", {"many": 3}),
        ("make", {"text": "", "many": 10}),
        ("rest", {"a": 1}),
        ("do", {}),
    ]
    wrong += [("make", {"text": "", "size": "small", "many": 1})]
    assert all(follows(one, write([call])) for call in right)
    assert not any(follows(one, write([call])) for call in wrong)
    assert not follows(one, write(right[:2]))
    assert follows(more, write(right)) is (form != "llama3")
    assert not follows(more, write([right[0], wrong[0]]))


REFERRING: dict[str, Any] = {
    "$id": "https://example.com/draw.json",
    "type": "object",
    "properties": {
        "at": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "to": {"$ref": "#/properties/at"},
        "leaf": {"$ref": "#/properties/at/$defs/a~1b"},
        "below": {"type": "array", "items": {"$ref": "#"}},
        "size": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
    },
    "required": ["at", "to"],
    "$defs": {"Size": {"enum": ["1", "big"]}},
}
REFERRING["properties"]["at"] |= {"additionalProperties": False, "$defs": {"a/b": {"type": "boolean"}}}
WHOLE = {key: each for key, each in REFERRING.items() if key != "$id"}
REFERRED: dict[str, Any] = {"$ref": "#/$defs/Whole", "$defs": {"Whole": WHOLE, **WHOLE["$defs"]}}
LEAF: dict[str, Any] = {"at": {"x": 1}, "to": {"x": 2}}


@pytest.mark.parametrize("parameters", [REFERRING, REFERRED], ids=["itself", "by reference"])
@pytest.mark.parametrize(("form", "write"), FORCED[:-1])  # the last holds types of tables alone
def test_references_within_a_tools_schema_hold(form: str, write: Write, parameters: dict[str, Any]) -> None:
    shown = format_of(SHOWN[form])
    assert shown is not None
    if parameters is REFERRED:
        parameters = json.loads(json.dumps(REFERRED).replace("#/properties", "#/$defs/Whole/properties"))
    tool: dict[str, Any] = {"type": "function", "function": {"name": "draw", "parameters": parameters}}
    wanted = Calls(shown, [tool], TOKENIZER)
    right: dict[str, Any] = LEAF | {"leaf": True}
    if parameters is not REFERRED:
        right |= {"below": [LEAF], "size": "1"}
    wrong: list[dict[str, Any]] = [
        LEAF | {"to": {"y": 2}},
        LEAF | {"below": [{"name": "draw"}]},
        LEAF | {"leaf": 1},
    ]
    assert follows(wanted, write([("draw", right)]))
    assert not any(follows(wanted, write([("draw", each)])) for each in wrong)
    reader = reader_of(SHOWN[form], [tool])
    reader.push(write([("draw", right)]), final=True)
    assert [call.arguments for call in reader.calls] == [right]


@pytest.mark.parametrize(("form", "write"), FORCED)
def test_beside_a_format_an_answer_may_be_a_call(form: str, write: Write) -> None:
    shown = format_of(SHOWN[form])
    assert shown is not None
    answers: list[tuple[Compilable, str]] = [
        (JsonSchema({"properties": {"a": {"type": "integer"}}, "additionalProperties": False}), '{"a": 1}'),
        (AnyJson(), '{"b": [1]}'),
        (Choice(["yes", "no"]), "no"),
        (Regex("[0-9]+"), "12"),
        (Lark('start: "a" rest\nrest: "b"'), "ab"),
    ]
    for answer, text in answers:
        wanted = Calls(shown, [DO, REST], TOKENIZER, True, answer)
        assert follows(wanted, text)
        assert follows(wanted, write([("rest", {})]))
        assert follows(wanted, '{"name": "rest", "arguments": {}}')
        assert not follows(wanted, "see " + text)
        assert isinstance(answer, AnyJson) or not follows(wanted, write([("sleep", {})]))


def test_a_tool_whose_schema_cannot_be_followed_is_named() -> None:
    form = format_of(HERMES)
    assert form is not None

    def refusal(parameters: object, **more: Any) -> str:
        tool: Any = {"type": "function", "function": {"name": "odd", "parameters": parameters, **more}}
        with pytest.raises(RequestError) as caught:
            Grammars(TOKENIZER, [END]).constraint(Calls(form, [REST, tool], TOKENIZER))
        return str(caught.value)

    unfit = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}},
        "required": ["a"],
    }
    assert re.match("tools has 'odd', whose schema cannot be followed: .*'a'", refusal(unfit))
    unique = {"properties": {"a/b": {"type": "array", "uniqueItems": True}}}
    said = refusal(unique, strict=True)
    assert (
        "'odd', whose schema cannot be followed strictly: no grammar holds uniqueItems at #/properties/a~1b;"
        in said
    )
    assert "tools has 'odd', whose parameters are no JSON" in refusal({"const": {1, 2}})
    assert "characters; allowed" in refusal({"description": "x" * 300_000})


def test_between_tags_bounds_of_texts_and_of_all_arguments_are_named() -> None:
    form = format_of(SHOWN["xml"])
    assert form is not None
    short = {"anyOf": [{"$ref": "#/$defs/Short"}, {"type": "null"}]}
    parameters = {
        "properties": {"a/b": short, "size": {"type": "integer", "minimum": 1}, "free": {"type": "string"}},
        "minProperties": 1,
        "$defs": {"Short": {"type": "string", "maxLength": 3, "pattern": "^a"}},
    }
    tool: Any = {"type": "function", "function": {"name": "make", "parameters": parameters}}
    (schema,) = Calls(form, [tool], TOKENIZER).grammar().schemas.values()
    assert [*schema.problems({"a/b": "abc"})] == []
    for wrong in ("abcd", "bc"):
        assert [*schema.problems({"a/b": wrong})] == ["the answer breaks anyOf at #/properties/a~1b"]
    assert [*schema.problems({})] == ["the answer breaks minProperties at #"]
    tool["function"]["strict"] = True
    with pytest.raises(RequestError, match=r"holds .*maxLength at #/properties/a~1b"):
        Grammars(TOKENIZER, [END]).constraint(Calls(form, [tool], TOKENIZER))


def test_a_conversation_with_calls_goes_through_the_template() -> None:
    _, (call,) = read("hermes", [f"<tool_call>\n{ADD}\n</tool_call>"])
    messages: list[dict[str, Any]] = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call.to_message()]},
        {"role": "tool", "content": "3", "tool_call_id": call.id},
    ]
    text = ChatTemplate(HERMES).render(messages, {"tools": TOOLS})
    assert f"<tool_call>\n{ADD}\n</tool_call>" in text
    assert "<tool_response>\n3\n</tool_response>" in text
    assert '{"type": "function", "function": {"name": "add"' in text
    assert "tools" not in ChatTemplate(HERMES).render(ASK)
    assert f'"id": "{call.id}"' in ChatTemplate(MISTRAL).render(messages, {"tools": TOOLS})
    assert '"parameters": {"a": 1' in ChatTemplate(LLAMA3).render(messages, {"tools": TOOLS})


@pytest.mark.parametrize(
    "tool", [{}, {"function": None}, {"function": {"name": ""}}, {"function": {"name": 3}}]
)
def test_a_tool_is_a_function_with_a_name(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"tools\[1\] is .*allowed: .*function"):
        check_tools([TOOLS[0], tool])
