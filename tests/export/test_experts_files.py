"""Experts in files: in whatever form they lie, they are the same; and files that contradict themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.errors import EdgespecError, ModelFileError, UnsupportedModelError
from edgespec_models.files.blocks import F32
from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import gguf_of
from tests.kit.hf import Tensors, config_of, weights, write_checkpoint, write_safetensors

GATE, UP, DOWN = (f"blk.0.ffn_{name}_exps" for name in ("gate", "up", "down"))


def directory(folder: Path, case: str, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    """A checkpoint whose tensors are changed."""
    write_checkpoint(folder, config_of(case))
    tensors = weights(config_of(case))
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def fuse(tensors: Tensors) -> None:
    """As transformers 5 saves the experts of a directory that has them one by one."""
    for layer in range(2):
        before = f"model.layers.{layer}.mlp.experts"
        one = [
            [tensors.pop(f"{before}.{expert}.{name}_proj.weight") for name in ("gate", "up", "down")]
            for expert in range(8)
        ]
        tensors[f"{before}.gate_up_proj"] = np.stack([np.concatenate(matrices[:2]) for matrices in one])
        tensors[f"{before}.down_proj"] = np.stack([matrices[2] for matrices in one])


def fused(model: TinyGGUF) -> TinyGGUF:
    """Gates and what they multiply in one tensor, as newer files have them."""
    for layer in range(2):
        (kind, gates), (_, ups) = (
            model.tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")
        )
        both = np.concatenate([gates, ups], axis=1)
        model.tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = kind, both
    return model


def matrices_of(checkpoint: Checkpoint) -> dict[str, F32]:
    with checkpoint:
        return {name: checkpoint.values(name) for name in checkpoint.tensors}


def test_experts_are_the_same_in_every_form(tmp_path: Path) -> None:
    one_by_one = HFCheckpoint(directory(tmp_path / "one", "qwen3_moe"))
    expected, rows = matrices_of(one_by_one), range(20, 45)  # of the first two experts
    assert expected["layers.1.experts_down"].shape == (8 * 64, 32)
    forms: list[Checkpoint] = [
        HFCheckpoint(directory(tmp_path / "fused", "qwen3_moe", fuse)),
        GGUFCheckpoint(gguf_of("qwen3_moe").write(tmp_path / "apart.gguf")),
        GGUFCheckpoint(fused(gguf_of("qwen3_moe", "Q8_0")).write(tmp_path / "fused.gguf")),
    ]
    for form in forms:
        name = "layers.1.experts_up"
        part = form.values(name, rows.start, rows.stop)
        np.testing.assert_array_equal(part, expected[name][rows.start : rows.stop])
        values = matrices_of(form)
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(values[name], value, name)


def test_codes_of_gpt_oss_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    """Rows of gates and of what they multiply take turns in a directory, and so do the codes of a byte."""
    model = gguf_of("gpt_oss")
    values = matrices_of(HFCheckpoint(directory(tmp_path / "m", "gpt_oss")))
    for name, part in ((GATE, "experts_gate"), (UP, "experts_up"), (DOWN, "experts_down")):
        _, raw = model.tensors[f"{name}.weight"]
        wanted = dequantize(raw, GGMLQuantizationType.MXFP4).reshape(-1, raw.shape[-1] // 17 * 32)
        np.testing.assert_array_equal(values[f"layers.0.{part}"], wanted)
        bias = model.tensors[f"{name}.bias"][1].ravel()
        np.testing.assert_array_equal(values[f"layers.0.{part}_bias"], bias)


def floats(tensors: Tensors) -> Tensors:
    """The experts of gpt-oss as its unquantized checkpoints have them: inputs are rows."""
    for name in [name for name in tensors if name.endswith("_blocks")]:
        codes, exponents = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:3], 32)  # type: ignore[operator]
        table = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32) / 2
        values = np.ldexp(table[pairs.astype(int)], exponents.astype(int)[..., None] - 127)
        rows = values.reshape(*values.shape[:2], -1)
        tensors[name.removesuffix("_blocks")] = np.ascontiguousarray(rows.swapaxes(1, 2), np.float32)
    return tensors


def test_unquantized_experts_of_gpt_oss_are_the_same(tmp_path: Path) -> None:
    expected = matrices_of(HFCheckpoint(directory(tmp_path / "codes", "gpt_oss")))
    source = directory(tmp_path / "floats", "gpt_oss", floats)
    values = matrices_of(HFCheckpoint(source))
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], value, name)
    checkpoint = HFCheckpoint(source)
    for name in ("layers.2.experts_up", "layers.2.experts_down"):  # across two experts
        np.testing.assert_array_equal(checkpoint.values(name, 50, 150), expected[name][50:150])
    checkpoint.close()


def test_experts_in_floats_and_in_codes_are_refused(tmp_path: Path) -> None:
    def both(tensors: Tensors) -> None:
        codes = {name: values for name, values in tensors.items() if name.endswith(("_blocks", "_scales"))}
        floats(tensors)
        tensors |= codes

    with pytest.raises(ModelFileError, match=r"has '.*down_proj' and '.*down_proj_blocks'"):
        HFCheckpoint(directory(tmp_path / "m", "gpt_oss", both))


def say(key: str, value: object) -> Callable[[TinyGGUF], object]:
    return lambda model: model.metadata.update({f"{model.architecture}.{key}": value})


def reshape(name: str, change: Callable[[Any], Any]) -> Callable[[TinyGGUF], object]:
    def edit(model: TinyGGUF) -> None:
        kind, raw = model.tensors[name]
        model.tensors[name] = kind, np.ascontiguousarray(change(raw))

    return edit


CONTRADICTIONS: list[tuple[str, Callable[[TinyGGUF], object], type[EdgespecError], str]] = [
    ("qwen3_moe", say("expert_count", 16), ModelFileError, r"_exps.*\(8, 64, 32\).*\(16, 64, 32\)"),
    ("qwen3_moe", say("expert_used_count", 9), UnsupportedModelError, "uses 9 experts; there are 8"),
    ("qwen3_moe", say("expert_used_count", 0), UnsupportedModelError, "used is 0"),
    ("qwen3_moe", say("expert_count", 0), UnsupportedModelError, "count is 0"),
    ("qwen3_moe", say("expert_count", 1 << 30), UnsupportedModelError, "count is 1073741824"),
    ("qwen3_moe", say("expert_feed_forward_length", 64), ModelFileError, r"\(8, 64, 32\).*\(8, 64, 64\)"),
    ("qwen3_moe", say("expert_feed_forward_length", [32, 64]), ModelFileError, "expert_feed_forward_length"),
    ("qwen3_moe", say("expert_gating_func", 4), UnsupportedModelError, "expert_gating_func is 4.*sigmoid"),
    ("qwen3_moe", say("expert_group_count", 2), UnsupportedModelError, "expert_group_count is 2"),
    ("qwen3", say("expert_count", 8), UnsupportedModelError, "no mixtures of experts of the family qwen3"),
    ("lfm2_moe", say("leading_dense_block_count", 2), ModelFileError, r"lacks a tensor for layers\.1\.gate"),
    ("qwen3_moe", reshape(f"{GATE}.weight", lambda raw: raw[:7]), ModelFileError, r"\(7, 32, 64\)"),
    ("qwen3_moe", reshape(f"{DOWN}.weight", lambda raw: raw.reshape(4, 128, 32)), ModelFileError, "128, 32"),
    (
        "qwen3_moe",
        lambda model: fused(model).tensors.update(
            {f"{UP}.weight": gguf_of("qwen3_moe").tensors[f"{UP}.weight"]}
        ),
        ModelFileError,
        "has layers.0.experts_up in",
    ),
    (
        "qwen3_moe",
        lambda model: model.tensors.update({f"{DOWN}.scale": ("F32", np.ones(8, np.float32))}),
        UnsupportedModelError,
        "ffn_down_exps.scale",
    ),
    (
        "gpt_oss",
        lambda model: model.tensors.pop("blk.1.attn_sinks.weight"),
        ModelFileError,
        r"layers\.1\.sinks",
    ),
    ("gpt_oss", lambda model: model.tensors.pop(f"{UP}.bias"), ModelFileError, "experts_up_bias"),
]


@pytest.mark.parametrize(("case", "change", "kind", "words"), CONTRADICTIONS)
def test_files_that_contradict_themselves_are_named(
    tmp_path: Path, case: str, change: Callable[[TinyGGUF], object], kind: type[EdgespecError], words: str
) -> None:
    model = gguf_of(case)
    change(model)
    with pytest.raises(kind, match=words) as caught:
        GGUFCheckpoint(model.write(tmp_path / "m.gguf"))
    assert caught.type is kind and "m.gguf" in str(caught.value)


LAST = "model.layers.1.mlp.experts.7.up_proj.weight"
DOWN_FLOATS, UP_FLOATS = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("down", "gate_up"))
FUSED = "model.layers.1.block_sparse_moe.input_linear.weight"
SHARED = "model.layers.1.shared_mlp.input_linear.weight"
BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{kind}" for kind in ("blocks", "scales"))


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (
            "qwen3_moe",
            lambda t: t.pop(LAST),
            r"7 of the 8 experts of layers\.1\.experts_up, and lacks number 7",
        ),
        ("qwen3_moe", lambda t: t.update({LAST.replace("7", "8"): t[LAST]}), "9 of the 8 experts"),
        ("qwen3_moe", lambda t: t.update({LAST: t[LAST][:16]}), r"\(16, 64\).*\(32, 64\)"),
        ("gpt_oss", lambda t: t.pop(SCALES), "down_proj_blocks' without .*down_proj_scales"),
        ("gpt_oss", lambda t: t.pop(BLOCKS), "down_proj_scales' without its codes"),
        ("gpt_oss", lambda t: t.update({SCALES: t[SCALES][:, :32].copy()}), "scales .* do not fit"),
        ("gpt_oss", lambda t: floats(t).pop(DOWN_FLOATS), r"lacks a tensor for layers\.1\.experts_down"),
        (
            "gpt_oss",
            lambda t: t.update({UP_FLOATS: floats(t)[UP_FLOATS][..., :-1].copy()}),
            "gate_up_proj' has shape",
        ),
        ("granite_moe", lambda t: t.update({FUSED: t[FUSED][:7]}), r"\(7, 128, 64\).*\(8, 128, 64\)"),
        ("granite_moe", lambda t: t.pop(FUSED), r"lacks a tensor for layers\.1\.experts_gate"),
        ("granite4_moe", lambda t: t.pop(SHARED), r"lacks a tensor for layers\.1\.shared_gate"),
        (
            "granite4_moe",
            lambda t: t.update({SHARED: t[SHARED][:-1]}),
            r"\(191, 64\); its metadata ask for \(192, 64\)",
        ),
    ],
)
def test_directories_that_contradict_themselves_are_named(
    tmp_path: Path, case: str, change: Callable[[Tensors], object], words: str
) -> None:
    with pytest.raises(ModelFileError, match=words):
        HFCheckpoint(directory(tmp_path / "m", case, change))
