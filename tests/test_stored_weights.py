"""Weights read out of a bundle: what they stand for, in every format; what cannot be read says so."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec_export.export import export_model
from edgespec_models.bundles.bundle import GRAPH, Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.bundles.stored_weights import StoredWeights
from edgespec_models.errors import BundleError, UnsupportedModelError
from tests.kit.foreign import ForeignSpec, write_genai
from tests.kit.gguf import tiny_gguf
from tests.kit.native import keep_weights_at, tiny_native
from tests.kit.toy import GEMMA, LLAMA, QWEN, tiny_bundle

DATA = f"{GRAPH}.data"
PROJECTIONS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"])
@pytest.mark.parametrize("config", [LLAMA, QWEN, GEMMA], ids=lambda config: config.architecture)
def test_weights_are_what_the_bundle_was_made_of(tmp_path: Path, config: ModelConfig, kind: str) -> None:
    model = tiny_native(tmp_path / "m", config, kind, role="drafter")
    stored = StoredWeights(model.bundle)
    for layer in range(config.num_layers):
        for name in PROJECTIONS:
            got = stored.matrix(f"layers.{layer}.{name}")
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, model.weights[f"layers.{layer}.{name.split('.')[1]}"])
    np.testing.assert_array_equal(stored.matrix("lm_head"), model.weights["lm_head"])
    np.testing.assert_array_equal(stored.embed(np.arange(config.vocab_size)), model.weights["embed"])
    for name, values in model.weights.items():
        if name.endswith("norm.weight"):
            np.testing.assert_array_equal(stored.vector(name), values)


def test_some_rows_are_those_of_all(tmp_path: Path) -> None:
    model = tiny_native(tmp_path / "m", LLAMA)
    stored = StoredWeights(model.bundle)
    ids = np.array([400, 3, 3, 0])
    some = stored.embed(ids)
    np.testing.assert_array_equal(some, model.weights["embed"][ids])
    part = stored.rows("lm_head.parts.0.weight", 384, 500)
    np.testing.assert_array_equal(part, model.weights["lm_head"][384:])
    assert stored.count("lm_head.parts.0.weight") == LLAMA.vocab_size
    some[:] = 7.0  # the caller's own, not the file
    assert not (stored.embed(ids) == 7.0).any()


def test_tied_heads_and_biases(tmp_path: Path) -> None:
    export_model(tiny_gguf("qwen2", "Q8_0").write(tmp_path / "m.gguf"), tmp_path / "out")
    stored = StoredWeights(Bundle(tmp_path / "out"))
    assert stored.parts("lm_head") == ["embedding.weight"]
    head = stored.matrix("lm_head")
    np.testing.assert_array_equal(head, stored.embed(np.arange(len(head))))
    model = tiny_native(tmp_path / "m", QWEN)
    stored = StoredWeights(model.bundle)
    assert len(stored.parts("layers.1.attention.qkv")) == 3
    expected = [model.weights[f"layers.1.attention.qkv.parts.{part}.bias"] for part in range(2)]
    bias = stored.bias("layers.1.attention.qkv")
    assert bias is not None
    np.testing.assert_array_equal(bias, np.concatenate(expected))
    assert stored.bias("layers.1.attention.o") is None


def test_graphs_of_other_operators_are_refused(tmp_path: Path) -> None:
    foreign = open_bundle(write_genai(tmp_path / "f", ForeignSpec(external=True)))
    for bundle in (tiny_bundle(tmp_path / "m").bundle, foreign):
        with pytest.raises(UnsupportedModelError, match="own operators"):
            StoredWeights(bundle)


def test_names_that_the_graph_lacks_are_refused(tmp_path: Path) -> None:
    stored = StoredWeights(tiny_native(tmp_path / "m").bundle)
    for read in (stored.vector, stored.matrix, stored.bias, stored.count):
        with pytest.raises(UnsupportedModelError, match=r"no stored weights layers\.9"):
            read("layers.9.attention.o")


@pytest.mark.parametrize("kept", [0.5, 0.0, None])
def test_a_data_file_that_ends_too_early_or_is_missing_is_found(tmp_path: Path, kept: float | None) -> None:
    model = tiny_native(tmp_path / "m")
    data, stored = model.path / DATA, StoredWeights(model.bundle)
    whole = data.read_bytes()
    data.write_bytes(whole[: int(len(whole) * kept)]) if kept is not None else data.unlink()
    with pytest.raises(BundleError, match=r"model\.onnx\.data"):
        stored.vector("final_norm.weight")
        stored.matrix("lm_head")


PLACES = [("location", where, "outside the bundle") for where in ("../secret", "/etc/passwd", "sub/file")]
PLACES += [("offset", at, "export the model again|as an ONNX graph") for at in ("-4000", "1000000000", "x")]


@pytest.mark.parametrize(("key", "value", "says"), PLACES)
def test_places_that_make_no_sense_are_found(tmp_path: Path, key: str, value: str, says: str) -> None:
    model = tiny_native(tmp_path / "m")
    (tmp_path / "secret").write_bytes((model.path / DATA).read_bytes())
    bundle = model.bundle  # which has looked at sizes
    keep_weights_at(model.path, key, value)
    with pytest.raises(BundleError, match=says):
        StoredWeights(bundle).vector("final_norm.weight")


def test_weights_within_the_graph_are_refused(tmp_path: Path) -> None:
    model = tiny_native(tmp_path / "m")
    bundle, loaded = model.bundle, onnx.load(model.path / GRAPH)
    (model.path / GRAPH).write_bytes(loaded.SerializeToString())
    with pytest.raises(UnsupportedModelError, match="no stored weights"):
        StoredWeights(bundle).vector("final_norm.weight")
