import random
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafting.pricing import Pricing
from edgespec_models.progress import Progress
from edgespec_runtimes import cost
from edgespec_runtimes.cost import CostCurve, measure_cost, recheck_cost
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from tests.native_for_tests import tiny_native
from tests.toy import F32, LLAMA, ToySession

READING = 2
"""Passes in which a toy reads the tokens that others are timed behind."""


def test_between_measured_points_cost_is_linear() -> None:
    curve = CostCurve({1: 1.0, 2: 3.0, 6: 5.0})
    assert [curve.seconds(n) for n in range(1, 7)] == [1.0, 3.0, 3.5, 4.0, 4.5, 5.0]


def test_beyond_the_last_point_the_last_slope_goes_on() -> None:
    assert CostCurve({1: 1.0, 2: 3.0, 6: 5.0}).seconds(10) == 7.0


def test_a_noisy_end_does_not_make_long_passes_free() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0, 12: 1.9})
    assert curve.seconds(10) == pytest.approx(1.95)
    assert curve.seconds(200) == 1.9


def test_the_order_of_the_points_does_not_matter() -> None:
    assert CostCurve({6: 5.0, 1: 1.0, 2: 3.0}).seconds(3) == 3.5


@pytest.mark.parametrize("rows", [0, 1, 3, 9])
def test_one_point_is_a_constant(rows: int) -> None:
    assert CostCurve({3: 0.5}).seconds(rows) == 0.5


@given(st.dictionaries(st.integers(1, 40), st.floats(1e-4, 10.0), min_size=1), st.integers(0, 100))
def test_cost_is_positive_and_exact_where_measured(points: dict[int, float], rows: int) -> None:
    curve = CostCurve(points)
    assert curve.seconds(rows) > 0
    for n, seconds in points.items():
        assert curve.seconds(n) == pytest.approx(seconds)


class _TimedSession(ToySession):
    """Its passes take as long as they are told to, on a clock of its own."""

    now = 0.0

    def forward(self, tokens: Sequence[int]) -> F32:
        self.now += self.costs[len(tokens)] if len(self.passes) >= self.reading else 1.0
        if len(self.passes) in self.disturbed:
            self.now += self.jitter()
        return super().forward(tokens)

    costs: dict[int, float]
    reading = READING
    disturbed: Collection[int] = ()
    jitter: Callable[[], float] = staticmethod(lambda: 9.0)


def _timed(monkeypatch: pytest.MonkeyPatch, costs: dict[int, float]) -> _TimedSession:
    toy = ToySession.markov(0, 50)
    session = _TimedSession(toy._next_logits, 50)
    session.costs = costs
    monkeypatch.setattr(cost, "perf_counter", lambda: session.now)
    return session


def test_each_size_is_timed_and_the_sequence_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _timed(monkeypatch, {1: 1.0, 2: 1.5, 5: 1.75})
    curve = measure_cost(session, rows=(1, 2, 5), repeats=3)
    assert dict(curve.seconds_by_rows) == {1: 1.0, 2: 1.5, 5: 1.75}
    assert session.length == 0
    assert session.passes[READING:] == [1, 2, 5] * 4


@pytest.mark.parametrize("disturbed", [(2,), (5,), (6,), (11,), (5, 8), (8, 9, 10, 11, 12, 13)])
def test_the_least_of_each_size_counts(monkeypatch: pytest.MonkeyPatch, disturbed: tuple[int, ...]) -> None:
    session = _timed(monkeypatch, {1: 1.0, 2: 1.5, 5: 1.75})
    session.disturbed = disturbed
    assert dict(measure_cost(session, rows=(1, 2, 5), repeats=3).seconds_by_rows) == {1: 1.0, 2: 1.5, 5: 1.75}


def test_the_first_pass_of_each_size_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _timed(monkeypatch, {1: 1.0, 2: 1.5})
    session.disturbed = (READING,)
    assert dict(measure_cost(session, rows=(1, 2), repeats=1).seconds_by_rows) == {1: 1.0, 2: 1.5}


def test_a_size_that_was_disturbed_each_time_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _timed(monkeypatch, {1: 1.0, 2: 1.5, 5: 1.75})
    session.disturbed = (6, 9)  # both passes over two rows that count
    session.jitter = lambda: float(len(session.passes))
    curve = measure_cost(session, rows=(1, 2, 5), repeats=2)
    assert curve.seconds(2) == 1.5 and curve.confirmed
    assert session.passes[READING + 9 :] == [2, 2]


def test_a_load_that_lasts_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _timed(monkeypatch, {1: 1.0, 2: 1.5, 5: 1.75})
    session.disturbed = (5, 8)  # both passes over one row that count, by as much
    curve = measure_cost(session, rows=(1, 2, 5), repeats=2)
    assert curve == CostCurve({1: 1.0, 2: 1.5, 5: 1.75})
    assert session.passes[READING + 9 :] == [1, 1]


def test_a_pass_costs_no_more_than_a_wider_one(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _timed(monkeypatch, {1: 3.0, 2: 1.5, 5: 1.75})
    curve = measure_cost(session, rows=(1, 2, 5), repeats=2)
    assert curve == CostCurve({1: 1.5, 2: 1.5, 5: 1.75}, confirmed=False)


def test_a_machine_that_never_settles_is_not_timed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _timed(monkeypatch, {1: 1.0, 2: 1.5})
    session.jitter = lambda: 2.0 ** len(session.passes)
    session.disturbed = range(1000)
    assert not measure_cost(session, rows=(1, 2), repeats=2).confirmed
    assert len(session.passes) <= READING + 2 * 7


def test_progress_goes_from_round_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []
    measure_cost(_timed(monkeypatch, {1: 1.0, 2: 1.5}), rows=(1, 2), repeats=2, progress=told.append)
    assert [(report.done, report.total) for report in told[:3]] == [(1, 3), (2, 3), (3, 3)]
    assert {report.done for report in told[3:]} <= {3}


TRUE = {1: 0.040, 2: 0.047, 3: 0.060, 4: 0.070, 5: 0.082, 6: 0.093, 8: 0.120, 12: 0.180, 16: 0.240, 32: 0.480}


@pytest.mark.parametrize("seed", range(20))
def test_disturbed_passes_turn_speculation_neither_off_nor_on(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One pass in five takes up to ten times as long."""
    session, draws = _timed(monkeypatch, TRUE), random.Random(seed)
    session.disturbed = [at for at in range(200) if draws.random() < 0.2]
    session.jitter = lambda: draws.uniform(0.02, 0.4)
    curve = measure_cost(session)
    for n, seconds in TRUE.items():
        assert seconds <= curve.seconds(n) * (1 + 1e-9) <= 1.15 * seconds
    for likely, drafted in ((0.95, 7), (0.05, 0)):
        assert (
            Pricing(curve).keep([likely] * 7)[0] == Pricing(CostCurve(TRUE)).keep([likely] * 7)[0] == drafted
        )


def _rechecked(
    stored: dict[int, float], now: dict[int, float], *, disturbed: Collection[int] = (), wide: int = 8
) -> tuple[CostCurve | None, _TimedSession]:
    with pytest.MonkeyPatch.context() as patch:
        session = _timed(patch, now)
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


@pytest.mark.parametrize("now", [{1: 0.040, 8: 0.300}, {1: 0.100, 8: 0.120}, {1: 0.040, 8: 0.041}])
def test_another_shape_is_measured_again(now: dict[int, float]) -> None:
    curve, session = _rechecked(TRUE, now)
    assert curve is None and session.length == 0


@pytest.mark.parametrize("disturbed", [(1,), (2,), (3,), (1, 2), (1, 2, 3), (2, 3, 4, 6), (3, 6)])
def test_a_disturbed_check_is_made_again(disturbed: tuple[int, ...]) -> None:
    curve, _ = _rechecked(TRUE, TRUE, disturbed=disturbed)
    assert curve is not None and dict(curve.seconds_by_rows) == pytest.approx(TRUE)


@pytest.mark.parametrize("wrong", [0.25, 4.0])
def test_a_single_row_that_was_measured_wrong_is_found_at_the_next_load(wrong: float) -> None:
    """Stored too dear it would have everything drafted, too cheap nothing."""
    curve, _ = _rechecked(TRUE | {1: TRUE[1] * wrong}, TRUE)
    assert curve is None


def test_a_curve_of_one_point_can_be_checked() -> None:
    curve, _ = _rechecked({1: 1.0}, {1: 3.0}, wide=1)
    assert curve == CostCurve({1: 3.0})


@pytest.fixture
def real(tmp_path: Path) -> Iterator[CpuSession]:
    session = CpuSession(tiny_native(tmp_path / "m", LLAMA, "Q4_0").bundle, CpuOptions(threads=1))
    yield session
    session.close()


def test_a_real_session_can_be_measured(real: CpuSession) -> None:
    curve = measure_cost(real, rows=(1, 2, 4), repeats=1)
    assert list(curve.seconds_by_rows) == [1, 2, 4]
    assert all(0 < seconds < 5 for seconds in curve.seconds_by_rows.values())
    assert real.length == 0
