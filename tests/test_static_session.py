"""Graphs of fixed shapes against the graph of any shape, of the same weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from edgespec_export.devices import static_export
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats.stored_weights import StoredWeights
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.static_graphs import StaticDevice, StaticGraphs
from edgespec_models.errors import BundleError, Cancelled, DeviceError, RequestError, UnsupportedModelError
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from edgespec_runtimes.devices import CPU, Device
from edgespec_runtimes.session import Session
from edgespec_runtimes.static import StaticIO, StaticSession, cheapest_passes
from tests.gguf_for_tests import F32, tiny_gguf

ON_CPU = Device(CPU, "ready")
ONE_THREAD = CpuOptions(threads=1)

Kind = StaticDevice | Literal["float", "cpu"]
"""A device; ``float`` is like ``npu-openvino`` with float32 weights."""
BUCKETS: dict[Kind, tuple[int, ...]] = {
    "cpu": (),
    "float": (64, 128),
    "npu-qnn": (64,),
    "npu-openvino": (64,),
}
ARCHITECTURES = ("llama", "qwen2", "gemma3")
Make = Callable[[str, Kind], Bundle]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Bundles of random models: for the CPU, or for a device; each is made once."""
    folder = tmp_path_factory.mktemp("static")

    @cache
    def bundle(architecture: str, kind: Kind) -> Bundle:
        source = folder / f"{architecture}.gguf"
        if not source.exists():
            tiny_gguf(architecture).write(source)
        options = ExportOptions(weights="portable")
        if kind != "cpu":
            options = ExportOptions(device="npu-openvino" if kind == "float" else kind, buckets=BUCKETS[kind])
        out = folder / f"{architecture}-{kind}"
        with pytest.MonkeyPatch.context() as patch:
            if kind == "float":
                patch.setattr(static_export, "format_for", lambda device: (False, False))
            export_model(source, out, options=options)
        return Bundle(out)

    return bundle


@pytest.fixture(scope="module")
def open_static(make: Make) -> Callable[[str, Kind], StaticSession]:
    @cache
    def opened(architecture: str, device: Kind) -> StaticSession:
        return StaticSession(make(architecture, device), ON_CPU, ONE_THREAD)

    return opened


@pytest.fixture(scope="module")
def open_dynamic(make: Make) -> Callable[[str], CpuSession]:
    return cache(lambda architecture: CpuSession(make(architecture, "cpu"), ONE_THREAD))


Steps = list[tuple[str, int]]
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.integers(1, 12)),
        st.tuples(st.just("truncate"), st.integers(0, 120)),
        st.tuples(st.just("prefill"), st.integers(1, 120)),
        st.tuples(st.just("next"), st.integers(1, 90)),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS, seed=st.integers(0, 99))
@example(steps=[("prefill", 60), ("forward", 8), ("truncate", 66), ("next", 4)], seed=0)  # a longer bucket
def test_whatever_is_asked_equals_the_cpu_session(
    architecture: str,
    open_static: Callable[[str, Kind], StaticSession],
    open_dynamic: Callable[[str], CpuSession],
    steps: Steps,
    seed: int,
) -> None:
    both = static, dynamic = open_static(architecture, "float"), open_dynamic(architecture)
    rng = np.random.default_rng(seed)
    for session in both:
        session.prefill([])
    for step, number in steps:
        tokens = rng.integers(0, 250, number).tolist()
        if step != "forward" or static.length + number <= static.longest:
            found, expected = (_ask(session, step, tokens) for session in both)
            if found is not None and expected is not None:
                _close(found, expected)
        assert static.length == dynamic.length


def _ask(session: Session, step: str, tokens: list[int]) -> F32 | None:
    if step == "forward":
        return session.predict(tokens).logits
    if step == "next":
        return session.predict_next(tokens).logits
    if step == "truncate":
        session.truncate(min(len(tokens), session.length))
    else:
        session.prefill(tokens)
    return None


def _close(found: F32, expected: F32) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-4 * float(np.abs(expected).max()))


@pytest.mark.parametrize(
    ("architecture", "device"), [(name, "npu-qnn") for name in ARCHITECTURES] + [("llama", "npu-openvino")]
)
def test_quantized_graphs_stay_near_and_roll_back(
    architecture: str, device: Kind, open_static: Callable[[str, Kind], StaticSession], make: Make
) -> None:
    report = make(architecture, device).report()["static"]
    assert report["top1_agreement"] > 0.7 and report["kl"] < 0.01
    session = open_static(architecture, device)
    session.prefill([])
    tokens = list(range(40))
    whole = session.predict(tokens).logits.copy()
    session.truncate(33)
    session.predict([9, 9, 9])
    session.truncate(33)
    again = session.predict(tokens[33:]).logits
    np.testing.assert_allclose(again, whole[33:], atol=0.02 * float(np.abs(whole).max()))


def test_nothing_can_be_tuned(open_static: Callable[[str, Kind], StaticSession], make: Make) -> None:
    session = open_static("llama", "float")
    assert not session.tunable and session.head_tokens is None
    with pytest.raises(RequestError, match="no weights to tune"):
        session.tune({})
    with pytest.raises(UnsupportedModelError, match="own operators"):
        StoredWeights(make("llama", "float"))


def test_what_does_not_fit_is_an_error(open_static: Callable[[str, Kind], StaticSession], make: Make) -> None:
    session = open_static("llama", "float")
    session.prefill([])
    with pytest.raises(RequestError, match=r"129 tokens do not fit the largest bucket .*, 128.*--buckets"):
        session.reserve(129)
    with pytest.raises(RequestError, match="641 tokens do not fit the model's context of 640"):
        session.reserve(641)
    session.prefill(list(range(124)))
    with pytest.raises(RequestError, match="largest bucket"):
        session.predict(list(range(8)))
    assert session.length == 124
    with pytest.raises(BundleError, match="no graphs of fixed shapes"):
        StaticSession(make("llama", "cpu"), ON_CPU)
    with pytest.raises(BundleError, match="graphs of fixed shapes"):
        CpuSession(make("llama", "float"))


def test_a_prefill_can_be_cancelled(open_static: Callable[[str, Kind], StaticSession]) -> None:
    session = open_static("llama", "float")
    session.prefill([])
    asked = iter([False, True])
    with pytest.raises(Cancelled):
        session.prefill(list(range(90)), lambda: next(asked))
    assert session.length == 64


def test_a_device_that_fails_leaves_an_empty_session(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    session = StaticSession(make("llama", "float"), ON_CPU, ONE_THREAD)
    session.prefill(list(range(20)))
    assert session.capacity == 64

    def refuse(graph: Path) -> None:
        raise DeviceError(f"no room for {graph}")

    io = session._open_io
    with monkeypatch.context() as patch:
        patch.setattr(io, "_open", refuse)
        with pytest.raises(DeviceError, match="no room"):
            session.reserve(100)
    assert (session.length, session.capacity) == (0, 0)
    session.prefill(list(range(100)))
    assert session.capacity == 128


def test_a_pass_that_fails_is_an_error_of_the_device(make: Make) -> None:
    class Failing:
        def run_with_iobinding(self, binding: object) -> None:
            raise RuntimeError("Error in execution: driver lost")

    session = StaticSession(make("llama", "npu-qnn"), ON_CPU, ONE_THREAD)
    io = session._open_io
    assert isinstance(io, StaticIO)
    io._passes = {rows: replace(one, session=Failing()) for rows, one in io._passes.items()}
    with pytest.raises(DeviceError, match=r"the device cannot run .*: Error in execution: driver lost"):
        session.predict([1])
    assert session.length == 0


GRAPHS = StaticGraphs(
    device="npu-openvino", verify=(1, 4, 8), prefill=64, buckets=(128,), activations="float32", masked=-1.0
)


@pytest.mark.parametrize(
    ("count", "rows", "seconds", "expected"),
    [
        (1, 1, (1, 1.1, 1.2, 3), (1,)),
        (3, 3, (1, 1.1, 1.2, 3), (4,)),
        (9, 9, (1, 1.1, 1.2, 3), (1, 8)),
        (5, 5, (1, 9, 9, 9), (1, 1, 1, 1, 1)),
        (64, 1, (1, 1.1, 1.2, 3), (64,)),
        (64, 64, (1, 1.1, 1.2, 3), (8,) * 8),
        (66, 1, (1, 1.1, 1.2, 3), (4, 64)),
        (20, 1, (1, 1.1, 1.2, 9), (4, 8, 8)),
    ],
)
def test_the_passes_that_take_least_time_are_chosen(
    count: int, rows: int, seconds: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    costs = dict(zip(GRAPHS.widths, seconds, strict=True))
    chosen = cheapest_passes(count, rows, GRAPHS, costs)
    assert sorted(chosen) == sorted(expected)


@given(st.integers(1, 150), st.data())
def test_passes_take_every_token_once(count: int, data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([1, count]))
    costs = {width: data.draw(st.floats(0.1, 10)) for width in GRAPHS.widths}
    left = count
    for width in cheapest_passes(count, rows, GRAPHS, costs):
        taken = min(width, left)
        left -= taken
        wanted = max(0, min(rows, left + taken) - left)
        assert width != GRAPHS.prefill or wanted <= 1
    assert left == 0
