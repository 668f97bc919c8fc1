"""Weights read out of a bundle: what they stand for, in every format; what cannot be read says so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec_export.export import export_model
from edgespec_export.formats.stored_weights import StoredWeights
from edgespec_models.bundles.bundle import GRAPH, Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.errors import BundleError, UnsupportedModelError
from edgespec_models.files.onnx_header import read_header
from tests.foreign_for_tests import ForeignSpec, write_genai
from tests.gguf_for_tests import tiny_gguf
from tests.native_for_tests import tiny_native
from tests.toy import GEMMA, LLAMA, QWEN, TinyModel, tiny_bundle

DATA = f"{GRAPH}.data"
PROJECTIONS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
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


def test_the_embedding_is_a_tied_models_head(tmp_path: Path) -> None:
    export_model(tiny_gguf("qwen2", "Q8_0").write(tmp_path / "m.gguf"), tmp_path / "out")
    stored = StoredWeights(Bundle(tmp_path / "out"))
    assert stored.parts("lm_head") == ["embedding.weight"]
    head = stored.matrix("lm_head")
    np.testing.assert_array_equal(head, stored.embed(np.arange(len(head))))


def test_biases_are_those_of_all_parts(tmp_path: Path) -> None:
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
    for read in (
        lambda: stored.vector("layers.9.attn_norm.weight"),
        lambda: stored.matrix("layers.9.attention.o"),
        lambda: stored.bias("layers.9.attention.o"),
        lambda: stored.count("layers.9.attention.o.parts.0.weight"),
    ):
        with pytest.raises(UnsupportedModelError, match=r"no stored weights layers\.9"):
            read()


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: data[:3], lambda data: b""],
    ids=["half", "three bytes", "empty"],
)
def test_a_data_file_that_ends_too_early_is_found(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    model = tiny_native(tmp_path / "m")
    data = model.path / DATA
    stored = StoredWeights(model.bundle)
    data.write_bytes(damage(data.read_bytes()))
    with pytest.raises(BundleError, match=r"model\.onnx\.data"):
        for name in model.weights:
            if name.endswith("norm.weight"):
                stored.vector(name)
        stored.matrix("lm_head")


def test_a_data_file_that_is_missing_is_found(tmp_path: Path) -> None:
    model = tiny_native(tmp_path / "m")
    stored = StoredWeights(model.bundle)
    (model.path / DATA).unlink()
    with pytest.raises(BundleError, match="cannot read"):
        stored.vector("final_norm.weight")


def _edited(model: TinyModel, key: str, value: str) -> Bundle:
    """A bundle whose weights lie elsewhere, changed behind the back of the manifest's sizes."""
    bundle, folder = model.bundle, model.path
    graph = onnx.load(folder / GRAPH, load_external_data=False)
    for weight in graph.graph.initializer:
        for entry in weight.external_data:
            if entry.key == key:
                entry.value = value
    (folder / GRAPH).write_bytes(graph.SerializeToString())
    return bundle


@pytest.mark.parametrize("where", ["../secret", "/etc/passwd", "sub/file"])
def test_no_file_outside_the_bundle_is_read(tmp_path: Path, where: str) -> None:
    model = tiny_native(tmp_path / "m")
    (tmp_path / "secret").write_bytes((model.path / DATA).read_bytes())
    bundle = _edited(model, "location", where)
    with pytest.raises(BundleError, match="outside the bundle"):
        StoredWeights(bundle).vector("final_norm.weight")


@pytest.mark.parametrize("offset", ["-4000", "1000000000", "x"])
def test_places_that_make_no_sense_are_found(tmp_path: Path, offset: str) -> None:
    bundle = _edited(tiny_native(tmp_path / "m"), "offset", offset)
    with pytest.raises(BundleError, match=r"export the model again|as an ONNX graph"):
        StoredWeights(bundle).vector("final_norm.weight")


def test_weights_within_the_graph_are_refused(tmp_path: Path) -> None:
    model = tiny_native(tmp_path / "m")
    bundle, loaded = model.bundle, onnx.load(model.path / GRAPH)
    (model.path / GRAPH).write_bytes(loaded.SerializeToString())
    with pytest.raises(UnsupportedModelError, match="no stored weights"):
        StoredWeights(bundle).vector("final_norm.weight")


def test_the_header_says_where_weights_begin(tmp_path: Path) -> None:
    model = tiny_native(tmp_path / "m", replace(GEMMA, num_layers=1))
    weights = read_header(model.path / GRAPH).weights
    loaded = onnx.load(model.path / GRAPH, load_external_data=False)
    offsets = {
        weight.name: int({entry.key: entry.value for entry in weight.external_data}["offset"])
        for weight in loaded.graph.initializer
        if weight.external_data
    }
    assert len(offsets) > 15
    assert {name: weights[name].offset for name in offsets} == offsets
