"""Tools, response formats, several answers: what the server makes of them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.requests.results import Generation, GenerationStats, Record, TokenRecord, ToolCall
from edgespec.serve.answers import Holding
from tests.serving_for_tests import (
    ServedModel,
    ask,
    drafting_model,
    events,
    question,
    said,
    serving,
    tokenizer,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
CALLS = (ToolCall("abcdefghi", "weather", {"city": "Bonn"}),)


def reads(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    return (text.partition("<tool_call>")[0].strip(), CALLS) if "</tool_call>" in text else ("", ())


@pytest.fixture
def url() -> Iterator[str]:
    with serving(ServedModel(reads=reads).as_model()) as url:
        yield url


def test_calls_come_whole_in_openais_form_streamed_or_not(url: str) -> None:
    messages: Any = [{"role": "user", "content": f"see {CALL}"}]
    asked: Any = {"model": "served", "messages": messages, "tools": [WEATHER]}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole.message.content == "re: see"
    assert "".join(chunk.delta.content or "" for chunk in chunks).strip() == "re: see"
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"
    for call in (whole.message.tool_calls[0], chunks[-1].delta.tool_calls[0]):
        assert (call.id, call.type, call.function.name) == ("abcdefghi", "function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Bonn"}
    assert chunks[-1].delta.tool_calls[0].index == 0


def test_what_only_looks_like_a_call_is_text_after_all(url: str) -> None:
    text = "a <tool_cal and <tool_call>{ never ended"
    reply = ask(url, CHAT, question(text, tools=[WEATHER], stream=True))
    assert said(reply) == f"re: {text}"
    assert events(reply)[-2]["choices"][0]["finish_reason"] == "stop"


def test_without_tools_nothing_is_held_back(url: str) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        chunks = events(ask(url, CHAT, question("<tool_call>{", stream=True) | more))[1:-2]
        assert all(c["choices"][0]["delta"]["content"] for c in chunks)


texts = st.lists(st.sampled_from(["ab ", "<", "<tool", "_call>", "{", "[", CALL, " ", "\n"]), max_size=8).map(
    "".join
)


@settings(deadline=None)
@given(texts, st.lists(st.integers(1, 5), max_size=40))
def test_a_held_stream_shows_the_text_around_calls(text: str, sizes: list[int]) -> None:
    """However it is cut: never a beginning of a call, and all of what is none."""
    holding, pieces, rest = Holding(tokenizer()), [], text
    for size in [*sizes, len(text) + 1]:
        piece, rest = rest[:size], rest[size:]
        records = tuple(TokenRecord(id_, "target") for id_ in tokenizer().encode(piece))
        pieces.append(holding.push(Record(piece, records, None if rest else "stop")))
        if not rest:
            break
    content, calls = reads(text)
    shown = "".join(pieces)
    assert "<tool_call>" not in shown and text.startswith(shown)
    stats = GenerationStats(0, 0, 0, 0.0, 0.0, 0, 0, 0, 0)
    whole = shown + holding.finish(Generation(text, (), "stop", stats, content=content, tool_calls=calls))
    assert (whole.strip() == content or whole.strip() == "") if calls else whole == text


def test_a_control_token_begins_a_call_too() -> None:
    holding, control = Holding(tokenizer()), tokenizer().special_id("<|im_start|>")
    assert control is not None
    assert holding.push(Record("see ", ())) == "see "
    assert holding.push(Record('{"name"', (TokenRecord(control, "target"),))) == ""
    assert holding.push(Record(": 1}", ())) == ""


def test_several_answers_are_choices_and_greedy_ones_cost_one() -> None:
    with drafting_model() as model, serving(model) as url:
        body = {"model": "toy", "prompt": "abc", "max_tokens": 6, "n": 3}
        greedy = ask(url, TEXT, body).json
        assert len({choice["text"] for choice in greedy["choices"]}) == 1
        assert "edgespec_tokens_total 6.0" in ask(url, "/metrics").body.decode()
        drawn = ask(url, TEXT, {**body, "prompt": ["abc", "de"], "temperature": 1.5, "seed": 7}).json
        assert [choice["index"] for choice in drawn["choices"]] == list(range(6))
        assert drawn["usage"]["completion_tokens"] == 36
        again = ask(url, TEXT, {**body, "n": 1, "temperature": 1.5, "seed": 8}).json
        assert again["choices"][0]["text"] == drawn["choices"][1]["text"]


def test_messages_that_no_model_reads_are_refused() -> None:
    with drafting_model() as model, serving(model) as url:
        for content in (3, [{"type": "image_url", "image_url": {"url": "data:,"}}]):
            body: Any = {"model": "toy", "messages": [{"role": "user", "content": content}]}
            reply = ask(url, CHAT, body)
            assert reply.status == 400 and "message 0" in reply.error
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        body = {"model": "toy", "messages": [{"role": "developer", "content": parts}], "max_tokens": 3}
        assert ask(url, CHAT, body).status == 200


def test_an_answer_has_the_form_that_was_asked_for() -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    with drafting_model() as model, serving(model) as url:
        body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
        for stream in (False, True):
            reply = ask(url, CHAT, {**body, "response_format": wanted, "stream": stream})
            assert json.loads(said(reply)) in ({"a": "x"}, {"a": "y"})
        wrong = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}}
        assert ask(url, CHAT, {**body, "response_format": wrong}).status == 400
