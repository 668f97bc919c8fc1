"""An answer as it is written, for threads and for tasks, and several answers to one prompt."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Final
from weakref import finalize

from edgespec.requests.request import Request, RequestOptions
from edgespec.requests.results import Generation, Record, choice_id
from edgespec.requests.worker import LOOK_S, Answer, Worker
from edgespec_models.errors import Busy, RequestError

_ENDED_EARLY: Final = ("cancelled", "timeout", "closed")


class Stream(
    Iterator[str], AsyncIterator[str], AbstractContextManager["Stream"], AbstractAsyncContextManager["Stream"]
):
    """Iterate over the text as it is generated, with ``for`` or ``async for``; then read :attr:`result`.

    Pieces are never half a character and never text that a stop string takes back. The request is queued
    when something is first asked of the stream: one that nobody reads costs nothing. One that is dropped
    half-read is cancelled, as it is when a ``with`` block around it is left. A task that is cancelled while
    it waits for text cancels the request.

    Iterating raises what went wrong, :class:`edgespec.Busy` and :class:`edgespec.Closed` at the start.
    """

    def __init__(self, answer: Answer, worker: Worker) -> None:
        self._answer, self._worker = answer, worker
        # The worker knows the answer alone, so that a stream that nobody holds any more can go.
        finalize(self, answer.interrupt, "cancelled").atexit = False

    def __next__(self) -> str:
        while (record := self._next()) is not None:
            if record.text:
                return record.text
        raise StopIteration

    async def __anext__(self) -> str:
        while (record := await self._next_async()) is not None:
            if record.text:
                return record.text
        raise StopAsyncIteration

    def __exit__(self, *exc: object) -> None:
        self.cancel()
        self._worker.check_process()
        self._answer.wait_for_end()

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()
        self._worker.check_process()
        while self._answer.result is None:
            self._answer.clear()
            await self._answer.wait_async(None)

    def records(self) -> "Records":
        """What each round added: an iterable of :class:`edgespec.Record`, both ways.

        First come records that say how far a long prompt is read, and have no text. It goes on where the
        iteration over the stream is, and the other way round.
        """
        return Records(self)

    def start(self) -> None:
        """Queue the request now, without waiting for it to be read.

        Raises:
            Busy: too many requests wait.
            Closed: the model is closed.
        """
        self._worker.submit(self._answer)

    @property
    def ended(self) -> bool:
        """Whether the answer is there, whole or as far as it came."""
        return self._answer.result is not None

    @property
    def at_once(self) -> int:
        """How many requests the model answers at once."""
        return self._worker.at_once

    def run(self) -> Generation:
        """Generate to the end; whatever interrupts the wait, such as Ctrl-C, cancels the request."""
        try:
            while self._next() is not None:
                pass
        except BaseException:
            self.cancel()
            raise
        return self.result

    async def run_async(self) -> Generation:
        """The same in an event loop."""
        while await self._next_async() is not None:
            pass
        return self.result

    def cancel(self) -> None:
        """End the request within a pass, from any thread; what came until then stays readable."""
        self._worker.withdraw(self._answer, "cancelled")

    @property
    def place(self) -> int:
        """How many requests are before this one in the model's queue; 0 once it runs."""
        return self._worker.place(self._answer)

    @property
    def prompt(self) -> tuple[int, int]:
        """How many tokens the prompt has, and how many of them a cache held; zeros until the request runs."""
        one = self._answer.prepared
        return (0, 0) if one is None else one.read

    @property
    def result(self) -> Generation:
        """The finished generation; the partial one of a request that ended early, and why.

        Of a request that was cancelled, but runs yet, it waits for the end of the pass.

        Raises:
            RequestError: it still runs, or was never read.
        """
        if self._answer.interruption is not None and self._answer.begun and self._answer.result is None:
            self._worker.check_process()
            self._answer.wait_for_end()
        if self._answer.result is None:
            raise RequestError("the generation is not finished; read the stream to its end, or cancel it")
        return self._answer.result

    def _next(self) -> Record | None:
        """The next record; None at the end."""
        answer = self._answer
        self._worker.submit(answer)
        while not answer.readable:
            answer.wait(LOOK_S)
            self._look()
        return self._taken()

    async def _next_async(self) -> Record | None:
        answer = self._answer
        self._worker.submit(answer)
        try:
            while not answer.readable:
                await answer.wait_async(None if answer.begun else LOOK_S)
                self._look()
        except BaseException:
            self.cancel()
            raise
        return self._taken()

    def _taken(self) -> Record | None:
        """The next record of those that are there, which is told to who wants to know of progress."""
        record, tell = self._answer.take(), self._answer.request.on_progress
        if tell is not None and record is not None and record.progress is not None:
            try:
                tell(record.progress)
            except BaseException:
                self.cancel()
                raise
        return record

    def _look(self) -> None:
        """End a request that waits for its turn, if it is not to wait any more; one that runs sees itself."""
        reason = None if self._answer.begun else self._answer.why_end()
        if reason is not None:
            self._worker.withdraw(self._answer, reason)


class Records:
    """The records of a stream; see :meth:`Stream.records`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Record]:
        while (record := self._stream._next()) is not None:
            yield record

    async def __aiter__(self) -> AsyncIterator[Record]:
        while (record := await self._stream._next_async()) is not None:
            yield record


def asked(options: RequestOptions, ask: Callable[..., Stream]) -> list[Stream]:
    """The streams of the ``n`` answers that ``options`` want, which ``ask`` asks for one by one.

    Answer i has the seed ``seed + i``, so that each can be had again alone. Greedy answers are all the same,
    so one is decoded.
    """
    request = Request.of(options)
    one = options.copy()
    one.pop("n", None)
    if request.n == 1 or request.sampling.greedy:
        return [ask(**one)]
    seed = request.sampling.seed
    if seed is None:
        return [ask(**one) for _ in range(request.n)]
    return [ask(**{**one, "seed": (seed + i) % 2**64}) for i in range(request.n)]


def answers(options: RequestOptions, streams: Sequence[Stream]) -> Generation:
    """The first of the answers that :func:`asked` asked for, with all of them as its choices.

    Where one is ended early there are no further ones.
    """
    given = list[Generation]()
    with _in_turn(streams) as turns:
        for stream in turns:
            given.append(stream.run())
            if given[-1].finish_reason in _ENDED_EARLY:
                break
    return together(given, options)


async def answers_async(options: RequestOptions, streams: Sequence[Stream]) -> Generation:
    """:func:`answers` in an event loop."""
    given = list[Generation]()
    with _in_turn(streams) as turns:
        for stream in turns:
            given.append(await stream.run_async())
            if given[-1].finish_reason in _ENDED_EARLY:
                break
    return together(given, options)


@contextmanager
def _in_turn(streams: Sequence[Stream]) -> Iterator[Iterator[Stream]]:
    """Each in its turn, while as many run as the model answers at once; at the end they are cancelled."""

    def started() -> Iterator[Stream]:
        for at, stream in enumerate(streams):
            stream.start()
            with suppress(Busy):  # then the others wait for their turns here
                for other in streams[at + 1 : at + stream.at_once]:
                    other.start()
            yield stream

    try:
        yield started()
    finally:
        for stream in streams:
            stream.cancel()


def together(given: Sequence[Generation], options: RequestOptions) -> Generation:
    """The first of the answers to one prompt, with all of them as its choices."""
    first, *others = given
    request = Request.of(options)
    if request.sampling.greedy and first.finish_reason not in _ENDED_EARLY:
        others = [first] * (request.n - 1)
    others = [
        replace(each, tool_calls=tuple(replace(c, id=choice_id(c.id, at)) for c in each.tool_calls))
        for at, each in enumerate(others, 1)
    ]
    return replace(first, others=tuple(others)) if others else first
