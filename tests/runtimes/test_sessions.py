"""Loading: the second time little is done again, and whatever goes wrong, nothing stays loaded."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from edgespec.loading import opening
from edgespec.loading.measurements import Conditions, Measurement, recall
from edgespec.loading.opening import TimedModel, open_one, open_pair
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import BundleError, TokenizerError
from edgespec_models.graphs.plan import Precision
from edgespec_runtimes.cost import DEFAULT_ROWS, CostCurve
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.cuda import open_cuda
from edgespec_runtimes.devices import CPU, KINDS, Device, Placement
from edgespec_runtimes.session import Session
from tests.kit.native import tiny_native
from tests.kit.toy import INT4, LLAMA, tiny_bundle

OPTIONS = CpuOptions(threads=1)
Bundles = dict[str, Bundle]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        "target": tiny_bundle(folder / "target", LLAMA, INT4).bundle,
        "drafter": tiny_native(folder / "drafter", LLAMA, "Q4_0", seed=1).bundle,
    }


class Opened(list[Session]):
    """Every session that is opened, and how many of them tested themselves."""

    tested = 0


@pytest.fixture
def opened(monkeypatch: MonkeyPatch, timings: Callable[..., None]) -> Opened:
    sessions, test = Opened(), Session.self_test

    def open_session(*arguments: Any, **options: Any) -> Session:
        sessions.append(open_cpu(*arguments, **options))
        return sessions[-1]

    def tested(session: Session) -> bool:
        sessions.tested += 1
        return test(session)

    timings(open_cpu=open_session)
    monkeypatch.setattr(Session, "self_test", tested)
    return sessions


@pytest.fixture
def measured(timings: Callable[..., None]) -> list[int]:
    """The machine of this test has one speed; counts what is measured."""
    measured: list[int] = []

    def measure(session: Session, rows: tuple[int, ...], **_: Any) -> CostCurve:
        measured.append(max(rows))
        return CostCurve({n: 1.0 + 0.1 * n for n in rows})

    timings(measure_cost=measure, recheck_cost=lambda session, stored, rows: stored)
    return measured


def _load(bundles: Bundles, *rows: int) -> TimedModel:
    """Open the target, and close it again."""
    running = open_one(bundles["target"], OPTIONS, rows or (1, 2))
    running.session.close()
    return running


def _kept(bundles: Bundles) -> Measurement | None:
    return recall(Conditions.of(bundles["target"], OPTIONS))


def test_the_second_load_neither_tests_nor_measures(
    bundles: Bundles, opened: Opened, measured: list[int]
) -> None:
    curves = []
    for again in (False, True):
        pair = open_pair(bundles["target"], bundles["drafter"], OPTIONS)
        assert pair.drafter is not None and pair.same_vocabulary
        assert pair.target.remembered == pair.drafter.remembered == again
        known = _kept(bundles)
        assert known is not None and known.row_exact == pair.target.session.model.row_exact is True
        assert opened.tested == 1  # graphs of edgespec's own operators need none
        curves.append((pair.target.curve, pair.drafter.curve))
        for session in opened:
            session.close()
    assert curves[0] == curves[1]
    assert measured == [32, 32]  # in the first load only
    assert set(curves[0][0].seconds_by_rows) == set(DEFAULT_ROWS)


@pytest.mark.usefixtures("measured")
def test_the_self_test_of_a_device_is_repeated(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Its measurements are not kept under the name of the chip, and another may have taken its place."""
    half = tiny_bundle(tmp_path / "m", LLAMA, INT4, precision=Precision("float16", "float16")).bundle
    on_cpu, exact = Device(CPU, "ready"), list[bool | None]()

    def open_session(bundle: Bundle, _: Device, options: CpuOptions, *, row_exact: bool | None) -> Any:
        exact.append(row_exact)
        return open_cuda(bundle, on_cpu, options, row_exact=row_exact)

    monkeypatch.setattr("edgespec_runtimes.cuda.open_cuda", open_session)
    for device in (on_cpu, Device(KINDS["cuda"], "ready", version="1")):
        for remembered in (False, True):
            running = open_pair(half, None, OPTIONS, (Placement(device, "given"), None)).target
            assert running.remembered == remembered
            running.session.close()
    assert exact == [None, running.session.model.row_exact, None, None]


def test_a_curve_that_no_longer_fits_is_measured_again_and_kept(
    bundles: Bundles, opened: Opened, measured: list[int], timings: Callable[..., None]
) -> None:
    _load(bundles)
    tested = opened.tested
    timings(recheck_cost=lambda *_: None)
    running, known = _load(bundles), _kept(bundles)
    assert not running.remembered and measured == [2, 2]
    assert opened.tested == tested  # the machine's speed is no matter of correctness
    assert known is not None and known.curve == running.curve


def test_what_is_in_doubt_is_kept_and_checked_by_the_next_load(
    bundles: Bundles, timings: Callable[..., None]
) -> None:
    doubtful = CostCurve({1: 1.0, 2: 1.1}, confirmed=False)
    timings(measure_cost=lambda *_, **__: doubtful, measure_context=lambda _, curve: curve)
    as_it_is = dict.fromkeys(("recheck_cost", "look_again"), lambda session, curve, rows: curve)
    timings(**as_it_is)
    first, second = _load(bundles), _load(bundles)
    assert (first.curve, first.remembered) == (doubtful, False)
    assert second.curve.seconds_by_rows == doubtful.seconds_by_rows and second.remembered


def test_a_stored_curve_serves_those_who_need_less_of_it(bundles: Bundles, measured: list[int]) -> None:
    for rows in ((1, 2), (1, 2, 4, 8), (1, 4), (1, 2, 3)):
        _load(bundles, *rows)
    assert measured == [2, 8, 3]


@pytest.mark.usefixtures("measured")
def test_the_check_does_not_spoil_what_is_kept(bundles: Bundles, timings: Callable[..., None]) -> None:
    """A few passes in a bad moment scale this load's curve, not the next one's."""
    first, slowed = _load(bundles), CostCurve({1: 50.0, 2: 60.0})
    timings(recheck_cost=lambda *_: slowed)
    second, known = _load(bundles), _kept(bundles)
    assert second.curve == slowed and known is not None and known.curve == first.curve


def _broken(folder: Path) -> Bundle:
    """A bundle whose graph ONNX Runtime cannot load, though its sizes are right."""
    copy = tiny_native(folder, LLAMA, "Q4_0", seed=2)
    graph = copy.path / "model.onnx"
    graph.write_bytes(b"\0" * graph.stat().st_size)
    return copy.bundle


@pytest.mark.parametrize("broken", ["target", "drafter", "tokenizer"])
def test_what_does_not_load_leaves_nothing_loaded(
    bundles: Bundles, opened: Opened, tmp_path: Path, broken: str
) -> None:
    if broken == "tokenizer":
        other = tiny_native(tmp_path / "small", replace(LLAMA, vocab_size=300)).bundle
        pair = bundles | {"drafter": other}
    else:
        pair = bundles | {broken: _broken(tmp_path / "broken")}
    error, message = (TokenizerError, None) if broken == "tokenizer" else (BundleError, "cannot load")
    with pytest.raises(error, match=message):
        open_pair(pair["target"], pair["drafter"], OPTIONS)
    assert all(session.closed for session in opened)


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "at"), [(opening, "measure_cost"), (opening, "remember"), (Bundle, "tokenizer")]
)
def test_ctrl_c_leaves_nothing_loaded_and_nothing_kept(
    bundles: Bundles, opened: Opened, own_measurements: Path, monkeypatch: MonkeyPatch, where: Any, at: str
) -> None:
    replacement: Any = property(_interrupt) if where is Bundle else _interrupt
    monkeypatch.setattr(where, at, replacement)
    with pytest.raises(KeyboardInterrupt):
        open_pair(Bundle(bundles["target"].path), Bundle(bundles["drafter"].path), OPTIONS)
    assert opened and all(session.closed for session in opened)
    assert not own_measurements.exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec-load")]


def test_a_template_that_is_given_leaves_a_pair_its_vocabulary(
    bundles: Bundles, measured: list[int], tmp_path: Path
) -> None:
    """Its marks are control tokens of the target alone; drafts are of the same ids."""
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<tool>{{ m.content }}<tool>{% endfor %}", encoding="utf-8")
    target = Bundle(bundles["target"].path)
    target.use_template(template)
    assert target.tokenizer.special_id("<tool>") is not None
    pair = open_pair(target, bundles["drafter"], OPTIONS)
    assert pair.drafter is not None and pair.same_vocabulary
    pair.target.session.close()
    pair.drafter.session.close()


def test_the_target_loads_while_the_drafter_does(bundles: Bundles, timings: Callable[..., None]) -> None:
    both = threading.Barrier(2, timeout=60)

    def waiting(*arguments: Any, **options: Any) -> Session:
        both.wait()
        return open_cpu(*arguments, **options)

    timings(open_cpu=waiting)
    pair = open_pair(bundles["target"], bundles["drafter"], OPTIONS)
    assert pair.drafter is not None
    assert pair.target.session is not pair.drafter.session
    pair.target.session.close()
    pair.drafter.session.close()
