"""NVFP4, whose blocks have small scales and whose matrices have factors beside them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edgespec_export.export import export_model
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.blocks import F32
from tests.kit import heads
from tests.kit.gguf import TinyGGUF, random_raw, tiny_gguf
from tests.kit.gguf_cases import gguf_of
from tests.kit.hf import Tensors, config_of, weights, write_checkpoint, write_safetensors
from tests.kit.stored import stored_matrix

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
    actual = stored_matrix(bundle, "layers.1.mlp.down")
    np.testing.assert_allclose(actual, expected, rtol=ROUNDING)
    np.testing.assert_array_equal(
        stored_matrix(bundle, "layers.0.mlp.down"), model.values("blk.0.ffn_down.weight")
    )


def test_a_head_in_several_files_has_its_factors(tmp_path: Path) -> None:
    target = tiny_gguf("llama", "Q8_0", layers=8).write(tmp_path / "target.gguf")
    model = heads.gguf_head("NVFP4")
    expected = scaled(model, "blk.0.ffn_down", np.array([3.7e-5], np.float32))
    model.write(tmp_path / "head.gguf", most_tensors=5)
    parts = sorted(tmp_path.glob("head-*.gguf"))
    assert len(parts) > 2
    with open_checkpoint(parts[1], target) as head:
        assert (head.model_name, head.files) == ("head", tuple(parts))
        np.testing.assert_allclose(head.values("layers.0.down"), expected, rtol=ROUNDING)
        assert head.head_tokens is not None
        np.testing.assert_array_equal(head.head_tokens, heads.TOKENS)


def test_each_expert_has_a_factor(tmp_path: Path) -> None:
    model, factors = gguf_of("qwen3_moe"), np.linspace(0.5, 2.0, 8, dtype=np.float32)
    expected = scaled(model, "blk.0.ffn_up_exps", factors)
    with GGUFCheckpoint(model.write(tmp_path / "m.gguf")) as checkpoint:
        actual = checkpoint.values("layers.0.experts_up")
        np.testing.assert_allclose(actual, expected, rtol=ROUNDING)
        np.testing.assert_array_equal(checkpoint.values("layers.0.experts_up", 40, 90), actual[40:90])


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


def packed(values: Tensors, form: str) -> tuple[Tensors, dict[str, F32]]:
    """Matrices of layers in NVFP4, as modelopt or compressed-tensors has it, and their values."""
    rng, stored, expected = np.random.default_rng(3), Tensors(), dict[str, F32]()
    for name, floats in values.items():
        stem = name.removesuffix(".weight")
        if not name.startswith("model.layers.") or floats.ndim != 2 or floats.shape[1] % 64:
            stored[name] = floats
            continue
        rows, columns = floats.shape
        codes = rng.integers(0, 16, (rows, columns // 16, 16), np.uint8)
        scales = rng.integers(1, 120, (rows, columns // 16), np.uint8)
        halves = (codes[..., :8] | codes[..., 8:] << np.uint8(4)).reshape(rows, -1, 32)
        raw = np.concatenate([scales.reshape(rows, -1, 4), halves], axis=-1)
        factor = np.float32(2.0**-9)
        expected[name] = dequantize(raw.reshape(rows, -1), GGMLQuantizationType.NVFP4) * factor
        other = form == "compressed-tensors"
        pairs = codes.reshape(rows, -1, 2)
        stored[f"{stem}.weight{'_packed' * other}"] = pairs[..., 0] | pairs[..., 1] << np.uint8(4)
        stored[f"{stem}.weight_scale"] = scales
        number = np.array([1 / factor] if other else factor, np.float32)
        stored[f"{stem}.weight_{'global_scale' if other else 'scale_2'}"] = number
        stored[f"{stem}.input_{'global_' * other}scale"] = np.ones_like(number)
    return stored, expected


CONFIGS: dict[str, dict[str, object]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
}


def directory(
    folder: Path, form: str, case: str = "qwen3_moe", change: Callable[[Tensors], object] = lambda t: None
) -> tuple[Path, dict[str, F32]]:
    config = config_of(case) | {"quantization_config": CONFIGS[form]}
    write_checkpoint(folder, config)
    stored, expected = packed(weights(config), form)
    change(stored)
    write_safetensors(folder / "model.safetensors", stored, scales="F8_E4M3")
    return folder, expected


@pytest.mark.parametrize("form", CONFIGS)
def test_directories_have_the_same_values(tmp_path: Path, form: str) -> None:
    source, expected = directory(tmp_path / "m", form)
    with HFCheckpoint(source) as checkpoint:
        np.testing.assert_array_equal(
            checkpoint.values("layers.1.q"), expected["model.layers.1.self_attn.q_proj.weight"]
        )
        ups = [expected[f"model.layers.0.mlp.experts.{n}.up_proj.weight"] for n in range(8)]
        np.testing.assert_array_equal(
            checkpoint.values("layers.0.experts_up", 20, 90), np.concatenate(ups)[20:90]
        )


def test_stacked_rows_are_cut_apart(tmp_path: Path) -> None:
    source, expected = directory(tmp_path / "m", "modelopt", "phi3")
    stacked = expected["model.layers.0.self_attn.qkv_proj.weight"]
    with HFCheckpoint(source) as checkpoint:
        parts = [checkpoint.values(f"layers.0.{part}") for part in "qkv"]
    np.testing.assert_array_equal(np.concatenate(parts), stacked)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale_2"), "weight_scale' without .*weight_scale_2"),
        (lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :2]}), "which do not fit"),
        (lambda t: t.update({f"{Q}.weight_scale_2": np.float32(0)}), "has the factor 0; allowed: above 0"),
        (lambda t: t.update({f"{Q}.weight_scale_2": np.ones(2, np.float32)}), "not one number in F32"),
    ],
    ids=["no factor", "few scales", "nothing", "two factors"],
)
def test_directories_that_contradict_themselves(
    tmp_path: Path, change: Callable[[Tensors], object], words: str
) -> None:
    source, _ = directory(tmp_path / "m", "modelopt", change=change)
    with pytest.raises(ModelFileError, match=words):
        HFCheckpoint(source)
