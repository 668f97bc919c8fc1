"""``/v1/messages``: what Anthropic's client reads of it, and what is refused in the shape that it knows."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from edgespec.serve.bodies import parse
from edgespec.serve.messages import MessagesBody
from edgespec.serve.options import ServeOptions
from edgespec_models.errors import Busy, Closed, EdgespecError
from edgespec_models.text.chat_template import ChatTemplate
from tests.kit.models import toy_model, toy_session
from tests.kit.serving import ServedModel, ask, named_events, serving
from tests.kit.templates import HERMES

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"name": "weather", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn", "days": [1, 2]}}</tool_call>'
ARGUMENTS = {"city": "Bonn", "days": [1, 2]}
KEY = "a-key-of-this-test"


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with client_of(url) as client:
        yield client


def client_of(url: str) -> Any:
    return anthropic.Anthropic(base_url=url, api_key="ignored", max_retries=0)


def asked(content: object = "hello", **more: object) -> dict[str, Any]:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return {"model": "served", "max_tokens": 999, "messages": messages, **more}


def test_a_message_is_what_anthropics_client_reads(model: ServedModel, client: Any) -> None:
    system = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    more: Any = {"system": system, "stop_sequences": ["x", "y"], "metadata": {"user_id": "u"}}
    more["tool_choice"] = {"type": "none", "disable_parallel_tool_use": True}
    answer = client.messages.create(**asked("naïve 😀"), **more, extra_body={"temperature": 0.5, "top_k": 4})
    (block,) = answer.content
    assert block.type == "text" and block.text == "re: naïve 😀"
    assert (answer.role, answer.type, answer.stop_reason) == ("assistant", "message", "end_turn")
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (4, 3)
    extension: Any = answer.model_extra
    assert extension["edgespec"]["stats"]["new_tokens"] == answer.usage.output_tokens
    messages, options = model.calls[0]
    assert messages == [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "naïve 😀"}]
    wanted = {"temperature": 0.5, "top_k": 4, "max_new_tokens": 999, "stop": ("x", "y")}
    choice = {"tool_choice": "none", "parallel_tool_calls": False}
    assert options == wanted | choice | {"timeout": pytest.approx(600.0, abs=10)}


def test_events_come_in_order_and_their_pieces_are_the_whole(url: str) -> None:
    events = named_events(ask(url, PATH, asked(f"see {CALL} {CALL}\nthen", tools=[WEATHER], stream=True)))
    kinds = [event["type"].removeprefix("content_block_") for event in events]
    once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    assert once == ["message_start", *["start", "delta", "stop"] * 4, "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    read = {"input_tokens": 4, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0}
    assert events[0]["message"]["usage"] == read | {"output_tokens": 0}
    assert events[-2]["usage"] == read | {
        "output_tokens": events[-2]["usage"]["output_tokens"],
        "output_tokens_details": {"thinking_tokens": 0},
    }
    pieces = ["", "", "", ""]
    for event in events:
        if event["type"] == "content_block_delta":
            pieces[event["index"]] += event["delta"].get("text", event["delta"].get("partial_json"))
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use", "text"]
    assert blocks[0]["text"] == "" and blocks[1]["input"] == {}
    assert pieces[0] + pieces[3] == "re: see  \nthen" and pieces[1] == pieces[2]
    assert json.loads(pieces[1]) == ARGUMENTS
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 20


def test_results_of_tools_go_back_in_messages(model: ServedModel, client: Any) -> None:
    first = client.messages.create(**asked(f"see {CALL}", tools=[WEATHER]))
    id_ = first.content[1].id
    thought = {"type": "thinking", "thinking": "so", "signature": ""}
    said = [thought, *(block.model_dump(exclude_none=True) for block in first.content)]
    result = {"type": "tool_result", "tool_use_id": id_, "content": [{"type": "text", "text": "sunny"}]}
    texts = [{"type": "text", "text": text} for text in ("and", "now?")]
    turns = [
        {"role": "user", "content": f"see {CALL}"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [result, *texts]},
    ]
    client.messages.create(**asked(turns))
    function = {"name": "weather", "arguments": ARGUMENTS}
    calls = [{"id": id_, "type": "function", "function": function}]
    assert model.calls[-1][0] == [
        turns[0],
        {"role": "assistant", "content": "re: see", "reasoning_content": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": id_, "content": "sunny"},
        {"role": "user", "content": "and\nnow?"},
    ]


def test_choices_stops_and_limits_are_anthropics() -> None:
    fixed: dict[str, Any] = {"city": {"enum": ["Bonn", "Köln"]}}
    schema = {"type": "object", "properties": fixed, "required": [*fixed], "additionalProperties": False}
    model = toy_model(toy_session(context=2000), toy_session(seed=1, context=2000))
    model.target.chat_template = ChatTemplate(HERMES)
    tools: Any = [{"name": "weather", "input_schema": schema}]
    with model, serving(model) as url, client_of(url) as client:
        wanted = asked("hi", thinking={"type": "disabled"}) | {"model": "toy", "max_tokens": 60}
        for choice in (
            {"type": "any"},
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        ):
            (call,) = client.messages.create(**wanted, tools=tools, tool_choice=choice).content
            assert call.type == "tool_use" and call.input["city"] in ("Bonn", "Köln")
        whole = client.messages.create(**wanted)
        assert whole.stop_reason == "max_tokens" and whole.content[0].type == "text"
        stop = whole.content[0].text[9:12]
        ended = client.messages.create(**wanted, stop_sequences=[stop])
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
        counted = client.messages.count_tokens(model="toy", messages=wanted["messages"], tools=tools)
        del wanted["thinking"]
        assert counted.input_tokens == model.count_tokens(
            wanted["messages"],
            tools=[{"type": "function", "function": {"name": "weather", "parameters": schema}}],
        )
        usage: Any = client.messages.create(**wanted, tools=tools).usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"container": "c"}, "'container' is not known; allowed: temperature"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type is 'between_tools'; allowed: 'enabled'"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'; allowed: 'low' or 'medium'"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "type is 'clear_t"),
        ({"thinking": {"type": "enabled"}}, "thinking is True, and toy does not support thinking; leave it"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens is 9, and toy does"),
        (
            {"thinking": {"type": "enabled"}, "output_config": {"effort": "low"}},
            "output_config.effort is 'low', and toy does not support thinking",
        ),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format is {'type': 'xml'}; allowed:"),
        ({"system": 3}, "system is 3"),
        ({"system": [{"type": "image"}]}, "system[0].type is 'image'; allowed: 'text'"),
        ({"messages": []}, "messages is"),
        ({"messages": [{"role": "user", "content": []}]}, "messages is []"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role is 'tool'; allowed: 'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is None; allowed: a text, or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "source.type is None; allowed"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "messages[0].role is 'assistant'; allowed"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_sequences": "x"}, "stop_sequences is 'x'"),
        ({"tools": [{"name": ""}]}, "tools[0] is {"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_refused_by_name(path: str, more: dict[str, Any], message: str) -> None:
    with toy_model(toy_session()) as model, serving(model) as url:
        reply = ask(url, path, asked() | {"model": "toy"} | more)
    assert reply.status == 400 and reply.json["type"] == "error"
    assert reply.json["error"]["type"] == "invalid_request_error" and message in reply.error


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Busy("64 requests wait"), 429, "rate_limit_error"),
        (Closed("closed"), 503, "overloaded_error"),
        (EdgespecError("a session broke"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_shape(
    model: ServedModel, url: str, stream: bool, error: EdgespecError, status: int, kind: str
) -> None:
    model.refusal = error
    reply = ask(url, PATH, asked(stream=stream))
    assert (reply.status, reply.json["error"]["type"]) == (status, kind)
    others: list[tuple[str, Any, dict[str, str], tuple[int, str]]] = [
        (PATH, asked() | {"model": "gpt-9"}, {}, (404, "not_found_error")),
        (f"{PATH}/batches", {}, {}, (404, "not_found_error")),
        (PATH, asked(), {"Origin": "https://evil.example"}, (403, "permission_error")),
        (PATH, b"{", {}, (400, "invalid_request_error")),
    ]
    for path, body, headers, wanted in others:
        reply = ask(url, path, body, headers=headers)
        assert (reply.status, reply.json["error"]["type"]) == wanted and reply.json["type"] == "error"


def test_an_error_behind_the_first_piece_is_raised(model: ServedModel, client: Any) -> None:
    model.fault = EdgespecError("a session broke")
    stream = client.messages.create(**asked(), stream=True)
    with stream, pytest.raises(anthropic.APIStatusError, match="a session broke"):
        list(stream)


def test_the_key_may_come_as_anthropics_clients_send_it() -> None:
    with serving(ServedModel().as_model(), ServeOptions(port=0, api_key=KEY)) as url:
        for key, fits in ((KEY, True), (f"{KEY}x", False), ("", False)):
            assert ask(url, PATH, asked(), headers={"x-api-key": key}).status == (200 if fits else 401)
        wrong = ask(url, PATH, asked(), headers={"x-api-key": KEY, "Authorization": "Bearer x"})
        assert (wrong.status, wrong.json["error"]["type"]) == (401, "authentication_error")


def test_a_request_as_agents_send_it_is_answered(model: ServedModel, url: str) -> None:
    """Of a model that does not think: effort and thoughts that are left to it ask for nothing then."""
    later = {"role": "system", "content": "Agents you may start: none."}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, later]
    agents: dict[str, Any] = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "tools": [{"type": "web_search_20250305", "name": "w"}, WEATHER],
    }
    for thinks in (True, False):
        model.thinks = thinks
        assert ask(url, PATH, asked(turns) | agents).status == 200
        assert ask(url, COUNT, asked(turns) | agents).status == 200
    said, options = model.calls[0]
    assert said == [turns[0], turns[1], later]
    assert [tool["function"]["name"] for tool in options["tools"]] == ["weather"]
    assert [call[1].get("thinking") for call in model.calls] == ["high", "high", None, None]


def test_a_systems_message_behind_a_question_is_read_before_it() -> None:
    """Models answer what comes last; results of tools stay behind their calls, other places as they are."""
    there = {"role": "system", "content": "Today is Monday."}
    hi, again = ({"role": "user", "content": text} for text in ("hi", "again"))
    ho = {"role": "assistant", "content": "ho"}
    call = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]}
    cases: list[tuple[list[Any], list[str]]] = [
        ([hi, there], ["system", "user"]),
        ([hi, there, ho, again], ["system", "user", "assistant", "user"]),
        ([hi, ho, again, there], ["user", "assistant", "system", "user"]),
        ([hi, there, again], ["user", "system", "user"]),
        (
            [hi, {"role": "assistant", "content": call}, result, there],
            ["user", "assistant", "tool", "system"],
        ),
    ]
    for messages, roles in cases:
        assert [message["role"] for message in parse(MessagesBody, asked(messages)).chat_messages()] == roles
    said = parse(MessagesBody, asked([hi, there], system="Be brief.")).chat_messages()
    assert said == [{"role": "system", "content": "Be brief.\nToday is Monday."}, hi]
