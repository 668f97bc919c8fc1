"""Chat and text completions: a request in, an answer out, at once or piece by piece."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edgespec.decoding.draft import Progress
from edgespec.engine import Model
from edgespec.requests.attribution import Attribution
from edgespec.requests.request import RequestOptions
from edgespec.requests.results import Generation, Record
from edgespec.requests.stream import Stream, answers_async, asked
from edgespec.serve.answers import ChatAnswer, CompletionAnswer
from edgespec.serve.bodies import ChatBody, CompletionBody, parse, read_json
from edgespec.serve.metrics import RequestCount, count_of
from edgespec.serve.options import ServeOptions
from edgespec.serve.problems import Problem, of_error, shutting_down
from edgespec_models.errors import EdgespecError

T = TypeVar("T")
Ask = Callable[..., Stream]
Answer = ChatAnswer | CompletionAnswer
_AT_ONCE_S = 0.2
"""How long the headers wait for what goes wrong with a request."""
_SILENCE_S = 5.0
"""How long nothing is sent; proxies commonly give up after a minute, some clients sooner."""


class Completions:
    """Asks one model for answers, on behalf of many clients; the model takes them in turn.

    Where it is ``closing``, no further request is taken, since the server ends.
    """

    def __init__(self, model: Model, options: ServeOptions) -> None:
        self._model, self._options = model, options
        self.closing = False

    @property
    def plain_tokens_per_s(self) -> float:
        """What the model would write without speculation: one token a pass, as measured at load."""
        return 1.0 / self._model.cost_curve.seconds(1)

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = parse(ChatBody, await self._read(request))
        self._check(body)
        ask = partial(self._model.stream_chat, body.conversation())
        return await self._respond(request, body, [ask], self._answer(ChatAnswer, body.logprobs))

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = parse(CompletionBody, await self._read(request))
        self._check(body)
        asks = [partial(self._model.stream, prompt) for prompt in body.prompts()]
        answer = self._answer(CompletionAnswer, body.logprobs is not None)
        return await self._respond(request, body, asks, answer)

    async def _read(self, request: Request) -> dict[str, Any]:
        if self.closing:
            raise shutting_down()
        return await read_json(request, self._options)

    def _check(self, body: ChatBody | CompletionBody) -> None:
        if body.model != self._model.name:
            raise Problem(
                404,
                f"there is no model {body.model!r:.200}; this server has {self._model.name!r}",
                "model_not_found",
            )

    def _answer(self, kind: type[ChatAnswer | CompletionAnswer], logprobs: bool) -> Answer:
        tokenizer = self._model.target.tokenizer
        return kind(self._model.name, tokenizer, self.plain_tokens_per_s, logprobs=logprobs)

    async def _respond(
        self, request: Request, body: ChatBody | CompletionBody, asks: Sequence[Ask], answer: Answer
    ) -> Response:
        limits = {"max_new_tokens": self._options.max_new_tokens, "timeout": self._options.timeout_s}
        options = cast(RequestOptions, {**limits, **body.options()})
        if body.stream:
            if len(asks) > 1 or body.n > 1:
                raise Problem(400, "one answer can be streamed; leave out stream, or ask for each by itself")
            return await self._streamed(request, body, partial(asks[0], **options), answer)
        answers = await _while_connected(request, _all(asks, options))
        count = count_of(request)
        for each in {id(choice.stats): choice for answer in answers for choice in answer.choices}.values():
            count.tokens += len(each.tokens)  # greedy choices are one answer several times
            count.stats.append(each.stats)
            _check_ended(each)
        return JSONResponse(answer.whole(answers))

    async def _streamed(
        self, request: Request, body: ChatBody | CompletionBody, start: Ask, answer: Answer
    ) -> Response:
        """Waits for a moment, so that what is wrong with a request is told by the status."""
        stream = await asyncio.to_thread(start)
        events = _EventStream(count_of(request), body, answer, stream)
        try:
            await _while_connected(request, events.begin())
        except BaseException:
            events.close()
            raise
        return events


class _EventStream(StreamingResponse):
    """Server-sent events of one answer; when it is over, however that came, the generation is."""

    def __init__(
        self, count: RequestCount, body: ChatBody | CompletionBody, answer: Answer, stream: Stream
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # no proxy gathers them
        super().__init__(self._lines(), media_type="text/event-stream", headers=headers)
        self._count, self._answer, self._stream = count, answer, stream
        self._with_usage, self._with_progress = body.stream_options.include_usage, body.return_progress
        self._attribution = Attribution(answer.tokenizer)
        self._records = aiter(stream.records())
        self._coming = self._next()
        self._read: Progress | None = None
        self._ended = False

    async def begin(self) -> None:
        """Raise what goes wrong at once; whoever waits longer gets the headers."""
        await asyncio.wait((self._coming,), timeout=_AT_ONCE_S)
        if self._coming.done():
            self._coming.result()

    def close(self) -> None:
        """End an answer that nobody reads any more."""
        self._coming.cancel()
        self._stream.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()
            self._count.left = not self._ended

    async def _lines(self) -> AsyncIterator[str]:
        """All that goes over the wire."""
        try:
            async for line in self._pieces():
                yield line
            answer = self._stream.result
            _check_ended(answer)
        except (EdgespecError, Problem) as error:  # the status is sent already
            problem = error if isinstance(error, Problem) else of_error(error)
            yield _line(problem.to_json())
        else:
            self._count.stats.append(answer.stats)
            yield self._event(self._answer.end(answer))
            if self._with_usage:
                yield _line(self._answer.used(answer))
            yield "data: [DONE]\n\n"
        self._ended = True

    async def _pieces(self) -> AsyncIterator[str]:
        """Events of what comes, and comments while there is nothing to say."""
        begin, clock = self._answer.begin(), asyncio.get_running_loop().time
        due = clock() + (0 if self._stream.place else _SILENCE_S)
        while True:
            await asyncio.wait((self._coming,), timeout=max(0.0, due - clock()))
            if not self._coming.done():
                yield self._comment()
            elif (record := self._coming.result()) is None:
                return
            else:
                self._coming, self._read = self._next(), record.progress
                if self._read is not None and not self._with_progress:
                    continue
                if begin is not None:  # not before: clients take it for the end of the wait
                    yield self._event(begin)
                    begin = None
                yield self._event(self._chunk(record))
            due = clock() + _SILENCE_S

    def _next(self) -> "asyncio.Future[Record | None]":
        return asyncio.ensure_future(anext(self._records, None))

    def _chunk(self, record: Record) -> Mapping[str, Any]:
        if record.progress is not None:
            return self._answer.reading(record.progress)
        self._count.tokens += len(record.tokens)
        return self._answer.chunk(record, self._attribution.push(record))

    def _comment(self) -> str:
        """What the request waits for; clients skip it, and neither they nor proxies take it for dead."""
        if place := self._stream.place:
            return f": waiting, {place} before it\n\n"
        if self._read is not None:
            return f": reading the prompt, {self._read.read} of {self._read.total} tokens\n\n"
        return ": working\n\n"

    def _event(self, chunk: Mapping[str, Any]) -> str:
        return _line({**chunk, "usage": None} if self._with_usage else chunk)


def _line(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _all(asks: Sequence[Ask], options: RequestOptions) -> list[Generation]:
    """The answers to all prompts; if one cannot be had, none is."""

    async def one(ask: Ask) -> Generation:
        streams = await asyncio.to_thread(asked, options, ask)  # a long prompt takes a while to encode
        return await answers_async(options, streams)

    tasks = [asyncio.ensure_future(one(ask)) for ask in asks]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Do ``work`` until it is done, or the client leaves.

    Raises:
        ClientDisconnect: it left; ``work`` is cancelled.
    """
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
    """Refuse to pass off as an answer what ended before it was one.

    Raises:
        Problem: the server ends, or time ran out before the first token.
    """
    if answer.finish_reason == "closed":
        raise shutting_down()
    if answer.finish_reason == "timeout" and not answer.tokens:
        raise Problem(
            503,
            "no token was written in the time that a request has (--timeout); too many others wait",
            "timeout",
            {"Retry-After": "30"},
        )
