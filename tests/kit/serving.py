"""A server on the loopback interface, and a model for it that answers to order, without weights."""

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Self, TypeVar, cast
from urllib.parse import urlsplit

from edgespec.answering.results import (
    FinishReason,
    Generation,
    GenerationStats,
    Record,
    SourceStats,
    TokenRecord,
    ToolCall,
)
from edgespec.asking.request import Hole, PromptInput, Request, RequestOptions, seen
from edgespec.engine import Model
from edgespec.history.manage import History
from edgespec.models import Models
from edgespec.running.stream import Answers
from edgespec.serve import replies
from edgespec.serve.app import App
from edgespec.serve.options import ServeOptions, bound_socket
from edgespec.serve.server import Server
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import EdgespecError
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve
from tests.kit.calls import reader_of
from tests.kit.models import VOCAB, printable, toy_model
from tests.kit.templates import HERMES
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import F32, ToySession, markov_logits

SOURCES = ("target", "model", "ngram", "history")


R = TypeVar("R", bound=replies.Reply)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(byte_level_json())


@dataclass
class ServedModel:
    """Repeats what it is told, one request at a time, in the order of arrival."""

    refusal: EdgespecError | None = None  # raised by every request
    fault: EdgespecError | None = None  # raised behind the first record
    ends: FinishReason = "stop"
    pause_s: float = 0.0  # before every record
    calls: list[tuple[Any, Mapping[str, Any]]] = field(default_factory=list)  # prompts and options, in turn
    cancelled: int = 0  # streams, before their end
    closed: int = 0
    learned: list[Any] = field(default_factory=list)
    name: str = "served"
    drafter_name: str | None = "small"
    thinks: bool = True
    reads_images: bool = False

    def __post_init__(self) -> None:
        manifest, config = SimpleNamespace(name=self.name), SimpleNamespace(context_length=640)
        facts = {"tokenizer": tokenizer(), "chat_template": "template", "reads_images": self.reads_images}
        self.target = SimpleNamespace(manifest=manifest, config=config, **facts)
        self.cost_curve = CostCurve({1: 0.05})
        self.turn = asyncio.Lock()

    def as_model(self) -> Model:
        return cast(Model, self)

    def answers(self, prompts: Sequence[PromptInput | Hole], options: Mapping[str, Any]) -> Answers:
        if self.refusal is not None:
            raise self.refusal
        request = Request.of(cast(RequestOptions, options))
        prompts = [seen(cast(Bundle, self.target), prompt, request) for prompt in prompts]
        choices, single = request.choices, {**options}
        single.pop("n", None)
        seeded = [{**single, "seed": choice.sampler.seed} for choice in choices]
        rows = [
            [self._stream(prompt, each) for each in (seeded if len(seeded) > 1 else [single])]
            for prompt in prompts
        ]
        return Answers(cast(Any, rows), options.get("n", 1))

    def _stream(self, prompt: Any, options: Mapping[str, Any]) -> "ServedStream":
        text, asked = prompt, prompt
        if isinstance(prompt, Hole):
            text, asked = (
                prompt.prefix,
                (prompt.prefix, prompt.suffix, prompt.extra, options.get("max_lines")),
            )
        elif isinstance(prompt[0], Mapping):
            text = _told(prompt[-1]["content"])
        return ServedStream(self, text, asked, options)

    def count_tokens(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> int:
        messages = seen(cast(Bundle, self.target), messages, Request())
        self.calls.append((messages, options))
        return sum(len(_told(message["content"])) for message in messages)

    def use_history(self, path: Any) -> None:
        self.learned.append(path)

    def close(self) -> None:
        self.closed += 1
        self.ends = "closed"


class ServedStream:
    """An answer of :class:`ServedModel`: the prompt's text behind "re: ", two tokens a record."""

    place, at_once, prompt = 0, 1, (7, 3)

    def __init__(self, model: ServedModel, text: str, asked: Any, options: Mapping[str, Any]) -> None:
        self._model, self._options, self._over, self._has_turn = model, options, False, False
        self.asked = asked
        ids = tokenizer().encode(f"re: {text}")[: options.get("max_new_tokens", 256)]
        tools = options.get("tools", ()) if options.get("tool_choice") != "none" else ()
        self._reader = reader_of(HERMES, tools) if tools else None
        self._content = ""
        self._tokens = [TokenRecord(id_, SOURCES[at % 4]) for at, id_ in enumerate(ids)]
        if options.get("logprobs", False):
            self._tokens = [replace(t, logprob=-0.5, top_logprobs=((t.id, -0.5),)) for t in self._tokens]
        self.result = self._generation(self._tokens, "stop")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    @property
    def ended(self) -> bool:
        return self._over

    def start(self, first: object = None) -> None:
        pass

    def cancel(self) -> None:
        self._model.cancelled += not self._over
        self._over = True
        self._leave()  # whoever stopped reading between two records does not end the iteration

    async def run_async(self) -> Generation:
        async for _ in self.records():
            pass
        return self.result

    async def records(self) -> AsyncIterator[Record]:
        await self._model.turn.acquire()
        self._has_turn = True
        try:
            self._model.calls.append((self.asked, self._options))
            for at in range(0, len(self._tokens), 2):
                await asyncio.sleep(self._model.pause_s)
                if at and self._model.fault is not None:
                    self._over = True
                    raise self._model.fault
                ends, closed = self._model.ends, self._model.ends == "closed"
                self._over = closed or at + 2 >= len(self._tokens)
                record = Record("", (), ends) if closed else self._record(at)
                if self._over:
                    self.result = self._generation(self._tokens[:at] if closed else self._tokens, ends)
                yield record
                if closed:
                    return
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._has_turn:
            self._model.turn.release()
        self._has_turn = False

    def _record(self, at: int) -> Record:
        """The text behind ``at`` tokens and before the next; characters that are whole."""
        before, text = (_whole(self._tokens[:end]) for end in (at, at + 2))
        text = tokenizer().decode([token.id for token in self._tokens]) if self._over else text
        ends = self._model.ends if self._over else None
        content, calls = text[len(before) :], list[ToolCall]()
        if self._reader is not None:
            content, calls = self._reader.push(content, final=self._over)
        self._content += content
        tokens = tuple(self._tokens[at : at + 2])
        return Record(text[len(before) :], tokens, ends, content=content, calls=tuple(calls))

    def _generation(self, tokens: Sequence[TokenRecord], reason: FinishReason) -> Generation:
        count = len(tokens)
        stats = GenerationStats(
            prompt_tokens=7, cached_tokens=3, new_tokens=count, ttft_s=0.1, decode_s=1.0, decode_tokens=20,
            rounds=10, drafted=12, accepted=10, by_source={"model": SourceStats(12, 10)},
        )  # fmt: skip
        ids = tuple(token.id for token in tokens)
        calls = () if self._reader is None else tuple(self._reader.calls)
        return Generation(
            tokenizer().decode(ids), ids, "tool_calls" if calls else reason, stats,
            records=tuple(tokens), content=self._content,
            tool_calls=calls,
        )  # fmt: skip


class Clocked(ToySession):
    """Its passes take ``seconds`` of a clock that it moves itself."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__(printable(markov_logits(0, VOCAB, scale=4.0)), VOCAB)
        self._clock, self._seconds = clock, seconds

    def forward(self, tokens: Sequence[int]) -> F32:
        self._clock[0] += self._seconds
        return super().forward(tokens)


def drafting_model() -> Model:
    """Its drafter is the same model at a hundredth of the price, so all it drafts is right."""
    clock = [0.0]
    return toy_model(Clocked(clock, 1.0), Clocked(clock, 0.01), clock=lambda: clock[0], drafter_s=0.01)


def ready(reply: R) -> R:
    """A reply that knows its model."""
    reply.use(ServedModel().as_model())
    return reply


def _told(content: Any) -> str:
    """A content in which ``<picture>`` stands for each picture."""
    if not isinstance(content, list):
        return str(content)
    return "".join(part["text"] if part["type"] == "text" else "<picture>" for part in content)


def _whole(tokens: Sequence[TokenRecord]) -> str:
    return tokenizer().bytes_of([token.id for token in tokens]).decode("utf-8", "ignore")


def models_of(model: Model) -> Models:
    """One that is loaded."""
    models = Models({model.name: "made up"})
    models._models[model.name], models._used_at[model.name] = model, 0.0
    return models


@contextmanager
def serving(
    model: Model, options: ServeOptions | None = None, history: History | None = None
) -> Iterator[str]:
    """Serve a model, which is loaded, on a free port in a thread; yields the address."""
    models = models_of(model)
    try:
        with serving_models(models, options, history) as url:
            yield url
    finally:
        models._models.clear()  # who made the model closes it
        models.close()


@contextmanager
def serving_models(
    models: Models, options: ServeOptions | None = None, history: History | None = None
) -> Iterator[str]:
    """Serve models, which who made them closes; yields the address."""
    options = options or ServeOptions(port=0, max_new_tokens=1024)  # toy models end no answer
    started: list[Server] = []
    ready = threading.Event()

    def note(server: Server) -> None:
        started.append(server)
        ready.set()

    app = App(models, options, history)
    with bound_socket(options.host, options.port) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=Server(app, note).run, args=([listening],))
        thread.start()
        try:
            assert ready.wait(10)
            yield f"http://127.0.0.1:{port}"
        finally:
            started[0].should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@dataclass(frozen=True)
class Reply:
    """An HTTP response, whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        error = self.json["error"]
        return error if isinstance(error, str) else str(error["message"])


def ask(
    url: str,
    path: str,
    body: object = None,
    *,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    timeout_s: float = 30,
) -> Reply:
    """One request; ``body`` is sent as JSON unless it is bytes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} if data is not None else {}
    try:
        chosen = method or ("GET" if data is None else "POST")
        connection.request(chosen, path, data, {**sent, **(headers or {})})
        response = connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


@contextmanager
def leaving(url: str, path: str, body: object) -> Iterator[None]:
    """A request whose client leaves at the end of the block."""
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)) as connection:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        yield


@contextmanager
def open_stream(
    url: str, body: object, path: str = "/v1/chat/completions"
) -> Iterator[http.client.HTTPResponse]:
    """An answer while it is written."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    with closing(connection):
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response


def events(reply: Reply) -> list[Any]:
    """The events of a streamed answer; the last, "[DONE]", as that text."""
    blocks = [block for block in reply.body.decode().split("\n\n") if not block.startswith(": ")]
    assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
    values = [block.removeprefix("data: ") for block in blocks]
    return [value if value == "[DONE]" else json.loads(value) for value in values]


def named_events(reply: Reply) -> list[Any]:
    """The events of a stream of Responses or Messages, each of which is named as its type."""
    events = list[Any]()
    for block in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        if not block.startswith(": "):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def said(reply: Reply) -> str:
    """The text of a chat's answer, streamed or not."""
    assert reply.status == 200, reply.body
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json["choices"][0]["message"]["content"])
    *chunks, done = events(reply)
    assert done == "[DONE]"
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def question(text: str = "hello", **more: object) -> dict[str, object]:
    """The body of a chat completion."""
    return {"model": "served", "messages": [{"role": "user", "content": text}], **more}
