"""One thread that answers requests in turn, first come, first served."""

import atexit
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock, Thread, current_thread

from edgespec.requests.answer import LOOK_S, Answer
from edgespec.requests.results import FinishReason, Record, nothing
from edgespec_models.errors import Busy, Closed, RequestError

__all__ = ["Worker"]


class Worker:
    """Answers what is queued in a thread of its own, one request at a time, each to its end.

    The thread begins with a request and ends when none is left, so that an idle model has none, and nothing
    keeps the program from ending: at its end, what runs is ended too.

    Args:
        respond: answers a request, and raises nothing.
        most_waiting: requests that may wait while one is answered.
    """

    def __init__(self, respond: Callable[[Answer], None], most_waiting: int) -> None:
        self._respond, self._most_waiting = respond, most_waiting
        self._changed = Condition()
        self._waiting: deque[Answer] = deque()
        self._running: Answer | None = None
        self._thread: Thread | None = None
        self._pausing = Lock()  # one at a time
        self._paused = self._closed = False
        self._then: Callable[[], None] | None = None  # once the thread has ended

    def submit(self, answer: Answer) -> None:
        """Queue a request; once.

        Raises:
            Busy: too many wait.
            Closed: no more are answered.
            RequestError: a request's own thread asks.
        """
        with self._changed:
            if answer.queued:
                return
            if current_thread() is self._thread:
                raise RequestError("a request that runs cannot wait for another one; ask from another thread")
            if self._closed:
                raise Closed("the model is closed; load it again")
            self._sweep()
            if len(self._waiting) + (self._running is not None) > self._most_waiting:
                raise Busy(
                    f"{self._most_waiting} requests wait for the model, as many as may; ask again later, or "
                    "load it with a larger max_waiting"
                )
            if self._thread is None:
                thread = Thread(target=self._work, name="edgespec-model", daemon=True)
                thread.start()  # it waits for the lock
                atexit.register(self._leave)
                self._thread = thread
            answer.queue()
            self._waiting.append(answer)

    def withdraw(self, answer: Answer, reason: FinishReason) -> None:
        """End a request: now if it has not begun, else as soon as it can."""
        answer.interrupt(reason)
        with self._changed:
            if answer.begun or answer.result is not None:
                return
            answer.queued = answer.begun = True  # never again
            if answer in self._waiting:
                self._waiting.remove(answer)
        _abandon(answer)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No request runs within the block: the one that runs is waited for, the others wait.

        Raises:
            RequestError: a request's own thread asks for it.
        """
        if current_thread() is self._thread:
            raise RequestError("a request that runs cannot wait for its own end; ask from another thread")
        with self._pausing:
            try:
                with self._changed:
                    self._paused = True
                    while self._running is not None:
                        self._changed.wait(LOOK_S)
                yield
            finally:
                with self._changed:
                    self._paused = False
                    self._changed.notify_all()

    def close(self, then: Callable[[], None]) -> None:
        """Answer nothing any more: end what runs and what waits, and when it is over call ``then``.

        From a request's own thread this returns at once, and ``then`` is called behind the request.
        """
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            for answer in waiting:
                answer.begun = True
            if self._running is not None:
                self._running.interrupt("closed")
        for answer in waiting:
            answer.interrupt("closed")
            _abandon(answer)
        if current_thread() is self._thread:
            self._then = then
            return
        with self.paused():
            then()

    def _work(self) -> None:
        while (answer := self._next()) is not None:
            self._respond(answer)
        if self._then is not None:
            with self.paused():
                self._then()

    def _next(self) -> Answer | None:
        """The request whose turn it is; None ends the thread."""
        with self._changed:
            self._running = None
            self._changed.notify_all()
            while self._paused:
                self._changed.wait()
            self._sweep()
            if not self._waiting:
                self._thread = None
                atexit.unregister(self._leave)
                return None
            self._running = self._waiting.popleft()
            self._running.begin()
            return self._running

    def _sweep(self) -> None:
        """Let go of requests that were dropped while they waited: nobody reads them."""
        dropped = [answer for answer in self._waiting if answer.interruption is not None]
        for answer in dropped:
            self._waiting.remove(answer)
            _abandon(answer)

    def _leave(self) -> None:
        """The program ends: end the thread while Python still runs."""
        thread = self._thread
        self.close(lambda: None)
        if thread is not None and thread is not current_thread():
            thread.join()


def _abandon(answer: Answer) -> None:
    """End a request that has not begun."""
    reason = answer.interruption or "cancelled"
    answer.put(Record("", (), reason))
    answer.end(nothing(reason))
