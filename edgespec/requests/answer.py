"""One request and its answer, between the thread that writes it and whoever reads it."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Condition, Event
from time import monotonic
from typing import TYPE_CHECKING

from edgespec.requests.request import Request
from edgespec.requests.results import FinishReason, Generation, Record

if TYPE_CHECKING:
    import asyncio

    from edgespec.requests.generation import PreparedRequest

__all__ = ["LOOK_S", "Answer"]

LOOK_S = 0.2
"""How long a thread waits before it looks around: on Windows, Ctrl-C does not end a wait."""


class Answer:
    """A request from its queueing to its end. Records go in on one side and come out on the other.

    It ends once, with a result: whole, or as far as it came. It is bounded by the request's tokens, so a
    slow reader does not hold up the model.

    Args:
        request: what was asked for.
        prepare: reads the prompt and makes ready what the request runs on; called when its turn comes.
        ended: told of the result, before any reader is.

    Attributes:
        request: as given.
        prepare: as given.
        queued: whether it was queued.
        begun: whether its turn has come, or it has ended before that.
        queued_s: seconds that it waited for its turn.
        interruption: what is to end it early; None while nothing is.
    """

    def __init__(
        self,
        request: Request,
        prepare: Callable[[], "PreparedRequest"],
        ended: Callable[[Generation], None] = lambda result: None,
    ) -> None:
        self.request, self.prepare, self._ended = request, prepare, ended
        self.queued = self.begun = False
        self.queued_s = 0.0
        self.interruption: FinishReason | None = None
        self._queued_at = 0.0
        self._deadline: float | None = None
        self._changed = Condition()
        self._records: deque[Record] = deque()
        self._wakers: list[Callable[[], None]] = []  # of the tasks that wait
        self._over = Event()
        self._result: Generation | None = None
        self._error: BaseException | None = None

    def queue(self) -> None:
        """It is queued now: its time begins."""
        self.queued, self._queued_at = True, monotonic()
        if self.request.timeout is not None:
            self._deadline = self._queued_at + self.request.timeout

    def begin(self) -> None:
        """Its turn has come."""
        self.begun, self.queued_s = True, monotonic() - self._queued_at

    def interrupt(self, reason: FinishReason) -> None:
        """Have it end as soon as it can; the first reason counts.

        Takes no lock: the garbage collector may call this within any line of any thread.
        """
        self.interruption = self.interruption or reason

    def why_end(self) -> FinishReason | None:
        """What is to end it now; None if it is to go on."""
        if self.interruption is None and self.request.cancelled():
            self.interrupt("cancelled")
        if self.interruption is None and self._deadline is not None and monotonic() >= self._deadline:
            self.interrupt("timeout")
        return self.interruption

    def put(self, record: Record) -> None:
        """Hand out a record."""
        with self._changed:
            self._records.append(record)
            self._wake()

    def end(self, result: Generation, error: BaseException | None = None) -> None:
        """It is over; with ``error``, which whoever reads on is told, because of that."""
        try:
            self._ended(result)
        except BaseException as failed:  # noqa: BLE001 - raised where the result is read
            error = error or failed
        with self._changed:
            self._result, self._error = result, error
            self._over.set()
            self._wake()

    @property
    def result(self) -> Generation | None:
        """The result; None before the end."""
        return self._result

    @property
    def readable(self) -> bool:
        """Whether :meth:`take` has something to say."""
        return bool(self._records) or self._result is not None

    def take(self) -> Record | None:
        """The next record of those that are there; None at the end.

        Raises:
            BaseException: what ended it.
        """
        with self._changed:
            if self._records:
                return self._records.popleft()
        if self._error is not None:
            raise self._error
        return None

    def clear(self) -> None:
        """Nobody reads the records that are there."""
        with self._changed:
            self._records.clear()

    def wait_for_end(self) -> None:
        """Wait until it is over."""
        while not self._over.wait(LOOK_S):
            pass

    def wait(self, seconds: float | None) -> None:
        """Wait until it is readable; at most so long, if ``seconds`` is not None."""
        with self._changed:
            self._changed.wait_for(lambda: self.readable, seconds)

    async def wait_async(self, seconds: float | None) -> None:
        """The same in an event loop."""
        import asyncio  # which programs without tasks need not load

        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        wake = partial(_wake_in, loop, woken)
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


def _wake_in(loop: "asyncio.AbstractEventLoop", woken: "asyncio.Event") -> None:
    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(woken.set)
