"""What lacks room or memory, what happens behind answers, and what ends in a pause."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgespec import DeviceError, LoadOptions, Model
from edgespec.decoding.draft import PromptProgress
from edgespec.running.ticket import Stage
from edgespec_runtimes.kv_cache import Stretch
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows, Session
from tests.kit.models import VOCAB, queue_of, runner_of, slow_session, toy_model
from tests.kit.several import LAW, LONG, PROMPTS, Driven, alone, driving, facts, queued
from tests.kit.toy import KV_BYTES, ToyModel, until

LARGE: dict[str, Any] = {"max_new_tokens": 1000}
"""There is no room for it beside others; see :func:`_has_room_for`."""


def _has_room_for(tokens: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have room for a request of so many tokens beside others."""
    monkeypatch.setattr(
        "edgespec.running.runner.machine_memory",
        lambda: SimpleNamespace(available=2 * KV_BYTES * tokens()),  # of which half may be taken
    )


@pytest.mark.parametrize("leaves", ["waiting", "running"])
def test_what_waits_behind_a_request_without_room_begins_when_that_leaves(
    leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _has_room_for(lambda: 500, monkeypatch)
    with driving() as (driven, _):
        first = queued(driven, "x", max_new_tokens=60)
        driven.turn()
        second, third = queued(driven, "y", **LARGE), queued(driven, "z", max_new_tokens=60)
        driven.turn()
        assert second._ticket.stage is Stage.WAITING
        if leaves == "waiting":
            driven.turn()
            assert sum(driven.taken) == 1
        second.cancel()
        driven.turn()
        assert third._ticket.stage is Stage.RUNNING and not first.ended


def test_what_finds_no_room_waits_in_the_order_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind one that waits for another answer of its conversation."""
    _has_room_for(lambda: 500, monkeypatch)
    with driving() as (driven, _):
        talk = driven.model.conversation()
        streams = [driven.queue(talk.stream("x", max_new_tokens=60)) for _ in range(2)]
        driven.turn()
        streams.append(queued(driven, "y", **LARGE))
        driven.turn()
        assert [stream.place for stream in streams] == [0, 1, 2]
        for stream in streams:
            stream.cancel()


def test_room_that_comes_in_the_turn_in_which_one_lacks_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, the first ends behind the attempt to begin the last, which does not wait for the second."""
    with driving() as (driven, _):
        first = queued(driven, "x", max_new_tokens=2, speculate=False)
        second = queued(driven, "y", max_new_tokens=60)
        _has_room_for(lambda: 5000 if first.ended else 500, monkeypatch)
        driven.turn()
        third = queued(driven, "z", **LARGE)
        driven.turn()
        assert first.ended and third._ticket.stage is Stage.WAITING
        driven.turn()
        assert sum(driven.taken) == 2 and not second.ended
        third.cancel()


def test_room_that_an_error_in_a_pause_leaves_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = list[str]()

    def cancelled() -> bool:
        return bool(failing) and 1 // 0 > 0

    with driving() as (driven, _):
        _has_room_for(lambda: 5000 if failing else 500, monkeypatch)
        first = queued(driven, "x", max_new_tokens=60, cancelled=cancelled)
        second = queued(driven, "y", max_new_tokens=60)
        driven.turn()
        third = queued(driven, "z", **LARGE)
        driven.turn()
        assert sum(driven.taken) == 2
        failing.append("now")
        with driven.within():
            driven.model.pause()

        def resume() -> None:
            until(lambda: first.ended)
            driven.model.resume()

        waiting = threading.Thread(target=resume)
        waiting.start()
        driven.turn()
        waiting.join()
        assert third._ticket.stage is Stage.RUNNING and not second.ended
        third.cancel()


class Small(ToyModel):
    """Its caches take at most so many tokens together."""

    most = 200

    def make_room(self, stretch: Stretch, capacity: int) -> None:
        if sum(other.capacity for other in self.stretches if other is not stretch) + capacity > self.most:
            raise MemoryError

    def predict_together(self, rows: Sequence[Rows]) -> list[Predictions]:
        for part in rows:  # also if another's lack of memory has just emptied its cache
            assert part.session.length + len(part.tokens) <= part.session.capacity
        return super().predict_together(rows)


def test_of_two_answers_that_outgrow_the_memory_one_ends_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgespec.running.runner.USUAL_TOKENS", 8)
    target = Small(LAW, VOCAB, several=True)
    with toy_model(target.session(), options=LoadOptions(parallel=2)) as model:
        driven = Driven(model)
        streams = {prompt: queued(driven, prompt, max_new_tokens=110) for prompt in PROMPTS[:2]}
        driven.run()
        (ended,) = [text for text, stream in streams.items() if stream.result.finish_reason == "error"]
        with pytest.raises(DeviceError, match="not enough memory"):
            streams.pop(ended).run()
        ((prompt, stream),) = streams.items()
        assert facts(stream.result) == facts(alone(prompt, max_new_tokens=110))
        assert not any(driven.taken)


class Narrow(ToyModel):
    """Its passes take at most so many rows for want of memory."""

    most = 31

    def predict_together(self, rows: Sequence[Rows]) -> list[Predictions]:
        if sum(len(part.tokens) for part in rows) > self.most:
            raise DeviceError("not enough memory for a pass")
        return super().predict_together(rows)


@pytest.mark.parametrize(("chunk", "count"), [(32, 2), (64, 3)])
def test_a_pass_that_lacks_memory_ends_those_alone_whose_rows_lack_it(chunk: int, count: int) -> None:
    prompts = (LONG[1:29], LONG[2:30], LONG[:70])[:count]
    target = Narrow(LAW, VOCAB, chunk=chunk, several=True)
    with toy_model(target.session(), options=LoadOptions(parallel=3)) as model:
        driven = Driven(model)
        streams = [queued(driven, prompt, max_new_tokens=30) for prompt in prompts]
        driven.run()
        assert [stream for stream in streams if stream.result.finish_reason == "error"] == streams[2:]
        for prompt, stream in zip(prompts[:2], streams[:2], strict=True):
            assert facts(stream.result) == facts(alone(prompt, max_new_tokens=30))
        for stream in streams[2:]:
            with pytest.raises(DeviceError, match="not enough memory for a pass"):
                stream.run()
        assert not any(driven.taken)


@pytest.mark.parametrize("length", [24, 31, 33])
def test_a_round_has_memory_for_all_that_it_reads(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the prompt's end and the draft behind it, too."""
    ends, prepare = [0], Session.prepare

    def prepared(session: Session, end: int) -> None:
        ends.append(end)
        prepare(session, end)

    class Measured(ToyModel):
        def predict_together(self, rows: Sequence[Rows]) -> list[Predictions]:
            (part,) = rows
            assert part.session.length + len(part.tokens) <= ends[-1]
            return super().predict_together(rows)

    wanted = alone(LONG[:length], max_new_tokens=60)
    monkeypatch.setattr(Session, "prepare", prepared)
    told = list[PromptProgress]()
    with toy_model(Measured(LAW, VOCAB, chunk=64).session()) as model:
        answer = model.generate(
            LONG[:length], max_new_tokens=60, prediction=wanted.text, on_progress=told.append
        )
    assert facts(answer) == facts(wanted) and answer.stats.accepted > 8
    assert all(report.read <= report.total for report in told)


@pytest.mark.parametrize("error", [MemoryError(), ValueError("no place")])
def test_answers_go_on_when_tidying_fails(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    failures = [error]

    def tidy(stop: object) -> None:
        if failures:
            raise failures.pop()

    with toy_model() as model:
        cast(Any, runner_of(model)).write_behind = tidy
        for _ in range(3):
            model.generate("x", max_new_tokens=2)
        until(lambda: queue_of(model).thread is None)
        assert not failures
        (record,) = caplog.records
        assert "could not be put away" in record.message and record.exc_info is not None


class Paused:
    """A model whose only request runs and is paused."""

    def __init__(self, model: Model, **options: Any) -> None:
        self.model, self.passes = model, cast(ToyModel, runner_of(model).session.model).passes
        self.stream = model.stream(LONG, max_new_tokens=4000, **options)
        next(self.stream)
        model.pause()
        self.written = len(self.passes)

    def ends(self) -> None:
        """Check that the request ends without a pass, and that the thread does."""
        until(lambda: self.stream.ended)
        assert len(self.passes) == self.written
        self.model.resume()
        until(lambda: queue_of(self.model).thread is None)


@pytest.mark.parametrize("reason", ["timeout", "cancelled"])
def test_a_running_request_ends_in_a_pause_when_its_time_is_up_or_it_is_cancelled(reason: str) -> None:
    wish = threading.Event()
    with toy_model(slow_session()) as model:
        paused = Paused(model, **{"timeout": 0.5} if reason == "timeout" else {"cancelled": wish.is_set})
        wish.set()
        paused.ends()
        assert paused.stream.result.finish_reason == reason


def test_an_error_of_a_callback_ends_its_request_in_a_pause_too() -> None:
    calls = list[str]()

    def cancelled() -> bool:
        if calls:
            calls.append("again")
            raise ZeroDivisionError
        return False

    with toy_model(slow_session()) as model:
        paused = Paused(model, cancelled=cancelled)
        calls.append("paused")
        paused.ends()
        assert len(calls) == 2
        with pytest.raises(ZeroDivisionError):
            paused.stream.run()
