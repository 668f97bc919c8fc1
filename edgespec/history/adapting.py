"""Training on a history's texts in a process of its own, which has the lowest priority and can be paused at
once.

The process is ``python -m edgespec.align.adapting``. It reads lines: its task as JSON, then ``pause`` and
``go``; at the end of its input it puts away what it has trained, for the next run, and ends. It writes JSON
lines: progress, and at last a result or an error.
"""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from time import monotonic
from typing import Any, Final

from edgespec.history.changes import Adaptation, Learner
from edgespec.loading.options import on_battery
from edgespec_models.errors import Cancelled, EdgespecError
from edgespec_models.progress import Progress, ProgressCallback

CALM_S: Final = 5.0
"""Seconds without a request after which training goes on."""
_LOOK_S: Final = 0.2
_LOOK_AGAIN_S: Final = 5.0
_LOG = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of passes, by which a change is judged: of the target by rows, and of a step of the drafter."""

    target_s: Mapping[int, float]
    drafter_s: float


def check_can_train() -> None:
    """Raise EdgespecError if this program cannot start the process."""
    if getattr(sys, "frozen", False):
        raise EdgespecError("a frozen program cannot train drafters; run 'edgespec align --history NAME'")
    if find_spec("torch") is None:
        raise EdgespecError("training needs torch, which is not installed: pip install 'edgespec[align]'")


class Adapting:
    """A process that trains. ``report`` gets its progress, in a thread of its own."""

    def __init__(self, learner: Learner, prices: PassTimes, report: ProgressCallback) -> None:
        self._report, self._error = report, "the process ended"
        self._result: Adaptation | None = None
        task = {"learner": asdict(learner), "prices": asdict(prices)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "edgespec.align.adapting"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C in a terminal stops an answer, and not this
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self._send(json.dumps(task, default=str))
        self._thread = threading.Thread(target=self._read, name="edgespec-adapting", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Pause within a second."""
        self._send("pause")

    def go(self) -> None:
        """Go on after :meth:`pause`."""
        self._send("go")

    def stop(self) -> None:
        """Let the process put away what it has trained, and end. This does not wait."""
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process, at most so long; returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def result(self) -> Adaptation:
        """The result of the ended process. Raises EdgespecError if it failed."""
        if self._result is None:
            raise EdgespecError(f"the drafter was not trained: {self._error}")
        return self._result

    def run(self, cancelled: Callable[[], bool]) -> Adaptation:
        """Wait for the result. Raises Cancelled when ``cancelled`` is true, EdgespecError after a failure."""
        try:
            while not self.wait(_LOOK_S):
                if cancelled():
                    raise Cancelled("the training was cancelled; the next one goes on from where it was")
        finally:
            self.stop()
        return self.result

    def _send(self, line: str) -> None:
        with suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(line + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _read(self) -> None:
        with self._process:
            for line in self._process.stdout or ():
                message: dict[str, Any] = json.loads(line)
                if "progress" in message:
                    self._report(Progress(*message["progress"]))
                elif "result" in message:
                    self._result = Adaptation(**message["result"])
                else:
                    self._error = message["error"]


class WhenIdle:
    """Trains while a model is idle on mains power.

    ``begin`` starts the process, or returns None if there is too little to learn. ``is_busy`` says whether a
    request runs or waits.
    """

    def __init__(self, begin: Callable[[], Adapting | None], is_busy: Callable[[], bool]) -> None:
        self._begin, self._is_busy = begin, is_busy
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgespec-idle", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, without waiting for the process."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        adapting, busy_at, is_paused, has_news = None, monotonic(), False, True
        try:
            while not self._closing.wait(_LOOK_S if adapting else _LOOK_AGAIN_S):
                if self._is_busy():
                    busy_at, has_news = monotonic(), True
                rests = monotonic() - busy_at >= CALM_S and not on_battery()
                try:
                    if adapting is None:
                        if rests and has_news:
                            has_news = is_paused = False
                            adapting = self._begin()
                    elif adapting.wait(0.0):
                        ended, adapting = adapting, None
                        _LOG.info("the drafter was trained while nothing ran: %s", ended.result)
                    elif rests is is_paused:
                        adapting.go() if rests else adapting.pause()
                        is_paused = not rests
                except (EdgespecError, OSError) as error:  # perhaps another program's run; it is tried again
                    _LOG.warning("%s", error)
        finally:
            if adapting is not None:
                adapting.stop()
