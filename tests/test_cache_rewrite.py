"""KV caches that graphs concatenate, rewritten to attention in place: what is recognized and what is not."""

import errno
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from edgespec_export.cache_probe import AttentionFacts, examine
from edgespec_export.cache_rewrite import CacheRewrite, rewrite_cache
from edgespec_models.foreign import open_bundle
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from tests.foreign_for_tests import CONTEXT, GRAPH, LAYERS, WIDTH, ForeignSpec, edit_graph, write_optimum
from tests.written_out_for_tests import WrittenOut, write_written_out

TOKENS = [(7 * i * i + 3) % 400 for i in range(90)]
SUITABLE = {
    "PyTorch's": WrittenOut(),
    "window": WrittenOut(window=20),
    "window of two": WrittenOut(window=2),
    "scaled behind the product": WrittenOut(scale="after"),
    "stored mask": WrittenOut(mask="buffer"),
    "handed on": WrittenOut(cast=True),
    "positions by the cache": WrittenOut(positions="cache"),
    "all of these": WrittenOut(window=33, scale="after", mask="buffer", cast=True, positions="cache"),
}
UNSUITABLE = {
    "not causal": (WrittenOut(mask="everything"), "not causal"),
    "bias by distance": (WrittenOut(mask="alibi"), "the scores have a bias"),
    "hidden far behind": (WrittenOut(mask="first token"), "not causal"),
    "soft cap": (WrittenOut(scale="softcap"), "not attention of grouped heads"),
    "heads in turns": (WrittenOut(groups="tile"), "not attention of grouped heads"),
    "gated": (WrittenOut(gate=True), "depends on input_ids"),
    "read elsewhere": (WrittenOut(reader=True), r"leads to \d operators MatMul"),
}


def logits(folder: Path) -> npt.NDArray[np.float32]:
    """Of a long pass, single steps and a few rows, with a rollback."""
    session = CpuSession(open_bundle(folder), CpuOptions(threads=1))
    seen = [session.forward(TOKENS[:60]).copy()]
    seen += [session.forward([token]).copy() for token in TOKENS[60:66]]
    session.truncate(50)
    seen += [session.forward(TOKENS[at : at + 8]).copy() for at in range(50, 90, 8)]
    session.close()
    return np.concatenate(seen)


def in_place(folder: Path) -> list[dict[str, Any]]:
    """Attributes of the graph's attention operators."""
    nodes = onnx.load(str(folder / GRAPH), load_external_data=False).graph.node
    return [
        {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        for node in nodes
        if node.op_type == "GroupQueryAttention"
    ]


@pytest.mark.parametrize("how", SUITABLE.values(), ids=SUITABLE)
def test_causal_attention_is_rewritten_and_computes_the_same(tmp_path: Path, how: WrittenOut) -> None:
    folder = write_written_out(tmp_path / "m", how)
    files = {path.name for path in folder.iterdir()}
    before = logits(folder)
    assert rewrite_cache(folder) == CacheRewrite(LAYERS, "")
    session = CpuSession(open_bundle(folder))
    assert not session.copies_cache
    session.close()
    np.testing.assert_allclose(logits(folder), before, atol=1e-5 * np.abs(before).max())
    operators = in_place(folder)
    assert [facts["local_window_size"] for facts in operators] == [-1, how.window or -1]
    expected = 1 / 3 if how.scale == "after" else WIDTH**-0.25
    assert operators[0]["scale"] == pytest.approx(expected, rel=1e-5)
    assert {path.name for path in folder.iterdir()} == files


def test_what_nothing_needs_any_more_is_dropped(tmp_path: Path) -> None:
    folder = write_written_out(tmp_path / "m", WrittenOut(mask="buffer", positions="cache"))
    rewrite_cache(folder)
    graph = onnx.load(str(folder / GRAPH), load_external_data=False).graph
    kinds = {node.op_type for node in graph.node}
    assert not kinds & {"Softmax", "Expand", "Where"}
    assert all(list(tensor.dims) != [CONTEXT, CONTEXT] for tensor in graph.initializer)
    assert all(node.op_type != "Shape" or "past" not in node.input[0] for node in graph.node)


@pytest.mark.parametrize(("how", "reason"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_what_is_not_causal_attention_is_left_as_it_is(tmp_path: Path, how: WrittenOut, reason: str) -> None:
    folder = write_written_out(tmp_path / "m", how)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rewrite = rewrite_cache(folder)
    assert rewrite.layers == 0
    assert re.search(reason, rewrite.reason), rewrite.reason
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_one_layer_that_is_not_leaves_all(tmp_path: Path) -> None:
    folder = write_written_out(tmp_path / "m", WrittenOut())

    def hand_on(graph: onnx.GraphProto) -> None:
        (node,) = (n for n in graph.node if n.output[0] == f"present.{LAYERS - 1}.value")
        graph.node.insert(0, onnx.helper.make_node("Neg", [node.input[0]], ["minus"]))
        graph.node.insert(1, onnx.helper.make_node("Neg", ["minus"], ["again"]))
        node.input[0] = "again"

    edit_graph(folder / GRAPH, hand_on)
    rewrite = rewrite_cache(folder)
    assert rewrite.layers == 0
    assert rewrite.reason == "present.1.value is not past_key_values.1.value with new rows behind it"


def test_query_heads_as_rows_are_not_recognized(tmp_path: Path) -> None:
    folder = write_optimum(tmp_path / "m")
    rewrite = rewrite_cache(folder)
    assert rewrite.layers == 0
    assert "heads" in rewrite.reason


def test_a_cache_in_place_is_left_without_a_reason(tmp_path: Path) -> None:
    folder = write_optimum(tmp_path / "m", ForeignSpec(attention="gqa"))
    assert rewrite_cache(folder) == CacheRewrite(0, "")


def test_a_short_context_is_not_tried(tmp_path: Path) -> None:
    folder = write_written_out(tmp_path / "m", WrittenOut(), n_positions=32)
    assert "too short" in rewrite_cache(folder).reason


def test_other_logits_bring_the_graph_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no probe saw is seen at the end."""
    folder = write_written_out(tmp_path / "m", WrittenOut())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def mistaken(*given: Any) -> list[AttentionFacts]:
        return [replace(facts, scale=facts.scale * 1.01) for facts in examine(*given)]

    monkeypatch.setattr("edgespec_export.cache_rewrite.examine", mistaken)
    assert "logits differ by" in rewrite_cache(folder).reason
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_full_disk_brings_the_graph_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_written_out(tmp_path / "m", WrittenOut())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    save = onnx.save

    def full(model: onnx.ModelProto, path: str) -> None:
        if path == str(folder / GRAPH):
            Path(path).write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "no space left")
        save(model, path)

    monkeypatch.setattr(onnx, "save", full)
    with pytest.raises(OSError, match="no space left"):
        rewrite_cache(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
