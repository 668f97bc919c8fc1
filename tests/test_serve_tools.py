"""What the server shows of an answer: calls of tools whole, and every character by its token."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.requests.reading import Attribution, TextStream
from edgespec.requests.results import (
    Generation,
    GenerationStats,
    Record,
    TokenRecord,
    ToolCall,
)
from edgespec.serve.answers import Holding
from tests.serving_for_tests import ServedModel, ask, events, question, said, serving, tokenizer

CHAT = "/v1/chat/completions"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
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


PIECES = st.sampled_from(["ab ", "<", "<tool", "_call>", "{", "[", CALL, " ", "\n"])


@given(st.lists(PIECES, max_size=8).map("".join), st.lists(st.integers(1, 5), max_size=40))
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


@given(st.text(alphabet="abé日😀 \n", max_size=30), st.lists(st.integers(1, 7), max_size=30), st.data())
def test_attribution_gives_every_character_to_one_token(text: str, sizes: list[int], data: Any) -> None:
    """However records cut the tokens, and wherever a stop string ends the text."""
    ids = [byte for char in text.encode() for byte in tokenizer().encode_bytes(bytes([char]))]
    stop = data.draw(st.sampled_from(["", *text]))
    stream = TextStream(tokenizer(), stop=[stop] if stop else [])
    attribution, at = Attribution(tokenizer()), 0
    shown: list[dict[str, str]] = []
    pieces: list[str] = []
    for size in [*sizes, len(ids) + 1]:
        last = at + size >= len(ids)
        records = [TokenRecord(id_, str(at + index)) for index, id_ in enumerate(ids[at : at + size])]
        piece = stream.push([record.id for record in records])
        last = last or stream.stopped
        piece += stream.finish() if last else ""
        cut = attribution.push(piece, records, last=last)
        assert "".join(token["text"] for token in cut) == piece
        shown, pieces, at = shown + cut, [*pieces, piece], at + size
        if last:
            break
    assert [token["source"] for token in shown] == [str(index) for index in range(min(at, len(ids)))]
    expected = text.split(stop)[0] if stop else text
    assert "".join(pieces) == expected
