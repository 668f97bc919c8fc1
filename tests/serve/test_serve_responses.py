"""``/v1/responses``: what OpenAI's client reads of it, what is kept for later, and what is refused."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import openai
import pytest

from edgespec.serve.bodies import UNUSED, Once
from edgespec.serve.problems import Problem
from edgespec.serve.responses import ResponseStore
from edgespec_models.errors import Busy, EdgespecError
from edgespec_models.text.chat_template import ChatTemplate
from tests.kit.models import toy_model, toy_session
from tests.kit.serving import ServedModel, ask, named_events, serving
from tests.kit.templates import HERMES

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn", "days": [1, 2]}}</tool_call>'


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with client_of(url) as client:
        yield client


def client_of(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def asked(text: object = "hello", **more: object) -> dict[str, Any]:
    return {"model": "served", "input": text, **more}


def test_a_response_is_what_openais_client_reads(model: ServedModel, client: Any) -> None:
    more: Any = {
        "instructions": "Be brief.",
        "max_output_tokens": 99,
        "temperature": 0.5,
        "metadata": {"a": "b"},
    }
    answer = client.responses.create(**asked("naïve 😀"), **more, parallel_tool_calls=False)
    assert (answer.output_text, answer.status, answer.object) == ("re: naïve 😀", "completed", "response")
    (item,) = answer.output
    assert item.type == "message" and item.role == "assistant" and item.status == "completed"
    assert answer.instructions == "Be brief." and answer.metadata == {"a": "b"}
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.total_tokens == 7 + answer.usage.output_tokens
    extension: Any = answer.model_extra
    assert extension["edgespec"]["stats"]["accepted"] == 10
    messages, options = model.calls[0]
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 😀"}]
    wanted = {"temperature": 0.5, "max_new_tokens": 99, "parallel_tool_calls": False, "tool_choice": "auto"}
    assert options == wanted | {"timeout": pytest.approx(600.0, abs=10)}


def test_events_come_in_order_and_their_pieces_are_the_whole(url: str) -> None:
    events = named_events(ask(url, PATH, asked(f"see {CALL} {CALL}\nthen", tools=[WEATHER], stream=True)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1] or not kind.endswith("delta")]
    part = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    text = ["output_item.added", *part, "output_item.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    call = ["output_item.added", *arguments, "output_item.done"]
    assert once == ["created", "in_progress", *text, *call, *call, *text, "completed"]
    response = events[-1]["response"]
    begun: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None}
    assert events[0]["response"] | {"edgespec": response["edgespec"]} == response | begun
    for index, item in enumerate(response["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[-1]["item"] == item
        pieces = "".join(event["delta"] for event in own if event["type"].endswith("delta"))
        (whole,) = (event for event in own if event["type"].endswith(("text.done", "arguments.done")))
        assert pieces == whole.get("text", whole.get("arguments"))
        assert pieces == (item.get("arguments") or item["content"][0]["text"])
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
    assert json.loads(response["output"][1]["arguments"]) == {"city": "Bonn", "days": [1, 2]}


def test_results_of_tools_go_back_as_items(model: ServedModel, client: Any) -> None:
    """Or behind the response that called them."""
    first = client.responses.create(**asked(f"see {CALL}", tools=[WEATHER]))
    call: Any = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    user = {"role": "user", "content": f"see {CALL}"}
    thought: Any = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    sent = [thought, *(item.model_dump(exclude_none=True) for item in first.output), result]
    client.responses.create(**asked([user, *sent]))
    client.responses.create(**asked([result], previous_response_id=first.id))
    for (messages, _), thoughts in zip(model.calls[1:], ({"reasoning_content": "so"}, {}), strict=True):
        question, called, answered = messages
        function = {"name": "weather", "arguments": '{"city": "Bonn", "days": [1, 2]}'}
        calls = [{"id": call.call_id, "type": "function", "function": function}]
        assert question == user
        assert called == {"role": "assistant", "content": "re: see", "tool_calls": calls} | thoughts
        assert answered == {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}


def test_a_request_goes_on_behind_a_response_that_is_kept(model: ServedModel, client: Any) -> None:
    """With its own instructions; each in its own way, streamed or not."""
    first = client.responses.create(**asked("one", instructions="old"))
    second = list(client.responses.create(**asked("two", previous_response_id=first.id, stream=True)))[-1]
    assert second.type == "response.completed"
    third = client.responses.create(
        **asked("three", previous_response_id=second.response.id, instructions="new", store=False)
    )
    texts = ["new", "one", "re: one", "two", "re: two", "three"]
    assert [message["content"] for message in model.calls[-1][0]] == texts
    assert client.responses.retrieve(first.id) == first
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"the response is 'resp_.*unless store is false"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match=r"previous_response_id is 'resp_.*kept for 3600 s"):
        client.responses.create(**asked("two", previous_response_id=first.id))
    assert len(model.calls) == 3


def test_what_is_kept_is_bounded_by_time_and_memory() -> None:
    now = [0.0]
    kept = ResponseStore(most=1000, seconds=60.0, clock=lambda: now[0])

    def held() -> list[int]:
        return [at for at in range(10) if holds(f"r{at}")]

    def holds(id_: str) -> bool:
        try:
            return bool(deepcopy(kept).get(id_, "x")[0]["id"] == id_)  # a copy: who reads keeps it on
        except Problem as error:
            assert "kept for 60 s, 1,000 bytes" in str(error)
            return False

    for at in range(4):
        now[0] = 20.0 * at
        kept.put({"id": f"r{at}"}, [])
    assert held() == [1, 2, 3]  # 60 s are over for the first
    kept.put({"id": "r4"}, [{"role": "user", "content": "x" * 920}])
    assert held() == [3, 4]
    kept.put({"id": "r5"}, [{"role": "user", "content": "x" * 2000}])
    assert held() == []
    kept.put({"id": "r6"}, [])
    now[0] += 59.9
    assert held() == [6]
    now[0] += 0.2
    assert held() == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"background": True}, "background is True; allowed: False"),
        ({"conversation": "conv_1"}, "'conversation' is not known; allowed: temperature"),
        ({"truncation": "auto"}, "truncation is 'auto'"),
        ({"include": ["message.output_text.logprobs"]}, "include[0] is 'message.output_text.logprobs'"),
        ({"tools": [{"type": "function"}]}, "tools[0] is {"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice is {'type': 'allowed_tools'}; all"),
        ({"text": {"format": {"type": "xml"}}}, "text.format is {'type': 'xml'}; allowed:"),
        ({"text": {"verbosity": "low"}}, "text.verbosity is 'low'"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort is 'enormous'"),
        ({"input": [{"type": "computer"}]}, "input[0].type is 'computer'; allowed: 'message'"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role is 'tool'; allowed: 'user'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "served reads no images"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text is N"),
        ({"input": [{"role": "user"}]}, "input[0].content is None; allowed: a text, or a list of parts"),
        ({"input": []}, "input is"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_refused_by_name(
    model: ServedModel, url: str, more: dict[str, Any], message: str
) -> None:
    if "tools" in more or "tool_choice" in more:  # which the model's own checks see
        model = toy_model(toy_session())  # type: ignore[assignment]
        model.target.chat_template = ChatTemplate(HERMES)
        with serving(model) as own:  # type: ignore[arg-type]
            reply = ask(own, PATH, asked() | {"model": "toy"} | more)
    else:
        reply = ask(url, PATH, asked() | more)
    assert reply.status == 400 and message in reply.error
    assert reply.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_raises_is_an_error_of_openais(model: ServedModel, client: Any, stream: bool) -> None:
    model.refusal = Busy("64 requests wait")
    with pytest.raises(openai.RateLimitError):
        client.responses.create(**asked(), stream=stream)
    model.refusal, model.fault = None, EdgespecError("a session broke")
    failing = pytest.raises(openai.APIError, match="a session broke")
    with failing, client.responses.create(**asked(), stream=stream) as answer:
        assert stream and list(answer)


def test_a_reference_stands_for_an_item_that_is_kept(model: ServedModel, client: Any) -> None:
    """As AI SDK sends what was said: text, thoughts and calls alike."""
    first = client.responses.create(**asked(f"see {CALL}", tools=[WEATHER]))
    items = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"}
    user = {"role": "user", "content": "see"}
    client.responses.create(**asked([user, *items, result]))
    client.responses.create(**asked([user, *(item.model_dump() for item in first.output), result]))
    assert model.calls[1][0] == model.calls[2][0] and len(model.calls[1][0]) == 3
    unkept = client.responses.create(**asked("one", store=False)).output[0].id
    for id_ in (unkept, first.output[0].id[:-1] + "9", "msg", None, 3):
        with pytest.raises(openai.NotFoundError, match=r"input\[1\]\.id is .*, which is not kept: responses"):
            client.responses.create(**asked([user, {"type": "item_reference", "id": id_}]))


def test_what_is_read_or_referred_to_is_kept_on() -> None:
    now = [0.0]
    kept = ResponseStore(seconds=60.0, clock=lambda: now[0])
    for name in ("aa", "bb", "cc"):
        kept.put({"id": f"resp_{name}", "output": [{"id": f"msg_{name}0000"}]}, [])
    now[0] = 50.0
    assert kept.item("msg_aa0000", "x") == {"id": "msg_aa0000"}
    response, _ = kept.get("resp_cc", "x")
    now[0] = 100.0
    assert kept.item("msg_aa0000", "x") == {"id": "msg_aa0000"}
    assert kept.get("resp_cc", "x") == (response, [])
    with pytest.raises(Problem, match="x is 'msg_bb0000', which is not kept"):
        kept.item("msg_bb0000", "x")


FOREIGN = ("web_search", "namespace", "custom", "local_shell", "mcp", "computer_use_preview")


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_what_changes_no_answer_is_taken_and_told_once(
    model: ServedModel, url: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields that say who asks, and tools that run elsewhere, which the model is not shown."""
    tools = [{"type": kind, "name": "x"} for kind in FOREIGN]
    function = {"name": "weather", "parameters": PARAMETERS}
    own = WEATHER if path == PATH else {"type": "function", "function": function}
    more = {
        "client_metadata": {"session_id": "x"},
        "cache_salt": "s",
        "trace_id": "t",
        "tools": [*tools, own],
    }
    body = asked() if path == PATH else {"model": "served", "messages": [{"role": "user", "content": "a"}]}
    told = Once()
    UNUSED.addFilter(told)
    try:
        with caplog.at_level("INFO", logger=UNUSED.name):
            for _ in range(3):
                assert ask(url, path, body | more).status == 200
    finally:
        UNUSED.removeFilter(told)
    assert [tool["function"]["name"] for tool in model.calls[0][1]["tools"]] == ["weather"]
    messages = [record.getMessage() for record in caplog.records if record.name == UNUSED.name]
    assert len(messages) == len(set(messages)) == 3 + len(FOREIGN)
    assert "requests have the field 'client_metadata', which changes no answer here" in messages
    assert "requests have tools of the type 'local_shell', which no model here is shown" in messages
    for name in ("conversation", "prompt", "lora_id", "cached"):  # may change it
        assert f"'{name}' is not known" in ask(url, path, body | {name: "x"}).error


def test_errors_of_the_model_name_what_the_client_sent() -> None:
    """An effort is no error: it says how hard to think, if at all."""
    form = {"type": "json_schema", "name": "a", "strict": True, "schema": {"uniqueItems": True}}
    with toy_model(toy_session()) as model, serving(model) as url:
        strict = ask(url, PATH, asked() | {"model": "toy", "text": {"format": form}})
        effort = {"model": "toy", "max_output_tokens": 1, "reasoning": {"effort": "low"}}
        assert ask(url, PATH, asked() | effort).status == 200
    assert strict.status == 400 and "text.format cannot be followed strictly" in strict.error
