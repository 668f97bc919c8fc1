from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_runtimes import cost
from edgespec_runtimes.cost import CostCurve, measure_cost
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from tests.toy import F32, INT4, LLAMA, ToySession, tiny_bundle


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
        self.now += self.costs[len(tokens)] if len(self.passes) >= 8 else 1.0
        if len(self.passes) in self.disturbed:
            self.now += 9.0
        return super().forward(tokens)

    costs: dict[int, float]
    disturbed: Collection[int] = ()


def _timed(monkeypatch: pytest.MonkeyPatch, costs: dict[int, float]) -> _TimedSession:
    toy = ToySession.markov(0, 50)
    session = _TimedSession(toy._law, 50)
    session.costs = costs
    monkeypatch.setattr(cost, "perf_counter", lambda: session.now)
    return session


def test_each_size_is_timed_and_the_sequence_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _timed(monkeypatch, {1: 1.0, 2: 1.5, 5: 1.75})
    curve = measure_cost(session, rows=(1, 2, 5), repeats=3)
    assert dict(curve.seconds_by_rows) == {1: 1.0, 2: 1.5, 5: 1.75}
    assert session.length == 0
    assert session.passes[8:] == [1, 2, 5] * 4


@pytest.mark.parametrize("disturbed", [(8,), (11,), (12,), (17,), (11, 14), (14, 15, 16, 17, 18, 19)])
def test_the_least_of_each_size_counts(monkeypatch: pytest.MonkeyPatch, disturbed: tuple[int, ...]) -> None:
    session = _timed(monkeypatch, {1: 1.0, 2: 1.5, 5: 1.75})
    session.disturbed = disturbed
    assert dict(measure_cost(session, rows=(1, 2, 5), repeats=3).seconds_by_rows) == {1: 1.0, 2: 1.5, 5: 1.75}


def test_the_first_pass_of_each_size_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _timed(monkeypatch, {1: 1.0, 2: 1.5})
    session.disturbed = (8,)
    assert dict(measure_cost(session, rows=(1, 2), repeats=1).seconds_by_rows) == {1: 1.0, 2: 1.5}


@pytest.fixture
def real(tmp_path: Path) -> Iterator[CpuSession]:
    session = CpuSession(tiny_bundle(tmp_path / "m", LLAMA, INT4).bundle, CpuOptions(threads=1))
    yield session
    session.close()


def test_a_real_session_can_be_measured(real: CpuSession) -> None:
    curve = measure_cost(real, rows=(1, 2, 4), repeats=1)
    assert list(curve.seconds_by_rows) == [1, 2, 4]
    assert all(0 < seconds < 5 for seconds in curve.seconds_by_rows.values())
    assert real.length == 0
