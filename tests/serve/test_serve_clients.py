"""Requests in the shapes of real clients: names, streams that they read in part, older forms, idle fields."""

import copy
import json
import pickle
from typing import Any

import pytest

from edgespec import LoadOptions
from edgespec.answering.results import Generation, GenerationStats, Record, TokenRecord, ToolCall
from edgespec.decoding.grammar import AnyJson, Grammars, JsonSchema
from edgespec.models import Models
from edgespec.serve.bodies import ChatBody, CompletionBody, parse
from edgespec.serve.messages import MessageReply, MessagesBody
from edgespec.serve.ollama import OllamaChatBody
from edgespec.serve.options import ServeOptions
from edgespec.serve.replies import ChatReply, CompletionReply
from edgespec.serve.responses import ResponseReply, ResponsesBody, ResponseStore
from edgespec_models.errors import RequestError
from edgespec_models.text.chat_template import ChatTemplate
from tests.kit.models import toy_model, toy_session
from tests.kit.serving import ServedModel, ask, events, question, ready, serving, tokenizer
from tests.kit.templates import HERMES
from tests.serve.test_serve_tools import CALL, CHAT, WEATHER

FUNCTION = WEATHER["function"]
OTHER: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}


def chat_of(**more: object) -> ChatBody:
    return parse(ChatBody, {**question(), **more})


def test_each_endpoint_takes_the_names_that_any_endpoint_gives(url: str) -> None:
    (listed,) = ask(url, "/v1/models").json["data"]
    (tagged,) = ask(url, "/api/tags").json["models"]
    messages = [{"role": "user", "content": "a"}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": messages},
        "/api/chat": {"messages": messages, "stream": False},
        "/api/generate": {"prompt": "a", "stream": False},
    }
    for name in (listed["id"], tagged["name"]):
        assert ask(url, f"/v1/models/{name}").json["id"] == "served"
        for path, body in bodies.items():
            reply = ask(url, path, {"model": name, **body})
            assert reply.status == 200 and reply.json.get("model", name) == name
    assert ask(url, CHAT, question() | {"model": "served:latest:latest"}).status == 404


def test_idle_connections_are_kept_and_clients_are_told_how_long(url: str) -> None:
    assert ask(url, "/health").headers["keep-alive"] == "timeout=115"


def test_an_answer_ends_at_the_contexts_end_unless_a_limit_is_set(model: ServedModel, url: str) -> None:
    """A text to continue need not end by itself, so it has a limit."""
    limits = list[int]()
    for options in (ServeOptions(port=0), ServeOptions(port=0, max_new_tokens=9)):
        with serving(model.as_model(), options) as own:
            for path, body in ((CHAT, question()), ("/v1/completions", {"model": "served", "prompt": "a"})):
                assert ask(own, path, body).status == 200
                limits.append(model.calls[-1][1]["max_new_tokens"])
    assert limits == [2**31 - 1, 1024, 9, 9]


def test_a_chunk_has_one_piece_of_one_kind() -> None:
    """Continue reads one field of a delta, llama-index the first entry of its calls."""
    calls = ToolCall("a", "time", {}), ToolCall("b", "time", {})
    record = Record("", (TokenRecord(5, "target"),) * 2, content="so", calls=calls, thoughts=("hm",))
    chunks = ready(ChatReply("m")).chunk(record, [{"text": "hm"}])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[:2] == [{"reasoning_content": "hm"}, {"content": "so"}]
    entries = [entry for delta in deltas[2:] for entry in delta["tool_calls"]]
    assert [len(delta["tool_calls"]) for delta in deltas[2:]] == [1, 1]
    assert [(entry["index"], entry["id"]) for entry in entries] == [(0, "a"), (1, "b")]
    assert [chunk["choices"][0].get("edgespec") for chunk in chunks[1:]] == [None] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_answered_in_their_own_form(url: str, stream: bool) -> None:
    reply = ask(url, CHAT, question(f"see {CALL}", functions=[FUNCTION], stream=stream))
    assert reply.status == 200
    choices = [event["choices"][0] for event in events(reply)[:-1]] if stream else reply.json["choices"]
    deltas = [choice["delta" if stream else "message"] for choice in choices]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert json.loads("".join(call["arguments"] for call in calls))["city"] == "Bonn"
    assert choices[-1]["finish_reason"] == "function_call"
    assert not any("tool_calls" in delta for delta in deltas)


def test_older_messages_become_calls_and_results_of_tools() -> None:
    old = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    messages = [
        {"role": "User", "content": "a"},
        {"role": "ASSISTANT", "content": None, "function_call": old},
        {"role": "function", "name": "weather", "content": "7"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "p", "input": "x"}}],
        },
        {"role": "assistant", "content": None},
    ]
    user, call, result, custom, empty = chat_of(messages=messages).conversation()
    assert user == {"role": "user", "content": "a"} and empty == {"role": "assistant", "content": ""}
    assert call["tool_calls"] == [{"id": "000000001", "type": "function", "function": old}]
    assert result == {"role": "tool", "name": "weather", "content": "7", "tool_call_id": "000000001"}
    assert custom["tool_calls"][0]["function"] == {"name": "p", "arguments": {"input": "x"}}
    (ollama,) = (
        parse(OllamaChatBody, {"model": "m", "messages": [{"role": "USER", "content": "a"}]}).chat().messages
    )
    assert ollama["role"] == "user"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones(mode: str) -> None:
    named = [{"type": "function", "function": {"name": "time"}}, {"type": "mcp", "server_label": "a"}]
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    options = chat_of(tools=[WEATHER, OTHER], tool_choice=chosen).options()
    assert options["tools"] == [OTHER] and options["tool_choice"] == mode
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "time"}]}
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, OTHER)]
    body = parse(ResponsesBody, {"model": "m", "input": "a", "tools": tools, "tool_choice": flat})
    options = body.chat([{"role": "user", "content": "a"}]).options()
    assert [tool["function"]["name"] for tool in options["tools"]] == ["time"]
    assert options["tool_choice"] == mode
    named_one = {"type": "function", "name": "time"}  # as Responses has it
    options = chat_of(tools=[WEATHER, OTHER], tool_choice=named_one).options()
    assert options["tool_choice"] == {"type": "function", "function": named_one}
    for wrong in ({"mode": "none", "tools": named}, {"mode": mode, "tools": []}, {"mode": mode}, 7):
        with pytest.raises(RequestError, match="tool_choice"):
            chat_of(tools=[WEATHER], tool_choice={**chosen, "allowed_tools": wrong}).options()


IDLE: dict[str, object] = {
    "min_tokens": 0,
    "stop_token_ids": [],
    "echo": False,
    "skip_special_tokens": True,
    "extra_body": {},
    "verbosity": "medium",
    "typical_p": 1.0,
    "draft_model": "",
    "best_of": 1,
}


@pytest.mark.parametrize("name", IDLE)
def test_values_that_change_nothing_are_taken_and_others_refused(name: str) -> None:
    assert chat_of(**{name: IDLE[name]}).options() == chat_of().options()
    if IDLE[name] not in ("", [], {}):
        with pytest.raises(RequestError, match=rf"{name} is 'x'; allowed: .*, with no effect"):
            chat_of(**{name: "x"})


def test_a_model_without_thoughts_takes_what_turns_none_on_and_efforts() -> None:
    with toy_model(toy_session()) as model, serving(model) as url:
        for more in (
            {"enable_thinking": False},
            {"reasoning_effort": "low"},
            {"reasoning_effort": "none"},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ):
            reply = ask(url, CHAT, question(max_tokens=1, **more) | {"model": "toy"})
            assert reply.status == 200, reply.body


def test_stream_options_are_for_streams(url: str) -> None:
    for options in ({"include_usage": True}, {"continuous_usage_stats": False}):
        assert ask(url, CHAT, question(stream=True, stream_options=options)).status == 200
        refused = ask(url, CHAT, question(stream_options=options))
        assert refused.status == 400 and "stream_options is for streams" in refused.error


@pytest.mark.parametrize("most", [0, 1])
def test_the_chosen_token_is_among_the_most_likely(most: int) -> None:
    """Parts of a character have keys of their own."""
    first, second, *_ = tokenizer().encode("日")
    best = ((second, -0.1),)[:most]
    records = tuple(TokenRecord(id_, "target", -2.0, best) for id_ in (first, second))
    answer = Generation("", (first, second), "stop", GenerationStats(), records=records)
    body = parse(CompletionBody, {"model": "m", "prompt": "a", "logprobs": most})
    reply = ready(CompletionReply("m", logprobs=body.logprobs is not None))
    scores = reply.whole([answer])["choices"][0]["logprobs"]
    assert scores["tokens"] == ["bytes:\\xe6\\x97", "bytes:\\xa5"]
    for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True):
        assert top[token] == -2.0 and len(top) <= most + 1


def test_thoughts_are_signed_before_their_block_ends() -> None:
    record = Record("", (TokenRecord(5, "target"),), content="a", thoughts=("hm",))
    reply = ready(MessageReply("m"))
    happened = reply.chunk(record, [])
    signed, stop = happened[2:4]
    assert (signed["delta"]["type"], stop["type"]) == ("signature_delta", "content_block_stop")
    whole = ready(MessageReply("m"))
    answer = Generation("", (5,), "stop", GenerationStats(), content="a", thoughts=("hm",))
    assert whole.whole([answer])["content"][0]["signature"] == signed["delta"]["signature"] != ""


@pytest.mark.parametrize(
    ("content", "reason", "status", "details"),
    [
        ("", "tool_calls", "completed", None),
        ("", "length", "incomplete", {"reason": "max_output_tokens"}),
        ("so", "length", "incomplete", {"reason": "max_output_tokens"}),
    ],
)
def test_a_response_that_was_cut_is_incomplete_and_calls_are_whole(
    content: str, reason: Any, status: str, details: object
) -> None:
    body = parse(ResponsesBody, {"model": "m", "input": "a"})
    reply = ready(ResponseReply("m", body, [], ResponseStore()))
    reply.chunk(Record("", (), calls=(ToolCall("c", "f", {}),)), [])
    reply.chunk(Record("", (), content=content), [])
    *_, item, last = reply.end(Generation("", (), reason, GenerationStats()))
    assert item["type"] == "response.output_item.done"
    assert item["item"]["status"] == ("incomplete" if content else "completed")
    assert last["type"] == f"response.{status}" and last["response"]["incomplete_details"] == details


def test_items_of_tools_that_are_taken_are_taken_back() -> None:
    """Calls that the client answered are shown to the model, others are left out."""
    items = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "local_shell_call", "call_id": "s", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "call_id": "s", "output": {"stdout": "b"}},
    ]
    user, patch, done, shell, listed = parse(ResponsesBody, {"model": "m", "input": items}).chat_messages(
        ResponseStore()
    )
    assert user["content"] == "a" and done["content"] == "done" and listed["content"] == '{"stdout": "b"}'
    calls = [message["tool_calls"][0]["function"] for message in (patch, shell)]
    assert calls[0] == {"name": "patch", "arguments": {"input": "x"}}
    assert calls[1] == {"name": "local_shell", "arguments": {"action": {"command": ["ls"]}}}
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "t", "name": "web_search", "input": {"query": "b"}},
        {"type": "web_search_tool_result", "tool_use_id": "t", "content": [{"url": "u"}]},
        {"type": "text", "text": "so"},
    ]
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": blocks}]
    body = parse(MessagesBody, {"model": "m", "messages": [*conversation, {"role": "user", "content": "b"}]})
    _, call, result, text, _ = body.chat_messages()
    assert call["tool_calls"][0]["function"]["arguments"] == {"query": "b"}
    assert result == {"role": "tool", "tool_call_id": "t", "content": '[{"url": "u"}]'}
    assert text["content"] == "so"


def takes(form: AnyJson | JsonSchema, text: str) -> bool:
    constraint = Grammars(tokenizer(), [tokenizer().vocab_size - 1]).constraint(form)
    ids = tokenizer().encode(text)
    return all(id_ in constraint.allowed(ids[:at]) for at, id_ in enumerate(ids))


@pytest.mark.parametrize("text", ['{"a": [1, 2]}', '{ "a": 1, "b": 2 }', '{"a":1}'])
def test_json_of_free_names_may_have_a_space_in_each_place(text: str) -> None:
    assert takes(AnyJson(), text) and takes(JsonSchema({"additionalProperties": {}}), text)
    assert not takes(AnyJson(), text.replace("{", "{  "))
    assert takes(JsonSchema({"properties": {"a": {}}}), '{"a": 1') and not takes(
        JsonSchema({"properties": {"a": {}}}), '{ "a"'
    )


def test_what_a_model_holds_is_neither_pickled_nor_copied() -> None:
    with toy_model(toy_session()) as model, Models({"a": "b"}) as models:
        model.target.chat_template = ChatTemplate(HERMES)
        for held in (model, models, model.conversation(), model.stream("a")):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=r"call edgespec\.load in each process"):
                    copied(held)
    assert copy.deepcopy(LoadOptions()) == LoadOptions()
