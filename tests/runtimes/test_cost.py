import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafting.pricing import Pricing
from edgespec_models.progress import Progress
from edgespec_runtimes import cost
from edgespec_runtimes.cost import (
    CostCurve,
    look_again,
    measure_context,
    measure_cost,
    recheck_cost,
    sample_cost,
)
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Session
from tests.kit.native import tiny_native
from tests.kit.toy import F32, LLAMA, ToySession, markov_logits

READING = 2
"""Passes in which a toy reads the tokens that others are timed behind."""


@pytest.mark.parametrize(
    ("points", "rows", "seconds"),
    [
        *(({6: 5.0, 1: 1.0, 2: 3.0}, n, t) for n, t in ((1, 1.0), (3, 3.5), (5, 4.5), (10, 7.0))),
        *(({1: 1.0, 8: 2.0, 12: 1.9}, n, t) for n, t in ((10, 1.95), (200, 1.9))),  # a noisy end
        *(({3: 0.5}, n, 0.5) for n in (0, 1, 9)),
    ],
)
def test_cost_is_linear_between_points_and_never_falls_beyond_them(
    points: dict[int, float], rows: int, seconds: float
) -> None:
    assert CostCurve(points).seconds(rows) == pytest.approx(seconds)


@given(st.dictionaries(st.integers(1, 40), st.floats(1e-4, 10.0), min_size=1), st.integers(0, 100))
def test_cost_is_positive_and_exact_where_measured(points: dict[int, float], rows: int) -> None:
    curve = CostCurve(points)
    assert curve.seconds(rows) > 0
    assert {n: curve.seconds(n) for n in points} == pytest.approx(points)


def _on_clock_of(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "perf_counter", lambda: session.now)


class _TimedSession(ToySession):
    """Its passes take as long as they are told to, on a clock of its own."""

    now = 0.0
    reading = READING
    disturbed: Collection[int] = ()
    jitter: Callable[[], float] = staticmethod(lambda: 9.0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: dict[int, float]) -> None:
        super().__init__(markov_logits(0, 50), 50)
        self.costs = costs
        _on_clock_of(self, monkeypatch)

    def forward(self, tokens: Sequence[int]) -> F32:
        self.now += self.costs[len(tokens)] if len(self.passes) >= self.reading else 1.0
        if len(self.passes) in self.disturbed:
            self.now += self.jitter()
        return super().forward(tokens)


SIZES = {1: 1.0, 2: 1.5, 5: 1.75}


@pytest.mark.parametrize("disturbed", [(), (2, 3, 4), (5,), (6,), (11,), (5, 8), (8, 9, 10, 11, 12, 13)])
def test_the_least_of_each_size_counts(monkeypatch: pytest.MonkeyPatch, disturbed: tuple[int, ...]) -> None:
    """The first pass of each size never does."""
    session, told = _TimedSession(monkeypatch, SIZES), list[Progress]()
    session.disturbed = disturbed
    curve = measure_cost(session, rows=tuple(SIZES), repeats=3, progress=told.append)
    assert dict(curve.seconds_by_rows) == SIZES and session.length == 0
    if not disturbed:
        assert session.passes[READING:] == [1, 2, 5] * 4
    assert [(report.done, report.total) for report in told[:4]] == [(n, 4) for n in range(1, 5)]
    assert {report.done for report in told[4:]} <= {4}


def test_a_size_that_was_disturbed_each_time_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for disturbed, again in (((6, 9), [2, 2]), ((5, 8), [1, 1])):  # both passes of that size that count
        session = _TimedSession(monkeypatch, SIZES)
        session.disturbed = disturbed
        if again == [2, 2]:  # else by as much each time
            session.jitter = itertools.count(1.0).__next__
        curve = measure_cost(session, rows=(1, 2, 5), repeats=2)
        assert curve == CostCurve(SIZES)
        assert session.passes[READING + 9 :] == again


def test_a_pass_costs_no_more_than_a_wider_one(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = measure_cost(_TimedSession(monkeypatch, SIZES | {1: 3.0}), rows=(1, 2, 5), repeats=2)
    assert curve == CostCurve({1: 1.5, 2: 1.5, 5: 1.75}, confirmed=False)


def test_where_weights_come_from_the_disk_the_mean_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass reads other tokens, whose experts may have to come from the disk too."""
    session = _TimedSession(monkeypatch, SIZES)
    session.disturbed = (6, 11)  # a pass over one row, and one over two
    curve = sample_cost(session, (1, 2, 5), 4)
    assert curve == CostCurve({1: 1.75, 2: 1.75, 5: 1.75})  # a wider pass took no longer
    assert session.passes[READING:] == [5] * 4 + [1] * 4 + [2] * 4 + [5] * 4
    session.reading = READING + len(session.passes)
    session.disturbed, session.jitter = range(100), lambda: 0.25
    assert sample_cost(session, (1, 2, 5), 4) == CostCurve({1: 1.25, 2: 1.75, 5: 2.0})
    assert session.length == 0


def test_a_machine_that_never_settles_is_not_timed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _TimedSession(monkeypatch, SIZES)
    session.jitter = lambda: 2.0 ** len(session.passes)
    session.disturbed = range(1000)
    assert not measure_cost(session, rows=(1, 2), repeats=2).confirmed
    assert len(session.passes) <= READING + 2 * 7


TRUE = {1: 0.040, 2: 0.047, 3: 0.060, 4: 0.070, 5: 0.082, 6: 0.093, 8: 0.120, 12: 0.180, 16: 0.240, 32: 0.480}


@pytest.mark.parametrize("seed", range(20))
def test_disturbed_passes_turn_speculation_neither_off_nor_on(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One pass in five takes up to ten times as long."""
    session, draws = _TimedSession(monkeypatch, TRUE), random.Random(seed)
    session.disturbed = [at for at in range(200) if draws.random() < 0.2]
    session.jitter = lambda: draws.uniform(0.02, 0.4)
    curve = measure_cost(session)
    for n, seconds in TRUE.items():
        assert seconds <= curve.seconds(n) * (1 + 1e-9) <= 1.15 * seconds
    for likely, drafted in ((0.95, 7), (0.05, 0)):
        for known in (curve, CostCurve(TRUE)):
            assert Pricing(known).at().keep([likely] * 7)[0] == drafted


def _rechecked(
    stored: dict[int, float], now: dict[int, float], *, disturbed: Collection[int] = (), wide: int = 8
) -> tuple[CostCurve | None, _TimedSession]:
    with pytest.MonkeyPatch.context() as patch:
        session = _TimedSession(patch, now)
        session.reading = 1
        session.disturbed = disturbed
        return recheck_cost(session, CostCurve(stored), wide), session


@given(st.floats(0.85, 1.15) | st.floats(1.25, 20.0))
def test_a_stored_curve_follows_the_machines_speed(factor: float) -> None:
    curve, session = _rechecked(TRUE, {n: t * factor for n, t in TRUE.items()})
    assert curve is not None
    for n, seconds in TRUE.items():
        assert curve.seconds(n) == pytest.approx(seconds * factor)
    assert session.passes == [1] + [1, 1, 8] * (1 if factor <= 1.2 else 3) and session.length == 0


@given(st.floats(0.1, 0.8))
def test_a_curve_of_a_machine_that_was_busy_is_measured_again(factor: float) -> None:
    assert _rechecked(TRUE, {n: t * factor for n, t in TRUE.items()})[0] is None


SHAPES = [{1: 0.040, 8: 0.300}, {1: 0.100, 8: 0.120}, {1: 0.040, 8: 0.041}]
WRONG = [{1: 4.0 * TRUE[1], 8: TRUE[8]}, {1: 0.25 * TRUE[1], 8: TRUE[8]}]  # all would be drafted, or nothing


OTHERS = [*((TRUE, shape) for shape in SHAPES), *((TRUE | single, TRUE) for single in WRONG)]


@pytest.mark.parametrize(("stored", "now"), OTHERS)
def test_another_shape_is_measured_again(stored: dict[int, float], now: dict[int, float]) -> None:
    curve, session = _rechecked(stored, now)
    assert curve is None and session.length == 0


def test_steps_and_cliffs_survive_the_check() -> None:
    steps = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.9, 5: 1.9, 8: 2.0}
    curve, _ = _rechecked(steps, {n: 2 * t for n, t in steps.items()})
    assert curve is not None
    assert dict(curve.seconds_by_rows) == {n: 2 * t for n, t in steps.items()}


FAST = {1: 0.038, 2: 0.0475, 4: 0.072, 8: 0.123}
SLOW = {1: 0.048, 2: 0.0515, 4: 0.072, 8: 0.121}
"""The reference machine's two states: where its cores share a memory path, a single row waits for it."""


@pytest.mark.parametrize(("stored", "now"), [(FAST, SLOW), (SLOW, FAST)])
def test_another_state_of_memory_changes_the_single_row_only(
    stored: dict[int, float], now: dict[int, float]
) -> None:
    curve, _ = _rechecked(stored, now)
    assert curve is not None
    assert (curve.seconds(1), curve.seconds(8)) == pytest.approx((now[1], now[8]))
    for n, seconds in now.items():
        assert curve.seconds(n) == pytest.approx(seconds, rel=0.11)


@pytest.mark.parametrize("disturbed", [(1,), (2,), (3,), (1, 2), (1, 2, 3), (2, 3, 4, 6), (3, 6)])
def test_a_disturbed_check_is_made_again(disturbed: tuple[int, ...]) -> None:
    curve, _ = _rechecked(TRUE, TRUE, disturbed=disturbed)
    assert curve is not None and dict(curve.seconds_by_rows) == pytest.approx(TRUE)


HICCUP = {1: 0.024, 2: 0.031, 3: 0.038, 4: 0.038, 5: 0.038, 6: 0.048, 8: 0.062}
FREE = {1: 0.024, 2: 0.0245, 3: 0.025, 4: 0.0255, 5: 0.035, 6: 0.048, 8: 0.062}
"""A machine on which rows up to four are free, and what was measured beside a busy neighbour."""


@pytest.mark.parametrize(("stored", "passes"), [(HICCUP, [2, 3, 4, 5, 6]), (FREE, [5, 6])])
def test_what_was_measured_in_a_hiccup_is_corrected_later(
    monkeypatch: pytest.MonkeyPatch, stored: dict[int, float], passes: list[int]
) -> None:
    session = _TimedSession(monkeypatch, FREE)
    session.reading = 0
    curve = CostCurve(stored, True, 1e-6, 1e-7)
    looked = look_again(session, curve, 8)
    expected = FREE | ({5: 0.038} if stored is HICCUP else {})  # less than a tenth from what it was
    assert dict(looked.seconds_by_rows) == pytest.approx(expected)
    assert looked == replace(curve, seconds_by_rows=looked.seconds_by_rows)
    assert session.passes == passes and session.length == 0
    assert (looked is curve) == (stored is FREE)


def test_every_pass_of_a_curve_in_doubt_is_looked_at_until_none_is_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = _TimedSession(monkeypatch, FREE)
    session.reading = 0
    doubtful = CostCurve({n: t * (1.2 if n in (2, 4) else 1.02) for n, t in FREE.items()}, confirmed=False)
    looked = look_again(session, doubtful, 9)
    assert not looked.confirmed and looked.seconds_by_rows[4] == pytest.approx(FREE[4])
    assert session.passes == list(FREE)
    assert look_again(session, looked, 9) == replace(looked, confirmed=True)


def test_a_look_that_is_disturbed_makes_nothing_dearer(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _TimedSession(monkeypatch, FREE)
    session.reading, session.disturbed = 0, range(100)
    assert look_again(session, CostCurve(HICCUP), 8) == CostCurve(HICCUP)


def test_a_curve_of_one_point_can_be_checked() -> None:
    curve, _ = _rechecked({1: 1.0}, {1: 3.0}, wide=1)
    assert curve == CostCurve({1: 3.0})


def test_a_real_session_can_be_measured(tmp_path: Path) -> None:
    session = open_cpu(tiny_native(tmp_path / "m", LLAMA, "Q4_0").bundle, CpuOptions(threads=1))
    curve = measure_cost(session, rows=(1, 2, 4), repeats=1)
    assert list(curve.seconds_by_rows) == [1, 2, 4] and session.length == 0
    assert all(0 < seconds < 5 for seconds in curve.seconds_by_rows.values())
    session.close()


class _Attending(Session):
    """Its passes take 1 s and 0.1 s a row, and 10 and 2 ms more for each token in the cache."""

    now = 0.0

    def predict(self, tokens: Sequence[int]) -> Predictions:
        self.now += 1.0 + 0.1 * len(tokens) + self.length * (0.010 + 0.002 * len(tokens))
        return super().predict(tokens)


def test_what_attention_adds_along_a_context_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_cpu(tiny_native(tmp_path / "m", LLAMA, "Q4_0").bundle, CpuOptions(threads=1))
    session = _Attending(opened.model)
    opened.close()
    _on_clock_of(session, monkeypatch)
    curve = measure_context(session, CostCurve({1: 1.1, 4: 1.4}))
    assert curve.context_s == pytest.approx(0.010) and curve.row_context_s == pytest.approx(0.002)
    assert curve.seconds(4, 1000) == pytest.approx(1.4 + 10.0 + 8.0)
    assert curve.seconds(4, 1000, sequences=3) == pytest.approx(1.4 + 30.0 + 8.0)
    assert session.length == session.kv_bytes == 0
    session.close()


def test_a_cache_that_cannot_be_copied_leaves_the_curve_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uncopied(_TimedSession):
        def save(self, at: int) -> None:
            return None

    curve = CostCurve({1: 1.0, 8: 2.0})
    session = Uncopied(monkeypatch, dict.fromkeys(range(1, 20), 1.0))
    assert measure_context(session, curve) == curve and session.length == 0


def test_a_check_keeps_what_attention_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = CostCurve(TRUE, True, 0.010, 0.002)
    wide = max(TRUE)
    curve = recheck_cost(_TimedSession(monkeypatch, {n: 1.1 * t for n, t in TRUE.items()}), stored, wide)
    assert curve is not None
    assert (curve.context_s, curve.row_context_s) == pytest.approx((0.011, 0.0022))
