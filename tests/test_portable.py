"""Portable graphs: run piece by piece they give what they give in one; and an int8 KV cache in them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec_export.export import ExportOptions, export_model
from edgespec_export.graphs.kv_cache import cache_statistics, calibration_tokens, quantize_cache
from edgespec_export.graphs.pieces import cut, run_pieces
from edgespec_models.bundles.bundle import GRAPH, MANIFEST, Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.errors import BundleError, ParityError, RequestError
from edgespec_runtimes.cpu import CpuSession
from tests.gguf_for_tests import ARCHITECTURES, HEAD_DIM, tiny_gguf
from tests.machines_for_tests import X86
from tests.sessions_for_tests import passes
from tests.toy import COLUMNS, FLOAT, GEMMA, INT8, LLAMA, tiny_bundle

TEXTS = ([5, 17, 300, 2, 2, 41, 17], [300, 99], [250])


@pytest.mark.parametrize(
    ("config", "form"), [(LLAMA, FLOAT), (LLAMA, COLUMNS), (LLAMA, INT8), (GEMMA, COLUMNS)]
)
def test_pieces_compute_what_the_whole_does(tmp_path: Path, config: ModelConfig, form: WeightFormat) -> None:
    bundle = tiny_bundle(tmp_path / "b", config, form).path
    opened = Bundle(bundle)
    session = CpuSession(opened)
    expected = []
    for tokens in TEXTS:
        session.prefill([])
        expected.append(session.predict(tokens).logits.copy())
    pieces = cut(bundle / GRAPH, piece_bytes=1)
    rolls_back, row_exact, logits = run_pieces(pieces, config, TEXTS)
    assert len(pieces) > config.num_layers
    assert rolls_back
    assert row_exact == session.row_exact is True
    for got, whole in zip(logits, expected, strict=True):
        np.testing.assert_array_equal(got, whole)
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
    bundle = tiny_bundle(tmp_path / "b", LLAMA, FLOAT).path
    model = onnx.load(str(bundle / GRAPH), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[3] = node.input[4] = "nothing"
    nothing = np.zeros((1, LLAMA.num_kv_heads, 8, LLAMA.head_dim), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(nothing, "nothing"))
    onnx.save(model, str(bundle / GRAPH))
    assert not run_pieces(cut(bundle / GRAPH, 1), LLAMA, ())[0]


def test_an_export_that_cannot_roll_back_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec_export.graphs.pieces._Piece.test", lambda _piece, _values: (False, False))
    with pytest.raises(ParityError, match="after a truncation"):
        options = ExportOptions(weights="portable")
        export_model(tiny_gguf("llama").write(tmp_path / "m.gguf"), tmp_path / "out", options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


# ---- An int8 KV cache --------------------------------------------------------------------------------------


TOKENS = [5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63, 11, 380]


def export(folder: Path, architecture: str, kv: str) -> Bundle:
    source = tiny_gguf(architecture).write(folder / "m.gguf")
    options = ExportOptions(weights="portable", kv=kv)  # type: ignore[arg-type]
    export_model(source, folder / kv, options=options)
    return Bundle(folder / kv)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_computes_nearly_the_same_in_a_quarter_of_the_memory(tmp_path: Path, architecture: str) -> None:
    sessions = {kv: CpuSession(export(tmp_path, architecture, kv)) for kv in ("float32", "int8")}
    logits = {kv: session.predict(TOKENS).logits.copy() for kv, session in sessions.items()}
    difference = np.linalg.norm(logits["int8"] - logits["float32"]) / np.linalg.norm(logits["float32"])
    assert 0 < difference < 0.05
    assert sessions["int8"].kv_bytes * 4 == sessions["float32"].kv_bytes
    for session in sessions.values():
        session.close()


def test_the_bundle_says_so(tmp_path: Path) -> None:
    bundle = export(tmp_path, "llama", "int8")
    assert bundle.manifest.kv == "int8"
    assert bundle.manifest.kv_bytes_per_token * 4 == bundle.config.kv_bytes_per_token
    facts = json.loads((bundle.path / MANIFEST).read_text(encoding="utf-8"))
    del facts["kv"]  # bundles made before there was a choice
    (bundle.path / MANIFEST).write_text(json.dumps(facts), encoding="utf-8")
    assert Bundle(bundle.path).manifest.kv == "float32"
    for damage in ({"kv": "int3"}, {"float_kv_layers": 7}, {"float_kv_layers": [99]}):
        (bundle.path / MANIFEST).write_text(json.dumps(facts | damage), encoding="utf-8")
        with pytest.raises(BundleError, match="is damaged"):
            Bundle(bundle.path)


def test_a_choice_is_of_portable_bundles(tmp_path: Path) -> None:
    source = tiny_gguf("llama", layers=1).write(tmp_path / "m.gguf")
    with pytest.raises(RequestError, match="allowed: 'float32' or 'int8'"):
        ExportOptions(kv="int4")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"whose KV cache is float16; leave out weights, or kv='int8'"):
        export_model(source, tmp_path / "out", options=ExportOptions(weights="exact", kv="int8"))
    kinds = {None: ("float16", "edgespec"), "float32": ("float32", "standard"), "int8": ("int8", "standard")}
    for kv, found in kinds.items():
        options = ExportOptions(kv=kv, overwrite=True)  # type: ignore[arg-type]
        export_model(source, tmp_path / "out", options=options)
        manifest = Bundle(tmp_path / "out").manifest
        assert (manifest.kv, manifest.operators) == found


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=lambda config: config.architecture)
def test_scales_cover_what_the_cache_held(tmp_path: Path, config: object) -> None:
    bundle = tiny_bundle(tmp_path / "b", config).bundle  # type: ignore[arg-type]
    special = replace(bundle.manifest.special_tokens, bos=3, add_bos=True)
    texts = calibration_tokens(bundle.tokenizer, replace(special, add_bos=False))
    assert calibration_tokens(bundle.tokenizer, special) == [[3, *tokens] for tokens in texts]
    texts = [[token % bundle.config.vocab_size for token in tokens[:50]] for tokens in texts]
    whole = cache_statistics(cut(bundle.path / GRAPH), bundle.config, texts)
    in_pieces = cache_statistics(cut(bundle.path / GRAPH, 1), bundle.config, texts)
    assert whole.keys() == in_pieces.keys() and len(whole) == 2 * bundle.config.num_layers
    assert quantize_cache(bundle.path / GRAPH, bundle.config, texts) == ()
    model = onnx.load(str(bundle.path / GRAPH), load_external_data=False)
    scales = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if "past" in t.name}
    for name, (largest, spread) in whole.items():
        np.testing.assert_allclose(in_pieces[name][0], largest, rtol=1e-5)
        np.testing.assert_allclose(in_pieces[name][1], spread, rtol=1e-4)
        assert largest.shape == (bundle.config.num_kv_heads, bundle.config.head_dim)
        assert (spread <= largest).all()
        assert (scales[f"{name}.scale"] * 127 >= largest.ravel()).all()


def outlying(folder: Path, layers: tuple[int, ...]) -> Path:
    """A model whose keys have a channel with a huge bias in some layers, as Qwen2.5-0.5B's first."""
    source = tiny_gguf("qwen2", "Q8_0")
    for layer in layers:
        kind, raw = source.tensors[f"blk.{layer}.attn_k.bias"]
        bias = raw.copy()
        bias[HEAD_DIM - 1] = 400.0  # the channel that turns slowest
        source.tensors[f"blk.{layer}.attn_k.bias"] = (kind, bias)
    return source.write(folder / "m.gguf")


@X86
@pytest.mark.parametrize("layers", [(), (1,), (0, 1)])
def test_layers_with_keys_too_unequal_stay_float(tmp_path: Path, layers: tuple[int, ...]) -> None:
    source = outlying(tmp_path, layers)
    report = export_model(source, tmp_path / "out", options=ExportOptions(kv="int8"))
    assert report["row_exact"]
    manifest = Bundle(tmp_path / "out").manifest
    assert manifest.float_kv_layers == layers
    session = CpuSession(Bundle(tmp_path / "out"))
    together = session.predict(TOKENS).logits.copy()
    session.truncate(4)
    np.testing.assert_array_equal(passes(session, TOKENS[4:], 1), together[4:])
    rows = session.kv_bytes // manifest.kv_bytes_per_token
    assert session.kv_bytes == rows * manifest.kv_bytes_per_token
    count = manifest.config.num_layers
    share = (count - len(layers) + 4 * len(layers)) / (4 * count)
    assert manifest.kv_bytes_per_token == share * manifest.config.kv_bytes_per_token
    session.close()


def test_rounding_them_all_the_same_would_cost_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = outlying(tmp_path, (0,))
    logits = {}
    for name, limit in (("float32", 1), ("int8", 1), ("all int8", np.inf)):
        monkeypatch.setattr("edgespec_export.graphs.kv_cache._LARGEST_STEP", np.float32(limit))
        kv = "float32" if name == "float32" else "int8"
        options = ExportOptions(weights="portable", kv=kv)  # type: ignore[arg-type]
        export_model(source, tmp_path / name, options=options)
        session = CpuSession(Bundle(tmp_path / name))
        logits[name] = session.predict(TOKENS).logits.copy()
        session.close()
    far = {name: np.abs(rows - logits["float32"]).max() for name, rows in logits.items()}
    assert 0 < 3 * far["int8"] < far["all int8"]
