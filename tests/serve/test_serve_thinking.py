"""Thoughts as the server's clients and the terminal show them."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import typer

from edgespec.cli import options
from edgespec.cli.answers import answer_json, stream_to_terminal
from edgespec.serve.bodies import ChatBody, parse
from tests.kit.serving import ask, events, serving
from tests.kit.templates import TOOLS
from tests.kit.thoughts import ASK, QWEN3, QWEN38, scripted


@pytest.fixture
def url() -> Iterator[str]:
    with scripted(QWEN3) as model, serving(model) as url:
        yield url


def test_openais_client_reads_thoughts_beside_the_content(url: str) -> None:
    request: Any = {"model": "toy", "messages": ASK, "logprobs": True}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**request)
        chunks = list(
            client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
        )
        off = client.chat.completions.create(**request, reasoning_effort="none")
        few = client.chat.completions.create(**request, extra_body={"thinking_budget": 3})
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("One and two. One and two.", "Three.")
    deltas: Any = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("reasoning_content", "content"):
        pieces = [getattr(delta, name, None) or "" for delta in deltas]
        assert "".join(pieces) == getattr(message, name)
    for usage in (whole.usage, chunks[-1].usage):
        count = usage.completion_tokens_details.reasoning_tokens
        assert 0 < count < usage.completion_tokens
        assert len(whole.choices[0].logprobs.content) == usage.completion_tokens - count
    assert not hasattr(off.choices[0].message, "reasoning_content")
    assert off.usage.completion_tokens_details.reasoning_tokens == 0
    assert few.usage.completion_tokens_details.reasoning_tokens == 5


def test_thoughts_are_reasoning_items_and_thinking_blocks(url: str) -> None:
    """Which go back, and are bounded in each one's words."""
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client:
        request: Any = {"model": "toy", "input": "1 + 2?"}
        whole = client.responses.create(**request)
        with client.responses.stream(**request) as stream:
            pieces = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
            streamed = stream.get_final_response()
        assert "".join(pieces) == "One and two. One and two." and len(pieces) > 1
        for answer in (whole, streamed):
            item = answer.output[0]
            assert (item.type, item.content[0].text) == ("reasoning", "One and two. One and two.")
            assert answer.output_text == "Three." and len(answer.output) == 2
        off = client.responses.create(**request, reasoning={"effort": "none", "summary": "auto"})
        assert off.usage.output_tokens_details.reasoning_tokens == 0 and len(off.output) == 1
        sure = {"role": "user", "content": "Sure?"}
        again = client.responses.create(model="toy", input=[*ASK, *whole.output, sure])
        behind = client.responses.create(model="toy", input="Sure?", previous_response_id=whole.id)
        assert again.usage.input_tokens == behind.usage.input_tokens > whole.usage.input_tokens
    other: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with other:
        wanted: Any = {"model": "toy", "messages": ASK, "max_tokens": 100}
        with other.messages.stream(**wanted) as events_of:
            kinds = [event.type for event in events_of]
            final = events_of.get_final_message()
        assert kinds.count("thinking") > 1
        for message in (other.messages.create(**wanted), final):
            thought, text = message.content
            assert thought.type == "thinking" and thought.thinking == "One and two. One and two."
            assert text.type == "text" and text.text == "Three."
        few = other.messages.create(**wanted, thinking={"type": "enabled", "budget_tokens": 3})
        assert few.usage.output_tokens_details.thinking_tokens == 5
        (text,) = other.messages.create(**wanted, thinking={"type": "disabled"}).content
        assert text.type == "text"


def test_tokens_of_thoughts_are_marked_and_go_back_and_forth(url: str) -> None:
    path = "/v1/chat/completions"
    body = {"model": "toy", "messages": ASK}
    choice = ask(url, path, body).json["choices"][0]
    chunks = events(ask(url, path, {**body, "stream": True}))[1:-2]
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["edgespec"]["tokens"]]
    for tokens in (choice["edgespec"]["tokens"], streamed):
        thought = "".join(token["text"] for token in tokens if token.get("reasoning"))
        assert thought == "One and two. One and two."
        assert "".join(token["text"] for token in tokens if "reasoning" not in token) == "Three."
    again = [*ASK, choice["message"], *ASK]
    assert ask(url, path, {**body, "messages": again}).status == 200
    held = ask(url, path, {**body, "tools": TOOLS, "stream": True})
    assert held.status == 400  # this template shows no tools


CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BOUNDED = {"type": "enabled", "budget_tokens": 4}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        *(
            (CHATS, {"messages": ASK, "reasoning_effort": word})
            for word in ("minimal", "high", "max", "none")
        ),
        *((RESPONSES, {"input": "1 + 2?", "reasoning": {"effort": word}}) for word in ("high", "xhigh")),
        *(("/api/chat", {"messages": ASK, "think": level}) for level in (True, False, "high", "max")),
        *((MESSAGES, {"messages": ASK, "thinking": how}) for how in ({"type": "adaptive"}, BOUNDED)),
        (MESSAGES, {"messages": ASK, "output_config": {"effort": "high"}}),
    ],
)
def test_efforts_reach_a_template_that_refuses_other_words(path: str, more: dict[str, Any]) -> None:
    with scripted(QWEN38) as model, serving(model) as url:
        asked = {"model": "toy", "stream": False, **more}
        if path != "/api/chat":
            asked["max_output_tokens" if path == RESPONSES else "max_tokens"] = 40
        assert ask(url, path, asked).status == 200


@pytest.mark.parametrize(
    ("more", "thinking"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "xhigh"}, "xhigh"),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high", "thinking_budget_tokens": 0}, 0),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
    ],
)
def test_clients_bound_thoughts_in_their_own_words(more: dict[str, Any], thinking: Any) -> None:
    given = parse(ChatBody, {"model": "toy", "messages": ASK, **more}).options()
    assert given.get("thinking") == thinking and isinstance(given.get("thinking"), type(thinking))


def test_the_terminal_shows_thoughts_beside_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(QWEN3) as model:
        answer = stream_to_terminal(model.stream_chat(ASK))
        written = capsys.readouterr()
        assert written.out == "Three.\n" and written.err == f"{answer.reasoning}\n\n"
        stream_to_terminal(model.stream_chat(ASK, max_tokens=5), model.target.tokenizer)
        assert capsys.readouterr().err == "One\n"
        assert answer_json(answer)["reasoning"] == answer.reasoning


@pytest.mark.parametrize(
    ("given", "thinking"), [(None, None), ("on", True), ("off", False), ("300", 300), ("low", "low")]
)
def test_the_command_line_says_how_much_is_thought(given: str | None, thinking: Any) -> None:
    assert options.thinking(given) == thinking and isinstance(options.thinking(given), type(thinking))
    with pytest.raises(
        typer.BadParameter, match=r"'much' is unknown; allowed: on, off, minimal, low, .*, max and a number"
    ):
        options.thinking("much")
