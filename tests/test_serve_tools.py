"""What the server shows of an answer: calls of tools as they come, and every character by its token."""

import json
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.requests.answer_reading import TextStream
from edgespec.requests.attribution import Attribution
from edgespec.requests.results import Record, TokenRecord
from edgespec_models.text.chat_template import ChatTemplate
from tests.models_for_tests import toy_model, toy_session
from tests.serving_for_tests import ask, events, question, said, serving, tokenizer
from tests.templates_for_tests import HERMES

CHAT = "/v1/chat/completions"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn", "days": [1, 2]}}</tool_call>'
ARGUMENTS = {"city": "Bonn", "days": [1, 2]}


def put_together(chunks: Iterable[Any]) -> tuple[str, list[tuple[str, str, str, list[str]]], str]:
    """What a client makes of the chunks of a stream: content, calls with their pieces, and why it ended."""
    content, reason, calls = "", "", list[tuple[str, str, str, list[str]]]()
    for choice in (chunk.choices[0] for chunk in chunks):
        content, reason = content + (choice.delta.content or ""), choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            if part.id is not None:
                assert part.index == len(calls)
                calls.append((part.id, part.type, part.function.name, []))
            calls[part.index][3].append(part.function.arguments)
    return content, calls, reason


def test_calls_come_in_openais_form_streamed_or_not(url: str) -> None:
    messages: Any = [{"role": "user", "content": f"see {CALL} {CALL}\nthen"}]
    asked: Any = {"model": "served", "messages": messages, "tools": [WEATHER]}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        content, calls, reason = put_together(client.chat.completions.create(**asked, stream=True))
    assert content == whole.message.content == "re: see  \nthen"
    assert reason == whole.finish_reason == "tool_calls"
    said = [
        (call.id, call.type, call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert [(*head, "".join(pieces)) for *head, pieces in calls] == said and len(said) == 2
    for *head, pieces in calls:
        assert head[1:] == ["function", "weather"] and len(pieces) > 3
        assert json.loads("".join(pieces)) == ARGUMENTS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_streamed(choice: Any) -> None:
    """By a model that would say something else, with a drafter, under a grammar."""
    fixed: dict[str, Any] = {"city": {"enum": ["Bonn", "Köln"]}, "days": {"enum": [[1], [2, 3]]}}
    parameters = {"type": "object", "properties": fixed, "required": [*fixed], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    asked: Any = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    model = toy_model(toy_session(context=2000), toy_session(seed=1, context=2000))
    model.target.chat_template = ChatTemplate(HERMES)
    with serving(model) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answers = []
        for many in (None, False):
            more: Any = {} if many is None else {"parallel_tool_calls": many}
            stream = client.chat.completions.create(**asked, **more, tool_choice=choice, stream=True)
            content, ((_, _, name, pieces),), reason = put_together(stream)
            assert (content, name, reason) == ("", "weather", "tool_calls")
            answers.append(json.loads("".join(pieces)))
            for key, value in answers[-1].items():
                assert value in fixed[key]["enum"]
    assert answers[0] == answers[1] and answers[0].keys() == fixed.keys()


def test_what_only_looks_like_a_call_is_text_after_all(url: str) -> None:
    text = "a <tool_cal and <tool_call>{ never ended"
    reply = ask(url, CHAT, question(text, tools=[WEATHER], stream=True))
    assert said(reply) == f"re: {text}"
    assert events(reply)[-2]["choices"][0]["finish_reason"] == "stop"


def test_without_tools_nothing_is_held_back(url: str) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        chunks = events(ask(url, CHAT, question("<tool_call>{", stream=True) | more))[1:-2]
        assert all(c["choices"][0]["delta"]["content"] for c in chunks)


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
        cut = attribution.push(Record(piece, tuple(records), "stop" if last else None))
        assert "".join(token["text"] for token in cut) == piece
        shown, pieces, at = shown + cut, [*pieces, piece], at + size
        if last:
            break
    assert [token["source"] for token in shown] == [str(index) for index in range(min(at, len(ids)))]
    expected = text.split(stop)[0] if stop else text
    assert "".join(pieces) == expected
