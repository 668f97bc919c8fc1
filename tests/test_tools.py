"""Tools through the model's template, and calls read out of answers, in each form that models write."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.requests.tool_calls import check_tools, format_of, tool_reader
from edgespec_models.errors import RequestError
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.tokenizer import Tokenizer
from tests.templates_for_tests import HERMES, LLAMA3, MISTRAL, TOOLS
from tests.tokenizers_for_tests import byte_level_json

CONTROL = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>"
TOKENIZER = Tokenizer.from_json(byte_level_json(specials=CONTROL))
(END,) = TOKENIZER.encode("<|im_end|>", special=True)
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'
ASK = [{"role": "user", "content": "1 + 2?"}]

TAGS = "<tool_call></tool_call>"
HALVES = r'{"a\ud800": ["\ud83d\ude00", "\udc00b"]}'  # of characters are none
Calls = list[tuple[str, Any]]


def called(arguments: str) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'


def read(source: str, text: str) -> tuple[str, Calls]:
    """What is read of an answer: its content, and names and arguments of its calls."""
    reader = tool_reader(source, TOOLS, TOKENIZER, {END})
    content, calls = reader([1, 2], [*TOKENIZER.encode(text, special=True), END])
    return content, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("source", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", {"a": 1, "b": [2, "x"]})]),
        (HERMES, f"Let me see.\n<tool_call>{ADD}</tool_call>\nDone.", "Let me see.\n\nDone.", 1),
        (HERMES, f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", "", 2),
        (HERMES, f"<tool_call>{ADD}", "", 1),
        (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        (HERMES, called(r'"{\"a\": 1}"'), "", [("f", {"a": 1})]),
        (HERMES, called(f'{{"a": "{TAGS}"}}') + "!", "!", [("f", {"a": TAGS})]),
        (HERMES, called(HALVES), "", [("f", {"a\ufffd": ["😀", "\ufffdb"]})]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', None, []),
        (HERMES, "<tool_call>add(1, 2)</tool_call>", None, []),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', None, []),
        (HERMES, called("[1]"), None, []),
        (HERMES, ADD, None, []),
        (MISTRAL, f"[TOOL_CALLS] [{ADD}, {ADD}]", "", 2),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now{}', "", [("add", {"a": 1}), ("now", {})]),
        (MISTRAL, '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}', "", [("add", {"a": 1})]),
        (MISTRAL, f"I ask.[TOOL_CALLS] [{ADD}]", "I ask.", 1),
        (MISTRAL, "[TOOL_CALLS] [1, 2", None, []),
        (MISTRAL, ADD, None, []),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        (LLAMA3, '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "now"}', "", 2),
        (LLAMA3, '{"name": "Ada", "parameters": {"age": 36}}', None, []),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1}} is what I call.', None, []),
        (LLAMA3, "Three.", None, []),
        (LLAMA3, "[" * 100_000, None, []),
    ],
)
def test_calls_are_read(source: str, text: str, content: str | None, calls: Calls | int) -> None:
    said, found = read(source, text)
    assert said == (text if content is None else content)
    assert (len(found) if isinstance(calls, int) else found) == calls


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
arguments = st.dictionaries(st.text(), json_values, max_size=3)


@settings(deadline=None)
@given(st.lists(arguments, min_size=1, max_size=3), st.sampled_from([HERMES, MISTRAL, LLAMA3]))
def test_what_a_model_writes_is_read_whatever_it_says(given: list[dict[str, Any]], source: str) -> None:
    assert [format_of(form) for form in (HERMES, LLAMA3, MISTRAL)] == ["hermes", "llama3", "mistral"]
    key = "parameters" if source == LLAMA3 else "arguments"
    texts = [json.dumps({"name": "add", key: each}) for each in given]
    wrapped = {
        HERMES: "".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts),
        MISTRAL: f"[TOOL_CALLS][{', '.join(texts)}]",
        LLAMA3: "; ".join(texts),
    }
    assert read(source, wrapped[source]) == ("", [("add", each) for each in given])


@settings(deadline=None)
@given(st.text(alphabet='{}[]",:<>/ toolca_nmergus1') | st.text())
def test_no_answer_makes_reading_fail(text: str) -> None:
    for source in (HERMES, MISTRAL, LLAMA3):
        read(source, text)


def test_other_forms_are_not_taken_for_one_of_them() -> None:
    for source in ("{% if tools %}{{ tools }}{% endif %}", "<tool_call>\n<function=f>\n<parameter=x>"):
        assert format_of(source) is None


def test_ids_tell_calls_apart_and_are_the_same_again() -> None:
    reader = tool_reader(MISTRAL, TOOLS, TOKENIZER, {END})
    answer = TOKENIZER.encode(f"[TOOL_CALLS] [{ADD}, {ADD}]", special=True)
    first, again, other = (
        [call.id for call in reader([*prompt, *answer], answer)[1]] for prompt in ([1], [1], [2])
    )
    assert first == again
    assert len({*first, *other}) == 4
    assert all(len(each) == 9 and each.isalnum() for each in first)


def test_a_conversation_with_calls_goes_through_the_template() -> None:
    reader = tool_reader(HERMES, TOOLS, TOKENIZER, {END})
    answer = TOKENIZER.encode(f"<tool_call>\n{ADD}\n</tool_call>", special=True)
    _, (call,) = reader(answer, answer)
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
