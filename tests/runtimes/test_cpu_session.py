import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec_models.bundles.graph_contract import Part, Pass
from edgespec_models.errors import BundleError, RequestError
from edgespec_runtimes.block_pool import BlockPool
from edgespec_runtimes.cpu import CpuOptions, best_instructions, default_threads, most_threads, open_cpu
from edgespec_runtimes.graph_io import NativeModel
from edgespec_runtimes.kv_cache import SharedCache
from edgespec_runtimes.ort import ort
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Session
from tests.kit.machines import X86
from tests.kit.native import tiny_native
from tests.kit.sessions import KINDS, ONE_THREAD, TOKENS, opened
from tests.kit.toy import COLUMNS, GEMMA, INT4, LLAMA, tiny_bundle

_PATH = os.pathsep.join(sys.path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Session:
    model = tiny_native(tmp_path_factory.mktemp("models") / "m", GEMMA, "Q4_0")
    return open_cpu(model.bundle, replace(ONE_THREAD, prefill_chunk=8))


@pytest.fixture
def session(shared: Session) -> Session:
    shared.rewind(0)
    return shared


def test_rows_that_differ_in_longer_texts_alone_are_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of ONNX Runtime's operators on ARM, where rows beyond fours take other code."""
    session = open_cpu(tiny_native(tmp_path / "m", LLAMA, "Q4_0").bundle, ONE_THREAD)
    assert session.self_test()
    run = session.model.run

    def run_on_arm(parts: Sequence[Part]) -> list[Predictions]:
        logits = run(parts)[0].logits.copy()
        fours = len(logits) // 4 * 4
        if parts[0].end > 16:
            logits[fours:] = np.nextafter(logits[fours:], np.float32(np.inf))
        return [Predictions(logits)]

    monkeypatch.setattr(session.model, "run", run_on_arm)
    assert not session.self_test()


@pytest.mark.parametrize("exact_rows", [True, False])
def test_rows_are_exact_where_products_with_one_row_take_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact_rows: bool
) -> None:
    """As MatMulNBits does in blocks of 32 and 4 bits on processors with AVX2 alone (Haswell, under qemu)."""
    bundle = tiny_bundle(tmp_path / "m", LLAMA, INT4).bundle
    session = open_cpu(bundle, replace(ONE_THREAD, exact_rows=exact_rows))
    io = session.model
    assert isinstance(io, NativeModel)
    bind = io._bind

    def bind_without_avx512(pass_: Pass, rows: int) -> Any:
        bound = bind(pass_, rows)
        if len(pass_.tokens) > 1 and pass_.rows > 1:
            return bound
        return replace(
            bound, predictions=lambda rows: Predictions(bound.predictions(rows).logits + np.float32(1e-6))
        )

    io.passes.clear()
    monkeypatch.setattr(io, "_bind", bind_without_avx512)
    assert session.self_test() == exact_rows


@pytest.mark.parametrize("kind", [pytest.param("columns", marks=X86), "Q4_1"])
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_the_bits(tmp_path: Path, threads: int, kind: str) -> None:
    """In a process of its own: the first session of this one has settled the number for all."""
    KINDS[kind](tmp_path / "m")
    expected = opened(tmp_path / "m").predict(TOKENS).logits
    bundle, out = str(tmp_path / "m"), str(tmp_path / "logits.npy")
    for spinning in (False, True):
        code = f"""
from pathlib import Path
import numpy as np
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cpu import CpuOptions, open_cpu
session = open_cpu(Bundle(Path({bundle!r})), CpuOptions(threads={threads}, spinning={spinning}))
np.save({out!r}, session.predict({TOKENS}).logits)
"""
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": _PATH})
        np.testing.assert_array_equal(np.load(out), expected)


@pytest.mark.parametrize("spinning", [True, False])
def test_sessions_of_any_options_live_in_one_process(
    tmp_path: Path, spinning: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The application's own sessions too: nothing of ours may be the whole process's."""
    model, other = tiny_native(tmp_path / "m", LLAMA, "Q4_1"), tiny_bundle(tmp_path / "n", LLAMA, COLUMNS)
    expected = open_cpu(model.bundle, ONE_THREAD).predict(TOKENS).logits
    for threads in (0, 1, 2, most_threads()):
        session = open_cpu(model.bundle, CpuOptions(threads=threads, spinning=spinning))
        np.testing.assert_array_equal(session.predict(TOKENS).logits, expected)
        session.close()
        ort.InferenceSession(str(other.bundle.path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert capfd.readouterr() == ("", "")


def test_prefill_reuses_the_shared_prefix(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = session.predict(TOKENS).logits.copy()
    session.rewind(0)
    run, passes = session.model.run, list[int]()

    def counted(parts: Sequence[Part]) -> list[Predictions]:
        passes.extend(len(part.tokens) for part in parts)
        return run(parts)

    monkeypatch.setattr(session.model, "run", counted)
    changed = [*TOKENS[:12], 399, 398]
    for text, wanted in ((TOKENS[:20], [8, 8, 4]), (TOKENS[:25], [5]), (changed, [2]), (TOKENS[:10], [])):
        passes.clear()
        session.prefill(text)
        assert (session.length, passes) == (len(text), wanted)
    np.testing.assert_array_equal(session.predict(TOKENS[10:]).logits, expected[10:])
    session.prefill([])
    assert session.length == 0


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 300, 511, 512, 520])
def test_a_shared_prefix_is_found_to_the_token(session: Session, count: int) -> None:
    tokens = [(i * 31) % 400 for i in range(520)]
    session.prefill(tokens)
    changed = [*tokens[:count], *(((t + 1) % 400) for t in tokens[count:])]
    assert session.shared_prefix(changed) == session.shared_prefix(tokens[:count]) == count
    assert session.length == 520


@pytest.mark.parametrize("tokens", [[], [404], [-1], [3, 10_000_000]])
def test_nonsense_is_refused_before_it_does_harm(session: Session, tokens: list[int]) -> None:
    expected = session.predict(TOKENS).logits.copy()
    session.rewind(10)
    with pytest.raises(RequestError, match="0 to 403"):
        session.predict(tokens)
    assert session.length == 10
    np.testing.assert_array_equal(session.predict(TOKENS[10:]).logits, expected[10:])


@pytest.mark.parametrize("length", [-1, 6])
def test_truncating_to_what_is_not_there_is_refused(session: Session, length: int) -> None:
    session.predict(TOKENS[:5])
    with pytest.raises(RequestError, match="holds 5 tokens"):
        session.rewind(length)
    assert session.length == 5


def test_a_closed_session_says_so(tmp_path: Path) -> None:
    session = open_cpu(tiny_bundle(tmp_path / "m").bundle, ONE_THREAD)
    session.predict([1, 2])
    session.close()
    session.close()
    for ask in (session.predict, session.prefill, session.predict_next, lambda tokens: session.reserve(1)):
        with pytest.raises(RequestError, match="closed"):
            ask([1])
    assert (session.length, session.capacity, session.kv_bytes) == (0, 0, 0)


def test_a_step_allocates_no_logits(session: Session) -> None:
    session.prefill(TOKENS[:10])
    assert len({session.predict([3]).logits.ctypes.data for _ in range(5)}) == 1
    rows = (session.predict_next([*TOKENS[:10], token]).logits[0] for token in range(5))
    assert len({row.ctypes.data for row in rows}) == 1


@pytest.mark.parametrize("kind", ["Q8_0", "gemma"])
def test_the_cache_is_written_in_place(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "m")
    session, native = opened(tmp_path / "m"), kind == "Q8_0"
    session.reserve(len(TOKENS))
    assert isinstance(session.model, NativeModel)
    assert isinstance(session.model.cache, BlockPool if native else SharedCache)
    if native:
        session.prefill([5])
        session.rewind(0)
        arrays = [array[:1] for array in session.model.cache.arrays[1::2]]  # keys of 16 tokens lie otherwise
    else:
        width = GEMMA.num_kv_heads * GEMMA.head_dim
        assert session.kv_bytes == GEMMA.num_layers * 2 * width * 4 * (session.capacity + 1)
        arrays = session.model.cache.arrays
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


def test_many_sizes_of_pass_do_not_pile_up(session: Session) -> None:
    for size in range(1, 41):
        session.rewind(0)
        session.predict(TOKENS[:size])
    assert isinstance(session.model, NativeModel)
    assert len(session.model.passes) <= 32


@pytest.mark.parametrize(
    ("drift", "refused"),
    [
        (lambda number, tokens: number, True),  # much from pass to pass
        (lambda number, tokens: 0.01 * number, True),
        (lambda number, tokens: 1.0 if tokens > 4 else 0.0, True),
        (lambda number, tokens: 0.05 if tokens > 4 else 0.0, False),  # rounds otherwise
    ],
)
def test_a_graph_that_cannot_roll_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drift: Callable[[int, int], float], refused: bool
) -> None:
    """A model with a recurrent state would answer a repeated pass differently, by a share of its logits."""
    run, calls = NativeModel.run, list[int]()

    def drifting(self: NativeModel, parts: Sequence[Part]) -> list[Predictions]:
        tokens, logits = parts[0].tokens, run(self, parts)[0].logits
        calls.append(len(tokens))
        return [Predictions(logits + np.float32(drift(len(calls), len(tokens))) * np.abs(logits).max())]

    bundle = tiny_bundle(tmp_path / "m").bundle
    monkeypatch.setattr(NativeModel, "run", drifting)
    if not refused:
        assert not open_cpu(bundle, ONE_THREAD).model.row_exact
        return
    with pytest.raises(BundleError, match="cannot roll back"):
        open_cpu(bundle, ONE_THREAD)


@pytest.mark.parametrize(
    "options", [{"threads": -1}, {"threads": most_threads() + 1}, {"threads": 9_999}, {"prefill_chunk": 0}]
)
def test_options_have_bounds(options: dict[str, int]) -> None:
    ((name, value),) = options.items()
    allowed = f"0 to {most_threads()}, twice the logical cores" if name == "threads" else "from 1"
    with pytest.raises(RequestError, match=f"{name} is {value}; .* {allowed}"):
        CpuOptions(**options)  # type: ignore[arg-type]
    assert 1 <= default_threads() <= most_threads() == 2 * (os.cpu_count() or 1)


def test_plain_instructions_are_told_at_load_with_the_way_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = tiny_native(tmp_path / "m", LLAMA, "Q4_0").bundle
    open_cpu(bundle, replace(ONE_THREAD, instructions="plain")).close()
    (record,) = caplog.records
    assert "plain instructions" in record.message and "--weights portable" in record.message
    caplog.clear()
    if best_instructions() != "plain":
        open_cpu(bundle, ONE_THREAD).close()
        assert not caplog.records
