"""Chat and text completions: requests in, answers out, whole or as streams."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edgespec.answering.attribution import Attribution
from edgespec.answering.results import Generation
from edgespec.asking.pictures import parts_of
from edgespec.asking.request import Hole, PromptInput, RequestOptions, text_prompt
from edgespec.decoding.draft import PromptProgress
from edgespec.engine import Model
from edgespec.models import Models
from edgespec.running.embedding import Embeddings, Scores
from edgespec.running.stream import Answers, Stream
from edgespec.serve.bodies import (
    MOST_TOKENS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    InfillBody,
    RerankBody,
    read_body,
)
from edgespec.serve.metrics import count_of
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
from edgespec_models.errors import Cancelled, EdgespecError, RequestError
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress

T = TypeVar("T")
R = TypeVar("R", Embeddings, Scores)
_MOST_OF_A_TEXT = 1024  # tokens
_AT_ONCE_S = 0.2
"""Seconds that headers wait for an early error."""
RERANKING = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Paths of one endpoint, since clients have bases of three kinds."""
_SILENCE_S = 5.0
"""Seconds of silence before a comment. Proxies commonly give up after a minute, some clients sooner."""
_LOAD_LOOK_S = 1.0  # seconds between comments on a load
_WITHOUT_TIME = ("closed", "timeout")  # reasons of an end


@dataclass(slots=True)
class Job:
    """A request for answers to ``prompts``, with the options of ``body`` and ``more``.

    ``names`` are the endpoint's names of options. With ``may_think`` a model without thoughts answers,
    instead of refusing.
    """

    body: ChatBody | CompletionBody
    prompts: Sequence[PromptInput | Hole]
    reply: Reply
    names: Mapping[str, str] = field(default_factory=dict)
    may_think: bool = False
    more: RequestOptions = field(default_factory=RequestOptions)
    wanted: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {**self.body.names(), **self.names}
        self.wanted = {**self.body.options(), **self.more}  # its errors come before a load

    def options(self, model: Model) -> RequestOptions:
        """The options for ``model``, without ``thinking`` if it has no thoughts and may answer without."""
        options = {**self.wanted}
        if self.may_think and not model.thinks:
            variables = {**options.pop("template_args", {})}
            if variables.get("enable_thinking") is False:  # nothing is to be turned off
                del variables["enable_thinking"]
            options |= {"thinking": None, "template_args": variables}
        return cast(RequestOptions, options)


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block errors name the client's fields by ``names`` instead of the model's options."""
    try:
        yield
    except RequestError as error:
        option, mark, place = error.field.partition("[")
        raise type(error)(error.problem, names.get(option, option) + mark + place) from error


class Completions:
    """Asks models for the answers of all clients. A model answers a few requests at once.

    While the server is ``closing``, no further request is taken.
    """

    def __init__(self, models: Models, options: ServeOptions) -> None:
        self._models, self._options = models, options
        self.closing = False
        self._decoding = ThreadPoolExecutor(1, "edgespec-pictures")

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = await self.read(ChatBody, request)
        is_old = bool(body.functions and not body.tools)
        reply = ChatReply(body.model, logprobs=body.logprobs, is_old=is_old)
        return await self.respond(request, Job(body, [body.conversation()], reply, may_think=body.may_think))

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = await self.read(CompletionBody, request)
        scores, echoed = body.logprobs is not None, body.prompts() if body.echo else ()
        prompts = [
            Hole(cast(str, prompt), body.suffix) if body.suffix else text_prompt(prompt)
            for prompt in body.prompts()
        ]
        reply = CompletionReply(body.model, logprobs=scores, n=body.n, echoed=echoed, special=body.special)
        return await self.respond(request, Job(body, prompts, reply))

    async def embed(self, request: Request) -> Response:
        """``POST /v1/embeddings``."""
        body = await self.read(EmbeddingBody, request)
        embeddings = await self.vectors(request, body, *await self.model(request, body.model))
        written = partial(vectors_json, embeddings, body.model, base64=body.encoding_format == "base64")
        return Response(await asyncio.to_thread(written), media_type="application/json")

    async def vectors(self, request: Request, body: EmbeddingBody, model: Model, left_s: float) -> Embeddings:
        """The vectors of a body's texts by the request's model, within the time limit."""
        embed = partial(model.embed_async, instruction=body.instruction, dimensions=body.dimensions)
        with naming({"texts": "input"}):
            return await self._read_texts(request, embed(body.texts(), timeout=left_s))

    async def rerank(self, request: Request) -> Response:
        """``POST /v1/rerank``."""
        body = await self.read(RerankBody, request)
        model, left_s = await self.model(request, body.model)
        texts = body.texts()
        scoring = model.rerank_async(body.query, texts, instruction=body.instruction, timeout=left_s)
        with naming({"texts": "documents"}):
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
        hole = Hole(body.input_prefix + body.prompt, body.input_suffix, files)
        reply = InfillReply(completion.model, fields=body.response_fields)
        return await self.respond(request, Job(completion, [hole], reply, more={"max_lines": body.max_lines}))

    async def count_tokens(self, request: Request, job: Job) -> int:
        """The number of tokens that the model would read."""
        model, _ = await self.model(request, job.body.model)
        with naming(job.names):
            (prompt,) = job.prompts
            count = partial(model.count_tokens, cast(PromptInput, prompt), **job.options(model))
            return await self._reading(job, count)

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
        return await _while_connected(request, self.use(request, name))

    async def use(
        self, request: Request, name: str, progress: ProgressCallback = ignore_progress
    ) -> tuple[Model, float]:
        """:meth:`model`, also if the client leaves."""
        using = self._models.use_async(self.known_name(name), progress=progress)
        started, allowed = monotonic(), self._options.timeout_s
        try:
            async with asyncio.timeout(allowed):
                model = await request.scope["edgespec.held"].enter_async_context(using)
        except TimeoutError:
            raise _too_late() from None
        return model, max(0.001, round(allowed - (monotonic() - started), 3))

    async def ask(self, job: Job, model: Model, left_s: float) -> Answers:
        """Ask a model. A long prompt takes a while to encode."""
        # Ollama's raw prompts and fills have a chat's body. Such a text need not end.
        is_chat = isinstance(job.body, ChatBody) and not isinstance(job.prompts[0], Hole | str)
        most = self._options.max_new_tokens or (MOST_TOKENS if is_chat else _MOST_OF_A_TEXT)
        usual: dict[str, Any] = {"max_new_tokens": most}
        if self._options.sampling and is_chat:
            usual["sampling"] = self._options.sampling
        options = {**usual, **job.options(model), "timeout": left_s}
        job.reply.use(model)
        with naming(job.names):
            asking = partial(model.answers, job.prompts, cast(RequestOptions, options))
            return await self._reading(job, asking)

    async def _reading(self, job: Job, work: Callable[[], T]) -> T:
        """Run ``work``, which reads the prompts, in a thread. Prompts with pictures share one, since one is
        decoded at a time, and texts need not wait for them."""
        parts = (part for prompt in job.prompts for part in parts_of(prompt))
        pool = self._decoding if any(part.get("type") == "image_url" for part in parts) else None
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def respond(self, request: Request, job: Job) -> Response:
        """Answer a job, whole or as a stream."""
        if job.body.stream:
            events = _EventStream(self, request, job)
            try:
                await _while_connected(request, events.begin())
            except BaseException:
                await events.close()
                raise
            return events

        async def results() -> list[Generation]:
            answers = await self.ask(job, *await self.use(request, job.body.model))
            return await answers.run_async()

        answers, count = await _while_connected(request, results()), count_of(request)
        choices = {id(choice.stats): choice for answer in answers for choice in answer.choices}
        for choice in choices.values():
            count.tokens += len(choice.tokens)  # greedy choices share one answer
            count.stats.append(choice.stats)
        for choice in choices.values():
            _check_ended(choice, count.tokens)
        return JSONResponse(job.reply.whole(answers))


class _EventStream(StreamingResponse):
    """The events of a job's answers, as they come. When it ends, for whatever reason, the answers end."""

    def __init__(self, completions: Completions, request: Request, job: Job) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # keeps proxies from buffering
        super().__init__(self._lines(), media_type=job.reply.media_type, headers=headers)
        self._path = request.scope["path"]
        self._completions, self._job, self._reply = completions, job, job.reply
        self._count, options = count_of(request), job.body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._answers: Answers | None = None
        self._coming = dict[asyncio.Future[list[Json] | None], tuple[Stream, AsyncIterator[list[Json]]]]()
        self._loads = deque[Progress](maxlen=1)  # written by the thread that loads
        self._reading = dict[Stream, PromptProgress | None]()  # None behind the prompt
        self._ended = False
        self._loading = asyncio.ensure_future(completions.use(request, job.body.model, self._loads.append))

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
        if self._answers is not None:
            self._answers.close()
        await asyncio.gather(self._loading, *self._coming, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._count.left = not self._ended
            await self.close()

    async def _ask(self) -> Answers:
        """Ask the model, now that it is loaded."""
        self._answers = await self._completions.ask(self._job, *self._loading.result())
        self._start(self._answers)
        return self._answers

    def _start(self, answers: Answers) -> None:
        for stream in answers.start():
            self._await(stream, self._chunks(stream, self._reply.choices(answers.indices(stream))))

    def _await(self, stream: Stream, chunks: AsyncIterator[list[Json]]) -> None:
        self._coming[asyncio.ensure_future(anext(chunks, None))] = stream, chunks

    async def _chunks(self, stream: Stream, choices: Sequence[Reply]) -> AsyncIterator[list[Json]]:
        """The chunks of each record for the choices that have this answer; greedy choices share one.

        The role comes with the first record, because it ends a client's wait.
        """
        attribution, has_begun = Attribution(self._reply.tokenizer), False
        async for record in stream.records():
            progress, chunks = record.progress, list[Json]()
            self._reading[stream] = progress
            self._count.tokens += len(record.tokens)
            if record.finish_reason in _WITHOUT_TIME and not (has_begun or record.tokens):
                continue  # which is an error, unless other answers have tokens
            if progress is not None and not self._job.body.return_progress:
                yield []
                continue
            for choice in choices if not has_begun else ():
                choice.prompt, has_begun = stream.prompt, True
                chunks += choice.begin()
            if progress is None:
                shown = attribution.push(record)
                yield chunks + [chunk for choice in choices for chunk in choice.chunk(record, shown)]
            else:
                yield chunks + choices[0].reading(progress)
        _check_ended(stream.result, self._count.tokens)
        self._count.stats.append(stream.result.stats)
        yield [chunk for choice in choices if not has_begun for chunk in choice.begin()]
        yield [chunk for choice in choices for chunk in choice.end(stream.result)]

    async def _lines(self) -> AsyncIterator[str]:
        """The lines of the stream."""
        try:
            async for line in self._until_loaded():
                yield line
            answers = self._answers or await self._ask()
            async for line in self._pieces(answers):
                yield line
        except (EdgespecError, Problem) as error:  # the status is sent already
            problem = error if isinstance(error, Problem) else of_error(error)
            yield self._reply.line(self._reply.failed(problem, self._path))
        else:
            if self._with_usage:
                yield self._reply.line(self._reply.used(answers.results))
            yield self._reply.done
        self._ended = True

    async def _until_loaded(self) -> AsyncIterator[str]:
        """Comments about the progress of the load."""
        clock, before, due = asyncio.get_running_loop().time, "", 0.0
        while not self._loading.done():
            comment = f"loading {self._reply.model}{''.join(map(_stage, [*self._loads]))}"
            if comment != before or clock() >= due:
                yield self._reply.comment(comment)
                before, due = comment, clock() + _SILENCE_S
            await asyncio.wait((self._loading,), timeout=_LOAD_LOOK_S)

    async def _pieces(self, answers: Answers) -> AsyncIterator[str]:
        """Events of the answers, and comments while there are none."""
        clock = asyncio.get_running_loop().time
        due = clock() + (0 if self._place else _SILENCE_S)
        while self._coming:
            left = max(0.0, due - clock())
            done, _ = await asyncio.wait(self._coming, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            lines = [] if done else [self._reply.comment(self._waits_for())]
            for future in done:
                stream, chunks = self._coming.pop(future)
                if (events := future.result()) is None:
                    self._start(answers)
                else:
                    lines += map(self._event, events)
                    self._await(stream, chunks)
            for line in lines:
                yield line
            if lines:
                due = clock() + _SILENCE_S

    @property
    def _place(self) -> int:
        return min(stream.place for stream, _ in self._coming.values())

    def _waits_for(self) -> str:
        if place := self._place:
            return f"waiting, {place} before it"
        running = [self._reading.get(stream) for stream, _ in self._coming.values() if not stream.place]
        reading = [progress for progress in running if progress is not None]
        if len(reading) < len(running):
            return "working"
        last = max(reading, key=lambda progress: progress.read / progress.total)
        return f"reading the prompt, {last.read} of {last.total} tokens"

    def _event(self, chunk: Mapping[str, Any]) -> str:
        return self._reply.line({**chunk, "usage": None} if self._with_usage else chunk)


def _stage(load: Progress) -> str:
    """The present stage; empty when a stage has ended."""
    share = f" {100 * load.done // load.total} %" if load.total else ""
    return f", {load.stage}{share}" if load.done != load.total else ""


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


def _check_ended(answer: Generation, tokens: int) -> None:
    """Refuse a request that ended before it had an answer. All its answers have so many ``tokens``.

    Raises:
        Problem: the server ends, or the time was up before the first token.
    """
    if answer.finish_reason == "closed":
        raise shutting_down()
    if answer.finish_reason == "timeout" and not tokens:
        raise _too_late()


def _too_late() -> Problem:
    problem = (
        "no token was written within --timeout, while the model was loaded, read a long prompt or answered "
        "others; ask again later, or start the server with more --timeout"
    )
    return Problem(503, problem, "timeout", {"Retry-After": "30"})
