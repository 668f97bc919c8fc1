"""A server of several models, which answer to order: who answers, what is listed, loads and their waits."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edgespec.cli import app
from edgespec.engine import LoadOptions
from edgespec.history.manage import History
from edgespec.models import Models
from edgespec.serve.options import ServeOptions
from edgespec.serve.server import Server
from edgespec_models.errors import EdgespecError
from edgespec_models.progress import Progress, ProgressCallback
from tests.kit.native import tiny_native
from tests.kit.serving import ServedModel, ask, events, open_stream, question, said, serving_models
from tests.kit.toy import until

CHAT = "/v1/chat/completions"
ASKED: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": ["one", "two"]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


class Shelf:
    """Loads models that answer to order, of 20 bytes each; ``gate`` holds up loads, which raise ``fault``.

    ``tell`` is told how far the last load is.
    """

    def __init__(self) -> None:
        self.made = list[ServedModel]()
        self.gate, self.loads = threading.Event(), 0
        self.fault: EdgespecError | None = None
        self.gate.set()
        self.tell: ProgressCallback

    def load(
        self, target: str, ready: Callable[..., None], progress: ProgressCallback, **_: object
    ) -> ServedModel:
        self.tell = progress
        self.loads += 1
        assert self.gate.wait(10)
        if self.fault is not None:
            raise self.fault
        model = ServedModel(name=target)
        model.target.manifest.files, model.drafter = {}, None  # type: ignore[attr-defined]
        model.target.config.vocab_size, model.target.marks = 1, frozenset()
        ready(model.target, None)
        self.made.append(model)
        return model


@pytest.fixture
def shelf(loads: Callable[[Any], None], needs: Callable[[Callable[[Any], int]], None]) -> Shelf:
    shelf = Shelf()
    loads(shelf.load)
    needs(lambda _: 20)
    return shelf


@pytest.fixture
def models(shelf: Shelf) -> Iterator[Models]:
    with Models({"small": "small", "large": "large"}, memory=30) as models:
        yield models


@pytest.fixture
def url(models: Models) -> Iterator[str]:
    with serving_models(models) as url:
        yield url


def to(model: str, text: str = "hello", **more: object) -> dict[str, object]:
    return question(text, **more) | {"model": model}


def listed(url: str) -> dict[str, Any]:
    return {model["id"]: model for model in ask(url, "/v1/models").json["data"]}


def test_the_model_that_a_request_names_answers_in_every_form(shelf: Shelf, url: str) -> None:
    for name in ("small", "large", "small"):
        for stream in (False, True):
            reply = ask(url, CHAT, to(name, stream=stream))
            assert said(reply) == "re: hello"
            answered = events(reply)[0] if stream else reply.json
            assert answered["model"] == name
        texts = ask(url, "/v1/completions", {"model": name, "prompt": ["one", "two"]}).json
        assert (texts["model"], len(texts["choices"])) == (name, 2)
        assert ask(url, "/v1/responses", {"model": name, "input": "hi"}).json["model"] == name
        message = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        assert ask(url, "/v1/messages", message).json["model"] == name
        counted = ask(url, "/v1/messages/count_tokens", {"model": name, "messages": message["messages"]})
        assert counted.json == {"input_tokens": 2}
    assert [model.name for model in shelf.made] == ["small", "large", "small"]  # one has room
    assert [model.closed for model in shelf.made] == [1, 1, 0]


def test_all_are_listed_with_what_is_loaded(url: str) -> None:
    first = listed(url)
    assert list(first) == ["small", "large"] and not any(model["loaded"] for model in first.values())
    assert first["small"]["edgespec"] == {"history": None, "memory_bytes": None}
    ask(url, CHAT, to("small"))
    second = listed(url)
    assert second["small"]["loaded"] and second["large"] == first["large"]
    assert second["small"]["edgespec"]["memory_bytes"] == 20
    assert ask(url, "/v1/models/small").json == second["small"]
    ask(url, CHAT, to("large"))
    third = listed(url)
    assert (third["small"]["loaded"], third["large"]["loaded"]) == (False, True)
    assert third["small"]["edgespec"]["drafter"] == "small"  # what was seen of it is still said
    assert third["small"]["edgespec"]["memory_bytes"] is None
    assert ask(url, "/health").json == {"status": "ok"}
    assert f'edgespec_requests_total{{path="{CHAT}",status="200"}} 2.0' in ask(url, "/metrics").body.decode()


def test_other_names_are_refused_before_anything_is_loaded(shelf: Shelf, url: str) -> None:
    for stream in (False, True):
        reply = ask(url, CHAT, to("medium", stream=stream))
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
        assert "model 'medium' not found; this server has 'small', 'large'" in reply.error
        for wrong in ({"top_logprobs": -1}, {"prediction": 3}, {"response_format": {"type": "xml"}}):
            assert ask(url, CHAT, to("small", stream=stream, **wrong)).status == 400
    assert ask(url, CHAT, {**to("small"), "model": None}).status == 400
    assert shelf.loads == 0


def test_a_load_that_fails_is_told_and_the_next_request_tries_again(shelf: Shelf, url: str) -> None:
    shelf.fault = EdgespecError("the disk is full")
    for stream in (False, True):
        reply = ask(url, CHAT, to("small", stream=stream))
        assert (reply.status, reply.error) == (500, "the disk is full")
    shelf.fault = None
    assert said(ask(url, CHAT, to("small"))) == "re: hello"
    assert shelf.loads == 3


def test_requests_wait_for_one_load_and_clients_may_leave_meanwhile(
    shelf: Shelf, models: Models, url: str
) -> None:
    shelf.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, url, CHAT, to("small", stream=n % 2 == 0)) for n in range(4)]
        with pytest.raises(TimeoutError):
            ask(url, CHAT, to("small"), timeout_s=0.3)
        until(lambda: 'status="499"} 1.0' in ask(url, "/metrics").body.decode())
        shelf.gate.set()
        assert [said(future.result()) for future in waiting] == ["re: hello"] * 4
    assert shelf.loads == 1
    models.unload("small")
    until(lambda: not models.loaded)  # nobody uses it any more


@pytest.mark.parametrize("path", ASKED)
def test_streams_say_how_far_the_load_is_and_then_answer(
    shelf: Shelf, url: str, path: str, impatient: Callable[[float, float], None]
) -> None:
    impatient(5.0, 0.05)
    shelf.gate.clear()
    body = {**ASKED[path], "model": "small", "stream": True}
    with open_stream(url, body, path) as response:  # the headers are here
        assert response.status == 200
        told = [response.readline() + response.readline()]
        for report in (
            Progress("Exporting it", 2, 5),
            Progress("Checking", 7, 0),
            Progress("Checking", 7, 7),
        ):
            shelf.tell(report)
            told.append(response.readline() + response.readline())
        shelf.gate.set()
        answer = response.read().decode()
    stages = ("", ", Exporting it 40 %", ", Checking", "")
    assert told == [f": loading small{stage}\n\n".encode() for stage in stages]
    again = ask(url, path, body).body.decode()  # of the loaded model
    assert _without_marks(answer) == _without_marks(again) and '"error":{' not in answer
    assert shelf.loads == 1


def _without_marks(answer: str) -> str:
    """What differs between two equal answers is not in it."""
    return re.sub(r'[0-9a-f]{24}|"created(_at)?":\d+', "", answer)


def test_comments_of_a_load_come_now_and_then(
    shelf: Shelf, url: str, impatient: Callable[[float, float], None]
) -> None:
    impatient(0.3, 0.05)
    shelf.gate.clear()

    def load() -> None:
        for done in range(100):
            shelf.tell(Progress("Exporting", done, 100))
            time.sleep(0.004)
        time.sleep(0.7)
        shelf.gate.set()

    with open_stream(url, to("small", stream=True)) as response, ThreadPoolExecutor(1) as pool:
        loading, seen = pool.submit(load), list[float]()
        while (line := response.readline()).startswith((b": loading", b"\n")):
            seen += [time.monotonic()] * (line != b"\n")
        loading.result()
    gaps = [after - before for before, after in pairwise(seen)]
    assert 4 <= len(gaps) < 40 and max(gaps) > 0.25  # of a hundred reports; and where nothing was new


@pytest.mark.parametrize("path", ASKED)
def test_a_load_that_fails_late_is_told_by_an_event(shelf: Shelf, url: str, path: str) -> None:
    shelf.gate.clear()
    shelf.fault = EdgespecError("the disk is full")
    with open_stream(url, {**ASKED[path], "model": "small", "stream": True}, path) as response:
        assert response.status == 200  # the headers are here, so it is late
        comment = (response.readline() + response.readline()).decode().removesuffix("\n\n")
        shelf.gate.set()
        event, rest = response.read().decode().split("\n\n")
    named = path in ("/v1/responses", "/v1/messages")
    assert (comment, rest, event.startswith("event: error\ndata: ")) == (": loading small", "", named)
    told = json.loads(event.partition("data: ")[2])
    assert told["error"]["message"] == "the disk is full"
    assert told.get("type") == ("error" if named else None)


def test_who_leaves_a_stream_during_a_load_waits_no_more(shelf: Shelf, url: str) -> None:
    shelf.gate.clear()
    with open_stream(url, to("small", stream=True)) as response:
        assert response.readline() == b": loading small\n"
    until(lambda: 'status="499"} 1.0' in ask(url, "/metrics").body.decode())
    shelf.gate.set()
    assert said(ask(url, CHAT, to("small"))) == "re: hello"


def test_what_runs_keeps_its_model_until_its_client_has_it_all(shelf: Shelf, url: str) -> None:
    ask(url, CHAT, to("small"))
    shelf.made[0].pause_s = 0.05
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, url, CHAT, to("small", "a long answer", stream=True))
        until(lambda: len(shelf.made[0].calls) == 2)
        other = pool.submit(ask, url, CHAT, to("large"))
        assert said(running.result()) == "re: a long answer" and said(other.result()) == "re: hello"
    assert [(model.closed, model.cancelled) for model in shelf.made] == [(1, 0), (0, 0)]


def test_the_time_of_a_request_and_the_servers_end_end_its_wait(shelf: Shelf, models: Models) -> None:
    shelf.gate.clear()
    with serving_models(models, ServeOptions(port=0, timeout_s=0.6)) as url:
        reply = ask(url, CHAT, to("small"))
        assert (reply.status, reply.json["error"]["code"]) == (503, "timeout")
        late = events(ask(url, CHAT, to("small", stream=True)))
        assert [event["error"]["code"] for event in late] == ["timeout"]
    with ThreadPoolExecutor(2) as pool:
        with serving_models(models, ServeOptions(port=0, shutdown_s=0.1)) as url:
            waiting = pool.submit(ask, url, CHAT, to("small"))
            until(lambda: len(models._users) == 1)
            pool.submit(until, lambda: models._closed).add_done_callback(lambda _: shelf.gate.set())
        assert (waiting.result().status, waiting.result().json["error"]["code"]) == (503, "shutting_down")


def test_the_wait_for_a_load_and_the_answer_share_the_time_of_a_request(shelf: Shelf, models: Models) -> None:
    with serving_models(models, ServeOptions(port=0, timeout_s=60)) as url, ThreadPoolExecutor(2) as pool:
        shelf.gate.clear()
        futures = [pool.submit(ask, url, CHAT, to("small", stream=stream)) for stream in (False, True)]
        until(lambda: len(models._users) == 2)
        time.sleep(0.5)
        shelf.gate.set()
        assert [said(future.result()) for future in futures] == ["re: hello"] * 2
    assert all(50 < options["timeout"] <= 59.5 for _, options in shelf.made[0].calls)


def test_what_was_learned_is_forgotten_by_all_that_are_loaded(shelf: Shelf, tmp_path: Path) -> None:
    history = History(tmp_path / "h.sqlite")
    names = ("one", "two", "three")
    with Models({name: name for name in names}) as models, serving_models(models, history=history) as url:
        for name in names[:2]:
            ask(url, CHAT, to(name))
        assert ask(url, "/edgespec/history/forget", {"everything": True}).json["passages"] == 0
    assert [model.learned for model in shelf.made] == [[history.path]] * 2


def test_the_command_loads_the_first_and_names_models_as_their_bundles_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: Callable[[Any], None]
) -> None:
    bundle = tiny_native(tmp_path / "tiny").path.rename(tmp_path / "moved")
    served = list[Any]()

    def run(server: Server, sockets: object) -> None:
        server._ready(server)
        models = server._app.models
        served.extend((models.names, set(models.loaded), models._memory, models._keep))

    def load(target: str, options: LoadOptions, **_: object) -> ServedModel:
        return ServedModel(name=f"{target} on {options.threads}")

    monkeypatch.setattr("edgespec.serve.server.Server.run", run)
    loads(load)
    monkeypatch.setattr("edgespec.cli.serve._log_requests", lambda: None)  # which would outlast the test
    given = ["serve", "./dir/big.gguf", str(bundle), "hf:me/other@main", "--port", "0", "--memory", "1.5"]
    result = CliRunner().invoke(app, [*given, "--keep", "60", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert served == [("big", "tiny", "other"), {"big"}, 1_500_000_000, 60.0]
    assert "big with small; when asked for tiny, other: a page at http://127.0.0.1:" in result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen2.5-coder-0.5b-instrct", "Did you mean 'qwen2.5-coder-0.5b-instruct'?"),
        ("./gone.gguf", "gone.gguf does not exist"),
        ("hf:nobody", "hf:nobody"),
    ],
)
def test_the_command_tells_at_once_of_a_name_that_means_nothing(
    loads: Callable[[Any], None], name: str, message: str
) -> None:
    loads(lambda *_, **__: pytest.fail("the first is loaded already"))
    result = CliRunner().invoke(app, ["serve", "smollm2-135m-instruct", name, "--port", "0"])
    assert result.exit_code == 1 and message in result.stderr
