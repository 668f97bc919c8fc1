"""Training in idle time: a thread that stands still while a request runs and takes no more than its share."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final

from edgespec.learning.gains import Example, Lesson
from edgespec.learning.layer_math import F32
from edgespec.learning.tuning import Tuning
from edgespec_models.errors import Cancelled, EdgespecError

_WAITING: Final = 8  # texts; with more, the oldest go
_LOG = logging.getLogger("edgespec")


class Trainer:
    """Learns from texts one after the other, in a thread of its own that begins with the first.

    Between two layers of a pass it looks whether a request has begun, and waits for its end. An error ends
    training, not the program: it is reported.

    ``begin`` makes the tuning, in the thread. ``share`` is the largest share of the time that training takes,
    above 0. ``busy`` are requests that run. ``problem`` says why nothing is learned; ``undone``, how often
    what was learned was put back.
    """

    def __init__(self, begin: Callable[[], Tuning], *, share: float) -> None:
        self._begin, self._share = begin, share
        self._changed = threading.Condition()
        self._waiting: deque[Example] = deque(maxlen=_WAITING)
        self._tuning: Tuning | None = None
        self._thread: threading.Thread | None = None
        self.busy, self._closed = 0, False
        self._rest_until = self._stood_s = 0.0
        self._gains: dict[str, F32] | None = None
        self._lesson: Lesson | None = None
        self.problem: str | None = None
        self.undone = 0

    def take(self) -> dict[str, F32] | None:
        """The gains by name, if they changed since the last call."""
        with self._changed:
            gains, self._gains = self._gains, None
            return gains

    def lesson(self) -> Lesson | None:
        """The lesson since the last call; None if nothing was learned."""
        with self._changed:
            lesson, self._lesson = self._lesson, None
            return lesson

    def recall(self) -> None:
        """Begin now, so that :meth:`take` has what earlier requests taught. To be called first, if at all."""
        tuning = self._started()
        if tuning is not None:
            self._show(tuning)

    def pause(self) -> None:
        """Pause training, because a request begins."""
        with self._changed:
            self.busy += 1

    def resume(self) -> None:
        """Resume training after the end of a request."""
        with self._changed:
            self.busy -= 1
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
            while (tuning := self._started()) is not None:
                self._learn(tuning, self._next())
        except Cancelled:
            return
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread: it is told, and logged whole
            self._give_up(error)

    def _started(self) -> Tuning | None:
        if self._tuning is None and self.problem is None:
            try:
                self._tuning = self._begin()
            except Exception as error:  # noqa: BLE001 - it must not keep a model from being loaded either
                self._give_up(error)
        return self._tuning

    def _give_up(self, error: Exception) -> None:
        expected = isinstance(error, EdgespecError)
        why = str(error) if expected else f"{type(error).__name__} {error}".rstrip()
        with self._changed:
            self.problem = f"the drafter is not trained: {why}"
            self._waiting.clear()
        _LOG.warning("%s", self.problem, exc_info=None if expected else error)

    def _next(self) -> Example:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._waiting))
            while not self._closed and (left := self._rest_until - perf_counter()) > 0.0:
                self._changed.wait(left)
            if self._closed:
                raise Cancelled("the trainer is closed")
            return self._waiting.popleft()

    def _learn(self, tuning: Tuning, example: Example) -> None:
        started, self._stood_s = perf_counter(), 0.0
        tuning.learn(example, self._breathe)
        spent = perf_counter() - started - self._stood_s
        self._rest_until = perf_counter() + spent * (1.0 / self._share - 1.0)
        self._show(tuning)

    def _show(self, tuning: Tuning) -> None:
        lesson, gains = tuning.lesson(), tuning.gains
        with self._changed:
            self._gains, self.undone = gains, tuning.undone
            self._lesson = self._lesson if lesson is None else lesson.after(self._lesson)

    def _breathe(self) -> None:
        with self._changed:
            if self.busy and not self._closed:
                started = perf_counter()
                self._changed.wait_for(lambda: self._closed or not self.busy)
                self._stood_s += perf_counter() - started
            if self._closed:
                raise Cancelled("the trainer is closed")
