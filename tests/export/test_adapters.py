"""LoRA adapters: what PEFT computes with its own files, and what llama.cpp's converter makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import edgespec
from edgespec import LoadOptions
from edgespec.cli import app
from edgespec.loading.opening import open_model
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import EdgespecError, RequestError
from edgespec_runtimes.cpu import open_cpu
from tests.kit.adapters import CASES, golden, write_adapter, write_gguf_adapter
from tests.kit.gguf_cases import gguf_of
from tests.kit.hf import F32, ROWS, TOKENS, config_of, write_checkpoint, write_safetensors
from tests.kit.tokenizers import byte_level_json

FLOATS = ExportOptions(weights="portable")
FILE = "adapter_model.safetensors"


def checkpoint(folder: Path, case: str) -> Path:
    write_checkpoint(folder, config_of(case))
    (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    return folder


def logits_of(bundle: Path) -> F32:
    session = open_cpu(Bundle(bundle))
    logits = session.predict(TOKENS).logits[list(ROWS)].copy()
    session.close()
    return logits


def distance(logits: F32, case: str) -> float:
    return float(np.abs(logits - golden(case)).max() / golden(case).std())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("base", ["folder", "gguf"])
@pytest.mark.parametrize("form", ["peft", "gguf"])
def test_merged_models_compute_what_peft_computes(tmp_path: Path, case: str, base: str, form: str) -> None:
    """Rows of queries and keys have another order in GGUF files of some families, and in their adapters."""
    name = CASES[case]["base"]
    if form == "gguf" and case == "stabilized":
        return  # whose scale and pattern the converter leaves out
    source = checkpoint(tmp_path / "m", name)
    if base == "gguf":
        source = gguf_of(name).write(tmp_path / "m.gguf")
    adapter = write_adapter(tmp_path / "a", case)
    if form == "gguf":
        adapter = write_gguf_adapter(tmp_path / "a.gguf", case)
    export_model(
        source, tmp_path / "out", options=ExportOptions(weights="portable", adapters=(str(adapter),))
    )
    assert distance(logits_of(tmp_path / "out"), case) < 2e-5


def test_quantized_matrices_become_8_bits_where_an_adapter_changes_them(tmp_path: Path) -> None:
    source = gguf_of("llama", "Q8_0").write(tmp_path / "m.gguf")
    adapter = str(write_adapter(tmp_path / "a", "plain"))
    for weights, formats in (("exact", {"Q8_0"}), ("portable", {"int8"})):
        out = tmp_path / weights
        report = export_model(source, out, options=ExportOptions(weights=weights, adapters=(adapter,)))
        assert all(any(form in loss["format"] for form in formats) for loss in report["weights"])
        assert distance(logits_of(out), "plain") < 0.3
    note = Bundle(out).manifest.provenance["adapters"]
    assert note.startswith("a times 1 (SHA-256 ") and note.endswith("; 14 matrices changed")
    shown = CliRunner().invoke(app, ["inspect", str(out)])
    assert "14 matrices changed" in " ".join(shown.output.split())


def test_several_have_scales_and_add_up(tmp_path: Path) -> None:
    source, adapter = checkpoint(tmp_path / "m", "llama"), write_adapter(tmp_path / "a", "plain")
    with open_checkpoint(source) as base, open_checkpoint(source, adapters=[str(adapter)]) as whole:
        change = whole.values("layers.1.down") - base.values("layers.1.down")
        with open_checkpoint(source, adapters=[f"{adapter}=0.5", f"{adapter}=-2"]) as both:
            found = both.values("layers.1.down") - base.values("layers.1.down")
            np.testing.assert_allclose(found, -1.5 * change, atol=1e-6)
            np.testing.assert_array_equal(
                both.values("layers.1.down", 7, 9), both.values("layers.1.down")[7:9]
            )
    odd = write_adapter(tmp_path / "odd=1", "plain")
    with open_checkpoint(source, adapters=[str(odd)]) as named:
        assert " times 1 " in named.changes["adapters"]


@pytest.mark.parametrize("base", ["folder", "gguf"])
@pytest.mark.parametrize("name", ["ernie45", "glm4"])
def test_rows_stay_where_both_forms_of_files_have_one_order(tmp_path: Path, name: str, base: str) -> None:
    source = checkpoint(tmp_path / "m", name)
    if base == "gguf":
        source = gguf_of(name).write(tmp_path / "m.gguf")
    adapter = write_adapter(tmp_path / "a", "plain")
    a, b = np.ones((2, 64), np.float32), np.arange(256, dtype=np.float32).reshape(128, 2)
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    write_safetensors(adapter / FILE, {f"{stem}A.weight": a, f"{stem}B.weight": b})
    with open_checkpoint(source) as plain, open_checkpoint(source, adapters=[str(adapter)]) as adapted:
        change = adapted.values("layers.0.q") - plain.values("layers.0.q")
    np.testing.assert_allclose(change, 4 / 2 * b @ a, atol=1e-4)


def test_weights_of_the_base_in_a_file_are_passed_over(tmp_path: Path) -> None:
    source, adapter = checkpoint(tmp_path / "m", "llama"), tmp_path / "a"
    write_adapter(adapter, "plain")
    head = {"lora_A": np.ones((2, 64)), "lora_B": np.ones((320, 2)), "base_layer": np.ones((320, 64))}
    tensors = {
        f"base_model.model.lm_head.{name}.weight": value.astype(np.float32) for name, value in head.items()
    }
    write_safetensors(adapter / FILE, tensors)
    with open_checkpoint(source) as base, open_checkpoint(source, adapters=[str(adapter)]) as adapted:
        change = adapted.values("lm_head") - base.values("lm_head")
    np.testing.assert_allclose(change, 2 * 4 / 2, atol=1e-5)


def stating(**facts: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | facts), encoding="utf-8")

    return change


def holding(**tensors: tuple[int, int]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        named = {name.replace("__", "."): np.ones(shape, np.float32) for name, shape in tensors.items()}
        named |= {f"base_model.model.{name}.weight": named.pop(name) for name in [*named]}
        write_safetensors(folder / FILE, named)

    return change


Q = "model__layers__0__self_attn__q_proj__lora_"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (stating(use_dora=True), "use_dora True; edgespec merges plain LoRA"),
        (stating(modules_to_save=["lm_head"]), r"modules_to_save \['lm_head'\]"),
        (stating(bias="all"), "bias 'all'"),
        (stating(peft_type="IA3"), "peft_type 'IA3'"),
        (stating(alpha_pattern={"q.*": 3}), r"alpha_pattern has the expression 'q\.\*'"),
        (lambda folder: (folder / FILE).unlink(), "lacks adapter_model.safetensors"),
        (holding(**{f"{Q}A": (2, 64)}), "lacks a factor of 'model.layers.0.self_attn.q_proj'"),
        (holding(**{f"{Q}A": (2, 32), f"{Q}B": (64, 2)}), "q_proj' of 64 x 32 weights, and m has 64 x 64"),
        (holding(**{f"{Q}magnitude": (1, 64)}), "q_proj.lora_magnitude.*no factor of a matrix"),
        (
            holding(model__norm__lora_A=(2, 64), model__norm__lora_B=(64, 2)),
            "changes 'model.norm', which edgespec does not merge",
        ),
        (
            holding(model__embed_tokens__lora_A=(2, 64), model__embed_tokens__lora_B=(320, 2)),
            "changes 'model.embed_tokens', which edgespec",
        ),
        (
            holding(
                model__layers__7__mlp__up_proj__lora_A=(2, 64), model__layers__7__mlp__up_proj__lora_B=(96, 2)
            ),
            "changes 'model.layers.7.mlp.up_proj'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    source, adapter = checkpoint(tmp_path / "m", "llama"), write_adapter(tmp_path / "a", "plain")
    change(adapter)
    with pytest.raises(EdgespecError, match=message):
        export_model(source, tmp_path / "out", options=ExportOptions(adapters=(str(adapter),)))
    assert {path.name for path in tmp_path.iterdir()} == {"m", "a"}


def test_adapters_of_other_models_are_refused(tmp_path: Path) -> None:
    adapter = write_gguf_adapter(tmp_path / "a.gguf", "plain")
    other = gguf_of("qwen2").write(tmp_path / "m.gguf")
    with pytest.raises(EdgespecError, match=r"is an adapter of 'llama', and m\.gguf of 'qwen2'"):
        open_checkpoint(other, adapters=[str(adapter)])
    with pytest.raises(EdgespecError, match="is no LoRA adapter"):
        open_checkpoint(other, adapters=[str(other)])


def test_first_use_makes_a_bundle_of_each_choice(tmp_path: Path) -> None:
    source, adapter = checkpoint(tmp_path / "m", "llama"), write_adapter(tmp_path / "a", "plain")
    choices = ((), (str(adapter),), (f"{adapter}=0.5",))
    paths = [open_model(source, "target", adapters=adapters).path for adapters in choices]
    assert len(set(paths)) == 3
    again = LoadOptions(threads=1, adapters=choices[1])
    with edgespec.load(source, None, options=again) as model:
        assert model.target.path == paths[1]
    assert open_model(paths[1], "target").manifest.provenance["adapters"]
    with pytest.raises(RequestError, match="is no model's source"):
        open_model(paths[1], "target", adapters=choices[1])
    for wrong, message in (
        (f"{adapter}=x", "the scale is 'x'"),
        ("nowhere", "adapter nowhere does not exist"),
    ):
        with pytest.raises(RequestError, match=message):
            open_model(source, "target", adapters=(wrong,))


def test_plans_count_what_adapters_change(tmp_path: Path) -> None:
    source = gguf_of("llama", "Q8_0").write(tmp_path / "m.gguf")
    adapter = str(write_adapter(tmp_path / "a", "plain"))
    plain, adapted = (edgespec.plan(source, None, adapters=some) for some in ((), (adapter,)))
    assert plain.models[0].weights_bytes == adapted.models[0].weights_bytes
    assert adapted.models[0].name == f"m + {adapter}"
    with pytest.raises(RequestError, match="does not exist"):
        edgespec.plan(source, None, adapters=("nowhere",))


@pytest.mark.parametrize("option", ["--adapter", "--mmproj"])
def test_a_server_of_several_models_takes_no_adapter_or_tower(option: str) -> None:
    result = CliRunner().invoke(app, ["serve", "one", "two", option, "a"])
    said = " ".join(result.output.split())
    assert result.exit_code != 0 and "--adapter, --mmproj and --chat-template are for one target" in said
