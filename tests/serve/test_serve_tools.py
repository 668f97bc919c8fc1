"""What the server shows of an answer: calls of tools as they come, and every character by its token."""

import json
import re
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.answering.answer_reading import TextStream
from edgespec.answering.attribution import Attribution
from edgespec.answering.results import Record, TokenRecord
from edgespec.decoding.grammar import AnyJson
from edgespec.serve.bodies import response_format
from edgespec_models.text.chat_template import ChatTemplate
from tests.kit.models import toy_model, toy_session
from tests.kit.serving import ask, events, named_events, question, said, serving, tokenizer
from tests.kit.templates import HERMES

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
    request: Any = {"model": "served", "messages": messages, "tools": [WEATHER]}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**request).choices[0]
        content, calls, reason = put_together(client.chat.completions.create(**request, stream=True))
    assert content == whole.message.content == "re: see  \nthen"
    assert reason == whole.finish_reason == "tool_calls"
    said = [
        (call.id, call.type, call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert [(*head, "".join(pieces)) for *head, pieces in calls] == said and len(said) == 2
    for *head, pieces in calls:
        assert head[1:] == ["function", "weather"]
        assert json.loads("".join(pieces)) == ARGUMENTS


def test_a_call_in_a_fence_is_a_call_in_all_apis_streamed_or_not(url: str) -> None:
    call = '{"name": "weather", "arguments": {"city": "Bonn", "days": [1, 2]}}'
    text = f"see\n```json\n{call}\n```"
    answers = calls_by_api(url, text)
    assert len(answers) == 6
    for content, calls in answers:
        assert content.strip() == "re: see"
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", ARGUMENTS)]


def test_a_call_that_was_cut_is_text_in_all_apis(url: str) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bo'
    for content, calls in calls_by_api(url, text):
        assert (content, calls) == (f"re: {text}", [])


def calls_by_api(url: str, text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The content and the calls of an answer, by each API, whole and streamed."""
    function = WEATHER["function"]
    answers = list[tuple[str, list[tuple[str, str]]]]()
    whole = ask(url, CHAT, question(text, tools=[WEATHER])).json["choices"][0]["message"]
    functions = [call["function"] for call in whole.get("tool_calls", ())]
    answers.append(
        (whole["content"] or "", [(function["name"], function["arguments"]) for function in functions])
    )
    content, parts = "", dict[int, tuple[str, str]]()
    for chunk in events(ask(url, CHAT, question(text, tools=[WEATHER], stream=True)))[:-1]:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            name, arguments = parts.get(part["index"], (part["function"].get("name"), ""))
            parts[part["index"]] = (name, arguments + part["function"]["arguments"])
    answers.append((content, [*parts.values()]))
    body: dict[str, Any] = {"model": "served", "input": text, "tools": [{"type": "function", **function}]}
    items = ask(url, "/v1/responses", body).json["output"]
    stream = named_events(ask(url, "/v1/responses", body | {"stream": True}))
    for output in (items, stream[-1]["response"]["output"]):
        content = "".join(item["content"][0]["text"] for item in output if item["type"] == "message")
        calls = [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"]
        answers.append((content, calls))
    tool = {"name": "weather", "input_schema": function["parameters"]}
    body = {"model": "served", "messages": [{"role": "user", "content": text}], "tools": [tool]}
    blocks = ask(url, "/v1/messages", body).json["content"]
    content = "".join(block["text"] for block in blocks if block["type"] == "text")
    used = [block for block in blocks if block["type"] == "tool_use"]
    answers.append((content, [(block["name"], json.dumps(block["input"])) for block in used]))
    content, calls = "", []
    for event in named_events(ask(url, "/v1/messages", body | {"stream": True})):
        block, delta = event.get("content_block", {}), event.get("delta", {})
        content += delta.get("text", "")
        if block.get("type") == "tool_use":
            calls.append((block["name"], ""))
        if "partial_json" in delta:
            calls[-1] = (calls[-1][0], calls[-1][1] + delta["partial_json"])
    answers.append((content, calls))
    return answers


def test_identifiers_of_calls_differ_between_choices(url: str) -> None:
    body = question(CALL, tools=[WEATHER], n=3)
    whole = [choice["message"]["tool_calls"][0]["id"] for choice in ask(url, CHAT, body).json["choices"]]
    streamed = dict[int, str]()
    for chunk in events(ask(url, CHAT, body | {"stream": True}))[:-1]:
        for choice in chunk["choices"]:
            for part in choice["delta"].get("tool_calls", ()):
                streamed |= {choice["index"]: part["id"]} if "id" in part else {}
    assert whole == [streamed[at] for at in range(3)] and len({*whole}) == 3
    assert all(len(id_) == 9 and id_.isalnum() for id_ in whole)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_null_in_a_form_is_no_field() -> None:
    assert response_format({"type": "text", "json_schema": None, "strict": None}) is None
    assert response_format({"type": "json_object", "json_schema": None, "schema": None}) == AnyJson()


@pytest.mark.parametrize(
    ("form", "wrong"),
    [
        ({"type": "json_object", "schema": SCHEMA}, None),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, None),
        ({"type": "json_schema", "schema": SCHEMA, "name": "n", "strict": True}, None),
        ({"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": SCHEMA}}, None),
        ({"type": "json_object", "nonsense": 1}, "the unknown field 'nonsense'"),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, "nonsense": 1}},
            "the unknown field 'nonsense'",
        ),
        ({"type": "text", "schema": SCHEMA}, "the unknown field 'schema'"),
        (
            {"type": "json_object", "schema": SCHEMA, "json_schema": {"schema": {}}},
            "the unknown field 'schema'",
        ),
        ({"type": "json_object", "schema": 3}, "json_object.*; allowed"),
        ({"type": "json_schema", "json_schema": 3}, "json_schema.*; allowed"),
    ],
)
def test_a_form_is_followed_or_refused(form: dict[str, Any], wrong: str | None) -> None:
    model = toy_model(toy_session(context=2000))
    model.target.chat_template = ChatTemplate(HERMES.replace("think>", "plan>"))  # which does not think
    options = {"model": "toy", "max_tokens": 40}
    hi = [{"role": "user", "content": "hi"}]
    bodies = [(CHAT, options | {"messages": hi, "response_format": form})]
    if "json_schema" not in form:
        bodies.append(("/v1/responses", {"model": "toy", "input": "hi", "text": {"format": form}}))
        bodies.append(("/v1/messages", options | {"messages": hi, "output_config": {"format": form}}))
    with serving(model) as url:
        for path, body in bodies:
            reply = ask(url, path, body)
            if wrong is not None:
                assert reply.status == 400 and re.search(f"format (has|is).*{wrong}", reply.error)
                continue
            answer = reply.json
            text = (
                answer["choices"][0]["message"]["content"]
                if path == CHAT
                else (answer.get("output") or [answer])[0]["content"][0]["text"]
            )
            assert json.loads(text) in ({"a": "x"}, {"a": "y"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_streamed(choice: Any) -> None:
    """By a model that would say something else, with a drafter, under a grammar."""
    fixed: dict[str, Any] = {"city": {"enum": ["Bonn", "Köln"]}, "days": {"enum": [[1], [2, 3]]}}
    parameters = {"type": "object", "properties": fixed, "required": [*fixed], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    options: Any = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    model = toy_model(toy_session(context=2000), toy_session(seed=1, context=2000))
    model.target.chat_template = ChatTemplate(HERMES)
    with serving(model) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answers = []
        for many in (None, False):
            more: Any = {} if many is None else {"parallel_tool_calls": many}
            stream = client.chat.completions.create(**options, **more, tool_choice=choice, stream=True)
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
        last = last or stream.stop_string is not None
        piece += stream.finish() if last else ""
        cut = attribution.push(Record(piece, tuple(records), "stop" if last else None))
        assert "".join(token["text"] for token in cut) == piece
        shown, pieces, at = shown + cut, [*pieces, piece], at + size
        if last:
            break
    assert [token["source"] for token in shown] == [str(index) for index in range(min(at, len(ids)))]
    expected = text.split(stop)[0] if stop else text
    assert "".join(pieces) == expected
