"""Requests between the threads that ask and the one thread that answers them, a few at once."""

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, Event, Lock, Thread, current_thread
from time import monotonic
from typing import TYPE_CHECKING

from edgespec.requests.request import Request
from edgespec.requests.results import FinishReason, Generation, Record, nothing
from edgespec_models.errors import Busy, Closed, RequestError

if TYPE_CHECKING:
    from edgespec.requests.prepared import PreparedRequest


LOOK_S = 0.2
"""How long a thread waits before it looks around: on Windows, Ctrl-C does not end a wait."""


class Answer:
    """A request from its queueing to its end. Records go in on one side and come out on the other.

    It ends once, with a result: whole, or as far as it came. It is bounded by the request's tokens, so a
    slow reader does not hold up the model.

    ``tokens`` are those of its prompt, asked for when its turn comes. ``prepare`` makes it ready; None says
    that there is no room for it beside others. ``ended`` is told of the result before any reader is. Of those
    of one ``talk`` one runs at a time, since each goes on behind the last. ``interruption`` is what is to end
    it early; ``result`` is whole or as far as it came, and None before the end.
    """

    def __init__(
        self,
        request: Request,
        prepare: Callable[[], "PreparedRequest | None"],
        ended: Callable[[Generation], None] = lambda result: None,
        talk: object | None = None,
        tokens: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self.request, self.prepare, self._ended, self._talk = request, prepare, ended, talk
        self.tokens = tokens
        self.prepared: PreparedRequest | None = None
        self.queued = self.begun = False
        self.interruption: FinishReason | None = None
        self._queued_at = 0.0
        self._deadline: float | None = None
        self._changed = Condition()
        self._records: deque[Record] = deque()
        self._wakers: list[Callable[[], None]] = []  # of the tasks that wait
        self._over = Event()
        self.result: Generation | None = None
        self._error: BaseException | None = None

    def queue(self) -> None:
        """It is queued now: its time begins."""
        self.queued, self._queued_at = True, monotonic()
        if self.request.timeout is not None:
            self._deadline = self._queued_at + self.request.timeout

    @property
    def queued_s(self) -> float:
        """Seconds since it was queued."""
        return monotonic() - self._queued_at

    def postpone(self) -> None:
        """There is no room for it beside those that run: it goes back to the queue."""
        self.begun = False
        with self._changed:
            self._wake()  # its deadline counts again where it is waited for

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

    def excludes(self, other: "Answer") -> bool:
        """Whether both may not run at once: they are of one talk, or want the same drafter of the app's."""
        drafter, talk = self.request.drafter, self._talk
        return (talk is not None and talk is other._talk) or (
            drafter is not None and drafter is other.request.drafter
        )

    def put(self, record: Record) -> None:
        """Hand out a record."""
        with self._changed:
            self._records.append(record)
            self._wake()

    def end(self, result: Generation, error: BaseException | None = None) -> None:
        """End the answer; ``error`` is raised to its readers."""
        try:
            self._ended(result)
        except BaseException as failed:  # noqa: BLE001 - raised where the result is read
            error = error or failed
        with self._changed:
            self.result, self._error = result, error
            self._over.set()
            self._wake()

    def finish(self, error: BaseException | None = None) -> None:
        """Give back what it runs on, and end it as far as it came; the first error is told."""
        one, result = self.prepared, nothing("error")
        try:
            if one is not None:
                try:
                    one.close()
                finally:
                    result = one.result
        except BaseException as failed:  # noqa: BLE001 - raised where the answer is read
            error = error or failed
        self.end(result, error)

    @property
    def readable(self) -> bool:
        """Whether :meth:`take` has something to say."""
        return bool(self._records) or self.result is not None

    def take(self) -> Record | None:
        """The next record of those that are there; None at the end."""
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


class Worker:
    """Answers what is queued in a thread of its own, at most ``at_once`` requests together.

    ``turn`` takes those that run a pass further.

    The thread begins with a request and ends when none is left, so that an idle model has none, and nothing
    keeps the program from ending: at its end, what runs is ended too.

    At most ``most_waiting`` requests wait while ``at_once`` are answered. When there are none, ``tidy`` is
    called in the same thread; it ends soon after the function that it is given says so.
    """

    def __init__(
        self,
        most_waiting: int,
        turn: Callable[[Sequence[Answer]], None],
        at_once: int = 1,
        tidy: Callable[[Callable[[], bool]], None] = lambda stop: None,
    ) -> None:
        self._most_waiting, self._turn, self.at_once, self._tidy = most_waiting, turn, at_once, tidy
        self._changed = Condition()
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []
        self._turning = self._tidying = False
        self._thread: Thread | None = None
        self._process = os.getpid()  # which the thread is of
        self._pausing = Lock()  # one at a time
        self._paused = False  # no request begins
        self._between = self._held = False  # no pass begins, for `paused`, and until `resume`
        self._closed = self._is_crowded = False
        self._then: Callable[[], None] | None = None  # once the thread has ended

    @property
    def is_orphaned(self) -> bool:
        """Whether the thread is another process's, which was forked while it ran: locks may stay held."""
        return self._thread is not None and self._process != os.getpid()

    def check_process(self) -> None:
        """RequestError in a process that was forked while the model answered."""
        if self.is_orphaned:
            raise RequestError(
                "this process was forked while the model answered in its parent, so nothing answers here; "
                "load the model in this process, or start it otherwise (multiprocessing: 'spawn')"
            )

    def submit(self, answer: Answer) -> None:
        """Queue a request; once."""
        self.check_process()
        with self._changed:
            if answer.queued:
                return
            if current_thread() is self._thread:
                raise RequestError("a request that runs cannot wait for another one; ask from another thread")
            if self._closed:
                raise Closed("the model is closed; load it again")
            self._sweep()
            if len(self._waiting) + len(self._running) >= self._most_waiting + self.at_once:
                raise Busy(
                    f"{self._most_waiting} requests wait for the model, as many as may; ask again later, or "
                    "load it with a larger max_waiting"
                )
            if self._thread is None:
                thread = Thread(target=self._work, name="edgespec-model", daemon=True)
                thread.start()  # it waits for the lock
                atexit.register(self._leave)
                self._thread, self._process = thread, os.getpid()
            answer.queue()
            self._waiting.append(answer)

    def withdraw(self, answer: Answer, reason: FinishReason) -> None:
        """End a request: now if it has not begun, else as soon as it can."""
        answer.interrupt(reason)
        if self.is_orphaned:
            return
        with self._changed:
            if answer.begun or answer.result is not None:
                return
            answer.queued = answer.begun = True  # never again
            for queue in (self._waiting, self._running):
                if answer in queue:
                    queue.remove(answer)
        abandon(answer)

    def place(self, answer: Answer) -> int:
        """How many requests are before one that waits; 0 for all others."""
        self.check_process()
        with self._changed:
            if answer not in self._waiting:
                return 0
            return self._waiting.index(answer) + len(self._running)

    @contextmanager
    def paused(self, *, between_passes: bool = False) -> Iterator[None]:
        """No request runs within the block: those that run are waited for, or wait too ``between_passes``."""
        self.check_process()
        if current_thread() is self._thread:
            raise RequestError("a request that runs cannot wait for its own end; ask from another thread")
        if self._held and self._running and not (between_passes or self._closed):
            raise RequestError("the model is paused within a request, which this waits for; resume it")
        with self._pausing:
            try:
                with self._changed:
                    self._paused, self._between = True, between_passes
                    while self._tidying or (self._turning if between_passes else self._running):
                        self._changed.wait(LOOK_S)
                yield
            finally:
                with self._changed:
                    self._paused = self._between = False
                    self._changed.notify_all()

    def hold(self) -> None:
        """Let no pass begin until :meth:`resume`; one that runs is waited for, but not by itself."""
        self.check_process()
        with self._changed:
            self._held = True
            self._changed.notify_all()
            while self._held and self._turning and current_thread() is not self._thread:
                self._changed.wait(LOOK_S)

    def resume(self) -> None:
        """Let passes begin again."""
        self.check_process()
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def close(self, then: Callable[[], None]) -> None:
        """Answer nothing any more: end what runs and what waits, and when it is over call ``then``.

        From a request's own thread this returns at once, and ``then`` is called behind the request. In a
        process that was forked meanwhile there is nothing to end.
        """
        if self.is_orphaned:
            return
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            for answer in waiting:
                answer.begun = True
            for answer in self._running:
                answer.interrupt("closed")
        for answer in waiting:
            answer.interrupt("closed")
            abandon(answer)
        if current_thread() is self._thread:
            self._then = then
            return
        with self.paused():
            then()

    def _work(self) -> None:
        while running := self._next():
            try:
                self._turn(running)
            except BaseException as error:  # noqa: BLE001 - raised where the answers are read
                for answer in running:
                    if answer.result is None:
                        answer.finish(error)
            self._tidy_up()
        if self._then is not None:
            with self.paused():
                self._then()

    def _tidy_up(self) -> None:
        with self._changed:
            if self._waiting or any(answer.result is None for answer in self._running):
                return
            self._running, self._tidying = [], True
            self._changed.notify_all()
        try:
            self._tidy(lambda: self._paused or self._held or bool(self._waiting))
        finally:
            with self._changed:
                self._tidying = False
                self._changed.notify_all()

    def _next(self) -> list[Answer]:
        """The requests that run now; none ends the thread."""
        with self._changed:
            running = [answer for answer in self._running if answer.result is None and answer.begun]
            postponed = [answer for answer in self._running if not answer.begun]
            self._waiting.extendleft(reversed(postponed))
            # Until one of those ends that run, there is no more room.
            self._is_crowded = bool(postponed) or (self._is_crowded and len(running) == len(self._running))
            self._running, self._turning = running, False
            self._changed.notify_all()
            while (self._held or self._between) and not self._closed:
                if ending := [each for each in running if each.interruption]:
                    self._turning = True
                    return ending
                self._changed.wait(LOOK_S)
            while self._paused and not self._running:
                self._changed.wait()
            self._sweep()
            while answer := next((each for each in self._waiting if self._may_begin(each)), None):
                self._waiting.remove(answer)
                self._running.append(answer)
                answer.begun = True
            if not self._running:
                self._thread = None
                atexit.unregister(self._leave)
            self._turning = bool(self._running)
            return list(self._running)

    def _may_begin(self, answer: Answer) -> bool:
        """Whether there is a place, and none runs that has to end first."""
        if any(answer.excludes(each) for each in self._running):
            return False
        if self._paused or (self._running and self._is_crowded):
            return False
        return len(self._running) < self.at_once

    def _sweep(self) -> None:
        """Let go of requests that were dropped while they waited: nobody reads them."""
        dropped = [answer for answer in self._waiting if answer.interruption is not None]
        for answer in dropped:
            self._waiting.remove(answer)
            abandon(answer)

    def _leave(self) -> None:
        """The program ends: end the thread while Python still runs."""
        thread = self._thread
        self.close(lambda: self._tidy(lambda: False))
        if thread is not None and thread is not current_thread():
            thread.join()


def abandon(answer: Answer) -> None:
    """End a request of which nothing was read."""
    reason = answer.interruption or "cancelled"
    answer.put(Record("", (), reason))
    answer.end(nothing(reason))
