"""NVFP4, whose blocks have small scales and whose matrices have factors beside them."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edgespec_export.export import export_model
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.stored_weights import StoredWeights
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.blocks import F32
from tests.kit.gguf import TinyGGUF, random_raw, tiny_gguf
from tests.kit.gguf_cases import gguf_of

ROUNDING = 2.0**-11
"""Of a factor, to float16."""


def scaled(model: TinyGGUF, name: str, factors: F32) -> F32:
    """Give the matrices of ``name`` random blocks and factors; their values as the gguf package has them."""
    kind, raw = model.tensors[f"{name}.weight"]
    *shape, columns = dequantize(raw, GGMLQuantizationType[kind]).shape
    blocks = random_raw(np.random.default_rng(1), int(np.prod(shape)), columns, "NVFP4")
    model.tensors[f"{name}.weight"] = "NVFP4", blocks.reshape(*shape, -1)
    model.tensors[f"{name}.scale"] = "F32", factors
    model.tensors[f"{name}.input_scale"] = "F32", np.ones_like(factors)
    values: F32 = dequantize(blocks, GGMLQuantizationType.NVFP4).reshape(len(factors), -1, columns)
    return (values * factors[:, None, None]).reshape(-1, columns)


def test_factors_of_matrices_go_into_the_bundle(tmp_path: Path) -> None:
    model = tiny_gguf("llama", "NVFP4")
    expected = scaled(model, "blk.1.ffn_down", np.array([3.7e-5], np.float32))
    export_model(model.write(tmp_path / "m.gguf"), tmp_path / "out")
    bundle = Bundle(tmp_path / "out")
    assert set(bundle.manifest.formats) == {"NVFP4"}
    got = StoredWeights(bundle).matrix("layers.1.mlp.down")
    np.testing.assert_allclose(got, expected, rtol=ROUNDING)
    np.testing.assert_array_equal(
        StoredWeights(bundle).matrix("layers.0.mlp.down"), model.values("blk.0.ffn_down.weight")
    )


def test_each_expert_has_a_factor(tmp_path: Path) -> None:
    model, factors = gguf_of("qwen3_moe"), np.linspace(0.5, 2.0, 8, dtype=np.float32)
    expected = scaled(model, "blk.0.ffn_up_exps", factors)
    with GGUFCheckpoint(model.write(tmp_path / "m.gguf")) as checkpoint:
        got = checkpoint.values("layers.0.experts_up")
        np.testing.assert_allclose(got, expected, rtol=ROUNDING)
        np.testing.assert_array_equal(checkpoint.values("layers.0.experts_up", 40, 90), got[40:90])


@pytest.mark.parametrize(
    ("factors", "match"),
    [
        (np.ones(7, np.float32), r"ffn_up_exps\.scale' of m\.gguf is F32 of shape \(7,\); allowed .*\(8,\)"),
        (np.ones(8, np.float16), r"is F16 of shape \(8,\); allowed .* F32"),
        (np.full(8, 60, np.float32), "has a scale of 60; allowed: below 60"),
        (np.full(8, np.nan, np.float32), "has a scale of nan; allowed: below 60"),
    ],
    ids=["count", "kind", "size", "no number"],
)
def test_factors_that_do_not_fit_are_refused(tmp_path: Path, factors: F32, match: str) -> None:
    model = gguf_of("qwen3_moe")
    scaled(model, "blk.0.ffn_up_exps", np.ones(8, np.float32))
    kind = "F16" if factors.dtype == np.float16 else "F32"
    model.tensors["blk.0.ffn_up_exps.scale"] = kind, factors
    with pytest.raises(ModelFileError, match=match):
        GGUFCheckpoint(model.write(tmp_path / "m.gguf"))


def test_scales_of_other_formats_are_no_part_of_a_model(tmp_path: Path) -> None:
    model = tiny_gguf("llama", "Q4_0")
    model.tensors["blk.1.ffn_down.scale"] = "F32", np.ones(1, np.float32)
    with pytest.raises(UnsupportedModelError, match=r"1 unknown tensors, such as 'blk\.1\.ffn_down\.scale'"):
        GGUFCheckpoint(model.write(tmp_path / "m.gguf"))
