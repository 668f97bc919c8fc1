"""Chat and text completions: requests in, answers out, whole or as streams."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from time import monotonic
from types import MappingProxyType
from typing import Any, TypeVar, Unpack, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edgespec.decoding.draft import Progress
from edgespec.engine import Model
from edgespec.models import Models
from edgespec.requests import request as requests
from edgespec.requests.attribution import Attribution
from edgespec.requests.embedding import Embeddings, Scores
from edgespec.requests.request import RequestOptions
from edgespec.requests.results import Generation, Record, nothing
from edgespec.requests.stream import Stream, results_async, together
from edgespec.serve.bodies import ChatBody, CompletionBody, EmbeddingBody, InfillBody, RerankBody, read_body
from edgespec.serve.metrics import RequestCount, count_of
from edgespec.serve.options import ServeOptions
from edgespec.serve.problems import Problem, of_error, shutting_down
from edgespec.serve.replies import (
    ChatReply,
    CompletionReply,
    InfillReply,
    Json,
    Reply,
    scores_json,
    vectors_json,
)
from edgespec_models.errors import Busy, Cancelled, EdgespecError, RequestError
from edgespec_models.progress import Progress as LoadProgress
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.text.tokenizer import Tokenizer

T = TypeVar("T")
R = TypeVar("R", Embeddings, Scores)
Ask = Callable[..., Stream]
Asks = Callable[[Model], Sequence[Ask]]
MakeReply = Callable[..., Reply]
"""Makes a reply in the form of an endpoint, from the facts of :func:`described`."""
Words = Mapping[str, str]
"""An endpoint's names of options, by the names in errors."""
NO_WORDS: Words = MappingProxyType({})
_AT_ONCE_S = 0.2
"""Seconds that headers wait for an early error."""
RERANKING = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Paths of one endpoint, since clients have bases of three kinds."""
_SILENCE_S = 5.0
"""Seconds of silence before a comment. Proxies commonly give up after a minute, some clients sooner."""
_LOAD_LOOK_S = 1.0  # seconds between comments on a load


class Completions:
    """Asks models for the answers of all clients. A model answers a few requests at once.

    While the server is ``closing``, no further request is taken.
    """

    def __init__(self, models: Models, options: ServeOptions) -> None:
        self._models, self._options = models, options
        self.closing = False

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = await self.read(ChatBody, request)
        form = partial(ChatReply, logprobs=body.logprobs, is_old=bool(body.functions and not body.tools))
        return await self.converse(request, body, form, may_think=body.may_think)

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = await self.read(CompletionBody, request)

        def asks(model: Model) -> Sequence[Ask]:
            ask: Ask = partial(model.stream_fill, suffix=body.suffix) if body.suffix else model.stream
            return [partial(ask, prompt) for prompt in body.prompts()]

        echoed = body.prompts() if body.echo else ()
        scores = body.logprobs is not None
        form = partial(CompletionReply, logprobs=scores, n=body.n, echoed=echoed, special=body.special)
        return await self.respond(request, body, asks, form)

    async def embed(self, request: Request) -> Response:
        """``POST /v1/embeddings``."""
        body = await self.read(EmbeddingBody, request)
        embeddings = await self.vectors(request, body, *await self.model(request, body.model))
        written = partial(vectors_json, embeddings, body.model, base64=body.encoding_format == "base64")
        return Response(await asyncio.to_thread(written), media_type="application/json")

    async def vectors(self, request: Request, body: EmbeddingBody, model: Model, left_s: float) -> Embeddings:
        """The vectors of a body's texts by the request's model, within the time limit."""
        embed = partial(model.embed_async, instruction=body.instruction, dimensions=body.dimensions)
        return await self._read_texts(request, embed(body.texts(), timeout=left_s))

    async def rerank(self, request: Request) -> Response:
        """``POST /v1/rerank``."""
        body = await self.read(RerankBody, request)
        model, left_s = await self.model(request, body.model)
        texts = body.texts()
        scoring = model.rerank_async(body.query, texts, instruction=body.instruction, timeout=left_s)
        scores = await self._read_texts(request, scoring)
        reply = scores_json(scores, body.model, texts, top_n=body.top_n, whole=body.return_documents)
        return JSONResponse(reply)

    async def _read_texts(self, request: Request, reading: Awaitable[R]) -> R:
        """What is read of texts, within the time limit, while the client is there."""
        try:
            result = await _while_connected(request, reading)
        except Cancelled as error:
            raise Problem(503, str(error), "timeout", {"Retry-After": "30"}) from error
        count_of(request).prompt_tokens += sum(result.tokens)
        return result

    async def infill(self, request: Request) -> Response:
        """``POST /infill``, as llama.cpp's server has it."""
        body = await self.read(InfillBody, request)
        completion = body.completion(next(iter(self._models.names)))
        files = [(file.filename, file.text) for file in body.input_extra]
        before, behind = body.input_prefix + body.prompt, body.input_suffix

        def asks(model: Model) -> Sequence[Ask]:
            return [partial(model.stream_fill, before, behind, extra=files, max_lines=body.max_lines)]

        return await self.respond(
            request, completion, asks, partial(InfillReply, fields=body.response_fields)
        )

    async def converse(
        self,
        request: Request,
        body: ChatBody,
        form: MakeReply,
        *,
        words: Words = NO_WORDS,
        may_think: bool = False,
    ) -> Response:
        """Answer a conversation in the form of an endpoint.

        Errors name fields by the endpoint's ``words``. With ``may_think`` a model without thoughts answers,
        instead of refusing.
        """
        messages = body.conversation()

        def asks(model: Model) -> Sequence[Ask]:
            def ask(**options: Unpack[RequestOptions]) -> Stream:
                return model.stream_chat(messages, **_fitting(options, model, may_think))

            return [ask]

        return await self.respond(request, body, asks, form, words)

    async def count_tokens(
        self, request: Request, body: ChatBody, *, words: Words = NO_WORDS, may_think: bool = False
    ) -> int:
        """The number of tokens that the model would read."""
        model, _ = await self.model(request, body.model)
        options = _fitting(body.options(), model, may_think)
        with _worded({**body.words(), **words}):
            return await asyncio.to_thread(model.count_tokens, body.conversation(), **options)

    async def read(self, cls: type[T], request: Request) -> T:
        """The body of a request; see :func:`read_body`."""
        if self.closing:
            raise shutting_down()
        return await read_body(cls, request, self._options)

    def known_name(self, name: str) -> str:
        """A model's name, which may end in Ollama's ``:latest``. Problem of status 404 if there is none."""
        names = [known for known in (name, name.removesuffix(":latest")) if known in self._models.names]
        if not names:
            problem = f"model {name!r:.200} not found; this server has {str([*self._models.names])[1:-1]}"
            raise Problem(404, problem, "model_not_found")
        return names[0]

    async def model(self, request: Request, name: str) -> tuple[Model, float]:
        """A model that stays loaded during the request, and the seconds that the request has left."""
        return await _while_connected(request, self._use(request, name))

    async def _use(
        self, request: Request, name: str, progress: ProgressCallback = ignore_progress
    ) -> tuple[Model, float]:
        using = self._models.use_async(self.known_name(name), progress=progress)
        started, allowed = monotonic(), self._options.timeout_s
        try:
            async with asyncio.timeout(allowed):
                model = await request.scope["edgespec.held"].enter_async_context(using)
        except TimeoutError:
            raise _too_late() from None
        return model, max(0.001, round(allowed - (monotonic() - started), 3))

    async def respond(
        self,
        request: Request,
        body: ChatBody | CompletionBody,
        asks: Asks,
        form: MakeReply,
        words: Words = NO_WORDS,
    ) -> Response:
        """Answer ``asks`` with the options of ``body``, in the form of an endpoint."""
        usual: dict[str, Any] = {"max_new_tokens": self._options.max_new_tokens or body.usual_tokens}
        if self._options.sampling and isinstance(body, ChatBody):
            usual["sampling"] = self._options.sampling
        options = cast(RequestOptions, {**usual, **body.options()})
        words = {**body.words(), **words}
        if body.stream:
            load = partial(self._use, request, body.model)
            events = _EventStream(count_of(request), body, load, asks, form, options, words)
            try:
                await _while_connected(request, events.begin())
            except BaseException:
                await events.close()
                raise
            return events
        model, options["timeout"] = await self.model(request, body.model)
        answer = form(*described(body.model, model))
        answers = await _while_connected(request, _all(asks(model), options, words))
        count = count_of(request)
        for answer_choice in {
            id(choice.stats): choice for answer in answers for choice in answer.choices
        }.values():
            count.tokens += len(answer_choice.tokens)  # greedy choices share one answer
            count.stats.append(answer_choice.stats)
            _check_ended(answer_choice)
        return JSONResponse(answer.whole(answers))


def described(name: str, model: Model) -> tuple[str, Tokenizer, float]:
    """Facts of a model for replies, with its speed without speculation, by the costs at load."""
    return name, model.target.tokenizer, 1.0 / model.cost_curve.seconds(1)


class _Streamed:
    """A streamed answer and the indexes of its choices. Greedy choices share one answer."""

    def __init__(self, stream: Stream, choices: Sequence[Reply]) -> None:
        self.stream, self._choices, self._has_begun = stream, choices, False
        self._records, self._attribution = aiter(stream.records()), Attribution(choices[0].tokenizer)

    def next(self) -> "asyncio.Future[Record | None]":
        """The next record, or None at the end."""
        return asyncio.ensure_future(anext(self._records, None))

    def chunks(self, record: Record) -> list[Json]:
        """The chunks of a record. The role comes with the first one, because it ends a client's wait."""
        chunks = list[list[Json]]()
        if not self._has_begun:
            self._has_begun = True
            for choice in self._choices:
                choice.prompt = self.stream.prompt
                chunks.append(choice.begin())
        if record.progress is not None:
            chunks.append(self._choices[0].reading(record.progress))
        else:
            shown = self._attribution.push(record)
            chunks += [choice.chunk(record, shown) for choice in self._choices]
        return list(chain.from_iterable(chunks))

    def last(self) -> list[Json]:
        """The last chunks of each choice."""
        return list(chain.from_iterable(choice.end(self.stream.result) for choice in self._choices))


class _EventStream(StreamingResponse):
    """The events of all answers, as they come. When the stream ends, for whatever reason, the answers end.

    ``load`` gives the model and the seconds that are left. ``asks`` are the questions of the prompts; as many
    run as the model answers at once.
    """

    def __init__(
        self,
        count: RequestCount,
        body: ChatBody | CompletionBody,
        load: Callable[[ProgressCallback], Awaitable[tuple[Model, float]]],
        asks: Asks,
        form: MakeReply,
        options: RequestOptions,
        words: Words,
    ) -> None:
        self._answer = form(body.model, None, 0.0)  # without a model yet, it can only report errors
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # keeps proxies from buffering
        super().__init__(self._lines(), media_type=self._answer.media_type, headers=headers)
        self._count, self._asks, self._form, self._options = count, asks, form, options
        self._words = words
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._with_progress = body.return_progress
        self._streams: Sequence[Sequence[Stream]] = ()
        self._waiting, self._coming = deque[_Streamed](), dict[asyncio.Future[Record | None], _Streamed]()
        self._loads = deque[LoadProgress](maxlen=1)  # written by the thread that loads
        self._read: Progress | None = None
        self._ended = False
        self._loading = asyncio.ensure_future(load(self._loads.append))

    async def begin(self) -> None:
        """Raise an early error, for the status. After a short wait the headers are sent."""
        if not (await asyncio.wait((self._loading,), timeout=_AT_ONCE_S))[0]:
            return
        await self._ask()
        done, _ = await asyncio.wait(self._coming, timeout=_AT_ONCE_S, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()

    async def close(self) -> None:
        """End the answers, because their client is gone."""
        self._loading.cancel()
        for future in self._coming:
            future.cancel()
        for stream in chain.from_iterable(self._streams):
            stream.cancel()
        await asyncio.gather(self._loading, *self._coming, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._count.left = not self._ended
            await self.close()

    async def _ask(self) -> None:
        """Ask the model, now that it is loaded."""
        model, self._options["timeout"] = self._loading.result()
        answer = self._answer = self._form(*described(self._answer.model, model))
        options, asks = self._options, self._asks(model)
        with _worded(self._words):
            self._streams = await asyncio.to_thread(lambda: [_choices(options, ask) for ask in asks])
        every = [*chain.from_iterable(self._streams)]
        same = len(asks) * options.get("n", 1) // len(every)  # choices that share one answer
        choices = (answer.choices(range(at, at + same)) for at in range(0, len(every) * same, same))
        self._waiting.extend(map(_Streamed, every, choices))
        self._start()

    def _start(self) -> None:
        """Start the next answers. Those for which the queue has no room wait here."""
        while self._waiting and len(self._coming) < self._waiting[0].stream.at_once:
            try:
                self._waiting[0].stream.start()
            except Busy:
                if not self._coming:
                    raise
                return
            streamed = self._waiting.popleft()
            self._coming[streamed.next()] = streamed

    async def _lines(self) -> AsyncIterator[str]:
        """The lines of the stream."""
        try:
            async for line in self._until_loaded():
                yield line
            if not self._streams:
                await self._ask()
            async for line in self._pieces():
                yield line
        except (EdgespecError, Problem) as error:  # the status is sent already
            problem = error if isinstance(error, Problem) else of_error(error)
            yield self._answer.line(self._answer.failed(problem))
        else:
            if self._with_usage:
                count = self._options.get("n", 1)
                answers = [together([stream.result for stream in some], count) for some in self._streams]
                yield self._answer.line(self._answer.used(answers))
            yield self._answer.done
        self._ended = True

    async def _until_loaded(self) -> AsyncIterator[str]:
        """Comments about the progress of the load."""
        clock, before, due = asyncio.get_running_loop().time, "", 0.0
        while not self._loading.done():
            comment = f"loading {self._answer.model}{''.join(map(_stage, [*self._loads]))}"
            if comment != before or clock() >= due:
                yield self._answer.comment(comment)
                before, due = comment, clock() + _SILENCE_S
            await asyncio.wait((self._loading,), timeout=_LOAD_LOOK_S)

    async def _pieces(self) -> AsyncIterator[str]:
        """Events of the answers, and comments while there are none."""
        clock = asyncio.get_running_loop().time
        due = clock() + (0 if self._place else _SILENCE_S)
        while self._coming:
            left = max(0.0, due - clock())
            done, _ = await asyncio.wait(self._coming, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            lines = [] if done else [self._answer.comment(self._waits_for())]
            for future in done:
                lines += map(self._event, self._chunks(self._coming.pop(future), future.result()))
            for line in lines:
                yield line
            if lines:
                due = clock() + _SILENCE_S

    def _chunks(self, streamed: _Streamed, record: Record | None) -> list[Json]:
        """The chunks of a record."""
        if record is None:
            _check_ended(streamed.stream.result)
            self._count.stats.append(streamed.stream.result.stats)
            self._start()
            return streamed.last()
        self._coming[streamed.next()], self._read = streamed, record.progress
        self._count.tokens += len(record.tokens)
        return [] if self._read is not None and not self._with_progress else streamed.chunks(record)

    @property
    def _place(self) -> int:
        return min(streamed.stream.place for streamed in self._coming.values())

    def _waits_for(self) -> str:
        if place := self._place:
            return f"waiting, {place} before it"
        if self._read is not None:
            return f"reading the prompt, {self._read.read} of {self._read.total} tokens"
        return "working"

    def _event(self, chunk: Mapping[str, Any]) -> str:
        return self._answer.line({**chunk, "usage": None} if self._with_usage else chunk)


def _stage(load: LoadProgress) -> str:
    """The present stage; empty when a stage has ended."""
    share = f" {100 * load.done // load.total} %" if load.total else ""
    return f", {load.stage}{share}" if load.done != load.total else ""


@contextmanager
def _worded(words: Words) -> Iterator[None]:
    """Within the block errors name the client's fields instead of the model's options."""
    try:
        yield
    except RequestError as error:
        message = str(error)
        for name, word in words.items():
            message = message.replace(name, word)
        raise type(error)(message) from error


def _fitting(options: RequestOptions, model: Model, may_think: bool) -> RequestOptions:
    """``options``, without ``thinking`` if the model has no thoughts and may answer without."""
    if model.thinks or not may_think:
        return options
    variables = {**options.get("template_args", {})}
    if variables.get("enable_thinking") is False:  # nothing is to be turned off
        del variables["enable_thinking"]
    return cast(RequestOptions, {**options, "thinking": None, "template_args": variables})


def _choices(options: RequestOptions, ask: Ask) -> list[Stream]:
    """The streams of the answers to one prompt."""
    seeds, single = requests.Request.of(options).seeds, {**options}
    single.pop("n", None)
    return [ask(**single)] if len(seeds) == 1 else [ask(**{**single, "seed": seed}) for seed in seeds]


async def _all(asks: Sequence[Ask], options: RequestOptions, words: Words) -> list[Generation]:
    """The answers to all prompts. If one fails, all fail; if one ends early, so do those behind it."""
    with _worded(words):  # a long prompt takes a while to encode
        streams = await asyncio.to_thread(lambda: [_choices(options, ask) for ask in asks])
    results, count = await results_async([*chain.from_iterable(streams)]), len(streams[0])
    missing = nothing(results[-1].finish_reason)
    groups = (results[at * count : (at + 1) * count] for at in range(len(asks)))
    return [together(group or [missing], options.get("n", 1)) for group in groups]


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``. If the client leaves first, cancel it and raise ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_ended(answer: Generation) -> None:
    """Refuse a request that ended before it had an answer.

    Raises:
        Problem: the server ends, or the time was up before the first token.
    """
    if answer.finish_reason == "closed":
        raise shutting_down()
    if answer.finish_reason == "timeout" and not answer.tokens:
        raise _too_late()


def _too_late() -> Problem:
    problem = "no token was written within --timeout, because too many requests wait; ask again later"
    return Problem(503, problem, "timeout", {"Retry-After": "30"})
