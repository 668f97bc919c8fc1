"""Training in idle time: a thread that stands still while a request runs, and takes no more than its share."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final

from edgespec.learning.layer_math import F32
from edgespec.learning.tuning import Example, Tuning
from edgespec_models.errors import EdgespecError

__all__ = ["Trainer"]

_WAITING: Final = 8  # texts; with more, the oldest go
_LOG = logging.getLogger("edgespec")


class _Closed(Exception):
    """Training is given up."""


class Trainer:
    """Learns from texts one after the other, in a thread of its own that begins with the first.

    Between two layers of a pass it looks whether a request has begun, and waits for its end.

    Args:
        begin: makes the tuning, in the thread; an EdgespecError ends training, and is reported.
        share: of the time, the most that training takes.
        told: called in the thread after every text.

    Attributes:
        problem: why nothing is learned; None while there is no reason.
    """

    def __init__(
        self, begin: Callable[[], Tuning], *, share: float, told: Callable[[Tuning], None] = lambda tuning: None
    ) -> None:
        self._begin, self._share, self._told = begin, share, told
        self._changed = threading.Condition()
        self._waiting: deque[Example] = deque(maxlen=_WAITING)
        self._tuning: Tuning | None = None
        self._thread: threading.Thread | None = None
        self._busy = self._closed = False
        self._rest_until = 0.0
        self._gains: dict[str, F32] | None = None
        self.problem: str | None = None

    def take(self) -> dict[str, F32] | None:
        """The gains by name, if they changed since the last call."""
        with self._changed:
            gains, self._gains = self._gains, None
            return gains

    def pause(self) -> None:
        """A request begins."""
        with self._changed:
            self._busy = True

    def resume(self) -> None:
        """It has ended."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def offer(self, example: Example) -> None:
        """Learn from a text when there is time."""
        with self._changed:
            if self._closed or self.problem is not None:
                return
            self._waiting.append(example)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="edgespec-training", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Give up what has not been learned yet."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            tuning = self._begin()
            while True:
                self._learn(tuning, self._next())
        except _Closed:
            return
        except (EdgespecError, MemoryError) as error:
            with self._changed:
                self.problem = f"the drafter is not trained: {error}"
                self._waiting.clear()
            _LOG.warning("%s", self.problem)

    def _next(self) -> Example:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._waiting))
            while not self._closed and (left := self._rest_until - perf_counter()) > 0.0:
                self._changed.wait(left)
            if self._closed:
                raise _Closed
            return self._waiting.popleft()

    def _learn(self, tuning: Tuning, example: Example) -> None:
        started, self._stood_s = perf_counter(), 0.0
        tuning.learn(example, self._breathe)
        spent = perf_counter() - started - self._stood_s
        self._rest_until = perf_counter() + spent * (1.0 / self._share - 1.0)
        with self._changed:
            self._gains = tuning.gains
        self._told(tuning)

    def _breathe(self) -> None:
        with self._changed:
            if self._busy and not self._closed:
                started = perf_counter()
                self._changed.wait_for(lambda: self._closed or not self._busy)
                self._stood_s += perf_counter() - started
            if self._closed:
                raise _Closed
