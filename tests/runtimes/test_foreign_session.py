"""Graphs of other exporters under a session: the same contract, whatever keeps their KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import edgespec
from edgespec import LoadOptions
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.errors import BundleError
from edgespec_runtimes import graph_io
from edgespec_runtimes.graph_io import ForeignModel
from edgespec_runtimes.kv_cache import GrowingCache, SharedCache
from edgespec_runtimes.ort import ort
from tests.kit.foreign import (
    GRAPH,
    KV_HEADS,
    LAYERS,
    WIDTH,
    ForeignSpec,
    edit_graph,
    write_genai,
    write_optimum,
    write_written_out,
)
from tests.kit.machines import X86
from tests.kit.sessions import FOREIGN_EXACT, FOREIGN_OTHER, KINDS, ONE_THREAD, TOKENS, opened
from tests.kit.toy import F32

CONCAT = ForeignSpec(attention="concat")
TOLERANCE = 2e-2  # of logits up to 17: float16 attention, which on ARM was off by 0.011


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


@pytest.mark.parametrize("kind", FOREIGN_EXACT | FOREIGN_OTHER)
def test_a_pass_computes_what_onnx_runtime_alone_does(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "m")
    logits = opened(tmp_path / "m").predict(TOKENS).logits
    np.testing.assert_allclose(logits, in_one_pass(tmp_path / "m", TOKENS), atol=TOLERANCE)


@X86
def test_int4_blocks_of_32_are_row_exact_since_a_single_token_runs_twice(tmp_path: Path) -> None:
    folder = write_genai(tmp_path / "m", ForeignSpec(weights="int4"))
    assert open_bundle(folder).manifest.formats.keys() == {"int4/32", "float32"}
    assert opened(folder).model.row_exact
    assert not opened(folder, replace(ONE_THREAD, exact_rows=False)).model.row_exact


def test_what_later_tokens_change_the_bits_of_is_not_row_exact(tmp_path: Path) -> None:
    assert not opened(write_written_out(tmp_path / "m", alibi=True)).model.row_exact


@pytest.mark.parametrize(
    ("kind", "cache"), [("gqa", SharedCache), ("concat", GrowingCache), ("PyTorch's", GrowingCache)]
)
def test_the_cache_is_kept_as_the_graph_wants_it(
    tmp_path: Path, kind: str, cache: type, capfd: pytest.CaptureFixture[str]
) -> None:
    """The trial pass that finds it out may fail inside of ONNX Runtime, which would print."""
    KINDS[kind](tmp_path / "m")
    session = opened(tmp_path / "m")
    assert isinstance(session.model, ForeignModel)
    assert isinstance(session.model.cache, cache) and session.model.copies_cache == (cache is GrowingCache)
    # A token that runs twice needs a row more; graphs that concatenate are written to another buffer.
    rows = (session.capacity + 1) * (1 if cache is SharedCache else 2)
    assert session.kv_bytes == rows * LAYERS * 2 * KV_HEADS * WIDTH * 4
    assert capfd.readouterr() == ("", "")


def test_logits_of_a_long_prompt_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_io, "_LOGITS_BYTES", 8 * 404 * 4)
    session = opened(write_genai(tmp_path / "m"))
    assert isinstance(session.model, ForeignModel)
    assert session.model.most_rows == 8
    session.prefill(TOKENS)
    assert session.model._host._output.size <= 8 * 404
    assert len(session.predict(TOKENS).logits) == 40  # asked for, so given
    assert len({session.predict([3]).logits.ctypes.data for _ in range(5)}) == 1


def test_a_pass_that_fails_is_an_error_of_the_bundle(tmp_path: Path) -> None:
    """The header promises what the operators do not keep."""
    folder = write_genai(tmp_path / "m", CONCAT)

    def narrower(graph: onnx.GraphProto) -> None:
        for value in graph.input:
            if value.name.startswith("past"):
                value.type.tensor_type.shape.dim[3].dim_value = WIDTH + 1
        del graph.value_info[:]

    edit_graph(folder / GRAPH, narrower)
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot (run|load)"):
        opened(folder)


WRITERS: tuple[Callable[[Path, int], Path], ...] = (
    lambda folder, seed: write_genai(folder, ForeignSpec(seed=seed)),
    lambda folder, seed: write_genai(folder, ForeignSpec(kv="float16", seed=seed)),
    lambda folder, seed: write_genai(folder, replace(CONCAT, seed=seed)),
    lambda folder, seed: write_optimum(folder, replace(CONCAT, positions=True, seed=seed)),
    lambda folder, seed: write_written_out(folder, window=20, seed=seed),
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
            drafted = model.generate("def add(a, b):", max_new_tokens=60, stop_at_eos=False)
            assert drafted.tokens == plain.tokens
            assert len(drafted.tokens) == 60
            assert drafted.stats.drafted > 0 or drafter == "ngram"
            if drafter == same:
                assert drafted.stats.accepted > 30
