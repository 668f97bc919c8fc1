"""Mamba-2, latent attention and MTP layers in files that contradict themselves or are cut off.

Each is refused by name before anything is written.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec_export.export import export_model
from edgespec_models.errors import EdgespecError
from tests.kit import mtp
from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import gguf_of
from tests.kit.heads import drafts_for
from tests.kit.hf import config_of, weights, write_safetensors, write_with_tokenizer

CASES = ("granite4_h", "granite4_h_moe", "nemotron_h", "nemotron_h_moe", "glm4_moe_lite")
MTP_CASES = ("qwen35_moe", "glm4_moe_lite", "nemotron_h_moe")
Wrong = dict[str, dict[object, str]]
MAMBA: Wrong = {
    "ssm.inner_size": {130: "4 heads of Mamba-2 are 32 wide; allowed: 130", 64: r"blk\.0\.ssm_in.weight"},
    "ssm.time_step_rank": {3: "3 heads of Mamba-2 are 42 wide", 2: r"blk\.0\.ssm_in.weight"},
    "ssm.state_size": {24: "their keys 24; allowed: multiples of 16", 32: r"blk\.0\.ssm_in.weight"},
    "ssm.conv_kernel": {1: "conv_taps is 1", 3: r"blk\.0\.ssm_conv1d.weight"},
    "attention.head_count": {3: "3 query heads|head_dim is 21", 8: "attn_[qk].weight"},
}
EXPERTS: Wrong = {
    "expert_count": {
        7: r"exps.weight.*8, .*7, ",
        9: r"exps.weight.*8, .*9, ",
        2: "uses 3 experts; there are 2",
    },
    "expert_used_count": {9: "uses 9 experts; there are 8", 0: "used is 0"},
}
SHARED: Wrong = {"expert_shared_feed_forward_length": {64: "shexp.weight.*96.*64", 0: "shexp"}}
KEYS: dict[str, Wrong] = {
    "granite4_h": {**MAMBA, "ssm.group_count": {2: "mamba_n_groups is 2"}},
    "granite4_h_moe": {**EXPERTS, **SHARED, "feed_forward_length": {32: r"exps.weight.*\(8, 32, 64\)"}},
    "nemotron_h": {**MAMBA, "ssm.group_count": {3: "cannot share 3 groups", 1: r"blk\.0\.ssm_in.weight"}},
    "nemotron_h_moe": {
        **EXPERTS,
        **SHARED,
        "expert_feed_forward_length": {32: r"exps.weight.*\(8, 64, 32\)"},
        "expert_gating_func": {9: "expert_gating_func is 9"},
        "expert_group_count": {2: "expert_group_count is 2"},
    },
    "glm4_moe_lite": {
        **EXPERTS,
        "attention.kv_lora_rank": {32: "kv_lora_rank 32 and .* ask for 48 and 32", 0: "ask for 16 and 0"},
        "attention.q_lora_rank": {
            64: r"attn_q_a.weight.*\(96, 64\).*\(64, 64\)",
            0: "lacks a tensor for layers.0.q ",
        },
        "attention.key_length": {96: "keys and values are 96 and 64 wide"},
        "attention.key_length_mla": {80: r"attn_q_b.weight|attn_k_b.weight", 40: "qk_nope_head_dim 24"},
        "attention.value_length_mla": {
            32: r"attn_v_b.weight.*\(4, 48, 64\).*\(4, 32, 64\)",
            40: "v_head_dim 40",
        },
        "attention.head_count": {2: "attn_q_b.weight|attn_k_b.weight"},
        "attention.head_count_kv": {4: "in 4 heads"},
        "rope.dimension_count": {32: "rope.dimension_count 32 ask for 96"},
        "leading_dense_block_count": {0: r"layers\.0\.", 2: r"layers\.1\.", 4: r"layers\.1\."},
        "expert_shared_count": {1: "shexp.weight.*64.*32", 0: "shexp"},
        "expert_group_count": {2: "expert_group_count is 2"},
        "rope.scaling.type": {"yarn": "'yarn'|factor"},
    },
}
"""By case, key and wrong value: what the message says."""
ROWS = [(case, key, value) for case, keys in KEYS.items() for key, values in keys.items() for value in values]


def refused(source: Path, words: str, *, layer: bool = False) -> None:
    """The export of ``source``, or of its MTP layer, must fail with ``words`` and leave nothing behind."""
    with pytest.raises(EdgespecError, match=words) as caught:
        export_model(source, source.with_name("out"), options=drafts_for(source) if layer else None)
    assert source.name in str(caught.value) and not source.with_name("out").exists()


@pytest.mark.parametrize(("case", "key", "value"), ROWS)
def test_keys_that_contradict_each_other_or_tensors_are_named(
    tmp_path: Path, case: str, key: str, value: Any
) -> None:
    refused(gguf_of(case, **{key: value}).write(tmp_path / "m.gguf"), KEYS[case][key][value])


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_a_file_has_to_be_there_in_its_shape(tmp_path: Path, case: str) -> None:
    whole = gguf_of(case)
    for name in whole.tensors:
        if name != "output.weight":  # without which a model is tied
            _without_and_misshaped(tmp_path, whole, name)


@pytest.mark.parametrize("case", MTP_CASES)
def test_every_tensor_of_an_mtp_layer_has_to_be_there_in_its_shape(tmp_path: Path, case: str) -> None:
    whole = mtp.gguf(case=case)
    block = f"blk.{mtp.config(case)['num_hidden_layers']}."
    names = [name for name in whole.tensors if name.startswith(block)]
    assert len(names) > 14
    for name in names:
        optional = name.endswith("shared_head_norm.weight") and case != "nemotron_h_moe"  # as in llama.cpp
        _without_and_misshaped(tmp_path, whole, name, layer=True, optional=optional)


def _without_and_misshaped(
    folder: Path, whole: TinyGGUF, name: str, *, layer: bool = False, optional: bool = False
) -> None:
    own, (_, values) = whole.tensors, whole.tensors[name]
    larger = np.zeros((*values.shape[:-1], values.shape[-1] + 32), np.float32)
    for words, changed in (
        ("lacks a tensor for|has no usable token embedding", {n: t for n, t in own.items() if n != name}),
        (name, own | {name: ("F32", larger)}),
    ):
        if name in changed or not optional:
            whole.tensors = changed
            refused(whole.write(folder / "m.gguf"), words, layer=layer)
    whole.tensors = own


@pytest.mark.parametrize("case", MTP_CASES)
def test_every_tensor_of_an_mtp_layer_of_a_directory_has_to_be_there(tmp_path: Path, case: str) -> None:
    config = mtp.config(case)
    folder, whole = mtp.write_hf(tmp_path / "m", case=case), mtp.tensors(config)
    for name in mtp.layer_weights(config):
        rest = {other: values for other, values in whole.items() if other != name}
        write_safetensors(folder / "model.safetensors", rest)
        refused(folder, r"lacks (a tensor for|experts)|layers\.0\.experts", layer=True)


def test_a_second_mtp_layer_is_named(tmp_path: Path) -> None:
    config = mtp.config("nemotron_h_moe")
    twice = {"mtp.layers.1.mixer.q_proj.weight": mtp.tensors(config)["mtp.layers.0.mixer.q_proj.weight"]}
    folder = write_with_tokenizer(tmp_path / "m", config, mtp.tensors(config) | twice)
    refused(folder, r"mtp\.layers\.1\.mixer\.q_proj.* beside .*allowed: one MTP layer", layer=True)


def test_an_mtp_layer_of_a_model_without_experts_is_named(tmp_path: Path) -> None:
    config = config_of("nemotron_h")
    more = {"mtp.layers.0.eh_proj.weight": np.zeros((64, 128), np.float32)}
    refused(
        write_with_tokenizer(tmp_path / "m", config, weights(config) | more), "mtp.layers.0.eh_proj.weight"
    )
