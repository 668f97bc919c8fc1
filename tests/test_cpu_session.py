import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.graph_contract import Pass
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.errors import BundleError, Cancelled, RequestError
from edgespec_runtimes.cpu import CpuOptions, CpuSession, default_threads, most_threads
from edgespec_runtimes.graph_io import DynamicIO
from edgespec_runtimes.kv_buffers import SharedCache
from edgespec_runtimes.ort import ort
from edgespec_runtimes.session import Predictions, Session
from tests.machines_for_tests import X86
from tests.native_for_tests import tiny_native
from tests.toy import COLUMNS, F32, FLOAT, GEMMA, INT4, INT8, LLAMA, QWEN, WIDE, TinyModel, tiny_bundle

TOKENS = [(7 * i * i + 3) % 400 for i in range(40)]
_PATH = os.pathsep.join(sys.path)
ONE_THREAD = CpuOptions(threads=1)
MODELS: dict[str, tuple[ModelConfig, WeightFormat | str]] = {
    "Q4_0": (LLAMA, "Q4_0"),
    "Q4_1": (QWEN, "Q4_1"),
    "Q8_0": (GEMMA, "Q8_0"),
    "int4": (LLAMA, INT4),
    "columns": (LLAMA, COLUMNS),
    "int8": (LLAMA, INT8),
    "gemma": (GEMMA, COLUMNS),
    "int8, blocks of 64": (WIDE, WeightFormat(8, 64)),
}


def made(folder: Path, config: ModelConfig, form: WeightFormat | str) -> TinyModel:
    """A native model in blocks of a file's format, or a portable one."""
    if isinstance(form, str):
        return tiny_native(folder, config, form)
    return tiny_bundle(folder, config, form)


@pytest.fixture(
    scope="module",
    params=[
        name if isinstance(form, str) else pytest.param(name, marks=X86) for name, (_, form) in MODELS.items()
    ],
)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuSession:
    """Every quantized format; the module shares the sessions, tests start by truncating them."""
    model = made(tmp_path_factory.mktemp("models") / "m", *MODELS[request.param])
    return CpuSession(model.bundle, ONE_THREAD)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> CpuSession:
    model = tiny_native(tmp_path_factory.mktemp("models") / "m", GEMMA, "Q4_0")
    return CpuSession(model.bundle, replace(ONE_THREAD, prefill_chunk=8))


@pytest.fixture
def session(shared: CpuSession) -> CpuSession:
    shared.truncate(0)
    return shared


def _forward(session: CpuSession, tokens: list[int], *sizes: int) -> F32:
    """Logits of all tokens, in passes of these sizes (the last again and again)."""
    rows = list[F32]()
    at = 0
    while at < len(tokens):
        size = sizes[min(len(rows), len(sizes) - 1)]
        rows.append(session.predict(tokens[at : at + size]).logits.copy())
        at += size
    return np.concatenate(rows)


def test_the_number_of_rows_leaves_no_trace_in_the_bits(quantized: CpuSession) -> None:
    assert quantized.row_exact
    quantized.truncate(0)
    expected = _forward(quantized, TOKENS, 1)
    for sizes in ((40,), (2,), (3,), (5,), (8,), (13,), (20, 1, 4, 1, 6), (1, 39)):
        quantized.truncate(0)
        np.testing.assert_array_equal(_forward(quantized, TOKENS, *sizes), expected)


def test_nor_does_it_in_a_long_context(quantized: CpuSession) -> None:
    tokens = [(11 * i * i + 5 * i) % 400 for i in range(600)]
    quantized.truncate(0)
    whole = quantized.predict(tokens).logits.copy()
    quantized.truncate(0)
    quantized.prefill(tokens[:560])
    np.testing.assert_array_equal(_forward(quantized, tokens[560:], 1), whole[560:])
    for sizes in ((40,), (3,), (6, 1, 5, 1)):
        quantized.truncate(560)
        np.testing.assert_array_equal(_forward(quantized, tokens[560:], *sizes), whole[560:])


def test_a_rollback_forgets_all(quantized: CpuSession) -> None:
    quantized.truncate(0)
    expected = quantized.predict(TOKENS).logits.copy()
    for keep in (0, 1, 17, 39):
        quantized.truncate(keep)
        quantized.predict([9, 8, 7, 6])
        quantized.truncate(keep)
        assert quantized.length == keep
        np.testing.assert_array_equal(quantized.predict(TOKENS[keep:]).logits, expected[keep:])


def test_rows_that_differ_in_longer_texts_alone_are_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of ONNX Runtime's operators on ARM, where rows beyond fours take other code."""
    session = CpuSession(tiny_native(tmp_path / "m", LLAMA, "Q4_0").bundle, ONE_THREAD)
    assert session.self_test()
    run = session._run

    def run_on_arm(tokens: list[int], rows: int) -> Predictions:
        logits = run(tokens, rows).logits.copy()
        if session.length > 16:
            logits[rows // 4 * 4 :] = np.nextafter(logits[rows // 4 * 4 :], np.float32(np.inf))
        return Predictions(logits)

    monkeypatch.setattr(session, "_run", run_on_arm)
    assert not session.self_test()


@pytest.mark.parametrize("exact_rows", [True, False])
def test_rows_are_exact_where_products_with_one_row_take_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact_rows: bool
) -> None:
    """As MatMulNBits does in blocks of 32 and 4 bits on processors with AVX2 alone (Haswell, under qemu)."""
    bundle = tiny_bundle(tmp_path / "m", LLAMA, INT4).bundle
    session = CpuSession(bundle, replace(ONE_THREAD, exact_rows=exact_rows))
    bind = session._open_io._bind

    def bind_without_avx512(one: Pass, rows: int) -> Any:
        bound = bind(one, rows)
        if len(one.tokens) > 1 and one.rows > 1:
            return bound
        return replace(bound, predictions=lambda: Predictions(bound.predictions().logits + np.float32(1e-6)))

    session._open_io.passes.clear()
    monkeypatch.setattr(session._open_io, "_bind", bind_without_avx512)
    assert session.self_test() == exact_rows


def test_float_weights_agree_to_rounding(tmp_path: Path) -> None:
    session = CpuSession(tiny_bundle(tmp_path / "m", LLAMA, FLOAT).bundle, ONE_THREAD)
    expected = _forward(session, TOKENS, 1)
    session.truncate(0)
    np.testing.assert_allclose(session.predict(TOKENS).logits, expected, atol=1e-4)


@pytest.mark.parametrize("form", [pytest.param(COLUMNS, marks=X86), "Q4_1"], ids=["portable", "native"])
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_the_bits(tmp_path: Path, threads: int, form: WeightFormat | str) -> None:
    """In a process of its own: the first session of this one has settled the number for all."""
    model = made(tmp_path / "m", LLAMA, form)
    expected = _forward(CpuSession(model.bundle, ONE_THREAD), TOKENS, 1)
    for spinning in (False, True):
        code = f"""
from pathlib import Path
import numpy as np
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cpu import CpuOptions, CpuSession
session = CpuSession(Bundle(Path({str(model.path)!r})), CpuOptions(threads={threads}, spinning={spinning}))
np.save({str(tmp_path / "logits.npy")!r}, session.predict({TOKENS}).logits)
"""
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": _PATH})
        np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), expected)


@pytest.mark.parametrize("spinning", [True, False])
def test_sessions_of_any_options_live_in_one_process(
    tmp_path: Path, spinning: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The application's own sessions too: nothing of ours may be the whole process's."""
    model, other = tiny_native(tmp_path / "m", LLAMA, "Q4_1"), tiny_bundle(tmp_path / "n", LLAMA, COLUMNS)
    expected = _forward(CpuSession(model.bundle, ONE_THREAD), TOKENS, 1)
    for threads in (0, 1, 2, most_threads()):
        session = CpuSession(model.bundle, CpuOptions(threads=threads, spinning=spinning))
        np.testing.assert_array_equal(session.predict(TOKENS).logits, expected)
        session.close()
        ort.InferenceSession(str(other.bundle.path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert capfd.readouterr() == ("", "")


def test_the_shared_prefix_is_counted(session: CpuSession) -> None:
    assert session.shared_prefix(TOKENS) == 0
    session.predict(TOKENS[:20])
    assert session.shared_prefix(TOKENS) == session.shared_prefix(TOKENS[:20]) == 20
    assert session.shared_prefix(TOKENS[:7]) == 7
    assert session.shared_prefix([*TOKENS[:12], 399, *TOKENS[13:]]) == 12
    assert session.shared_prefix([]) == 0
    assert session.length == 20


def test_prefill_reuses_the_shared_prefix(session: CpuSession, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = session.predict(TOKENS).logits.copy()
    session.truncate(0)
    run, passes = session._run, list[int]()

    def counted(tokens: list[int], rows: int) -> Predictions:
        passes.append(len(tokens))
        return run(tokens, rows)

    monkeypatch.setattr(session, "_run", counted)
    session.prefill(TOKENS[:20])
    assert (session.length, passes) == (20, [8, 8, 4])
    passes.clear()
    session.prefill(TOKENS[:25])
    assert (session.length, passes) == (25, [5])
    passes.clear()
    session.prefill([*TOKENS[:12], 399, 398])
    assert (session.length, passes) == (14, [2])
    passes.clear()
    session.prefill(TOKENS[:10])
    assert (session.length, passes) == (10, [])
    np.testing.assert_array_equal(session.predict(TOKENS[10:]).logits, expected[10:])
    session.prefill([])
    assert session.length == 0


@pytest.mark.parametrize("shared_length", [0, 1, 255, 256, 257, 300, 511, 512, 520])
def test_a_long_shared_prefix_is_found_to_the_token(session: CpuSession, shared_length: int) -> None:
    tokens = [(i * 31) % 400 for i in range(520)]
    session.prefill(tokens)
    changed = [*tokens[:shared_length], *(((t + 1) % 400) for t in tokens[shared_length:])]
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(session.length)
        return True

    if shared_length == len(tokens):
        session.prefill(changed, cancelled)
        assert asked == []
    else:
        with pytest.raises(Cancelled):
            session.prefill(changed, cancelled)
        assert asked == [shared_length]


def test_next_logits_is_the_last_row(quantized: CpuSession) -> None:
    quantized.truncate(0)
    expected = quantized.predict(TOKENS).logits.copy()
    for end in (1, 5, 9, 30, 30, 12, 40):
        logits = quantized.predict_next(TOKENS[:end]).logits[0]
        assert logits.shape == (quantized.vocab_size,)
        assert quantized.length == end
        np.testing.assert_array_equal(logits, expected[end - 1])
    with pytest.raises(RequestError, match="at least one"):
        quantized.predict_next([])


def test_cancelling_a_prefill_leaves_the_session_valid(session: CpuSession) -> None:
    expected = session.predict(TOKENS).logits.copy()
    session.truncate(0)
    answers = iter([False, False, True])
    with pytest.raises(Cancelled, match="16 of 40"):
        session.prefill(TOKENS, lambda: next(answers))
    assert session.length == 16
    np.testing.assert_array_equal(session.predict(TOKENS[16:]).logits, expected[16:])


@pytest.mark.parametrize("form", [pytest.param(COLUMNS, marks=X86), "Q4_1"], ids=["portable", "native"])
def test_reserving_keeps_what_the_cache_holds(tmp_path: Path, form: WeightFormat | str) -> None:
    session = CpuSession(made(tmp_path / "m", GEMMA, form).bundle, ONE_THREAD)
    expected = session.predict(TOKENS).logits.copy()
    session.truncate(30)
    capacity, size = session.capacity, session.kv_bytes
    session.reserve(capacity)
    assert session.capacity == capacity
    session.reserve(capacity + 1)
    assert capacity < session.capacity <= GEMMA.context_length
    assert session.kv_bytes > size
    native = isinstance(form, str)
    rows = session.capacity + 16 * (not native)  # a token that runs twice needs one more
    assert session.kv_bytes == GEMMA.kv_bytes_per_token * rows // (2 if native else 1)
    assert session.length == 30
    np.testing.assert_array_equal(session.predict(TOKENS[30:]).logits, expected[30:])


@pytest.mark.parametrize("form", [INT4, "Q4_0"], ids=["portable", "native"])
def test_the_whole_context_can_be_used_and_no_more(tmp_path: Path, form: WeightFormat | str) -> None:
    config = replace(LLAMA, context_length=48)
    session = CpuSession(made(tmp_path / "m", config, form).bundle, ONE_THREAD)
    longer = CpuSession(made(tmp_path / "n", LLAMA, form).bundle, ONE_THREAD)
    tokens = (TOKENS * 2)[:48]
    np.testing.assert_array_equal(_forward(session, tokens, 40, 7, 1), longer.predict(tokens).logits)
    for ask in (
        lambda: session.predict([1]).logits,
        lambda: session.reserve(49),
        lambda: session.prefill([*tokens, 1]),
        lambda: session.predict_next([*tokens, 1]).logits[0],
    ):
        with pytest.raises(RequestError, match=r"49 tokens do not fit .* 48"):
            ask()
    assert session.length == 48
    session.truncate(47)
    session.predict([tokens[-1]])


@pytest.mark.parametrize("tokens", [[], [404], [-1], [3, 10_000_000]])
def test_nonsense_is_refused_before_it_does_harm(session: CpuSession, tokens: list[int]) -> None:
    expected = session.predict(TOKENS).logits.copy()
    session.truncate(10)
    with pytest.raises(RequestError, match="0 to 403"):
        session.predict(tokens)
    assert session.length == 10
    np.testing.assert_array_equal(session.predict(TOKENS[10:]).logits, expected[10:])


@pytest.mark.parametrize("length", [-1, 6])
def test_truncating_to_what_is_not_there_is_refused(session: CpuSession, length: int) -> None:
    session.predict(TOKENS[:5])
    with pytest.raises(RequestError, match="holds 5 tokens"):
        session.truncate(length)
    assert session.length == 5


def test_a_closed_session_says_so(tmp_path: Path) -> None:
    session = CpuSession(tiny_bundle(tmp_path / "m").bundle, ONE_THREAD)
    session.predict([1, 2])
    session.close()
    session.close()
    asks: tuple[Callable[[], object], ...] = (
        lambda: session.predict([1]).logits,
        lambda: session.prefill([1]),
        lambda: session.predict_next([1]).logits[0],
        lambda: session.reserve(1),
    )
    for ask in asks:
        with pytest.raises(RequestError, match="closed"):
            ask()
    assert (session.length, session.capacity, session.kv_bytes) == (0, 0, 0)


def test_a_step_allocates_no_logits(session: CpuSession) -> None:
    session.prefill(TOKENS[:10])
    buffers = {session.predict([3]).logits.ctypes.data for _ in range(5)}
    assert len(buffers) == 1
    buffers = {session.predict_next([*TOKENS[:10], token]).logits[0].ctypes.data for token in range(5)}
    assert len(buffers) == 1


@pytest.mark.parametrize("form", [INT4, "Q4_0"], ids=["portable", "native"])
def test_the_cache_is_written_in_place(tmp_path: Path, form: WeightFormat | str) -> None:
    session = CpuSession(made(tmp_path / "m", GEMMA, form).bundle, ONE_THREAD)
    session.reserve(len(TOKENS))
    assert isinstance(session._io, DynamicIO) and isinstance(session._io.cache, SharedCache)
    arrays = session._io.cache.arrays
    if isinstance(form, str):
        arrays = arrays[1::2]  # keys lie in tiles of 16 tokens
    for array in arrays:
        array[:] = 0
    session.predict(TOKENS[:5])
    for array in arrays:
        assert np.abs(array[:, :, :5]).min(axis=(0, 1, 3)).all()
        assert not array[:, :, 5:].any()
    before = [array[:, :, :5].copy() for array in arrays]
    session.predict(TOKENS[5:8])
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array[:, :, :5], old)
        assert array[:, :, 5:8].any()


def test_many_sizes_of_pass_do_not_pile_up(session: CpuSession) -> None:
    for size in range(1, 41):
        session.truncate(0)
        session.predict(TOKENS[:size])
    assert isinstance(session._io, DynamicIO)
    assert len(session._io.passes) <= 32


@pytest.mark.parametrize(("config", "form"), [(LLAMA, "Q4_0"), (GEMMA, FLOAT)])
def test_it_is_a_session(tmp_path: Path, config: ModelConfig, form: WeightFormat | str) -> None:
    session: Session = CpuSession(made(tmp_path / "m", config, form).bundle, ONE_THREAD)
    assert session.vocab_size == config.vocab_size
    assert session.length == 0


def test_a_damaged_graph_is_an_error_of_the_bundle(tmp_path: Path) -> None:
    model = tiny_bundle(tmp_path / "m")
    bundle = model.bundle
    (model.path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match="cannot load"):
        CpuSession(bundle)


def _drifting(monkeypatch: pytest.MonkeyPatch, drift: Callable[[int, int], float]) -> None:
    """Let every pass err by ``drift`` of the largest logit: by the pass's number and its tokens."""
    run, calls = CpuSession._run, list[int]()

    def drifting(self: CpuSession, tokens: list[int], rows: int) -> Predictions:
        calls.append(len(tokens))
        logits = run(self, tokens, rows).logits
        return Predictions(logits + np.float32(drift(len(calls), len(tokens))) * np.abs(logits).max())

    monkeypatch.setattr(CpuSession, "_run", drifting)


@pytest.mark.parametrize(
    "drift",
    [
        lambda number, tokens: number,
        lambda number, tokens: 0.01 * number,
        lambda number, tokens: 1.0 if tokens > 4 else 0.0,
    ],
    ids=["much from pass to pass", "little from pass to pass", "much in long passes"],
)
def test_a_graph_that_cannot_roll_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drift: Callable[[int, int], float]
) -> None:
    """A model with a recurrent state would answer a repeated pass differently."""
    model = tiny_bundle(tmp_path / "m")
    _drifting(monkeypatch, drift)
    with pytest.raises(BundleError, match="cannot roll back"):
        CpuSession(model.bundle, ONE_THREAD)


def test_passes_of_other_sizes_may_round_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_bundle(tmp_path / "m")
    _drifting(monkeypatch, lambda number, tokens: 0.05 if tokens > 4 else 0.0)
    assert not CpuSession(model.bundle, ONE_THREAD).row_exact


@pytest.mark.parametrize("threads", [-1, most_threads() + 1, 9_999])
def test_threads_are_bounded_by_the_machine(threads: int) -> None:
    said = rf"threads is {threads}; .* 0 to {most_threads()}, twice the logical cores"
    with pytest.raises(RequestError, match=said):
        CpuOptions(threads=threads)
    assert CpuOptions(threads=most_threads()).threads == 2 * (os.cpu_count() or 1)


def test_a_prefill_pass_has_a_token() -> None:
    with pytest.raises(RequestError, match="prefill_chunk is 0"):
        CpuOptions(prefill_chunk=0)


def test_there_is_a_thread() -> None:
    assert 1 <= default_threads() <= most_threads()
