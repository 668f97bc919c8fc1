"""Training beside requests: when it stands still, what it rests, what it hands out, how it ends."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from edgespec.learning.gains import ROWS, Example, Lesson
from edgespec.learning.layer_math import F32
from edgespec.learning.trainer import Trainer
from edgespec.learning.tuning import Tuning
from edgespec_models.errors import UnsupportedModelError
from tests.kit.toy import until

SOON = 30.0  # seconds that nothing here comes near
Step = Callable[[Callable[[], None]], None]


def _text(number: int) -> Example:
    return Example((number, number, number), 1)


@dataclass
class _Tuning:
    """Counts texts; :attr:`step` is what learning one does."""

    step: Step = lambda breathe: breathe()
    undone: int = 0
    learned: "queue.Queue[int]" = field(default_factory=queue.Queue)
    begun: "queue.Queue[int]" = field(default_factory=queue.Queue)
    _texts: int = 0
    _told: int = 0

    @property
    def gains(self) -> dict[str, F32]:
        return {"final_norm.weight": np.full(2, self._texts, np.float32)}

    def lesson(self) -> Lesson | None:
        new, self._told = self._texts - self._told, self._texts
        return Lesson(np.full((ROWS, 2), new, np.float32), False, new) if new else None

    def learn(self, example: Example, breathe: Callable[[], None]) -> None:
        self.begun.put(example.tokens[0])
        self.step(breathe)
        self._texts += 1
        self.learned.put(example.tokens[0])


class _Condition(threading.Condition):
    """Tells of every wait: its time limit."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: queue.Queue[float | None] = queue.Queue()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.put(timeout)
        return super().wait(timeout)

    def until(self, expected: object) -> None:
        """Until the thread waits that long; None is without a limit."""
        while self.waits.get(timeout=SOON) != expected:
            pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("edgespec.learning.trainer.perf_counter", lambda: clock.now)
    return clock


def _trains() -> bool:
    return any(thread.name == "edgespec-training" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not _trains()


def _trainer(tuning: _Tuning, share: float = 1.0) -> tuple[Trainer, _Condition]:
    trainer = Trainer(lambda: cast("Tuning", tuning), share=share)
    trainer._changed = condition = _Condition()
    return trainer, condition


@pytest.mark.usefixtures("clock")
def test_texts_are_learned_in_turn_and_handed_out_once() -> None:
    trainer, _ = _trainer(tuning := _Tuning())
    assert trainer.take() is None and trainer.lesson() is None
    assert not _trains() and trainer.undone == 0  # no text, no thread
    for number in range(4):
        tuning.undone = number
        trainer.offer(_text(number))
        assert tuning.learned.get(timeout=SOON) == number
    trainer.close()
    gains, lesson = trainer.take(), trainer.lesson()
    assert gains is not None and gains["final_norm.weight"][0] == 4.0
    assert lesson is not None and (lesson.tokens, lesson.change[0, 0]) == (4, 4.0)
    assert trainer.undone == 3
    assert trainer.take() is None and trainer.lesson() is None


@pytest.mark.usefixtures("clock")
def test_nothing_is_learned_while_a_request_runs_whether_it_began_before_a_text_or_between_layers() -> None:
    def step(breathe: Callable[[], None]) -> None:
        for layer in range(4):
            breathe()
            layers.put(layer)
            if layer == 1:
                request.wait(SOON)

    layers, request = queue.Queue[int](), threading.Event()
    trainer, condition = _trainer(tuning := _Tuning(step))
    trainer.pause()
    trainer.offer(_text(1))
    for expected in ([0, 1], [2, 3]):
        condition.until(None)
        assert tuning.begun.qsize() == 1 and layers.empty() and tuning.learned.empty()
        trainer.resume()
        assert [layers.get(timeout=SOON) for _ in range(2)] == expected
        trainer.pause()
        request.set()
    assert tuning.learned.get(timeout=SOON) == 1
    trainer.close()


@pytest.mark.parametrize("paused", [False, True])
def test_closing_gives_up_a_long_text(paused: bool) -> None:
    def step(breathe: Callable[[], None]) -> None:
        while True:
            breathe()

    trainer, condition = _trainer(tuning := _Tuning(step))
    trainer.offer(_text(1))
    trainer.offer(_text(2))
    assert tuning.begun.get(timeout=SOON) == 1
    if paused:
        trainer.pause()
        condition.until(None)
    trainer.close()
    trainer.offer(_text(3))
    trainer.close()
    assert tuning.learned.empty() and tuning.begun.empty() and trainer.problem is None


@pytest.mark.usefixtures("clock")
def test_the_oldest_texts_go_where_too_many_wait() -> None:
    trainer, _ = _trainer(tuning := _Tuning())
    trainer.pause()
    trainer.offer(_text(1))
    assert tuning.begun.get(timeout=SOON) == 1
    for number in range(2, 14):
        trainer.offer(_text(number))
    trainer.resume()
    assert [tuning.learned.get(timeout=SOON) for _ in range(9)] == [1, *range(6, 14)]
    trainer.close()


@pytest.mark.parametrize(("share", "rest"), [(0.2, 40.0), (0.5, 10.0), (0.8, 2.5)])
def test_it_rests_for_its_share_and_time_in_which_it_stood_still_does_not_count(
    clock: SimpleNamespace, share: float, rest: float
) -> None:
    def step(breathe: Callable[[], None]) -> None:
        clock.now += 3.0
        breathe()
        clock.now += 7.0

    trainer, condition = _trainer(tuning := _Tuning(step), share)
    trainer.pause()
    trainer.offer(_text(1))
    trainer.offer(_text(2))
    condition.until(None)
    clock.now += 100.0  # the request takes its time
    trainer.resume()
    assert tuning.learned.get(timeout=SOON) == 1
    condition.until(pytest.approx(rest))
    assert tuning.begun.get() == 1 and tuning.begun.empty()
    with condition:
        clock.now += rest + 1e-6
        condition.notify_all()
    assert tuning.learned.get(timeout=SOON) == 2
    trainer.close()


ERRORS = [
    (UnsupportedModelError("remainders"), "remainders"),
    (MemoryError(), "MemoryError"),
    (IndexError("index 9 is out of bounds"), "IndexError index 9 is out of bounds"),
]


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize(("error", "told"), ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_ends_training_and_is_told_once(
    caplog: pytest.LogCaptureFixture, error: Exception, told: str, begins: bool
) -> None:
    def begin() -> Tuning:
        begun.append(1)
        if begins:
            return cast("Tuning", tuning)
        raise error

    def step(breathe: Callable[[], None]) -> None:
        if not tuning.learned.empty():
            raise error

    tuning, begun = _Tuning(step), list[int]()
    trainer = Trainer(begin, share=1.0)
    trainer.offer(_text(1))
    trainer.offer(_text(2))
    until(lambda: not _trains())
    trainer.offer(_text(3))
    trainer.recall()
    assert begun == [1] and not _trains()
    assert caplog.messages == [trainer.problem] == [f"the drafter is not trained: {told}"]
    assert bool(caplog.records[0].exc_info) != isinstance(error, UnsupportedModelError)
    lesson, gains = trainer.lesson(), trainer.take()  # what was learned before stays
    assert (lesson and lesson.tokens) == (gains and gains["final_norm.weight"][0]) == (1 if begins else None)
    trainer.close()


@pytest.mark.usefixtures("clock")
def test_what_earlier_requests_taught_is_there_before_the_first_text() -> None:
    begun, tuning = list[str](), _Tuning()

    def begin() -> Tuning:
        begun.append(threading.current_thread().name)
        return cast("Tuning", tuning)

    trainer = Trainer(begin, share=1.0)
    trainer.recall()
    gains = trainer.take()
    assert gains is not None and not gains["final_norm.weight"].any()
    assert trainer.take() is None and not _trains()
    trainer.offer(_text(1))
    assert tuning.learned.get(timeout=SOON) == 1
    trainer.close()
    assert begun == [threading.current_thread().name]  # once, and at once
