"""Weights read out of a bundle: what they stand for, in every format; what cannot be read says so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec_models.bundle import GRAPH, Bundle
from edgespec_models.config import ModelConfig
from edgespec_models.errors import BundleError, UnsupportedModelError
from edgespec_models.foreign import open_bundle
from edgespec_models.onnx_header import read_header
from edgespec_models.stored_weights import StoredWeights
from edgespec_models.weight_format import WeightFormat
from tests.foreign_for_tests import ForeignSpec, write_genai
from tests.toy import COLUMNS, FLOAT, GEMMA, INT4, INT8, LLAMA, MATMUL, QWEN, WIDE, TinyModel, tiny_bundle

ZEROS = WeightFormat(4, 32, zero_points=True)
LARGE = WeightFormat(4, 128, zero_points=True)
DATA = f"{GRAPH}.data"


def _in_features(config: ModelConfig) -> dict[str, int]:
    """By the graph's name of a projection, without its layer."""
    hidden = config.hidden_size
    return {
        "attention.qkv": hidden,
        "attention.o": config.query_width,
        "mlp.gate_up": hidden,
        "mlp.down": config.intermediate_size,
    }


@pytest.mark.parametrize(
    ("config", "form"),
    [(LLAMA, FLOAT), (GEMMA, INT4), (LLAMA, ZEROS), (WIDE, LARGE), (QWEN, INT8), (QWEN, INT4)],
    ids=lambda value: value.name if isinstance(value, WeightFormat) else value.architecture,
)
def test_weights_are_what_the_bundle_was_made_of(
    tmp_path: Path, config: ModelConfig, form: WeightFormat
) -> None:
    model = tiny_bundle(tmp_path / "m", config, form, role="drafter")
    stored = StoredWeights(model.bundle)
    for layer in range(config.num_layers):
        for name, in_features in _in_features(config).items():
            got = stored.matrix(f"layers.{layer}.{name}", in_features)
            assert got.dtype == np.float32
            expected = model.weights[f"layers.{layer}.{name.split('.')[1]}"]
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        stored.matrix("lm_head", config.hidden_size), model.weights["lm_head"], rtol=1e-6, atol=1e-7
    )
    table = stored.rows("embedding", slice(None), config.hidden_size)
    np.testing.assert_allclose(table, model.weights["embed"], rtol=1e-6, atol=1e-6)
    for name, values in model.weights.items():
        if name.endswith(("norm.weight", ".bias")):
            np.testing.assert_array_equal(stored.vector(name), values)


@pytest.mark.parametrize("form", [FLOAT, INT4, INT8, ZEROS], ids=lambda form: form.name)
def test_some_rows_are_those_of_all(tmp_path: Path, form: WeightFormat) -> None:
    model = tiny_bundle(tmp_path / "m", LLAMA, form)
    stored = StoredWeights(model.bundle)
    ids = np.array([400, 3, 3, 0])
    some = stored.rows("embedding", ids, LLAMA.hidden_size)
    np.testing.assert_array_equal(some, stored.rows("embedding", slice(None), LLAMA.hidden_size)[ids])
    part = stored.rows("lm_head.parts.0", slice(398, 500), LLAMA.hidden_size)
    np.testing.assert_array_equal(part, stored.matrix("lm_head", LLAMA.hidden_size)[398:])
    assert stored.count("lm_head.parts.0") == LLAMA.vocab_size
    some[:] = 7.0  # the caller's own, not the file
    assert not (stored.rows("embedding", ids, LLAMA.hidden_size) == 7.0).any()


def test_biases_are_those_of_all_parts(tmp_path: Path) -> None:
    model = tiny_bundle(tmp_path / "m", QWEN, INT8)
    stored = StoredWeights(model.bundle)
    assert stored.parts("layers.1.attention.qkv") == [f"layers.1.attention.qkv.parts.{n}" for n in range(2)]
    expected = [model.weights[f"layers.1.attention.qkv.parts.{part}.bias"] for part in range(2)]
    bias = stored.bias("layers.1.attention.qkv")
    assert bias is not None
    np.testing.assert_array_equal(bias, np.concatenate(expected))
    assert stored.bias("layers.1.attention.o") is None
    assert "layers.1.attention.qkv.parts.1.bias" in stored
    assert "layers.1.attention.qkv.parts.2.bias" not in stored


@pytest.mark.parametrize("form", [COLUMNS, MATMUL], ids=lambda form: form.name)
def test_weights_with_remainders_are_refused(tmp_path: Path, form: WeightFormat) -> None:
    stored = StoredWeights(tiny_bundle(tmp_path / "m", LLAMA, form).bundle)
    with pytest.raises(UnsupportedModelError, match="remainders"):
        stored.matrix("layers.0.attention.o", LLAMA.query_width)


def test_names_that_the_graph_lacks_are_refused(tmp_path: Path) -> None:
    stored = StoredWeights(tiny_bundle(tmp_path / "m").bundle)
    for read in (
        lambda: stored.vector("layers.9.attn_norm.weight"),
        lambda: stored.matrix("layers.9.attention.o", 96),
        lambda: stored.bias("layers.9.attention.o"),
        lambda: stored.count("layers.9.attention.o"),
    ):
        with pytest.raises(UnsupportedModelError, match=r"no stored weights layers\.9"):
            read()


def test_a_foreign_graph_has_no_such_names(tmp_path: Path) -> None:
    stored = StoredWeights(open_bundle(write_genai(tmp_path / "f", ForeignSpec(external=True))))
    with pytest.raises(UnsupportedModelError, match="no stored weights"):
        stored.vector("final_norm.weight")


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: data[:3], lambda data: b""],
    ids=["half", "three bytes", "empty"],
)
def test_a_data_file_that_ends_too_early_is_found(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    model = tiny_bundle(tmp_path / "m")
    data = model.path / DATA
    stored = StoredWeights(model.bundle)
    data.write_bytes(damage(data.read_bytes()))
    with pytest.raises(BundleError, match=r"model\.onnx\.data"):
        for name in model.weights:
            if name.endswith("norm.weight"):
                stored.vector(name)
        stored.matrix("lm_head", LLAMA.hidden_size)


def test_a_data_file_that_is_missing_is_found(tmp_path: Path) -> None:
    model = tiny_bundle(tmp_path / "m")
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
    model = tiny_bundle(tmp_path / "m")
    (tmp_path / "secret").write_bytes((model.path / DATA).read_bytes())
    bundle = _edited(model, "location", where)
    with pytest.raises(BundleError, match="outside the bundle"):
        StoredWeights(bundle).vector("final_norm.weight")


@pytest.mark.parametrize("offset", ["-4000", "1000000000", "x"])
def test_places_that_make_no_sense_are_found(tmp_path: Path, offset: str) -> None:
    bundle = _edited(tiny_bundle(tmp_path / "m"), "offset", offset)
    with pytest.raises(BundleError, match=r"export the model again|as an ONNX graph"):
        StoredWeights(bundle).vector("final_norm.weight")


def test_weights_within_the_graph_are_refused(tmp_path: Path) -> None:
    model = tiny_bundle(tmp_path / "m")
    bundle, loaded = model.bundle, onnx.load(model.path / GRAPH)
    (model.path / GRAPH).write_bytes(loaded.SerializeToString())
    with pytest.raises(UnsupportedModelError, match="no stored weights"):
        StoredWeights(bundle).vector("final_norm.weight")


def test_the_header_says_where_weights_begin(tmp_path: Path) -> None:
    model = tiny_bundle(tmp_path / "m", replace(GEMMA, num_layers=1), INT4)
    weights = read_header(model.path / GRAPH).weights
    loaded = onnx.load(model.path / GRAPH, load_external_data=False)
    offsets = {
        weight.name: int({entry.key: entry.value for entry in weight.external_data}["offset"])
        for weight in loaded.graph.initializer
        if weight.external_data
    }
    assert len(offsets) > 20
    assert {name: weights[name].offset for name in offsets} == offsets
