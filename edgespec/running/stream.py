"""Streams of answers, for threads and tasks, and several answers to one prompt."""

from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, closing
from dataclasses import replace
from itertools import chain
from typing import Final
from weakref import finalize

from edgespec.answering.results import Generation, Record, call_id, nothing
from edgespec.running.scheduler import Scheduler
from edgespec.running.ticket import LOOK_S, InProcess, Stage, Ticket
from edgespec_models.errors import RequestError

_ENDED_EARLY: Final = ("cancelled", "timeout", "closed")


class Stream(
    InProcess,
    Iterator[str],
    AsyncIterator[str],
    AbstractContextManager["Stream"],
    AbstractAsyncContextManager["Stream"],
):
    """Iterate over the text as it is generated, with ``for`` or ``async for``; then read :attr:`result`.

    Pieces are whole characters, and never text that a stop string takes back. The request is queued when the
    stream is first read, so a stream that nobody reads costs nothing. Dropping a half-read stream cancels the
    request, as does leaving a ``with`` block around it, or cancelling a task that waits for text.

    Iterating raises the request's error; :class:`edgespec.Busy` and :class:`edgespec.Closed` come first.
    """

    def __init__(self, ticket: Ticket, queue: Scheduler) -> None:
        self._ticket, self._queue = ticket, queue
        # The queue holds the ticket alone, so that an abandoned stream can be collected.
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
        """Iterate over the records of rounds (:class:`edgespec.Record`), with ``for`` or ``async for``.

        Records about the reading of a long prompt come first and have no text. Records and text share one
        position: each continues where the other stopped.
        """
        return Records(self)

    def start(self, first: "Stream | None" = None) -> None:
        """Queue the request now, without waiting for it to be read.

        With ``first`` it is another answer to that stream's request, which is queued already: it has what is
        left of the request's time, and there is always room for it.

        Raises:
            Busy: too many requests wait.
            Closed: the model is closed.
        """
        self._ticket.first = None if first is None else first._ticket
        self._queue.put(self._ticket)

    @property
    def ended(self) -> bool:
        """Whether the result is there, complete or as far as it came."""
        return self._ticket.result is not None

    @property
    def at_once(self) -> int:
        """The number of requests that the model answers at once."""
        return self._queue.at_once

    def run(self) -> Generation:
        """Generate to the end. An interruption of the wait, such as Ctrl-C, cancels the request."""
        try:
            while self._next() is not None:
                pass
        except BaseException:
            self.cancel()
            raise
        return self.result

    async def run_async(self) -> Generation:
        """Generate to the end in an event loop."""
        while await self._next_async() is not None:
            pass
        return self.result

    def cancel(self) -> None:
        """End the request within a pass, from any thread. The text so far stays readable."""
        self._queue.withdraw(self._ticket, "cancelled")

    @property
    def place(self) -> int:
        """The number of requests before this one in the model's queue; 0 once it runs."""
        return self._queue.place(self._ticket)

    @property
    def prompt(self) -> tuple[int, int]:
        """The prompt's number of tokens, and how many a cache held. Both are 0 until the request runs."""
        answer = self._ticket.answer
        return (0, 0) if answer is None else (answer.prompt_tokens, answer.cached_tokens)

    @property
    def result(self) -> Generation:
        """The generation, complete or as far as it came.

        For a request that was cancelled and still runs, this waits for the end of the pass.

        Raises:
            RequestError: the request still runs, or was never read.
        """
        ticket = self._ticket
        if ticket.interruption is not None and ticket.stage is Stage.RUNNING:
            self._queue.check_process()
            ticket.wait_for_end()
        if ticket.result is None:
            raise RequestError("the answer is not finished; read the stream to its end, or cancel it")
        return ticket.result

    def _next(self) -> Record | None:
        """The next record, or None at the end."""
        ticket = self._ticket
        self._queue.put(ticket)
        while not ticket.readable:
            ticket.wait(LOOK_S)
            self._look()
        return self._get()

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
        return self._get()

    def _get(self) -> Record | None:
        """Take the next record that is there, and call ``on_progress`` if it is about progress."""
        record, on_progress = self._ticket.get(), self._ticket.request.on_progress
        if on_progress is not None and record is not None and record.progress is not None:
            try:
                on_progress(record.progress)
            except BaseException:
                self.cancel()
                raise
        return record

    def _look(self) -> None:
        """End a waiting request that was cancelled or whose time is up. A running one ends itself."""
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


class Answers:
    """Answers to several prompts, with one of ``streams`` for each that is decoded, in a row for each prompt.

    Each prompt has ``n`` answers; a single stream stands for all of them, because they are equal. As many
    run as the model answers at once. The others wait here, and not in the queue, which may be full. All share
    the time that the request may take, and none begins behind one that ended early.
    """

    def __init__(self, streams: Sequence[Sequence[Stream]], n: int) -> None:
        self._rows, self.n = streams, n
        self.streams = [*chain.from_iterable(streams)]
        self._waiting, self._begun = deque(self.streams), list[Stream]()

    def start(self) -> list[Stream]:
        """Start the next answers if there is room for them, and return their streams.

        Raises:
            Busy: other requests fill the queue, and none of these was started.
            Closed: the model is closed.
        """
        ended, before = [stream for stream in self._begun if stream.ended], len(self._begun)
        if any(stream.result.finish_reason in _ENDED_EARLY for stream in ended):
            self._waiting.clear()
        while self._waiting and len(self._begun) - len(ended) < self._waiting[0].at_once:
            self._waiting[0].start(*self._begun[:1])
            self._begun.append(self._waiting.popleft())
        return self._begun[before:]

    def run(self) -> list[Generation]:
        """Generate to the end; see :attr:`results`."""
        with closing(self):
            for stream in self._in_turn():
                for _ in stream.records():
                    self.start()  # others may have ended
        return self.results

    async def run_async(self) -> list[Generation]:
        """Generate to the end in an event loop; see :attr:`results`."""
        with closing(self):
            for stream in self._in_turn():
                async for _ in stream.records():
                    self.start()
        return self.results

    def close(self) -> None:
        """End those that have not ended."""
        for stream in self.streams:
            stream.cancel()

    @property
    def results(self) -> list[Generation]:
        """For each prompt the first answer, with all that began as its choices."""
        answers, results = [stream.result for stream in self._begun], list[Generation]()
        missing = [nothing(answers[-1].finish_reason)]
        for row in self._rows:
            results.append(_together(answers[: len(row)] or missing, self.n // len(row)))
            answers = answers[len(row) :]
        return results

    def indices(self, stream: Stream) -> range:
        """The places of a stream's answer among the choices of all prompts."""
        same = len(self._rows) * self.n // len(self.streams)
        at = self.streams.index(stream) * same
        return range(at, at + same)

    def _in_turn(self) -> Iterator[Stream]:
        """Each stream that is started."""
        for stream in self.streams:
            self.start()
            if stream not in self._begun:
                return
            yield stream


def _together(results: Sequence[Generation], same: int) -> Generation:
    """The first of the answers to one prompt, with all of them as its choices, each ``same`` times."""
    first, *others = [result for result in results for _ in range(same)]
    others = [
        replace(other, tool_calls=tuple(replace(c, id=call_id(c.id, at)) for c in other.tool_calls))
        for at, other in enumerate(others, 1)
    ]
    return replace(first, others=tuple(others)) if others else first
