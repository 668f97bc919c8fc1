"""One scheduler: requests wait, a few run at once, and each step takes these a pass further."""

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, Flag
from itertools import count
from threading import Condition, Lock, Thread, current_thread

from edgespec.answering.results import FinishReason
from edgespec.decoding.draft import Load
from edgespec.running.passes import context, take_further
from edgespec.running.runner import Runner
from edgespec.running.sequence import Sequence
from edgespec.running.ticket import LOOK_S, Stage, Ticket
from edgespec_models.errors import Busy, Closed, RequestError
from edgespec_models.forks import check_process
from edgespec_runtimes.kv_cache import shared_length

_LOG = logging.getLogger("edgespec")


class _State(Enum):
    """The state of the thread."""

    IDLE = "it waits, or there is none"
    STEPPING = "it takes requests a pass further"
    TIDYING = "it tidies up, since no request is left"


class _Pause(Flag):
    """Reasons for which requests or passes do not begin."""

    NOBODY = 0
    REQUESTS = 1  # `paused`: no request begins
    PASSES = 2  # `paused` between passes: no pass begins either
    HELD = 4  # `hold`: no pass begins


class Scheduler:
    """Waiting and running requests, and the thread that answers them, at most ``at_once`` together.

    At most ``most_waiting`` requests wait. When no request is left, what was read is put away; errors of that
    go to the log.

    The thread begins with a request and ends when none is left. So an idle model has no thread, and nothing
    keeps the program from ending: at its end running requests end too.
    """

    def __init__(self, most_waiting: int, runner: Runner, at_once: int = 1) -> None:
        self._most_waiting, self._runner, self.at_once = most_waiting, runner, at_once
        self._changed = Condition()
        self._numbers, self.waiting = count(), deque[Ticket]()
        self.running: dict[Ticket, Sequence | None] = {}  # the sequences of those that have begun
        self._state, self._pause = _State.IDLE, _Pause.NOBODY
        self.thread: Thread | None = None
        self._process = os.getpid()
        self._pausing = Lock()  # one `paused` block at a time
        self.lacks_room: Ticket | None = None  # waits until a running one ends, with all behind it
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
        """Queue a request, once. There is always room behind the first of several answers."""
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
            is_full = len(self.waiting) + len(self.running) >= self._most_waiting + self.at_once
            if is_full and ticket.first is None:
                raise Busy(
                    f"{self._most_waiting} requests wait already, as many as max_waiting allows; ask again "
                    "later, or load the model with a larger max_waiting"
                )
            if self.thread is None:
                thread = Thread(target=self._work, name="edgespec-model", daemon=True)
                thread.start()  # the thread waits for the lock
                atexit.register(self._leave)
                self.thread = thread
            ticket.queue(next(self._numbers))
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
            if ticket in self.waiting:
                self.waiting.remove(ticket)
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
                    while self._state is not _State.IDLE if between_passes else self._is_busy:
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
            while self.is_held and self._state is not _State.IDLE:
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
        """Take the running requests a pass further, and return them; an empty list ends the thread."""
        running = self._admit()
        if not running:
            return running
        try:
            texts = self._runner.texts(running)
            others = [ticket for ticket in running if ticket not in texts]
            if sequences := self._begun(others):
                take_further(sequences, self._runner.pricing)
            if texts:
                self._runner.read_texts(texts, len(others))
        except BaseException as error:  # noqa: BLE001 - raised where the answers are read
            for ticket in running:
                if ticket.stage is Stage.RUNNING:
                    ticket.finish(error)
        with self._changed:
            self._retire()
        self._tidy_up()
        return running

    def _begun(self, tickets: list[Ticket]) -> list[Sequence]:
        """Begin new requests, end those that must end, and return the others."""
        for ticket in tickets:
            if ticket not in self.running:  # it waits again
                continue
            with ticket.ending_on_error():
                reason, sequence = ticket.reason_to_end(), self.running[ticket]
                if reason is None:
                    if sequence is None:
                        self._begin(ticket, tickets)
                elif sequence is None:
                    ticket.abandon()
                else:
                    sequence.stop(reason)
        return self._live(tickets)

    def _begin(self, ticket: Ticket, tickets: list[Ticket]) -> None:
        """Begin a request, unless it waits for tokens that another reads, or for room."""
        sequences = self._live(tickets)
        if _is_being_read(ticket, sequences):
            return
        prices = self._runner.pricing.at(Load(len(tickets), context(sequences)))
        sequence = self._runner.begin(ticket, prices)
        if sequence is not None:
            self.running[ticket] = sequence
            sequence.begin()
            return
        late = [other for other in tickets[tickets.index(ticket) :] if self.running[other] is None]
        with self._changed:  # nobody overtakes it
            for other in late:
                del self.running[other]
            self.waiting = deque(sorted([*late, *self.waiting], key=lambda waiting: waiting.number))
            self.lacks_room = ticket
            for other in late:
                other.postpone()

    def _work(self) -> None:
        while self.step():
            pass
        if self._at_end is not None:
            with self.paused():
                self._at_end()

    def _tidy_up(self) -> None:
        """Tidy up if no request is left."""
        with self._changed:
            if self.waiting or self.running:
                return
            self._state = _State.TIDYING
            self._changed.notify_all()
        self._try_to_tidy(lambda: bool(self._pause or self.waiting))
        with self._changed:
            self._state = _State.IDLE
            self._changed.notify_all()

    def _try_to_tidy(self, stop: Callable[[], bool]) -> None:
        try:
            self._runner.write_behind(stop)
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
        return bool(self.running) or self._state is _State.TIDYING

    @property
    def _is_full(self) -> bool:
        """Whether a request waits for room that a running one has."""
        return bool(self.running) and self.lacks_room in self.waiting

    def _retire(self) -> None:
        """Forget the running requests that have ended, whose room others may take."""
        for ticket in [ticket for ticket in self.running if ticket.result is not None]:
            del self.running[ticket]
            self.lacks_room = None

    def _live(self, tickets: list[Ticket]) -> list[Sequence]:
        """Those of the requests that have begun and not ended."""
        sequences = (self.running.get(ticket) for ticket in tickets if ticket.result is None)
        return [sequence for sequence in sequences if sequence is not None]

    def _admit(self) -> list[Ticket]:
        """The requests of the next pass. An empty list ends the thread."""
        with self._changed:
            self._state = _State.IDLE
            self._changed.notify_all()
            while self._pause & (_Pause.PASSES | _Pause.HELD) and not self.is_closed:
                if ending := [ticket for ticket in self.running if ticket.has_to_end()]:
                    self._state = _State.STEPPING
                    return ending
                self._retire()
                self._changed.wait(LOOK_S)
            while self._pause & (_Pause.REQUESTS | _Pause.PASSES) and not self.running:
                self._changed.wait()
            self._sweep()
            while ticket := next(filter(self._may_begin, self.waiting), None):
                self.waiting.remove(ticket)
                self.running[ticket] = None
                ticket.stage = Stage.RUNNING
            if not self.running:
                self.thread = None
                atexit.unregister(self._leave)
            self._state = _State.STEPPING if self.running else _State.IDLE
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


def _is_being_read(ticket: Ticket, others: list[Sequence]) -> bool:
    """Whether others read most of its prompt just now, so that it need not be read twice."""
    if ticket.request.prompt_logprobs:  # for which it reads its prompt itself
        return False
    tokens = ticket.prompt.rows  # in which pictures have names
    known = max((other.session.shared_prefix(tokens) for other in others), default=0)
    reading = (other.ticket.prompt.rows for other in others if other.unread > 0)
    shared = (shared_length(rows, tokens) for rows in reading)
    coming = max(shared, default=0) - known
    return coming > 0 and 2 * coming >= len(tokens) - known
