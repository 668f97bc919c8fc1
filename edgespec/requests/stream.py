"""An answer as it is written, for threads and for tasks, and several answers to one prompt."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Final
from weakref import finalize

from edgespec.requests.queue import RequestQueue
from edgespec.requests.results import Generation, Record, choice_id
from edgespec.requests.ticket import LOOK_S, Stage, Ticket
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

    def __init__(self, ticket: Ticket, queue: RequestQueue) -> None:
        self._ticket, self._queue = ticket, queue
        # The queue knows the ticket alone, so that a stream that nobody holds any more can go.
        finalize(self, ticket.interrupt, "cancelled").atexit = False

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
        self._queue.check_process()
        self._ticket.wait_for_end()

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()
        self._queue.check_process()
        while self._ticket.result is None:
            self._ticket.clear()
            await self._ticket.wait_async(None)

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
        self._queue.put(self._ticket)

    @property
    def ended(self) -> bool:
        """Whether the answer is there, whole or as far as it came."""
        return self._ticket.result is not None

    @property
    def at_once(self) -> int:
        """How many requests the model answers at once."""
        return self._queue.at_once

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
        self._queue.withdraw(self._ticket, "cancelled")

    @property
    def place(self) -> int:
        """How many requests are before this one in the model's queue; 0 once it runs."""
        return self._queue.place(self._ticket)

    @property
    def prompt(self) -> tuple[int, int]:
        """How many tokens the prompt has, and how many of them a cache held; zeros until the request runs."""
        decoding = self._ticket.decoding
        return (0, 0) if decoding is None else (decoding.prompt_tokens, decoding.cached_tokens)

    @property
    def result(self) -> Generation:
        """The finished generation; the partial one of a request that ended early, and why.

        Of a request that was cancelled, but runs yet, it waits for the end of the pass.

        Raises:
            RequestError: it still runs, or was never read.
        """
        ticket = self._ticket
        if ticket.interruption is not None and ticket.stage is Stage.RUNNING:
            self._queue.check_process()
            ticket.wait_for_end()
        if ticket.result is None:
            raise RequestError("the generation is not finished; read the stream to its end, or cancel it")
        return ticket.result

    def _next(self) -> Record | None:
        """The next record; None at the end."""
        ticket = self._ticket
        self._queue.put(ticket)
        while not ticket.readable:
            ticket.wait(LOOK_S)
            self._look()
        return self._take()

    async def _next_async(self) -> Record | None:
        ticket = self._ticket
        self._queue.put(ticket)
        try:
            while not ticket.readable:
                await ticket.wait_async(None if ticket.stage is Stage.RUNNING else LOOK_S)
                self._look()
        except BaseException:
            self.cancel()
            raise
        return self._take()

    def _take(self) -> Record | None:
        """The next record of those that are there; who wants to know of progress is told."""
        record, on_progress = self._ticket.take(), self._ticket.request.on_progress
        if on_progress is not None and record is not None and record.progress is not None:
            try:
                on_progress(record.progress)
            except BaseException:
                self.cancel()
                raise
        return record

    def _look(self) -> None:
        """End a request that waits for its turn, if it is not to wait any more; one that runs sees itself."""
        if self._ticket.stage is not Stage.WAITING:
            return
        reason = self._ticket.reason_to_end()
        if reason is not None:
            self._queue.withdraw(self._ticket, reason)


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


def answers(streams: Sequence[Stream], count: int) -> Generation:
    """The first of ``count`` answers to one prompt, with all of them as its choices.

    Where one is ended early there are no further ones.
    """
    results = list[Generation]()
    with _in_turn(streams) as turns:
        for stream in turns:
            results.append(stream.run())
            if results[-1].finish_reason in _ENDED_EARLY:
                break
    return together(results, count)


async def answers_async(streams: Sequence[Stream], count: int) -> Generation:
    """:func:`answers` in an event loop."""
    results = list[Generation]()
    with _in_turn(streams) as turns:
        for stream in turns:
            results.append(await stream.run_async())
            if results[-1].finish_reason in _ENDED_EARLY:
                break
    return together(results, count)


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


def together(results: Sequence[Generation], count: int) -> Generation:
    """The first of the answers to one prompt, with all of them as its choices.

    One answer that did not end early stands for all ``count``: they are the same.
    """
    first, *others = results
    if not others and first.finish_reason not in _ENDED_EARLY:
        others = [first] * (count - 1)
    others = [
        replace(other, tool_calls=tuple(replace(c, id=choice_id(c.id, at)) for c in other.tool_calls))
        for at, other in enumerate(others, 1)
    ]
    return replace(first, others=tuple(others)) if others else first
