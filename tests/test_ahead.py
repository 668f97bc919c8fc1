"""Whether to draft ahead: what is begun, what it costs, what it gains, on a clock that the tests turn."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from edgespec.decoding.draft import Remarks
from edgespec.drafting.ahead import Beside
from edgespec.drafting.cascade import Followers
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.reading import Reader
from edgespec.requests.request import Request
from edgespec.requests.results import Generation
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.devices import KINDS, Device, Placement, State, run_at_once
from tests.kit.drafters import (
    PROMPT,
    VOCAB,
    Timed,
    ahead_of,
    draft_of,
    mixed,
    model_of,
    plain,
    reader_of,
    stream_of,
)
from tests.kit.toy import markov_logits, round_of
from tools.replay import Clock, lane


@pytest.fixture
def clock() -> Clock:
    """All time is made up; beside it, time of threads."""
    return Clock()


def _beside(clock: Clock, step_s: float = 3.0) -> Beside:
    return Beside(CostCurve({1: step_s}), clock=clock, thread=lane(clock))


@dataclass
class _Steps:
    """Steps of three seconds that are needed with a constant probability."""

    clock: Clock
    chance: float
    taken: int = 0
    seconds: float = 3.0

    def __iter__(self) -> Iterator[float]:
        while True:
            yield self.chance
            self.clock.spend(self.seconds)
            self.taken += 1


@pytest.mark.parametrize(("chance", "taken"), [(0.0, 0), (0.05, 3), (0.6, 3), (0.7, 4), (1.0, 4)])
def test_a_step_beyond_the_pass_is_begun_where_it_is_worth_the_waiting(
    clock: Clock, chance: float, taken: int
) -> None:
    """The fourth step would be two thirds beyond the pass."""
    beside = _beside(clock)
    steps, before = _Steps(clock, chance), clock.now
    assert beside.start(iter(steps), pass_s=10.0, wanted=3) == (taken > 0)
    assert steps.taken == taken
    clock.spend(10.0)
    beside.settle()
    assert clock.now == pytest.approx(before + (12.0 if taken == 4 else 10.0))


def _passes(beside: Beside, clock: Clock, rounds: int, *, slowdown: float, alone: float = 1.0) -> int:
    """How many of so many passes the drafter read beside, each then taking longer by a factor."""
    read_beside = 0
    for _ in range(rounds):
        steps = _Steps(clock, 0.9)
        beside.start(iter(steps), pass_s=10.0, wanted=3)
        ratio = slowdown if steps.taken else alone
        read_beside += steps.taken > 0
        clock.spend(10.0 * ratio)
        beside.observe(ratio)
        beside.settle()
    return read_beside


def test_how_much_the_target_suffers_is_learned_and_ends_what_does_not_pay(clock: Clock) -> None:
    harmless, harmful, slow = (_beside(clock) for _ in range(3))
    assert _passes(harmless, clock, 160, slowdown=1.3) == 150  # every sixteenth pass is left alone
    assert harmless.slowdown == pytest.approx(1.3, rel=0.01)
    assert _passes(harmful, clock, 160, slowdown=3.0) < 20
    assert _passes(harmful, clock, 160, slowdown=3.0) > 0  # it is tried again
    assert _passes(harmful, clock, 400, slowdown=1.0) > 200
    for _ in range(8):  # a machine that is slower than measured is no harm of the drafter's
        slow.observe(1.5)
    _passes(slow, clock, 40, slowdown=1.5, alone=1.5)
    assert slow.slowdown == pytest.approx(1.0, abs=0.07)


def test_a_drafter_says_how_much_longer_its_pass_takes(clock: Clock) -> None:
    """So the pricing learns what passes take alone, whatever their rows."""
    curve, next_logits = CostCurve({1: 5.0, 2: 6.0, 5: 12.0}), markov_logits(5, VOCAB, scale=200.0)
    pricing, beside = Pricing(curve), _beside(clock, 1.0)
    small = Timed(next_logits, VOCAB, clock, CostCurve({1: 1.0}))
    reader = reader_of(small)
    ahead = ahead_of(model_of(small, reader=reader), reader, beside)
    tokens, slowdowns = list(PROMPT), list[float]()
    for number in range(251):
        draft = draft_of(ahead, tokens, 1 + 3 * (number % 3 > 0), prices=pricing.at())
        slowdowns.append(ahead.slowdown)
        rows = 1 + len(draft.tokens)
        took = curve.seconds(rows) * (1.3 if beside._ran else 1.0)
        pricing.observe_pass(rows, took / ahead.slowdown)  # as the policy does
        ahead.observe(replace(round_of(*draft.tokens, draft=draft, accepted=rows - 1), target_s=took))
        tokens = [*tokens, *draft.tokens] if len(tokens) < 500 else list(PROMPT)
    assert slowdowns[0] == 1.0 and slowdowns[-1] == pytest.approx(1.3, rel=0.05)
    assert slowdowns.count(1.0) > 251 // 16
    assert pricing.at().pass_seconds(5) == pytest.approx(12.0, rel=0.05)


def _answer(clock: Clock, *, right: float, side_by_side: bool) -> Generation:
    """128 tokens, a drafter's step taking a quarter of the target's pass."""
    pricing, next_logits = Pricing(CostCurve({1: 1.0, 16: 1.02})), markov_logits(5, VOCAB)
    curve = CostCurve({1: 0.25})
    beside = _beside(clock, 0.25) if side_by_side else None
    small = Timed(mixed(next_logits, markov_logits(6, VOCAB), right), VOCAB, clock, curve)
    target = Timed(next_logits, VOCAB, clock, CostCurve({1: 1.0}))
    without = Followers(CostCurve({1: 0.25, 2: 0.5}))  # what it writes is not guessed: rows are too dear
    reader, remarks = Reader(small, curve, without), Remarks()
    model = model_of(small, reader=reader)
    drafter = model if beside is None else ahead_of(model, reader, beside, remarks)
    result = stream_of(target, drafter, pricing, Request(max_new_tokens=128), clock, remarks).run()
    assert [*PROMPT, *result.tokens] == plain(next_logits, 128)
    return result


@pytest.mark.parametrize("right", [1.0, 0.9, 0.6, 0.0])
def test_two_devices_are_faster_than_one_and_never_much_slower(clock: Clock, right: float) -> None:
    one, two = (_answer(clock, right=right, side_by_side=both) for both in (False, True))
    assert (one.stats.drafted_ahead, one.stats.used_ahead) == (0, 0)
    gained = one.stats.decode_s / two.stats.decode_s
    if right == 1.0:
        assert gained > 1.3 and two.stats.used_ahead > 60
    assert gained > (1.05 if right == 0.9 else 0.97)
    assert two.stats.used_ahead <= two.stats.drafted_ahead
    assert two.stats.to_json()["drafted_ahead"] == two.stats.drafted_ahead


@pytest.mark.parametrize(
    ("one", "other", "state", "expected"),
    [
        ("cuda", "cpu", "ready", True),
        ("qnn:htp", "cpu", "ready", True),
        ("openvino:npu", "cpu", "ready", True),
        ("cpu", "cpu", "ready", False),
        ("cuda", "cuda", "ready", False),
        ("openvino:cpu", "cpu", "ready", False),
        ("qnn:htp", "cpu", "emulated", False),
    ],
)
def test_two_devices_compute_at_once_where_they_are_of_two_kinds(
    one: str, other: str, state: State, expected: bool
) -> None:
    first, second = (
        Placement(Device(KINDS[name], kind), "made up") for name, kind in ((one, state), (other, "ready"))
    )
    assert run_at_once(first, second) is expected is run_at_once(second, first)
