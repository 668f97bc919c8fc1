"""``POST /v1/embeddings``: what OpenAI's clients get from a model that makes vectors of texts."""

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest

import edgespec
from edgespec import LoadOptions, Model
from edgespec.serve.options import ServeOptions
from edgespec_models.schema import read
from tests.kit.models import queue_of, runner_of
from tests.kit.native import edit_manifest, tiny_native
from tests.kit.serving import ask, serving
from tests.kit.toy import until

PATH = "/v1/embeddings"
TEXTS = ["def add(a, b):", "the quick brown fox " * 20, "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = tiny_native(tmp_path_factory.mktemp("served") / "embeds").path
    edit_manifest(path, lambda value: value.update(embedding={"pooling": "last", "end": 2}))
    with edgespec.load(path, options=LoadOptions(threads=1, max_waiting=0, parallel=1)) as loaded:
        yield loaded


@pytest.fixture
def url(model: Model) -> Iterator[str]:
    with serving(model) as url:
        yield url


def test_openais_client_gets_the_models_vectors(model: Model, url: str) -> None:
    """It asks for base64 unless it is told otherwise."""
    expected = model.embed(TEXTS)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        several = client.embeddings.create(model="embeds", input=TEXTS)
        floats = client.embeddings.create(model="embeds", input=TEXTS[0], encoding_format="float")
        short = client.embeddings.create(model="embeds", input=TEXTS[0], dimensions=8)
        tokens = client.embeddings.create(model="embeds", input=model.tokenize(TEXTS[0]))
        lists = client.embeddings.create(model="embeds", input=[model.tokenize(text) for text in TEXTS])
        more = {"instruction": "Find code."}
        query = client.embeddings.create(model="embeds", input="x", extra_body=more)
    for reply in (several, lists):
        assert np.array_equal(np.array([item.embedding for item in reply.data]), expected.vectors)
        assert [item.index for item in reply.data] == [0, 1, 2]
    assert several.usage.prompt_tokens == several.usage.total_tokens == sum(expected.tokens)
    for one in (floats, tokens):
        assert np.array_equal(np.array(one.data[0].embedding), expected.vectors[0])
    assert np.array_equal(np.array(short.data[0].embedding), model.embed(TEXTS[0], dimensions=8).vectors[0])
    instructed = model.embed("x", instruction="Find code.").vectors[0]
    assert np.array_equal(np.array(query.data[0].embedding), instructed)
    read = 2 * sum(expected.tokens) + 3 * expected.tokens[0] + query.usage.prompt_tokens
    assert f"edgespec_prompt_tokens_total {float(read)}" in ask(url, "/metrics").body.decode()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "other"}, 404, "this server has 'embeds'"),
        ({"input": []}, 400, "input is []; allowed: a text or a list"),
        ({"input": ["x"] * 2049}, 400, "of length 1 to 2048"),
        ({"input": ["x", ""]}, 400, "input[1] is empty"),
        ({"input": [1, "x"]}, 400, "input mixes token ids and texts"),
        ({"input": [[1, 10_000]]}, 400, "input[0] is a list of tokens; allowed: ids from 0 to 403"),
        ({"input": "the fox " * 5000}, 400, "input[0] is too long: 1"),
        ({"dimensions": 4096}, 400, "dimensions is 4096; allowed: 1 to the model's own, 96"),
        ({"encoding_format": "int8"}, 400, "allowed: 'float' or 'base64'"),
        ({"truncate": True}, 400, "'truncate' is not known"),
        ({"stream": True}, 400, "'stream' is not known"),
    ],
)
def test_what_is_wrong_is_said(url: str, body: dict[str, Any], status: int, message: str) -> None:
    reply = ask(url, PATH, {"model": "embeds", "input": "x"} | body)
    assert (reply.status, message in reply.error) == (status, True), reply.error


@pytest.mark.parametrize("text", ["", [10_000], "the fox " * 5000])
def test_a_wrong_text_is_named(url: str, text: str | list[int]) -> None:
    reply = ask(url, PATH, {"model": "embeds", "input": ["x", text] if isinstance(text, str) else [text]})
    assert reply.json["error"]["param"] == ("input[1]" if isinstance(text, str) else "input[0]")


def test_a_chat_model_says_what_it_lacks(tmp_path: Path) -> None:
    with edgespec.load(tiny_native(tmp_path / "chats").path, None) as model, serving(model) as url:
        reply = ask(url, PATH, {"model": "chats", "input": "x"})
    assert reply.status == 400 and "chats makes no vectors of texts" in reply.error


def test_a_client_that_leaves_frees_the_model_and_others_wait_their_turn(
    model: Model, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = runner_of(model).text_reader._model
    run = texts.predict_together

    def slowly(rows: Any) -> Any:
        sleep(0.01)
        return run(rows)

    monkeypatch.setattr(texts, "predict_together", slowly)
    body = {"model": "embeds", "input": TEXTS * 600}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
    until(lambda: bool(queue_of(model).running))
    full = ask(url, PATH, {"model": "embeds", "input": "x"})
    assert (full.status, full.json["error"]["code"]) == (429, "queue_full")
    connection.close()
    until(lambda: not queue_of(model).running)
    assert ask(url, PATH, {"model": "embeds", "input": "x"}).status == 200
    assert ' path="/v1/embeddings",status="499"' in ask(url, "/metrics").body.decode().replace("{", " ")


def test_nobody_waits_while_a_body_is_parsed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Event()

    def slow(*args: Any) -> Any:
        assert answered.wait(10)
        return read(*args)

    monkeypatch.setattr("edgespec.serve.bodies.read", slow)
    with ThreadPoolExecutor(1) as pool:
        large = {"model": "embeds", "input": [[1, 2]], "user": "x" * 100_000}
        future = pool.submit(ask, url, PATH, large)
        assert ask(url, "/health").status == 200
        assert not future.done()
        answered.set()
        assert future.result(30).status == 200


def test_time_is_up(model: Model) -> None:
    with serving(model, ServeOptions(port=0, timeout_s=0.05)) as url:
        reply = ask(url, PATH, {"model": "embeds", "input": TEXTS * 600})
    assert (reply.status, reply.json["error"]["code"]) == (503, "timeout")
    assert re.search(r"1800 texts are unread: not finished within 0\.0\d+ s", reply.error)
