"""The part of a request that its threads share: the reader of the answer, and its writer."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cached_property
from threading import Condition
from time import monotonic
from typing import NoReturn

from edgespec.answering.answer import Answer
from edgespec.answering.results import FinishReason, Generation, Record, nothing
from edgespec.asking.request import PromptTokens, Request
from edgespec.decoding.grammar import Constraint

LOOK_S = 0.2
"""The longest wait of a thread in seconds. On Windows Ctrl-C does not end a wait."""


class Stage(Enum):
    """The stage of a request."""

    NEW = "nobody has queued it yet"
    WAITING = "it waits for its turn"
    RUNNING = "whoever took it out of the queue must end it"
    ENDED = "it has its result"


class InProcess:
    """An object of this process alone, such as a loaded model. It is neither pickled nor copied."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied, because its model is loaded in this "
            "process; share it among threads, or call edgespec.load in each process"
        )


class Ticket:
    """A request from its queueing to its end: the model's thread puts records in, and the reader takes them.

    It ends once, with a result that is complete or as far as it came. The number of records is bounded by the
    request's tokens, so a slow reader does not hold up the model.

    ``prompt`` makes the prompt when it is first needed. ``ended`` is called with the result before any reader
    gets it. Requests of one ``conversation`` run one after the other. ``answer`` is there once it runs, and
    ``close`` frees what it runs on, once. ``interruption`` is the reason to end it early. ``first`` is the
    ticket of the first of several answers, with whose queueing the time of all begins; else None.
    """

    def __init__(
        self,
        request: Request,
        prompt: Callable[[], PromptTokens] | None = None,
        constraint: Constraint | None = None,
        *,
        ended: Callable[[Generation], None] = lambda result: None,
        conversation: object | None = None,
    ) -> None:
        self.request, self.constraint = request, constraint
        self._read, self._ended, self._conversation = prompt, ended, conversation
        self.stage = Stage.NEW
        self.answer: Answer | None = None
        self.close: Callable[[], None] = lambda: None
        self.interruption: FinishReason | None = None
        self.first: Ticket | None = None
        self.result: Generation | None = None
        self._error: BaseException | None = None
        self._queued_at, self.number = 0.0, 0
        self._changed = Condition()
        self._records: deque[Record] = deque()
        self._wakers: list[Callable[[], None]] = []  # functions that wake waiting tasks

    @cached_property
    def prompt(self) -> PromptTokens:
        """The prompt as the models read it."""
        assert self._read is not None
        return self._read()

    def queue(self, number: int) -> None:
        """Note that the request is queued, the ``number``-th one: its time begins, unless it has begun."""
        self.number, self.stage = number, Stage.WAITING
        self._queued_at = monotonic() if self.first is None else self.first._queued_at

    @property
    def queued_s(self) -> float:
        """Seconds since it was queued, or the first of several answers."""
        return monotonic() - self._queued_at

    def postpone(self) -> None:
        """Wait again, because there is no room for the request beside the running ones."""
        self.stage = Stage.WAITING
        with self._changed:
            self._wake()  # its reader looks at its deadline again

    def interrupt(self, reason: FinishReason) -> None:
        """Ask the request to end as soon as it can. The first reason counts.

        This takes no lock, because the garbage collector may call it within any line of any thread.
        """
        self.interruption = self.interruption or reason

    def reason_to_end(self) -> FinishReason | None:
        """The reason to end the request now, or None."""
        timeout = self.request.timeout
        if self.interruption is None and self.request.cancelled():
            self.interrupt("cancelled")
        if self.interruption is None and timeout is not None and self.queued_s >= timeout:
            self.interrupt("timeout")
        return self.interruption

    def has_to_end(self) -> bool:
        """Whether there is a reason to end the request now. An error of its ``cancelled`` ends it at once."""
        with self.ending_on_error():
            return self.reason_to_end() is not None
        return False

    def excludes(self, other: "Ticket") -> bool:
        """Whether the two may not run at once, because they share a conversation or an app's drafter."""
        drafter, conversation = self.request.drafter, self._conversation
        return (conversation is not None and conversation is other._conversation) or (
            drafter is not None and drafter is other.request.drafter
        )

    def put(self, record: Record) -> None:
        """Give the reader a record."""
        with self._changed:
            self._records.append(record)
            self._wake()

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """Within the block an error ends this request alone, and is raised to its readers."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised where the answer is read
            self.finish(error)

    def finish(self, error: BaseException | None = None) -> None:
        """Free what the request runs on, and end it as far as it came. Readers get the first error."""
        result = nothing("error")
        try:
            try:
                self.close()
            finally:
                if self.answer is not None:
                    result = self.answer.result
        except BaseException as failure:  # noqa: BLE001 - raised where the answer is read
            error = error or failure
        self.end(result, error)

    def abandon(self) -> None:
        """End a request that was never read."""
        reason = self.interruption or "cancelled"
        self.put(Record("", (), reason))
        self.end(nothing(reason))

    def end(self, result: Generation, error: BaseException | None = None) -> None:
        """End the request. Readers get ``error``."""
        try:
            self._ended(result)
        except BaseException as failure:  # noqa: BLE001 - raised where the result is read
            error = error or failure
        with self._changed:
            self.result, self._error, self.stage = result, error, Stage.ENDED
            self._wake()

    @property
    def readable(self) -> bool:
        """Whether :meth:`get` returns at once with a record, the end, or an error."""
        return bool(self._records) or self.result is not None

    def get(self) -> Record | None:
        """The next record, or None at the end."""
        with self._changed:
            if self._records:
                return self._records.popleft()
        if self._error is not None:
            raise self._error
        return None

    def clear(self) -> None:
        """Drop the unread records."""
        with self._changed:
            self._records.clear()

    def wait_for_end(self) -> None:
        """Wait until the request has ended."""
        with self._changed:
            while self.result is None:
                self._changed.wait(LOOK_S)

    def wait(self, seconds: float | None) -> None:
        """Wait until the ticket is readable, at most ``seconds`` unless that is None."""
        with self._changed:
            self._changed.wait_for(lambda: self.readable, seconds)

    async def wait_async(self, seconds: float | None) -> None:
        """Wait until the ticket is readable, in an event loop."""
        import asyncio  # programs without tasks need not load it

        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(woken.set)

        with self._changed:
            if self.readable:
                return
            self._wakers.append(wake)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await woken.wait()
        finally:
            with self._changed, suppress(ValueError):
                self._wakers.remove(wake)

    def _wake(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()
