"""The server over whole models, whose sessions are toys: answers, queue, leaving clients, learning, forms."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import openai
import pytest

from edgespec.engine import Model
from edgespec.history.manage import History
from edgespec.loading.options import LoadOptions
from edgespec.serve.options import ServeOptions
from tests.kit.models import Gated, queue_of, toy_model, toy_session
from tests.kit.serving import ask, drafting_model, events, leaving, open_stream, said, serving
from tests.kit.toy import settle, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NEW = 24


def body(content: object, role: str = "user", **more: object) -> dict[str, object]:
    return {"model": "toy", "messages": [{"role": role, "content": content}], "max_tokens": NEW} | more


@pytest.fixture
def model() -> Iterator[Model]:
    with drafting_model() as model:
        yield model


@pytest.fixture
def url(model: Model) -> Iterator[str]:
    with serving(model) as url:
        yield url


def test_answers_are_the_models_own(model: Model, url: str) -> None:
    expected = model.chat([{"role": "user", "content": "hi"}], max_new_tokens=NEW)
    whole = ask(url, CHAT, body("hi"))
    choice = whole.json["choices"][0]
    assert choice["message"]["content"] == expected.text == said(ask(url, CHAT, body("hi", stream=True)))
    assert whole.json["usage"]["completion_tokens"] == len(expected.tokens) == NEW
    assert choice["finish_reason"] == "length"
    sources = [token["source"] for token in choice["edgespec"]["tokens"]]
    assert sources.count("model") == choice["edgespec"]["stats"]["accepted"] > 0
    assert sources[0] == "target"
    plain = ask(url, CHAT, body("hi", speculate=False)).json["choices"][0]
    assert {token["source"] for token in plain["edgespec"]["tokens"]} == {"target"}
    assert plain["message"] == choice["message"]
    text = ask(url, TEXT, {"model": "toy", "prompt": "abc", "max_tokens": 5}).json["choices"][0]["text"]
    assert text == model.generate("abc", max_new_tokens=5).text
    records = model.generate("abc", max_tokens=4, logprobs=True, top_logprobs=2).records
    scored = ask(url, TEXT, {"model": "toy", "prompt": "abc", "max_tokens": 4, "logprobs": 2}).json
    lists = scored["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == pytest.approx([record.logprob for record in records])
    assert all(len(top) == 2 for top in lists["top_logprobs"])


def test_a_stop_string_ends_a_stream_before_it(url: str) -> None:
    whole = said(ask(url, CHAT, body("hi")))
    stop = whole[9:12]
    cut = whole.split(stop)[0]
    reply = ask(url, CHAT, body("hi", stop=[stop], stream=True))
    assert said(reply) == cut
    last = events(reply)[-2]["choices"][0]
    assert (last["finish_reason"], last["edgespec"]["stop"]) == ("stop", stop)
    shown = [t["text"] for c in events(reply)[1:-2] for t in c["choices"][0]["edgespec"]["tokens"]]
    assert "".join(shown) == cut


def test_what_does_not_fit_is_refused_and_what_nearly_does_is_shortened() -> None:
    with toy_model(toy_session(context=100)) as model, serving(model) as url:
        reply = ask(url, TEXT, {"model": "toy", "prompt": "a" * 200})
        assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
        answer = ask(url, TEXT, {"model": "toy", "prompt": "a" * 60, "max_tokens": 1000}).json
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["total_tokens"] <= 100


def test_one_more_than_may_wait_is_told_to_come_back() -> None:
    gate = Gated()
    options = LoadOptions(max_waiting=1)
    with toy_model(gate, options=options) as model, serving(model) as url, ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, url, CHAT, body("runs"))
        assert gate.arrived.acquire(timeout=10)
        waiting = pool.submit(ask, url, CHAT, body("waits", stream=True))
        until(lambda: len(queue_of(model).waiting) > 0)
        busy = [ask(url, CHAT, body("too many", stream=stream)) for stream in (False, True)]
        assert [reply.status for reply in busy] == [429, 429]
        assert int(busy[0].headers["retry-after"]) > 0
        gate.open()
        assert len(said(running.result())) > 0 and len(said(waiting.result())) > 0


def test_a_client_that_leaves_ends_its_request_within_a_pass() -> None:
    gate = Gated()
    with toy_model(gate) as model, serving(model) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "hi"}]
        gate.let(200)  # the prompt's
        with client:
            options: Any = {"model": "toy", "messages": messages, "max_tokens": 3000}
            stream = client.chat.completions.create(**options, stream=True)
            next(stream)
            stream.close()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, url, CHAT, body("next"))
            while not answer.done():  # a busy machine may take a while to tell the server
                gate.let(1)
                wait([answer], timeout=0.01)
        assert answer.result().status == 200
        assert 'status="499"} 1.0' in ask(url, "/metrics").body.decode()
        passes = len(gate.passes)
    assert passes < 1000


LONG = "a document of many words " * 4


def test_a_stream_says_how_far_the_prompt_is_in_the_form_of_llama_cpp() -> None:
    for path, options in ((CHAT, body(LONG)), (TEXT, {"model": "toy", "prompt": LONG, "max_tokens": NEW})):
        with toy_model() as model, serving(model) as url:
            plain = events(ask(url, path, {**options, "stream": True}))
            assert not any("prompt_progress" in chunk for chunk in plain[:-1])
            model.forget()
            chunks = events(ask(url, path, {**options, "stream": True, "return_progress": True}))
            assert ask(url, path, {**options, "return_progress": True}).status == 200  # and has no effect
        first = 1 if path == CHAT else 0  # who speaks
        told = [chunk for chunk in chunks[:-1] if "prompt_progress" in chunk]
        assert told == chunks[first : first + len(told)]
        assert len(chunks) == len(plain) + len(told)
        progress = [chunk["prompt_progress"] for chunk in told]
        total = progress[0]["total"]
        assert [report["processed"] for report in progress] == [*range(0, total, 8), total]
        assert {(report["total"], report["cache"]) for report in progress} == {(total, 0)}
        assert all(type(report["time_ms"]) is int for report in progress)
        for chunk in told:
            choice = chunk["choices"][0]
            assert choice["finish_reason"] is None
            assert choice.get("text", "") == "" and choice.get("delta", {}) == {}


def test_who_waits_is_told_the_place_and_is_not_left_in_silence(
    impatient: Callable[[float, float], None],
) -> None:
    """While it waits, and while its prompt is read; OpenAI's client takes no notice."""
    impatient(0.05, 1.0)
    gate = Gated()
    with toy_model(gate) as model, serving(model) as url, ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, url, CHAT, body("runs"))
        assert gate.arrived.acquire(timeout=10)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": LONG}]
        with client, open_stream(url, body(LONG, stream=True)) as response:
            assert response.status == 200  # before its turn
            assert response.readline() == b": waiting, 1 before it\n"
            options: Any = {"model": "toy", "messages": messages, "max_tokens": NEW, "stream": True}
            last = pool.submit(lambda: list(client.chat.completions.create(**options)))
            while b": reading the prompt, " not in response.readline():
                gate.let(1)
            gate.open()
            assert response.read().endswith(b"data: [DONE]\n\n")
            written = "".join(chunk.choices[0].delta.content or "" for chunk in last.result())
        assert running.result().status == 200
        assert written == model.chat(messages, max_new_tokens=NEW).text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_prompt_is_read_frees_its_place(stream: bool) -> None:
    gate = Gated()
    with toy_model(gate) as model, serving(model) as url:
        gate.let(2)
        with leaving(url, CHAT, body(LONG, stream=stream)):
            for _ in range(3):
                assert gate.arrived.acquire(timeout=10)
        until(lambda: any(ticket.interruption is not None for ticket in queue_of(model).running))
        gate.open()
        until(lambda: 'status="499"} 1.0' in ask(url, "/metrics").body.decode())
        settle()
        assert len(gate.passes) == 3  # the one that waited was its last
        assert said(ask(url, CHAT, body("next"))) != ""


def test_time_that_is_up_while_a_prompt_is_read_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gated()
    with toy_model(gate) as model, serving(model) as url:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(ask, url, CHAT, body(LONG, stream=True))
            assert gate.arrived.acquire(timeout=10)
            monkeypatch.setattr("edgespec.running.ticket.monotonic", lambda: time.monotonic() + 1000)
            gate.let(1)
            assert events(future.result())[-1]["error"]["code"] == "timeout"
        assert len(gate.passes) == 1


def test_time_that_is_up_before_the_first_token_is_an_error_and_after_it_an_end() -> None:
    gate = Gated()
    short = ServeOptions(port=0, timeout_s=0.5)
    with toy_model(gate) as model, serving(model, short) as url:
        running = model.stream("runs", max_new_tokens=NEW)
        running.start()
        assert gate.arrived.acquire(timeout=10)
        waiting = ask(url, CHAT, body("waits"))
        assert (waiting.status, waiting.json["error"]["code"]) == (503, "timeout")
        gate.open()
        assert running.run().finish_reason == "length"


def test_what_was_learned_is_forgotten_by_the_model_too(tmp_path: Path) -> None:
    history = History(tmp_path / "h.edgespec-history")
    with drafting_model() as model:
        model.use_history(history.path)
        with serving(model, history=history) as url:

            def accepted() -> int:
                """Tokens that the history proposed and the target took."""
                answer = ask(url, CHAT, body("hi", max_tokens=100)).json["choices"][0]["edgespec"]
                return [token["source"] for token in answer["tokens"]].count("history")

            assert accepted() == 0
            assert accepted() > 0
            forgotten = ask(url, "/edgespec/history/forget", {"everything": True}).json
            assert forgotten["passages"] > 0
            assert ask(url, "/edgespec/history").json["passages"] == 0
            assert accepted() == 0
            assert accepted() > 0  # and learned anew
    assert history.show()


def test_several_answers_are_choices_and_greedy_ones_cost_one(url: str) -> None:
    options = {"model": "toy", "prompt": "abc", "max_tokens": 6, "n": 3}
    greedy = ask(url, TEXT, options).json
    assert len({choice["text"] for choice in greedy["choices"]}) == 1
    assert "edgespec_tokens_total 6.0" in ask(url, "/metrics").body.decode()
    options |= {"temperature": 1.5, "seed": 7}
    drawn = ask(url, TEXT, {**options, "prompt": ["abc", "de"]}).json
    assert [choice["index"] for choice in drawn["choices"]] == list(range(6))
    assert drawn["usage"]["completion_tokens"] == 36
    again = ask(url, TEXT, {**options, "n": 1, "seed": 8}).json
    assert again["choices"][0]["text"] == drawn["choices"][1]["text"]


def test_messages_that_no_model_reads_are_refused(url: str) -> None:
    for content in (3, [{"type": "image_url", "image_url": {"url": "data:,"}}]):
        reply = ask(url, CHAT, body(content))
        assert reply.status == 400 and "messages[0]" in reply.error
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ask(url, CHAT, body(parts, "developer")).status == 200
