"""Requests between the threads that ask and the one thread that answers them, a few at once."""

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, Flag
from threading import Condition, Lock, Thread, current_thread

from edgespec.requests.results import FinishReason
from edgespec.requests.ticket import LOOK_S, Stage, Ticket
from edgespec_models.errors import Busy, Closed, RequestError
from edgespec_models.forks import check_process

_LOG = logging.getLogger("edgespec")


class _Phase(Enum):
    """The state of the thread."""

    IDLE = "it waits, or there is none"
    TURNING = "it takes requests a pass further"
    TIDYING = "it tidies up, since no request is left"


class _Pause(Flag):
    """Reasons for which requests or passes do not begin."""

    NOBODY = 0
    REQUESTS = 1  # `paused`: no request begins
    PASSES = 2  # `paused` between passes: no pass begins either
    HELD = 4  # `hold`: no pass begins


class RequestQueue:
    """A queue of requests and the thread that answers them, at most ``at_once`` together.

    ``turn`` runs a pass for the running requests. At most ``most_waiting`` requests wait. When no request is
    left, ``tidy`` is called; it returns soon after the function that it gets returns True. Its errors go to
    the log.

    The thread begins with a request and ends when none is left. So an idle model has no thread, and nothing
    keeps the program from ending: at its end running requests end too.
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
        self._process = os.getpid()
        self._pausing = Lock()  # one `paused` block at a time
        self._lacks_room: Ticket | None = None  # waits until a running one ends, with all behind it
        self.is_closed = False
        self._at_end: Callable[[], None] | None = None  # called when the thread has ended

    @property
    def is_orphaned(self) -> bool:
        """Whether this process was forked from the one that made the queue. Locks may stay held here."""
        return self._process != os.getpid()

    def check_process(self) -> None:
        """Raise RequestError in a process that was forked from the one that made the queue."""
        check_process(self._process)

    def put(self, ticket: Ticket) -> None:
        """Queue a request, once."""
        self.check_process()
        with self._changed:
            if ticket.stage is not Stage.NEW:
                return
            if current_thread() is self.thread:
                raise RequestError(
                    "this thread runs the model's requests, so it cannot wait for another one; ask from "
                    "another thread"
                )
            if self.is_closed:
                raise Closed("the model is closed; load it again")
            self._sweep()
            if len(self.waiting) + len(self.running) >= self._most_waiting + self.at_once:
                raise Busy(
                    f"{self._most_waiting} requests wait already, as many as max_waiting allows; ask again "
                    "later, or load the model with a larger max_waiting"
                )
            if self.thread is None:
                thread = Thread(target=self._work, name="edgespec-model", daemon=True)
                thread.start()  # the thread waits for the lock
                atexit.register(self._leave)
                self.thread = thread
            ticket.queue()
            self.waiting.append(ticket)

    def withdraw(self, ticket: Ticket, reason: FinishReason) -> None:
        """End a request: at once if it waits, else after the running pass."""
        ticket.interrupt(reason)
        if self.is_orphaned:
            return
        with self._changed:
            if ticket.stage in (Stage.RUNNING, Stage.ENDED):
                return
            ticket.stage = Stage.RUNNING  # nobody else ends it
            for tickets in (self.waiting, self.running):  # a postponed request is among the running ones
                if ticket in tickets:
                    tickets.remove(ticket)
        ticket.abandon()

    def place(self, ticket: Ticket) -> int:
        """The number of requests before a waiting one; 0 for all others."""
        self.check_process()
        with self._changed:
            if ticket not in self.waiting:
                return 0
            return self.waiting.index(ticket) + len(self.running)

    @contextmanager
    def paused(self, *, between_passes: bool = False) -> Iterator[None]:
        """Let no request run within the block. Running ones end first; with ``between_passes`` they pause."""
        self.check_process()
        if current_thread() is self.thread:
            raise RequestError(
                "this thread runs the model's requests, so it cannot wait for their end; call from another "
                "thread"
            )
        if self.is_held and self.running and not (between_passes or self.is_closed):
            raise RequestError(
                "the model is paused, and this call would wait for its running request; resume it first"
            )
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
        """Let no pass begin until :meth:`resume`. Waits for the running pass, but not in its own thread."""
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
        """End all running and waiting requests, then call ``then``. Later requests are refused.

        From a request's own thread this returns at once, and ``then`` is called after the request. In a
        forked process there is nothing to end.
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
        """Run a pass for the running requests, tidy up, and return them; an empty list ends the thread."""
        running = self._next()
        if not running:
            return running
        try:
            self._turn(running)
        except BaseException as error:  # noqa: BLE001 - raised where the answers are read
            for ticket in running:
                if ticket.result is None:
                    ticket.finish(error)
        self._tidy_up()
        return running

    def _work(self) -> None:
        while self.step():
            pass
        if self._at_end is not None:
            with self.paused():
                self._at_end()

    def _tidy_up(self) -> None:
        """Tidy up if no request is left."""
        with self._changed:
            if self.waiting or any(ticket.result is None for ticket in self.running):
                return
            self.running, self._phase = [], _Phase.TIDYING
            self._changed.notify_all()
        self._try_to_tidy(lambda: bool(self._pause or self.waiting))
        with self._changed:
            self._phase = _Phase.IDLE
            self._changed.notify_all()

    def _try_to_tidy(self, stop: Callable[[], bool]) -> None:
        try:
            self._tidy(stop)
        except Exception:  # noqa: BLE001 - answers go on without it
            _LOG.exception("what was read could not be put away; answers go on")

    @property
    def is_held(self) -> bool:
        """Whether :meth:`hold` keeps passes from beginning."""
        return _Pause.HELD in self._pause

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs. It may be asked in any thread."""
        return bool(self.waiting or self.running)

    @property
    def _is_busy(self) -> bool:
        """Whether the model is not idle yet."""
        return bool(self.running) or self._phase is _Phase.TIDYING

    @property
    def _is_full(self) -> bool:
        """Whether a request waits for room that a running one has."""
        return bool(self.running) and self._lacks_room in self.waiting

    def _next(self) -> list[Ticket]:
        """The requests of the next pass. An empty list ends the thread."""
        with self._changed:
            running = [ticket for ticket in self.running if ticket.stage is Stage.RUNNING]
            postponed = [ticket for ticket in self.running if ticket.stage is Stage.WAITING]
            self.waiting.extendleft(reversed(postponed))
            if len(running) + len(postponed) < len(self.running):
                self._lacks_room = None  # what ended has left room
            elif postponed:
                self._lacks_room = postponed[0]
            self.running, self._phase = running, _Phase.IDLE
            self._changed.notify_all()
            while self._pause & (_Pause.PASSES | _Pause.HELD) and not self.is_closed:
                if ending := [ticket for ticket in self.running if ticket.has_to_end()]:
                    self._phase = _Phase.TURNING
                    return ending
                self.running = [ticket for ticket in self.running if ticket.result is None]
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
        """Whether there is a free place, and no running request has to end first."""
        if self._pause & (_Pause.REQUESTS | _Pause.PASSES) or self._is_full:
            return False
        if len(self.running) >= self.at_once:
            return False
        return not any(ticket.excludes(other) for other in self.running)

    def _sweep(self) -> None:
        """Remove waiting requests whose streams were dropped."""
        dropped = [ticket for ticket in self.waiting if ticket.interruption is not None]
        for ticket in dropped:
            self.waiting.remove(ticket)
            ticket.abandon()

    def _leave(self) -> None:
        """End the thread when the program ends, while Python still runs."""
        thread = self.thread
        self.close(lambda: self._try_to_tidy(lambda: False))
        if thread is not None and thread is not current_thread():
            thread.join()
