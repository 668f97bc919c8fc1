"""The server's paths, on a model made to order: what OpenAI's format says, what edgespec adds, its end."""

import logging
import os
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest

from edgespec.cli import app
from edgespec.history.manage import History
from edgespec.serve.bodies import ChatBody, CompletionBody, InfillBody
from edgespec.serve.messages import MessagesBody
from edgespec.serve.options import ServeOptions
from edgespec.serve.responses import ResponsesBody
from edgespec_models.errors import Busy, Closed, DoesNotFit, EdgespecError, RequestError
from tests.kit.models import toy_model, toy_session
from tests.kit.serving import SOURCES, ServedModel, ask, events, leaving, open_stream, question, said, serving
from tests.kit.toy import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = ChatBody, CompletionBody, InfillBody, ResponsesBody, MessagesBody
HARD = 'naïve 😀 日本語 \u0000 \\ "quotes" \u2028'


def test_a_chat_is_answered_in_openais_form(model: ServedModel, url: str) -> None:
    reply = ask(
        url,
        CHAT,
        question(HARD, temperature=0.5, max_tokens=99, stop="x", seed=3, top_k=4, prompt_cache=False),
    )
    answer = reply.json
    assert (reply.status, answer["object"], answer["model"]) == (200, "chat.completion", "served")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": f"re: {HARD}", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    extension = choice["edgespec"]  # what OpenAI's format has no place for
    assert "".join(token["text"] for token in extension["tokens"]) == f"re: {HARD}"
    assert [token["source"] for token in extension["tokens"]][:4] == list(SOURCES)
    assert (extension["stats"]["accepted"], extension["plain_tokens_per_second"]) == (10, pytest.approx(20))
    written = len(extension["tokens"])
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": written,
        "total_tokens": 7 + written,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    messages, options = model.calls[0]
    assert list(messages) == [{"role": "user", "content": HARD}]
    given = {
        "temperature": 0.5,
        "max_new_tokens": 99,
        "stop": "x",
        "seed": 3,
        "top_k": 4,
        "prompt_cache": False,
    }
    assert options == given | {"timeout": pytest.approx(600.0, abs=10)}


def test_a_stream_has_openais_events(url: str) -> None:
    reply = ask(url, CHAT, question(HARD, stream=True, stream_options={"include_usage": True}))
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(reply)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    first, *middle, last, used = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    pieces = [chunk["choices"][0] for chunk in middle]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == f"re: {HARD}"
    for piece in pieces:
        shown = "".join(token["text"] for token in piece["edgespec"]["tokens"])
        assert shown == piece["delta"].get("content", "") and piece["finish_reason"] is None
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["edgespec"]["stats"]["rounds"] == 10
    assert used["choices"] == [] and used["usage"]["prompt_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_texts_are_continued_one_or_several(model: ServedModel, url: str) -> None:
    answer = ask(url, TEXT, {"model": "served", "prompt": ["one", "two"]}).json
    assert answer["object"] == "text_completion"
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "re: one"), (1, "re: two")]
    assert answer["usage"]["prompt_tokens"] == 14
    *chunks, done = events(ask(url, TEXT, {"model": "served", "prompt": "one", "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "re: one" and done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    *first, last = [call[0] for call in model.calls]
    assert (sorted(first), last) == (["one", "two"], "one")  # prompts are read in threads


def test_logprobs_come_in_the_form_of_each_endpoint(model: ServedModel, url: str) -> None:
    choice = ask(url, CHAT, question("é", logprobs=True, top_logprobs=1)).json["choices"][0]
    content, first = choice["logprobs"]["content"], {"token": "r", "logprob": -0.5, "bytes": [114]}
    assert content[0] == first | {"top_logprobs": [first]}
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "re: é"
    assert model.calls[0][1]["top_logprobs"] == 1
    body = {"model": "served", "prompt": "ab", "logprobs": 2, "stream": True}
    lists = [c["choices"][0]["logprobs"] for c in events(ask(url, TEXT, body))[:-1]]
    offsets = [offset for values in lists if values for offset in values["text_offset"]]
    texts = [text for values in lists if values for text in values["tokens"]]
    assert "".join(texts) == "re: ab"
    assert offsets == [len("".join(texts[:index])) for index in range(len(texts))]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"banana": 1}, "'banana' is not known; allowed: temperature"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls is 'no'"),
        ({"n": 0}, "n is 0"),
        ({"messages": []}, "messages is"),
        ({"logit_bias": {"x": 1}}, "its keys are ids of tokens"),
        ({"stream_options": {"usage": True}}, "stream_options.'usage' is not known"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 10**23}, "max_tokens is 1000000000000000000"),
        ({"response_format": {"type": "xml"}}, "response_format is {'type': 'xml'}; allowed:"),
        ({"response_format": {"type": "json_schema"}}, "'json_schema': {'schema': SCHEMA}"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_refused(
    model: ServedModel, url: str, more: dict[str, Any], message: str
) -> None:
    reply = ask(url, CHAT, question() | more)
    assert reply.status == 400 and message in reply.error
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert model.calls == []


def test_fields_that_change_nothing_and_null_are_taken(model: ServedModel, url: str) -> None:
    harmless: dict[str, Any] = {"user": "u", "store": True, "metadata": {"a": "b"}, "prediction": None}
    message = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}  # as handed back
    body = question(**harmless, temperature=None, tools=None, n=1) | {"messages": [message]}
    assert ask(url, CHAT, body).status == 200
    assert list(model.calls[0][0]) == [{"role": "assistant", "content": "a"}]
    assert set(model.calls[0][1]) == {"max_new_tokens", "timeout"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Busy("64 requests wait"), 429, "queue_full"),
        (Closed("closed"), 503, "shutting_down"),
        (DoesNotFit("700 tokens"), 400, "context_length_exceeded"),
        (RequestError("top_k is -1"), 400, None),
        (EdgespecError("a session broke"), 500, None),
    ],
)
def test_what_the_model_raises_becomes_a_status(
    model: ServedModel, url: str, stream: bool, error: EdgespecError, status: int, code: str | None
) -> None:
    model.refusal = error
    reply = ask(url, CHAT, question(stream=stream))
    assert (reply.status, reply.json["error"]["code"]) == (status, code)
    assert ("retry-after" in reply.headers) == (status in (429, 503))


def test_an_error_behind_the_first_piece_is_an_event(model: ServedModel, url: str) -> None:
    model.fault = EdgespecError("a session broke")
    chunks = events(ask(url, CHAT, question(stream=True)))
    assert chunks[-1]["error"]["message"] == "a session broke"
    assert "[DONE]" not in chunks


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ran_out_of_time_says_so(model: ServedModel, url: str, stream: bool) -> None:
    model.ends = "timeout"
    reply = ask(url, CHAT, question(stream=stream))
    choice = events(reply)[-2]["choices"][0] if stream else reply.json["choices"][0]
    assert (choice["finish_reason"], choice["edgespec"]["finish_reason"]) == ("length", "timeout")


@pytest.mark.parametrize(
    ("more", "field", "problem"),
    [
        ({"enable_thinking": True}, "enable_thinking", "is True, and toy does not support thinking; leave"),
        ({"thinking_budget_tokens": 7}, "thinking_budget_tokens", "is 7, and toy does not support thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "has messages, which"),
        ({"repeat_penalty": 99}, "repeat_penalty", "is 99.0; allowed: a number"),
        ({"stop": ["a", ""]}, "stop[1]", "is ''; allowed: a text of one character or more"),
        ({"functions": [{"name": 3}]}, "functions[0]", "is {"),
        ({"tool_choice": "required"}, "tool_choice", "is 'required'; allowed: 'auto', 'none'"),
        ({"response_format": {"type": "xml"}}, "response_format", "is {'type': 'xml'}; allowed"),
        ({"stream_options": {"banana": 1}}, "stream_options.'banana'", "is not known; allowed"),
        ({"prediction": 3}, "prediction", "is 3; allowed: "),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "has a lone sur"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_what_the_client_sent(
    stream: bool, more: dict[str, Any], field: str, problem: str
) -> None:
    with toy_model(toy_session()) as model, serving(model) as url:
        reply = ask(url, CHAT, question(stream=stream) | more | {"model": "toy"})
    assert reply.status == 400 and f"{field} {problem}" in reply.error
    assert reply.json["error"]["param"] == field and "template_args" not in reply.error


@pytest.mark.parametrize(("seed", "taken"), [(-1, None), (-7, -7), (0, 0), (2**64 - 1, 2**64 - 1)])
def test_numbers_are_those_that_openai_takes(
    model: ServedModel, url: str, seed: int, taken: int | None
) -> None:
    """A seed of -1 is none, as front ends mean it."""
    assert ask(url, CHAT, question(seed=seed, top_p=0)).status == 200
    assert model.calls[0][1].get("seed") == taken and model.calls[0][1]["top_p"] == 0


def test_a_seed_below_0_is_a_seed() -> None:
    with toy_model(toy_session()) as model:
        wanted: Any = {"temperature": 2.0, "max_tokens": 30, "n": 2}
        first, again, other = (model.generate("a", seed=seed, **wanted) for seed in (-7, -7, -9))
    texts = [[choice.text for choice in answer.choices] for answer in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/served", "/health", "/v1/responses", CHAT])
def test_a_slash_at_the_end_changes_nothing(url: str, path: str) -> None:
    body = question(input="a") if path == "/v1/responses" else question()
    if path == "/v1/responses":
        del body["messages"]
    sent = body if path in (CHAT, "/v1/responses") else None
    assert [ask(url, each, sent).status for each in (path, f"{path}/")] == [200, 200]


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br"])
def test_a_compressed_body_is_refused_as_such(url: str, coding: str) -> None:
    reply = ask(url, CHAT, b"\x1f\x8b\x08", headers={"Content-Encoding": coding})
    assert (reply.status, reply.error) == (415, f"the body is compressed ('{coding}'); send it as it is")


def test_models_health_and_unknown_paths(url: str) -> None:
    listed = ask(url, "/v1/models").json
    assert [each["id"] for each in listed["data"]] == ["served"]
    assert listed["data"][0]["edgespec"]["drafter"] == "small"
    assert ask(url, "/v1/models/served").json == listed["data"][0]
    assert ask(url, "/v1/models/other").status == 404
    reply = ask(url, CHAT, question() | {"model": "gpt-9"})
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
    assert "this server has 'served'" in reply.error
    assert ask(url, "/health").json == {"status": "ok"}
    assert ask(url, "/v1/images", {}).status == 404
    assert ask(url, CHAT).status == 405 and "Method Not Allowed" in ask(url, CHAT).error


def test_metrics_count_requests_and_tokens(url: str) -> None:
    written = [ask(url, CHAT, question("ab")).json["usage"]["completion_tokens"] for _ in range(3)]
    ask(url, "/made-up-by-a-client")
    text = ask(url, "/metrics").body.decode()
    assert f'edgespec_requests_total{{path="{CHAT}",status="200"}} 3.0' in text
    assert 'edgespec_requests_total{path="other",status="404"} 1.0' in text and "made-up" not in text
    assert 'edgespec_accepted_tokens_total{source="model"} 30.0' in text
    assert f"edgespec_tokens_total {sum(written):.1f}" in text


def test_a_request_is_a_line_of_the_log_without_its_words(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "edgespec.serve"):
        ask(url, CHAT, question("secret words"))
        ask(url, "/a%0Ab")
        until(lambda: len(caplog.records) == 2)  # a line is written behind its response
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"POST {CHAT} 200 ") and first.endswith("20.0 tokens/s")
    assert "secret" not in caplog.text
    assert second.startswith("GET /a%0Ab 404 ") and "\n" not in second


def test_an_empty_history_is_forgotten_and_none_is_not(model: ServedModel, url: str, tmp_path: Path) -> None:
    history, forget = History(tmp_path / "h.sqlite"), "/edgespec/history/forget"
    with serving(model.as_model(), history=history) as learning:
        assert ask(learning, "/edgespec/history").json["passages"] == 0
        assert ask(learning, forget, {"everything": True}).json == {"passages": 0}
        for body in ({}, {"text": "a", "everything": True}, {"all": True}):
            assert ask(learning, forget, body).status == 400
    assert model.learned == [history.path]
    assert ask(url, "/edgespec/history").json["name"] is None
    reply = ask(url, forget, {"everything": True})
    assert reply.status == 400 and "--history" in reply.error


def test_forgetting_that_waits_leaves_threads_to_other_requests(tmp_path: Path) -> None:
    over, begun, forget = Event(), Event(), "/edgespec/history/forget"

    class Slow(ServedModel):
        def use_history(self, path: Path) -> None:
            begun.set()
            over.wait(60)

    with (
        serving(Slow().as_model(), history=History(tmp_path / "h.sqlite")) as url,
        ThreadPoolExecutor(40) as clients,
    ):
        waiting = [clients.submit(ask, url, forget, {"everything": True}, timeout_s=60) for _ in range(40)]
        try:
            assert begun.wait(60)
            sleep(0.3)  # the others have arrived, too
            assert ask(url, CHAT, question("hello")).status == 200
        finally:
            over.set()
        assert {reply.result().status for reply in waiting} == {200}


def test_the_documentation_has_every_field() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = "".join((docs / page).read_text(encoding="utf-8") for page in ("server.md", "options.md"))
    names = {field.name for body in BODIES for field in fields(body)}
    assert [name for name in names if f"`{name}`" not in text] == []


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert app(["serve", "model"], standalone_mode=False)
    said = capsys.readouterr().err
    assert "serving needs uvicorn, " in said and 'pip install "edgespec[server]"' in said


def test_the_extra_brings_what_forms_and_pictures_need() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert "edgespec[images,structured]" in extras["server"]
    assert any(need.startswith("llguidance") for need in extras["structured"])


def test_an_address_that_others_reach_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(RequestError, match="EDGESPEC_API_KEY"):
            ServeOptions(host=host)
        assert "long-enough" not in repr(ServeOptions(host=host, api_key="long-enough"))
    for host in ("127.0.0.1", "localhost", "127.8.9.1"):
        ServeOptions(host=host)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_nobody_waits_for_is_cancelled(model: ServedModel, url: str, stream: bool) -> None:
    """Before its first token."""
    model.pause_s = 60.0
    with leaving(url, CHAT, question(stream=stream)):
        until(lambda: len(model.calls) == 1)
    until(lambda: model.cancelled == 1)
    counted = f'edgespec_requests_total{{path="{CHAT}",status="499"}} 1.0'
    until(lambda: counted in ask(url, "/metrics").body.decode())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_time", [True, False])
def test_what_runs_at_the_end_may_finish_in_time(model: ServedModel, stream: bool, in_time: bool) -> None:
    model.pause_s = 0.05
    asked = question("to the end" if in_time else "x" * 3000, stream=stream, max_tokens=4000)
    options = ServeOptions(port=0, shutdown_s=10.0 if in_time else 0.2)
    with ThreadPoolExecutor(1) as pool, serving(model.as_model(), options) as url:
        asking = pool.submit(ask, url, CHAT, asked)
        until(lambda: len(model.calls) == 1)
    reply = asking.result()
    assert model.closed == (not in_time)  # by who made it, if all goes well
    if in_time:
        assert said(reply) == "re: to the end"
    else:
        error = events(reply)[-1]["error"] if stream else reply.json["error"]
        assert (error["code"], reply.status) == ("shutting_down", 200 if stream else 503)


SCRIPT = """
import sys
import tomllib
from edgespec.cli import app
import edgespec.models
from edgespec.serve.options import ServeOptions
from tests.kit.serving import ServedModel

class Closing(ServedModel):
    def close(self): print("closed", flush=True)

ServeOptions.__dataclass_fields__["shutdown_s"].default = 60.0
edgespec.models.load = lambda **options: Closing(pause_s=0.02)
app(["serve", "served", "--port", "0"])
"""


@pytest.mark.skipif(os.name == "nt", reason="signals end the process on Windows")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("twice", [False, True])
def test_signals_end_the_command_in_order(number: int, twice: bool) -> None:
    """The model is closed, so what it learned is stored, and the command has not failed.

    A second signal does not wait for an answer of over a minute.
    """
    long, log = question("x" * 8000, stream=True, max_tokens=8000), ""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], env=os.environ | {"COLUMNS": "200"}, **pipes)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "served with small: a page at http://127.0.0.1:" in line
        url = line.split()[-1].removesuffix("/v1")
        assert ask(url, CHAT, question()).status == 200
        with open_stream(url, long) if twice else nullcontext():
            process.send_signal(number)
            while line and "shutting down" not in line:
                log += (line := process.stderr.readline())
            if twice:
                process.send_signal(number)
            out, rest = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "closed\n")
    assert f"POST {CHAT} 200" in log and "shutting down" in log and "Traceback" not in log + rest


@pytest.mark.parametrize(
    "form",
    [
        "x = 1",
        {"type": "content", "content": "x = 1"},
        {"type": "content", "content": [{"text": "x = "}, {"text": "1"}]},
    ],
)
def test_a_prediction_reaches_the_model_in_all_its_forms(model: ServedModel, url: str, form: object) -> None:
    assert ask(url, CHAT, question("hi", prediction=form)).status == 200
    assert model.calls[0][1]["prediction"] == "x = 1"


@pytest.mark.parametrize("form", [{"type": "content"}, {"content": [3]}, [], 3])
def test_other_predictions_are_refused(url: str, form: object) -> None:
    reply = ask(url, CHAT, question("hi", prediction=form))
    assert reply.status == 400 and "prediction" in reply.json["error"]["message"]
