"""The server under OpenAI's own client, clients that leave, and its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from edgespec.serve.options import ServeOptions
from edgespec_models.errors import Busy, DoesNotFit
from tests.serving_for_tests import ServedModel, ask, events, question, said, serving, until

CHAT = "/v1/chat/completions"
KEY = "a-key-of-this-test"
USER: Any = [{"role": "user", "content": "grüße 😀"}]


@pytest.fixture
def model() -> ServedModel:
    return ServedModel()


@pytest.fixture
def url(model: ServedModel) -> Iterator[str]:
    with serving(model.as_model(), ServeOptions(port=0, api_key=KEY)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_openais_client_reads_answers_and_streams(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(model="served", messages=USER, logprobs=True)
    assert answer.choices[0].message.content == "re: grüße 😀"
    assert answer.choices[0].logprobs.content[0].logprob == -0.5
    assert answer.choices[0].edgespec["stats"]["rounds"] == 10  # what it does not know, it hands on
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stream: Any = client.chat.completions.create(
        model="served", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "re: grüße 😀"
    assert chunks[-1].usage.prompt_tokens == 7
    text = client.completions.create(model="served", prompt="one")
    pieces = client.completions.create(model="served", prompt="one", stream=True)
    assert text.choices[0].text == "".join(piece.choices[0].text for piece in pieces) == "re: one"
    assert [model.id for model in client.models.list()] == ["served"]
    assert client.models.retrieve("served").owned_by == "edgespec"


def test_openais_client_knows_every_refusal(model: ServedModel, client: openai.OpenAI, url: str) -> None:
    def error(**options: object) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as raised:
            create: Any = client.chat.completions.create
            create(**{"model": "served", "messages": USER} | options)
        return raised.value

    assert isinstance(error(model="other"), openai.NotFoundError)
    assert isinstance(error(temperature="x"), openai.BadRequestError)
    model.refusal = DoesNotFit("700 tokens do not fit 640")
    assert error().code == "context_length_exceeded"
    model.refusal = Busy("64 requests wait")
    busy = error()
    assert isinstance(busy, openai.RateLimitError) and int(busy.response.headers["retry-after"]) > 0
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="another-key", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_nobody_waits_for_ends_before_its_first_token(
    model: ServedModel, url: str, stream: bool
) -> None:
    model.pause_s = 60.0
    impatient = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=0.2)
    with impatient, pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(model="served", messages=USER, stream=stream)
    until(lambda: model.cancelled == 1)
    text = ask(url, "/metrics", headers={"Authorization": f"Bearer {KEY}"}).body.decode()
    assert f'edgespec_requests_total{{path="{CHAT}",status="499"}} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_time", [True, False])
def test_what_runs_at_the_end_may_finish_in_time_and_else_says_so(
    model: ServedModel, stream: bool, in_time: bool
) -> None:
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
from edgespec.cli import app
import edgespec.engine, edgespec
from tests.serving_for_tests import ServedModel

class Closing(ServedModel):
    def __enter__(self): return self
    def __exit__(self, *exc): print("closed", flush=True)

edgespec.load = lambda *names, **options: Closing(pause_s=0.02)
app(["serve", "t", "--port", "0"])
"""


@pytest.mark.skipif(os.name == "nt", reason="signals end the process on Windows")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_command_in_order(number: int) -> None:
    """The model is closed, so what it learned is stored, and the command has not failed."""
    root = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "served with small: a page at http://127.0.0.1:" in line
        url = line.split()[-1].removesuffix("/v1")
        assert ask(url, CHAT, question()).status == 200
        process.send_signal(number)
        out, log = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "closed\n")
    assert f"POST {CHAT} 200" in log and "shutting down" in log and "Traceback" not in log
    assert urlsplit(url).port
