"""Requests between the threads that ask and the one thread that answers them, a few at once."""

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, Flag
from threading import Condition, Lock, Thread, current_thread

from edgespec.requests.results import FinishReason
from edgespec.requests.ticket import LOOK_S, Stage, Ticket
from edgespec_models.errors import Busy, Closed, RequestError


class _Phase(Enum):
    """What the thread does."""

    IDLE = "it waits, or there is none"
    TURNING = "it takes requests a pass further"
    TIDYING = "it tidies up, since no request is left"


class _Pause(Flag):
    """Who holds up what."""

    NOBODY = 0
    REQUESTS = 1  # `paused`: no request begins
    PASSES = 2  # `paused` between passes: no pass begins either
    HELD = 4  # `hold`: no pass begins


class RequestQueue:
    """A queue of requests, and the thread that answers them, at most ``at_once`` together.

    ``turn`` takes those that run a pass further. At most ``most_waiting`` wait meanwhile. When there are none
    ``tidy`` is called; it ends soon after the function that it is given says so.

    The thread begins with a request and ends when none is left, so that an idle model has none, and nothing
    keeps the program from ending: at its end, what runs is ended too.
    """

    def __init__(
        self,
        most_waiting: int,
        turn: Callable[[Sequence[Ticket]], None],
        at_once: int = 1,
        tidy: Callable[[Callable[[], bool]], None] = lambda stop: None,
    ) -> None:
        self._most_waiting, self._turn, self.at_once, self._tidy = most_waiting, turn, at_once, tidy
        self._changed = Condition()
        self.waiting: deque[Ticket] = deque()
        self.running: list[Ticket] = []
        self._phase, self._pause = _Phase.IDLE, _Pause.NOBODY
        self.thread: Thread | None = None
        self._process = os.getpid()  # which the thread is of
        self._pausing = Lock()  # `paused` is one at a time
        self._is_full = False  # until one of those that run ends, there is no room for more
        self.is_closed = False
        self._at_end: Callable[[], None] | None = None  # called when the thread has ended

    @property
    def is_orphaned(self) -> bool:
        """Whether the thread is another process's, which was forked while it ran: locks may stay held."""
        return self.thread is not None and self._process != os.getpid()

    def check_process(self) -> None:
        """RequestError in a process that was forked while the model answered."""
        if self.is_orphaned:
            raise RequestError(
                "this process was forked while the model answered in its parent, so nothing answers here; "
                "load the model in this process, or start it otherwise (multiprocessing: 'spawn')"
            )

    def put(self, ticket: Ticket) -> None:
        """Queue a request; once."""
        self.check_process()
        with self._changed:
            if ticket.stage is not Stage.NEW:
                return
            if current_thread() is self.thread:
                raise RequestError("a request that runs cannot wait for another one; ask from another thread")
            if self.is_closed:
                raise Closed("the model is closed; load it again")
            self._sweep()
            if len(self.waiting) + len(self.running) >= self._most_waiting + self.at_once:
                raise Busy(
                    f"{self._most_waiting} requests wait for the model, as many as may; ask again later, or "
                    "load it with a larger max_waiting"
                )
            if self.thread is None:
                thread = Thread(target=self._work, name="edgespec-model", daemon=True)
                thread.start()  # it waits for the lock
                atexit.register(self._leave)
                self.thread, self._process = thread, os.getpid()
            ticket.queue()
            self.waiting.append(ticket)

    def withdraw(self, ticket: Ticket, reason: FinishReason) -> None:
        """End a request: now if it does not run, else as soon as it can."""
        ticket.interrupt(reason)
        if self.is_orphaned:
            return
        with self._changed:
            if ticket.stage in (Stage.RUNNING, Stage.ENDED):
                return
            ticket.stage = Stage.RUNNING  # nobody else ends it
            for tickets in (self.waiting, self.running):  # a postponed one is among those that run
                if ticket in tickets:
                    tickets.remove(ticket)
        ticket.abandon()

    def place(self, ticket: Ticket) -> int:
        """How many requests are before one that waits; 0 for all others."""
        self.check_process()
        with self._changed:
            if ticket not in self.waiting:
                return 0
            return self.waiting.index(ticket) + len(self.running)

    @contextmanager
    def paused(self, *, between_passes: bool = False) -> Iterator[None]:
        """No request runs within the block: those that run are waited for, or wait too ``between_passes``."""
        self.check_process()
        if current_thread() is self.thread:
            raise RequestError("a request that runs cannot wait for its own end; ask from another thread")
        if self.is_held and self.running and not (between_passes or self.is_closed):
            raise RequestError("the model is paused within a request, which this waits for; resume it")
        pause = _Pause.PASSES if between_passes else _Pause.REQUESTS
        with self._pausing:
            try:
                with self._changed:
                    self._pause |= pause
                    while self._phase is not _Phase.IDLE if between_passes else self._is_busy:
                        self._changed.wait(LOOK_S)
                yield
            finally:
                with self._changed:
                    self._pause &= ~pause
                    self._changed.notify_all()

    def hold(self) -> None:
        """Let no pass begin until :meth:`resume`; one that runs is waited for, but not by itself."""
        self.check_process()
        with self._changed:
            self._pause |= _Pause.HELD
            self._changed.notify_all()
            if current_thread() is self.thread:
                return
            while self.is_held and self._phase is not _Phase.IDLE:
                self._changed.wait(LOOK_S)

    def resume(self) -> None:
        """Let passes begin again."""
        self.check_process()
        with self._changed:
            self._pause &= ~_Pause.HELD
            self._changed.notify_all()

    def close(self, then: Callable[[], None]) -> None:
        """Answer nothing any more: end what runs and what waits, and when it is over call ``then``.

        From a request's own thread this returns at once, and ``then`` is called behind the request. In a
        process that was forked meanwhile there is nothing to end.
        """
        if self.is_orphaned:
            return
        with self._changed:
            self.is_closed = True
            waiting, self.waiting = self.waiting, deque()
            for ticket in waiting:
                ticket.stage = Stage.RUNNING  # nobody else ends it
            for ticket in self.running:
                ticket.interrupt("closed")
        for ticket in waiting:
            ticket.interrupt("closed")
            ticket.abandon()
        if current_thread() is self.thread:
            self._at_end = then
            return
        with self.paused():
            then()

    def step(self) -> list[Ticket]:
        """Take the requests that run now a pass further; those that did. None: the thread's work is over."""
        running = self._next()
        if not running:
            return running
        try:
            self._turn(running)
        except BaseException as error:  # noqa: BLE001 - raised where the answers are read
            for ticket in running:
                if ticket.result is None:
                    ticket.finish(error)
        return running

    def _work(self) -> None:
        while self.step():
            self._tidy_up()
        if self._at_end is not None:
            with self.paused():
                self._at_end()

    def _tidy_up(self) -> None:
        """Tidy up where no request is left."""
        with self._changed:
            if self.waiting or any(ticket.result is None for ticket in self.running):
                return
            self.running, self._phase = [], _Phase.TIDYING
            self._changed.notify_all()
        try:
            self._tidy(lambda: bool(self._pause or self.waiting))
        finally:
            with self._changed:
                self._phase = _Phase.IDLE
                self._changed.notify_all()

    @property
    def is_held(self) -> bool:
        """Whether :meth:`hold` lets no pass begin."""
        return _Pause.HELD in self._pause

    @property
    def _is_busy(self) -> bool:
        """Whether there is something to wait for until the model is idle."""
        return bool(self.running) or self._phase is _Phase.TIDYING

    def _next(self) -> list[Ticket]:
        """The requests that run now; none ends the thread."""
        with self._changed:
            running = [ticket for ticket in self.running if ticket.stage is Stage.RUNNING]
            postponed = [ticket for ticket in self.running if ticket.stage is Stage.WAITING]
            self.waiting.extendleft(reversed(postponed))
            self._is_full = bool(postponed) or (self._is_full and len(running) == len(self.running))
            self.running, self._phase = running, _Phase.IDLE
            self._changed.notify_all()
            while self._pause & (_Pause.PASSES | _Pause.HELD) and not self.is_closed:
                if ending := [ticket for ticket in running if ticket.interruption]:
                    self._phase = _Phase.TURNING
                    return ending
                self._changed.wait(LOOK_S)
            while self._pause & (_Pause.REQUESTS | _Pause.PASSES) and not self.running:
                self._changed.wait()
            self._sweep()
            while ticket := next(filter(self._may_begin, self.waiting), None):
                self.waiting.remove(ticket)
                self.running.append(ticket)
                ticket.stage = Stage.RUNNING
            if not self.running:
                self.thread = None
                atexit.unregister(self._leave)
            self._phase = _Phase.TURNING if self.running else _Phase.IDLE
            return list(self.running)

    def _may_begin(self, ticket: Ticket) -> bool:
        """Whether there is a place, and none runs that has to end first."""
        if self._pause & (_Pause.REQUESTS | _Pause.PASSES) or (self.running and self._is_full):
            return False
        if len(self.running) >= self.at_once:
            return False
        return not any(ticket.excludes(other) for other in self.running)

    def _sweep(self) -> None:
        """Let go of requests that were dropped while they waited: nobody reads them."""
        dropped = [ticket for ticket in self.waiting if ticket.interruption is not None]
        for ticket in dropped:
            self.waiting.remove(ticket)
            ticket.abandon()

    def _leave(self) -> None:
        """The program ends: end the thread while Python still runs."""
        thread = self.thread
        self.close(lambda: self._tidy(lambda: False))
        if thread is not None and thread is not current_thread():
            thread.join()
