"""Requests at once of which one fails, or has no room: the others do not notice."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from edgespec import Choice, EdgespecError
from edgespec.requests import decoding as decodings
from edgespec.requests.runner import Runner
from edgespec.requests.seats import Seats
from edgespec.requests.ticket import Stage, Ticket
from edgespec_models.errors import DeviceError
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows
from tests.models_for_tests import runner_of
from tests.several_for_tests import LONG, NEW, PROMPTS, Own, alone, driven, facts, reads, session, stream
from tests.toy import ToyModel, ToySession


def test_one_for_which_there_is_no_room_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with driven() as (one, _):
        first, second = (stream(one, prompt, max_new_tokens=NEW) for prompt in PROMPTS[:2])
        while reads(first):
            one.turn()
        monkeypatch.setattr(Runner, "_has_room", lambda *asked: False)
        third = stream(one, PROMPTS[2], max_new_tokens=NEW)
        while not first.ended:
            assert one.turn() == 1 or not second.ended
            assert second._ticket.stage is not Stage.RUNNING and second.place <= 1
        assert third.place == second.place + 1
        one.run()
        for prompt, each in zip(PROMPTS, (first, second, third), strict=False):
            assert facts(each.result) == facts(alone(prompt, max_new_tokens=NEW))
        assert len(one.taken) == 1


def test_those_that_waited_for_a_prompt_and_find_no_room_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with driven() as (one, _):
        first, *others = (stream(one, LONG, max_new_tokens=NEW) for _ in range(3))
        for _ in range(3):
            one.turn()
        assert all(each._ticket.stage is Stage.RUNNING and each._ticket.decoding is None for each in others)
        monkeypatch.setattr(Runner, "_has_room", lambda *asked: False)
        while reads(first) or others[0]._ticket.stage is Stage.RUNNING:
            one.turn()
        one.turn()
        assert [each.place for each in others] == [1, 2]
        one.run()


@pytest.mark.parametrize("way", ["cancelled", "fails"])
def test_those_that_wait_for_a_prompt_go_on_where_that_ends_early(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driven() as (one, _):
        first, *others = (stream(one, LONG, max_new_tokens=NEW) for _ in range(3))
        for _ in range(4):
            one.turn()
        assert reads(first)
        if way == "cancelled":
            first.cancel()
        else:
            monkeypatch.setattr(type(first._ticket), "reason_to_end", failing(first._ticket))
        one.run()
        for each in others:
            assert facts(each.result) == facts(alone(LONG, max_new_tokens=NEW))


def failing(answer: Ticket) -> Any:
    """What asks why to end, and raises for one answer."""
    usual = Ticket.reason_to_end
    return lambda each: raising() if each is answer else usual(each)


def test_a_short_prompt_does_not_overtake_one_that_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with driven() as (one, _):
        first = stream(one, PROMPTS[0], max_new_tokens=NEW)
        one.turn()
        monkeypatch.setattr(Runner, "_has_room", lambda runner, tokens: tokens < 50)
        others = [stream(one, prompt, max_new_tokens=2) for prompt in (LONG, PROMPTS[2])]
        for _ in range(2):
            one.turn()
            assert not any(each._ticket.stage is Stage.RUNNING for each in others)
        one.run()
        assert facts(first.result) == facts(alone(PROMPTS[0], max_new_tokens=NEW))


def test_one_that_waits_for_room_may_be_cancelled_or_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_has_room", lambda *asked: False)
    with driven() as (one, _):
        first, second, third = (stream(one, prompt, max_new_tokens=NEW) for prompt in PROMPTS[:3])
        for _ in range(6):
            one.turn()
        second.cancel()
        assert second.result.finish_reason == "cancelled" and second.result.tokens == ()
        one.run()
        for prompt, each in ((PROMPTS[0], first), (PROMPTS[2], third)):
            assert facts(each.result) == facts(alone(prompt, max_new_tokens=NEW))


def raising(*args: Any, **options: Any) -> Any:
    raise ZeroDivisionError("of its own")


FAULTS = ["propose", "observe", "close", "constraint", "policy", "ended", "begin", "prepare", "cancelled"]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_fails_leaves_the_others_alone(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with driven() as (one, _):
        others = [stream(one, prompt, max_new_tokens=NEW) for prompt in PROMPTS[:2]]
        for _ in range(5):
            one.turn()
        options: dict[str, Any] = {"max_new_tokens": NEW}
        with monkeypatch.context() as patch:
            if fault in ("propose", "observe", "close"):
                options["drafter"] = Own(raises_at=fault)
            elif fault == "constraint":
                options["response_format"] = Choice(["AN ANSWER", "AN OTHER ONE"])
            elif fault == "cancelled":
                options["cancelled"] = raising
            failing = one.model.stream(PROMPTS[2], **options)
            if fault == "begin":
                patch.setattr(Runner, "_policy", raising)
            elif fault == "prepare":
                patch.setattr(decodings, "call_reader", raising)
            elif fault == "ended":
                failing._ticket._ended = raising
            one.queue(failing)
            if fault in ("begin", "prepare"):
                one.turn()
                patch.undo()
            others.append(stream(one, PROMPTS[3], max_new_tokens=NEW))
            while not failing.ended:
                if fault == "policy" and failing._ticket.decoding is not None:
                    patch.setattr(failing._ticket.decoding._policy, "observe", raising)
                if fault == "constraint" and failing._ticket.decoding is not None:
                    patch.setattr(failing._ticket.decoding._constraint, "begin", raising)
                one.turn()
        one.run()
        with pytest.raises(ZeroDivisionError):
            failing.run()
        for prompt, each in zip((*PROMPTS[:2], PROMPTS[3]), others, strict=True):
            assert facts(each.result) == facts(alone(prompt, max_new_tokens=NEW))
        assert not any(one.taken) and len(one.taken) <= 4


def test_a_pass_that_fails_ends_all_and_the_model_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise EdgespecError("a pass broke")

    with driven() as (one, _):
        streams = [stream(one, prompt, max_new_tokens=NEW) for prompt in PROMPTS[:3]]
        for _ in range(8):
            one.turn()
        with monkeypatch.context() as patch:
            patch.setattr(ToyModel, "predict_together", broken)
            one.turn()
        for prompt, each in zip(PROMPTS, streams, strict=False):
            with pytest.raises(EdgespecError, match="a pass broke"):
                each.run()
            assert each.result.finish_reason == "error"
            written = each.result.tokens
            assert written and alone(prompt, max_new_tokens=NEW).tokens[: len(written)] == written
        assert not any(one.taken)
        again = [stream(one, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        one.run()
        for prompt, each in zip(PROMPTS, again, strict=True):
            assert facts(each.result) == facts(alone(prompt, max_new_tokens=NEW))


def test_a_drafters_pass_that_fails_within_a_round_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts that were begun are given up; the next requests read with the same sessions."""
    drafter = session()
    with driven(drafter=drafter) as (one, _):
        streams = [stream(one, prompt, max_new_tokens=40) for prompt in PROMPTS[:2]]
        usual, failures = ToyModel.predict_together, list[int]()

        def fails_at_steps(model: ToyModel, rows: Sequence[Rows]) -> list[Predictions]:
            if model is drafter.model and any(len(each.tokens) == each.wanted == 1 for each in rows):
                failures.append(len(rows))
                raise EdgespecError("a pass broke")
            return usual(model, rows)

        with monkeypatch.context() as patch:
            patch.setattr(ToyModel, "predict_together", fails_at_steps)
            one.run()
        assert failures
        for prompt, each in zip(PROMPTS, streams, strict=False):
            with pytest.raises(EdgespecError, match="a pass broke"):
                each.run()
            written = each.result.tokens
            assert written and alone(prompt, max_new_tokens=40).tokens[: len(written)] == written
        again = [stream(one, prompt, max_new_tokens=40) for prompt in PROMPTS[:3]]
        one.run()
        for prompt, each in zip(PROMPTS, again, strict=False):
            assert facts(each.result) == facts(alone(prompt, max_new_tokens=40))
            drafts = each.result.stats.by_source["model"]
            assert drafts.accepted == drafts.drafted > 0


def test_room_that_fails_empties_all_caches_and_the_others_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with driven(chunk=16) as (one, _):
        others = [stream(one, prompt, max_new_tokens=40) for prompt in (LONG, PROMPTS[0])]
        while reads(others[1]):
            one.turn()

        def scarce(self: ToySession, capacity: int) -> None:
            for each in runner_of(one.model).seats.sessions:
                each.rewind(0)
            raise DeviceError("not enough memory")

        failing = stream(one, PROMPTS[2], max_new_tokens=NEW)
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "_has_room", lambda *asked: True)
            patch.setattr(Seats, "take", taking(scarce, Seats.take))
            while not failing.ended:
                one.turn()
        one.run()
        with pytest.raises(DeviceError):
            failing.run()
        for prompt, each in zip((LONG, PROMPTS[0]), others, strict=True):
            assert facts(each.result) == facts(alone(prompt, max_new_tokens=40))


def taking(reserve: Any, take: Any) -> Any:
    """Seats whose sessions make room by ``reserve``."""

    def taken_with(self: Seats, *args: Any, **options: Any) -> Any:
        seat = take(self, *args, **options)
        seat.target.reserve = partial(reserve, seat.target)
        return seat

    return taken_with
