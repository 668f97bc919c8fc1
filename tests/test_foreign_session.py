"""Graphs of other exporters under a session: the same contract, whatever keeps their KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import edgespec
from edgespec import LoadOptions, engine
from edgespec.loading import opening
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.errors import BundleError, RequestError
from edgespec_runtimes import cost, graph_io
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from edgespec_runtimes.graph_io import DynamicIO
from edgespec_runtimes.kv_buffers import GrowingCache, SharedCache
from edgespec_runtimes.ort import ort
from edgespec_runtimes.session import Predictions
from tests.foreign_for_tests import (
    CONTEXT,
    GRAPH,
    KV_HEADS,
    LAYERS,
    WIDTH,
    ForeignSpec,
    WrittenOut,
    edit_graph,
    write_genai,
    write_optimum,
    write_written_out,
)
from tests.machines_for_tests import X86
from tests.toy import F32

TOKENS = [(7 * i * i + 3) % 400 for i in range(40)]
ONE_THREAD = CpuOptions(threads=1)
SPECS = {
    "gqa": ForeignSpec(),
    "gqa, positions": ForeignSpec(positions=True),
    "gqa, float16": ForeignSpec(kv="float16"),
    "gqa, external": ForeignSpec(external=True),
    "concat": ForeignSpec(attention="concat"),
    "concat, positions": ForeignSpec(attention="concat", positions=True),
    "concat, float16": ForeignSpec(attention="concat", kv="float16"),
}
WRITTEN_OUT = {
    "PyTorch's": WrittenOut(),
    "window": WrittenOut(window=20),
    "positions counted": WrittenOut(counted=True),
    "handed on": WrittenOut(cast=True),
}
TOLERANCE = 2e-2  # of logits up to 17: float16 attention, which on ARM was off by 0.011


def open_session(folder: Path, options: CpuOptions = ONE_THREAD) -> CpuSession:
    return CpuSession(open_bundle(folder), options)


@pytest.fixture(scope="module", params=SPECS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuSession:
    folder = write_genai(tmp_path_factory.mktemp("foreign") / "m", SPECS[request.param])
    return open_session(folder, replace(ONE_THREAD, prefill_chunk=8))


@pytest.fixture
def session(shared: CpuSession) -> CpuSession:
    shared.truncate(0)
    return shared


def in_one_pass(folder: Path, tokens: Sequence[int]) -> F32:
    """What ONNX Runtime computes without any cache of ours."""
    graph = ort.InferenceSession(str(folder / GRAPH), providers=["CPUExecutionProvider"])
    count = len(tokens)
    ids, mask = np.array([tokens], np.int64), np.ones((1, count), np.int64)
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.arange(count)[None]}
    for value in graph.get_inputs():
        if value.name.startswith("past"):
            dtype = np.float16 if value.type == "tensor(float16)" else np.float32
            feeds[value.name] = np.zeros((1, KV_HEADS, 0, WIDTH), dtype)
    known = {value.name for value in graph.get_inputs()}
    logits: F32 = graph.run(["logits"], {name: feeds[name] for name in known})[0][0]
    return logits


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sizes", [(40,), (1,), (3, 1, 8), (1, 39)])
def test_passes_of_any_size_compute_what_one_pass_does(
    tmp_path: Path, name: str, sizes: tuple[int, ...]
) -> None:
    folder = write_genai(tmp_path / "m", SPECS[name])
    session, rows, at = open_session(folder), list[F32](), 0
    while at < len(TOKENS):
        size = sizes[min(len(rows), len(sizes) - 1)]
        rows.append(session.predict(TOKENS[at : at + size]).logits.copy())
        at += size
    np.testing.assert_allclose(np.concatenate(rows), in_one_pass(folder, TOKENS), atol=TOLERANCE)


@X86
@pytest.mark.parametrize("positions", [False, True])
def test_int4_blocks_of_32_are_row_exact(tmp_path: Path, positions: bool) -> None:
    """A single token is run twice, since attention over one row sums in another order."""
    folder = write_genai(tmp_path / "m", ForeignSpec(weights="int4", positions=positions))
    session = open_session(folder)
    assert session.row_exact
    assert open_bundle(folder).manifest.formats.keys() == {"int4/32", "float32"}
    expected = session.predict(TOKENS).logits.copy()
    for size in (1, 2, 3, 7):
        session.truncate(0)
        rows = [session.predict(TOKENS[at : at + size]).logits.copy() for at in range(0, len(TOKENS), size)]
        np.testing.assert_array_equal(np.concatenate(rows), expected)
    assert session.predict_next(TOKENS[:5]).logits[0].shape == (404,)
    assert not open_session(folder, replace(ONE_THREAD, exact_rows=False)).row_exact


@X86
@pytest.mark.parametrize("how", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
def test_graphs_that_concatenate_are_row_exact(tmp_path: Path, how: WrittenOut) -> None:
    """A product with one row sums in another order too; what its second left behind is never read."""
    folder = write_written_out(tmp_path / "m", how)
    session = open_session(folder)
    assert session.copies_cache
    assert session.row_exact
    expected = session.predict(TOKENS).logits.copy()
    np.testing.assert_allclose(expected, in_one_pass(folder, TOKENS), atol=TOLERANCE)
    for size in (1, 2, 3, 7):
        session.truncate(5)
        rows = [session.predict(TOKENS[at : at + size]).logits.copy() for at in range(5, len(TOKENS), size)]
        np.testing.assert_array_equal(np.concatenate(rows), expected[5:])


def test_what_later_tokens_change_the_bits_of_is_not_row_exact(tmp_path: Path) -> None:
    folder = write_written_out(tmp_path / "m", WrittenOut(alibi=True))
    session = open_session(folder)
    assert not session.row_exact
    rows = np.concatenate(
        [session.predict(TOKENS[at : at + 3]).logits.copy() for at in range(0, len(TOKENS), 3)]
    )
    np.testing.assert_allclose(rows, in_one_pass(folder, TOKENS), atol=TOLERANCE)


@pytest.mark.parametrize(("name", "kind"), [("gqa", SharedCache), ("concat", GrowingCache)])
def test_the_cache_is_kept_as_the_graph_wants_it(
    tmp_path: Path, name: str, kind: type, capfd: pytest.CaptureFixture[str]
) -> None:
    """The trial pass that finds it out may fail inside of ONNX Runtime, which would print."""
    session = open_session(write_genai(tmp_path / "m", SPECS[name]))
    assert isinstance(session._io, DynamicIO)
    assert isinstance(session._io.cache, kind)
    # A token that runs twice needs a row more; graphs that concatenate are written to another buffer.
    rows = (session.capacity + 1) * (1 if kind is SharedCache else 2)
    assert session.kv_bytes == rows * LAYERS * 2 * KV_HEADS * WIDTH * 4
    assert capfd.readouterr() == ("", "")


def test_a_rollback_forgets_all(session: CpuSession) -> None:
    expected = session.predict(TOKENS).logits.copy()
    for keep in (0, 1, 17, 39, 3):
        session.truncate(keep)
        session.predict([9, 8, 7, 6])
        session.truncate(keep)
        got = session.predict(TOKENS[keep:]).logits
        np.testing.assert_allclose(got, expected[keep:], atol=TOLERANCE)
        assert session.length == 40


@pytest.mark.parametrize("name", ["gqa", "concat"])
def test_reserving_keeps_what_the_cache_holds(tmp_path: Path, name: str) -> None:
    session = open_session(write_genai(tmp_path / "m", SPECS[name]))
    expected = session.predict(TOKENS).logits.copy()
    session.truncate(30)
    session.reserve(session.capacity + 1)
    assert session.length == 30
    np.testing.assert_allclose(session.predict(TOKENS[30:]).logits, expected[30:], atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gqa", "gqa, positions", "concat, positions"])
def test_the_whole_context_can_be_used_and_no_more(tmp_path: Path, name: str) -> None:
    session = open_session(write_genai(tmp_path / "m", SPECS[name]))
    tokens = [(11 * i * i + 5 * i) % 400 for i in range(CONTEXT)]
    session.prefill(tokens[:-3])
    assert np.isfinite(session.predict(tokens[-3:]).logits).all()
    with pytest.raises(RequestError, match=r"641 tokens do not fit .* 640"):
        session.predict([1])


def test_logits_of_a_long_prompt_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_io, "_LOGITS_BYTES", 8 * 404 * 4)
    session = open_session(write_genai(tmp_path / "m"))
    assert isinstance(session._io, DynamicIO)
    assert session._io.most_rows == 8
    session.prefill(TOKENS)
    assert session._io._logits.size <= 8 * 404
    assert len(session.predict(TOKENS).logits) == 40  # asked for, so given


def test_a_step_allocates_no_logits(session: CpuSession) -> None:
    session.prefill(TOKENS)
    session.truncate(10)
    assert len({session.predict([3]).logits.ctypes.data for _ in range(5)}) == 1


def test_a_pass_that_fails_is_an_error_of_the_bundle(tmp_path: Path) -> None:
    """The header promises what the operators do not keep."""
    folder = write_genai(tmp_path / "m", SPECS["concat"])

    def narrower(graph: onnx.GraphProto) -> None:
        for value in graph.input:
            if value.name.startswith("past"):
                value.type.tensor_type.shape.dim[3].dim_value = WIDTH + 1
        del graph.value_info[:]

    edit_graph(folder / GRAPH, narrower)
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot (run|load)"):
        open_session(folder)


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which a target's pass takes a second and a drafter's 10 ms: drafts are always made."""
    now = 0.0

    class Timed(CpuSession):
        def _run(self, tokens: Sequence[int], rows: int) -> Predictions:
            nonlocal now
            now += 1.0 if self._options.exact_rows else 0.01
            return super()._run(tokens, rows)

    monkeypatch.setattr(opening, "CpuSession", Timed)
    for module in (cost, engine):
        monkeypatch.setattr(module, "perf_counter", lambda: now)


WRITERS: tuple[Callable[[Path, int], Path], ...] = (
    lambda folder, seed: write_genai(folder, replace(SPECS["gqa"], seed=seed)),
    lambda folder, seed: write_genai(folder, replace(SPECS["gqa, float16"], seed=seed)),
    lambda folder, seed: write_genai(folder, replace(SPECS["concat"], seed=seed)),
    lambda folder, seed: write_optimum(folder, replace(SPECS["concat, positions"], seed=seed)),
    lambda folder, seed: write_written_out(folder, WrittenOut(window=20), seed=seed),
)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.usefixtures("cheap_drafts")
def test_speculation_does_not_change_the_output(tmp_path: Path, write: Callable[[Path, int], Path]) -> None:
    target = write(tmp_path / "target", 0)
    same, other = write(tmp_path / "same", 0), write(tmp_path / "other", 1)
    drafters: list[Path | str] = [same, other, "ngram"]
    for drafter in drafters:
        with edgespec.load(target, drafter, options=LoadOptions(threads=1)) as model:
            plain = model.generate("def add(a, b):", max_new_tokens=60, speculate=False, stop_at_eos=False)
            got = model.generate("def add(a, b):", max_new_tokens=60, stop_at_eos=False)
            assert got.tokens == plain.tokens
            assert len(got.tokens) == 60
            assert got.stats.drafted > 0 or drafter == "ngram"
            if drafter == same:
                assert got.stats.accepted > 30
