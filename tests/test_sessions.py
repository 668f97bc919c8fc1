"""Loading: the second time little is done again, and whatever goes wrong, nothing stays loaded."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.loading import opening
from edgespec.loading.measurements import Conditions, recall
from edgespec.loading.opening import open_one, open_pair
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import BundleError, TokenizerError
from edgespec_models.graphs.plan import Precision
from edgespec_runtimes.cost import DEFAULT_ROWS, CostCurve, measure_cost
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from edgespec_runtimes.cuda import CudaSession
from edgespec_runtimes.devices import CPU, KINDS, Device, Placement
from tests.native_for_tests import tiny_native
from tests.toy import INT4, LLAMA, tiny_bundle

OPTIONS = CpuOptions(threads=1)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        "target": tiny_bundle(folder / "target", LLAMA, INT4).bundle,
        "drafter": tiny_native(folder / "drafter", LLAMA, "Q4_0", seed=1).bundle,
    }


@pytest.fixture(autouse=True)
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine of the test is, what it measures is kept."""
    monkeypatch.setattr(
        opening, "measure_cost", lambda *a, **o: replace(measure_cost(*a, **o), confirmed=True)
    )


class _Recorded(CpuSession):
    """Says whether it tested itself."""

    tested = False

    def self_test(self) -> bool:
        self.tested = True
        return super().self_test()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> "list[_Recorded]":
    """Every session that is opened."""
    found: list[_Recorded] = []

    def open_session(*arguments: Any, **options: Any) -> _Recorded:
        found.append(_Recorded(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(opening, "CpuSession", open_session)
    return found


def _always_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The machine of this test has one speed; counts what is measured."""
    measured: list[int] = []

    def measure(session: CpuSession, rows: tuple[int, ...], **_: Any) -> CostCurve:
        measured.append(max(rows))
        return CostCurve({n: 1.0 + 0.1 * n for n in rows})

    monkeypatch.setattr(opening, "measure_cost", measure)
    monkeypatch.setattr(opening, "recheck_cost", lambda session, stored, rows: stored)
    return measured


def test_the_second_load_neither_tests_nor_measures(
    bundles: dict[str, Bundle], opened: list[_Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = _always_the_same_shape(monkeypatch)
    curves = []
    for again in (False, True):
        pair = open_pair(bundles["target"], bundles["drafter"], OPTIONS)
        assert pair.drafter is not None and pair.same_vocabulary
        assert pair.target.remembered == pair.drafter.remembered == again
        assert pair.target.session.row_exact
        # Graphs of edgespec's own operators need none.
        assert sum(session.tested for session in opened[-2:]) == (not again)
        curves.append((pair.target.curve, pair.drafter.curve))
        for session in opened:
            session.close()
    assert curves[0] == curves[1]
    assert measured == [32, 32]  # in the first load only
    assert set(curves[0][0].seconds_by_rows) == set(DEFAULT_ROWS)


def test_what_was_found_is_that_of_the_self_test(bundles: dict[str, Bundle], opened: list[_Recorded]) -> None:
    for _ in range(2):
        running = open_one(bundles["target"], OPTIONS, (1, 2))
        known = recall(Conditions.of(bundles["target"], OPTIONS))
        assert known is not None and known.row_exact == running.session.row_exact is True
        assert running.session.predict([1, 2, 3]).logits.shape == (3, LLAMA.vocab_size)
        running.session.close()


def test_the_self_test_of_a_device_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its measurements are not kept under the name of the chip, and another may have taken its place."""
    _always_the_same_shape(monkeypatch)
    half = tiny_bundle(tmp_path / "m", LLAMA, INT4, precision=Precision("float16", "float16")).bundle
    on_cpu, given = Device(CPU, "ready"), list[bool | None]()

    def open_session(bundle: Bundle, _: Device, options: CpuOptions, *, row_exact: bool | None) -> Any:
        given.append(row_exact)
        return CudaSession(bundle, on_cpu, options, row_exact=row_exact)

    monkeypatch.setattr("edgespec_runtimes.cuda.CudaSession", open_session)
    for device in (on_cpu, Device(KINDS["cuda"], "ready", version="1")):
        for remembered in (False, True):
            running = open_pair(half, None, OPTIONS, (Placement(device, "given"), None)).target
            assert running.remembered == remembered
            running.session.close()
    assert given == [None, running.session.row_exact, None, None]


def test_a_curve_that_no_longer_fits_is_measured_again_and_kept(
    bundles: dict[str, Bundle], opened: list[_Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = _always_the_same_shape(monkeypatch)
    where = Conditions.of(bundles["target"], OPTIONS)
    open_one(bundles["target"], OPTIONS, (1, 2)).session.close()
    monkeypatch.setattr(opening, "recheck_cost", lambda *_: None)
    running = open_one(bundles["target"], OPTIONS, (1, 2))
    running.session.close()
    assert not running.remembered and measured == [2, 2]
    assert not opened[1].tested  # the machine's speed is no matter of correctness
    known = recall(where)
    assert known is not None and known.curve == running.curve


def test_what_is_in_doubt_is_not_kept(bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    doubtful = CostCurve({1: 1.0, 2: 1.1}, confirmed=False)
    monkeypatch.setattr(opening, "measure_cost", lambda *_, **__: doubtful)
    for _ in range(2):
        running = open_one(bundles["target"], OPTIONS, (1, 2))
        running.session.close()
        assert (running.curve, running.remembered) == (doubtful, False)
    assert recall(Conditions.of(bundles["target"], OPTIONS)) is None


def test_a_stored_curve_serves_those_who_need_less_of_it(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = _always_the_same_shape(monkeypatch)
    for rows in ((1, 2), (1, 2, 4, 8), (1, 4), (1, 2, 3)):
        open_one(bundles["target"], OPTIONS, rows).session.close()
    assert measured == [2, 8, 3]


def test_the_check_does_not_spoil_what_is_kept(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few passes in a bad moment scale this load's curve, not the next one's."""
    _always_the_same_shape(monkeypatch)
    first = open_one(bundles["target"], OPTIONS, (1, 2))
    slowed = CostCurve({1: 50.0, 2: 60.0})
    monkeypatch.setattr(opening, "recheck_cost", lambda *_: slowed)
    second = open_one(bundles["target"], OPTIONS, (1, 2))
    for running in (first, second):
        running.session.close()
    known = recall(Conditions.of(bundles["target"], OPTIONS))
    assert second.curve == slowed and known is not None and known.curve == first.curve


def _broken(folder: Path) -> Bundle:
    """A bundle whose graph ONNX Runtime cannot load, though its sizes are right."""
    copy = tiny_native(folder, LLAMA, "Q4_0", seed=2)
    graph = copy.path / "model.onnx"
    graph.write_bytes(b"\0" * graph.stat().st_size)
    return copy.bundle


@pytest.mark.parametrize("broken", ["target", "drafter", "tokenizer"])
def test_what_does_not_load_leaves_nothing_loaded(
    bundles: dict[str, Bundle], opened: list[_Recorded], tmp_path: Path, broken: str
) -> None:
    if broken == "tokenizer":
        other = tiny_native(tmp_path / "small", replace(LLAMA, vocab_size=300)).bundle
        pair = bundles | {"drafter": other}
    else:
        pair = bundles | {broken: _broken(tmp_path / "broken")}
    with pytest.raises(TokenizerError if broken == "tokenizer" else BundleError):
        open_pair(pair["target"], pair["drafter"], OPTIONS)
    assert [session._io for session in opened] == [None]


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "at"), [(opening, "measure_cost"), (opening, "remember"), (Bundle, "tokenizer")]
)
def test_ctrl_c_leaves_nothing_loaded_and_nothing_kept(
    bundles: dict[str, Bundle],
    opened: list[_Recorded],
    own_measurements: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    at: str,
) -> None:
    replacement: Any = property(_interrupt) if where is Bundle else _interrupt
    monkeypatch.setattr(where, at, replacement)
    with pytest.raises(KeyboardInterrupt):
        open_pair(Bundle(bundles["target"].path), Bundle(bundles["drafter"].path), OPTIONS)
    assert opened and all(session._io is None for session in opened)
    assert not own_measurements.exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec-load")]


def test_the_target_loads_while_the_drafter_does(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=60)

    class Waiting(CpuSession):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            both.wait()
            super().__init__(*arguments, **options)

    monkeypatch.setattr(opening, "CpuSession", Waiting)
    pair = open_pair(bundles["target"], bundles["drafter"], OPTIONS)
    assert pair.drafter is not None
    assert pair.target.session is not pair.drafter.session
    ends: tuple[Callable[[], None], ...] = (pair.target.session.close, pair.drafter.session.close)
    for close in ends:
        close()
