"""Portable graphs: run piece by piece they give what they give in one."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec_export.export import ExportOptions, export_model
from edgespec_export.graphs.pieces import cut, run_pieces
from edgespec_models.bundles.bundle import GRAPH, Bundle
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import ParityError
from edgespec_runtimes.cpu import open_cpu
from tests.kit.gguf import tiny_gguf
from tests.kit.toy import COLUMNS, FLOAT, GEMMA, INT8, LLAMA, tiny_bundle

TEXTS = ([5, 17, 300, 2, 2, 41, 17], [300, 99], [250])


@pytest.mark.parametrize(
    ("config", "form"), [(LLAMA, FLOAT), (LLAMA, COLUMNS), (LLAMA, INT8), (GEMMA, COLUMNS)]
)
def test_pieces_compute_what_the_whole_does(tmp_path: Path, config: Transformer, form: WeightFormat) -> None:
    bundle = tiny_bundle(tmp_path / "b", config, form).path
    opened = Bundle(bundle)
    session = open_cpu(opened)
    expected = []
    for tokens in TEXTS:
        session.prefill([])
        expected.append(session.predict(tokens).logits.copy())
    pieces = cut(bundle / GRAPH, piece_bytes=1)
    rolls_back, row_exact, logits = run_pieces(pieces, opened.manifest, TEXTS)
    assert len(pieces) > config.num_layers
    assert rolls_back
    assert row_exact == session.model.row_exact is True
    for logit, whole in zip(logits, expected, strict=True):
        np.testing.assert_array_equal(logit, whole)
    session.close()


def test_the_weights_are_shared_out(tmp_path: Path) -> None:
    graph = tiny_bundle(tmp_path / "b", LLAMA, FLOAT).path / GRAPH
    whole = {t.name for t in onnx.load(str(graph), load_external_data=False).graph.initializer}
    pieces = [onnx.load(str(p), load_external_data=False) for p in cut(graph, piece_bytes=1)]
    weights = [{t.name for t in piece.graph.initializer if t.name.endswith(".weight")} for piece in pieces]
    assert sum(len(names) for names in weights) == len(set().union(*weights))
    assert set().union(*weights) == {name for name in whole if name.endswith(".weight")}
    assert len(cut(graph)) == 1  # enough for a small model


def test_a_graph_that_cannot_roll_back_is_told(tmp_path: Path) -> None:
    """One that forgets its cache."""
    opened = tiny_bundle(tmp_path / "b", LLAMA, FLOAT).bundle
    bundle = opened.path
    model = onnx.load(str(bundle / GRAPH), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[3] = node.input[4] = "nothing"
    nothing = np.zeros((1, LLAMA.num_kv_heads, 8, LLAMA.head_dim), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(nothing, "nothing"))
    onnx.save(model, str(bundle / GRAPH))
    assert not run_pieces(cut(bundle / GRAPH, 1), opened.manifest, ())[0]


def test_an_export_that_cannot_roll_back_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec_export.graphs.pieces._Piece.test", lambda _piece, _values: (False, False))
    with pytest.raises(ParityError, match="after a roll-back"):
        options = ExportOptions(weights="portable")
        export_model(tiny_gguf("llama").write(tmp_path / "m.gguf"), tmp_path / "out", options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
