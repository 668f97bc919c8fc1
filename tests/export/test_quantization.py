"""Quantization by choice: which matrix gets what, bundles made with it, and choices that are refused."""

from pathlib import Path
from typing import Any, get_args

import pytest

from edgespec_export.formats.quantization import Mixed, Quantization
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import RequestError
from edgespec_models.files.tensors import GGMLType
from tests.export.test_export import exported, logits_error
from tests.kit.gguf import tiny_gguf


def test_choices_are_named_and_others_refused() -> None:
    assert [Quantization().name, Quantization(4, "none").name] == ["4-bit", "4-bit/mixed=none"]
    assert Quantization(8, "none").name == "8-bit"
    refused: Any = {"bits is 5; allowed: 4 or 8": {"bits": 5}, "'head' or 'sensitive'": {"mixed": "all"}}
    for says, choice in refused.items():
        with pytest.raises(RequestError, match=says):
            Quantization(**choice)


@pytest.mark.parametrize(("columns", "bits"), [(576, 4), (1536, 4), (48, 32), (40, 32)])
def test_a_width_without_whole_blocks_stays_in_floating_point(columns: int, bits: int) -> None:
    form = Quantization().format_of("layers.0.q", GGMLType.F16, columns, 2)
    assert (form.bits, form.block) == (bits, 32)


def test_mixed_spares_what_it_says() -> None:
    def spared(mixed: Mixed, name: str) -> bool:
        choice = Quantization(mixed=mixed)
        bits = choice.format_of(name, GGMLType.F16, 1024, 16).bits
        assert choice.block_format(name, GGMLType.F16, 16) == ("Q8_0" if bits == 8 else "Q4_1")
        return bits == 8

    assert [spared(mixed, "lm_head") for mixed in ("none", "head", "sensitive")] == [False, True, True]
    for name in ("v", "down"):
        of_layers = [spared("sensitive", f"layers.{layer}.{name}") for layer in range(16)]
        assert of_layers[:5] == [True, True, False, False, True] and of_layers[-2:] == [True, True]
        assert sum(of_layers) == 8
        assert not any(spared("head", f"layers.{layer}.{name}") for layer in range(16))
    for kind in get_args(Mixed):
        assert Quantization(8, mixed=kind).format_of("layers.3.v", GGMLType.F16, 1024, 16).bits == 8
    assert not spared("sensitive", "layers.0.q") and not spared("sensitive", "layers.15.gate")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_a_bundle(tmp_path: Path, architecture: str) -> None:
    model = tiny_gguf(architecture, "F16")
    choice = Quantization(mixed="sensitive")
    report = exported(model, tmp_path, quantization=choice)
    manifest = Bundle(tmp_path / "out").manifest
    assert (manifest.weights, manifest.operators) == (choice.name, "edgespec")
    assert set(manifest.formats) == {"Q4_1", "Q8_0"}
    assert report["row_exact"]
    assert not [file for file in (tmp_path / "out").iterdir() if file.is_dir()]  # of the comparison
    coarse = report["rounding"]
    assert logits_error(model, tmp_path / "out") < 0.4  # random weights in 4 bits, through every layer
    finer = exported(model, tmp_path, quantization=Quantization(bits=8), overwrite=True)["rounding"]
    assert coarse["kl"] > 10 * finer["kl"] and finer["top1_agreement"] >= coarse["top1_agreement"]
    assert exported(model, tmp_path, overwrite=True)["rounding"] is None
    exported(model, tmp_path, quantization=Quantization(bits=8), overwrite=True)
    assert logits_error(model, tmp_path / "out") < 0.06


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_a_quantized_portable_bundle(tmp_path: Path, architecture: str) -> None:
    model = tiny_gguf(architecture, "Q4_K")
    report = exported(model, tmp_path, quantization=Quantization(), weights="portable")
    manifest = Bundle(tmp_path / "out").manifest
    assert (manifest.weights, manifest.operators) == ("4-bit", "standard")
    assert set(manifest.formats) == {"int4/32+minimums", "int8/32"}
    assert report["row_exact"]
    assert logits_error(model, tmp_path / "out") < 0.4


def test_what_the_file_holds_in_this_form_is_kept(tmp_path: Path) -> None:
    for kind, bits in (("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)):
        keep = Quantization(bits, "none")  # type: ignore[arg-type]
        for weights in (None, "portable"):
            options = {"quantization": keep, "weights": weights, "overwrite": True}
            report = exported(tiny_gguf("llama", kind), tmp_path, **options)
            # The minimums of portable bundles are rounded once more.
            limit = 1e-2 if (kind, weights) == ("Q4_1", "portable") else 1e-6
            assert [loss["relative_error"] < limit for loss in report["weights"]] == [True], (kind, weights)


def test_a_policy_and_a_quantization_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'exact' and quantization '4-bit' exclude each other"):
        exported(tiny_gguf("llama"), tmp_path, weights="exact", quantization=Quantization())
    assert not (tmp_path / "out").exists()
