"""Weights read out of a bundle; what cannot be read says so."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec_models.bundles.bundle import GRAPH
from edgespec_models.bundles.stored_weights import stored_vector
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import BundleError
from tests.kit.native import keep_weights_at, tiny_native
from tests.kit.toy import GEMMA, LLAMA

DATA = f"{GRAPH}.data"


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=lambda config: config.architecture)
def test_vectors_are_what_the_bundle_was_made_of(tmp_path: Path, config: Transformer) -> None:
    model = tiny_native(tmp_path / "m", config)
    for name, values in model.weights.items():
        if name.endswith("norm.weight"):
            stored = stored_vector(model.bundle, name)
            assert stored.dtype == np.float32
            np.testing.assert_array_equal(stored, values)


def test_a_name_that_the_graph_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no stored weights layers\.9"):
        stored_vector(tiny_native(tmp_path / "m").bundle, "layers.9.attention.o")


@pytest.mark.parametrize("kept", [0.5, 0.0, None])
def test_a_data_file_that_ends_too_early_or_is_missing_is_found(tmp_path: Path, kept: float | None) -> None:
    model = tiny_native(tmp_path / "m")
    data, bundle = model.path / DATA, model.bundle
    whole = data.read_bytes()
    data.write_bytes(whole[: int(len(whole) * kept)]) if kept is not None else data.unlink()
    with pytest.raises(BundleError, match=r"model\.onnx\.data"):
        stored_vector(bundle, "final_norm.weight")


PLACES = [("location", where, "outside the bundle") for where in ("../secret", "/etc/passwd", "sub/file")]
PLACES += [("offset", at, "export the model again|as an ONNX graph") for at in ("-4000", "1000000000", "x")]


@pytest.mark.parametrize(("key", "value", "says"), PLACES)
def test_places_that_make_no_sense_are_found(tmp_path: Path, key: str, value: str, says: str) -> None:
    model = tiny_native(tmp_path / "m")
    (tmp_path / "secret").write_bytes((model.path / DATA).read_bytes())
    bundle = model.bundle  # which has looked at sizes
    keep_weights_at(model.path, key, value)
    with pytest.raises(BundleError, match=says):
        stored_vector(bundle, "final_norm.weight")


def test_weights_within_the_graph_are_refused(tmp_path: Path) -> None:
    model = tiny_native(tmp_path / "m")
    bundle, loaded = model.bundle, onnx.load(model.path / GRAPH)
    (model.path / GRAPH).write_bytes(loaded.SerializeToString())
    with pytest.raises(BundleError, match="no stored weights"):
        stored_vector(bundle, "final_norm.weight")
