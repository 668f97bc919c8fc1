"""Tiny Hugging Face checkpoints, written on the spot.

Weights are a formula: the stream of PCG64 (whose raw numbers are the same in every version of numpy) over
the tensors in the order of their names, seven significant bits each, so that float32, float16 and bfloat16
files hold the same values.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.record import record
from edgespec_models.families import model_of
from edgespec_models.families.reading import config_of as decoder_of
from edgespec_models.files.facts import Facts
from tests.kit.tokenizers import byte_level_json

F32 = npt.NDArray[np.float32]
Tensors = dict[str, F32]

VOCAB = 320
CONTEXT = 96
TOKENS = tuple((7 + 37 * index * index) % VOCAB for index in range(40))
ROWS = (0, 1, 5, 6, 7, 12, 20, 28, 38, 39)
"""Positions whose logits the goldens hold."""
EMBEDDED = (TOKENS[:1], TOKENS[:9], TOKENS[3:40], TOKENS[5:8], TOKENS)
"""Texts whose vectors the goldens hold, for each of these cases."""
EMBEDDERS = ("qwen3", "granite", "gemma3")

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
_PHI = {"partial_rotary_factor": 0.5, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 100.0,
    "tie_word_embeddings": True,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.4, 2.9, 3.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0],
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0}
_MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 48,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_QWEN35 = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 64,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
}
_LFM2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-4,
    "intermediate_size": 112,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.2,
    "block_multiple_of": 32,
    "tie_word_embeddings": True,
}
_LFM3 = {
    "model_type": "lfm3",
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention"],
    "head_dim": 32,
    "sliding_window": 6,
    "conv_L_cache": 7,
    "norm_eps": 1e-4,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full") * 2],
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 100.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
_GEMMA4_TIED = {
    **_GEMMA4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_OLDER = ("layer_types", "intermediate_size", "tie_word_embeddings", "block_auto_adjust_ff_dim")
_GRANITE = {
    "model_type": "granite",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
    "logits_scaling": 3.0,
}
_GRANITE_H = {
    **_GRANITE,
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "position_embedding_type": "nope",
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
_NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hidden_act": None,
    "head_dim": 32,
    "hybrid_override_pattern": "M-M*-",
    "num_hidden_layers": 5,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "time_step_min": 0.0,
}
_GLM4_MOE_LITE = {
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,  # as transformers has it for latent parts, whatever the file says
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.75,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 32},
    "llama3": {"model_type": "llama", "rope_scaling": _LLAMA3, "rope_theta": 500.0},
    "llama_linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "mistral_window": {"model_type": "mistral", "sliding_window": 7},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True},
    "smollm3_list": {"model_type": "smollm3", "no_rope_layers": [0, 1]},
    "qwen2": {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "attention_bias": False},
    "qwen3_yarn": {"model_type": "qwen3", "head_dim": 32, "attention_bias": False, "rope_scaling": _YARN},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 32, "attention_bias": True},
    "ernie45": {"model_type": "ernie4_5", "head_dim": 32, "tie_word_embeddings": True},
    "glm4": {"model_type": "glm4", "head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True},
    "granite": _GRANITE,
    "qwen35": _QWEN35,
    "qwen35_equal": {
        **_QWEN35,
        "num_hidden_layers": 5,
        "layer_types": [f"{kind}_attention" for kind in ("linear", "full", "linear", "full", "linear")],
        "full_attention_interval": 2,
        "linear_key_head_dim": 32,
        "linear_num_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "granite4": {
        **_GRANITE,
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "nope",
        "layer_types": ["full_attention"] * 2,
    },
    "granite4_h": _GRANITE_H,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": {
        **{key: value for key, value in _NEMOTRON_H.items() if key != "hybrid_override_pattern"},
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    "granite4_h_moe": {
        **_GRANITE_H,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 64,
    },
    "exaone4": {
        "model_type": "exaone4",
        "sliding_window": None,
        "head_dim": 32,
        "rope_scaling": _LLAMA3,
        "rope_theta": 500.0,
        "layer_types": ["full_attention"] * 2,
    },
    "exaone4_window": {
        "model_type": "exaone4",
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "sliding_window_pattern": "LLLG",
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "sliding", "full")],
    },
    "granite_moe": {
        **_GRANITE,
        "model_type": "granitemoe",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 64,
    },
    "granite4_moe": {
        **_GRANITE,
        "model_type": "granitemoehybrid",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 64,
        "shared_intermediate_size": 96,
        "position_embedding_type": "nope",
        "layer_types": ["attention"] * 2,
    },
    "ernie45_moe": {
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "tie_word_embeddings": True,
        "num_dense_layers": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 8,
        "moe_k": 3,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
    },
    "exaone_moe": {
        "model_type": "exaone_moe",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 6,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "sliding", "full")],
        **_EXPERTS,
        "num_dense_layers": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_shared_experts": 2,
        "routed_scaling_factor": 2.5,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, **_EXPERTS, "decoder_sparse_step": 1},
    "qwen35_moe": {
        **_QWEN35,
        **_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 64,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "sliding_window": 6,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
        "rope_parameters": {**_YARN, "rope_theta": 10000.0, "truncate": False},
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "sliding", "full")],
        "rope_parameters": {
            "full_attention": {**_YARN, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "lfm2": _LFM2,
    "lfm2_keys": {
        **{key: value for key, value in _LFM2.items() if key not in _OLDER},
        "full_attn_idxs": [1, 3],
        "block_ff_dim": 128,
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": True,
        "conv_L_cache": 4,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **_EXPERTS,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
    "lfm3": _LFM3,
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 32,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        "tie_word_embeddings": True,
    },
    "apertus": {
        "model_type": "apertus",
        "hidden_act": "xielu",
        "rope_scaling": _LLAMA3,
        "rope_theta": 500.0,
    },
    "laguna": {
        "model_type": "laguna",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "num_attention_heads_per_layer": [4, 6, 6],
        "sliding_window": 6,
        "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding")],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "gating": True,
        "rope_parameters": {
            "full_attention": {**_YARN, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
        **_EXPERTS,
        "num_dense_layers": 1,
        "shared_expert_intermediate_size": 64,
        "moe_routed_scaling_factor": 2.5,
    },
    "nanbeige": {"model_type": "nanbeige", "num_loops": 2, "skip_loop_final_norm": False},
    "muse_glimmer": {
        "model_type": "muse_glimmer_text",
        "num_hidden_layers": 5,
        "head_dim": 32,
        "hidden_activation": "silu",
        "sliding_window": 6,
        "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "sliding", "full")],
        "layer_rope_theta": [0, 100.0, 100.0, 100.0, 0],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "final_logit_softcapping": 4.0,
        "output_multiplier": 0.5,
        "qk_scale_factor": 3.87,
        "post_norm_eps": 1e-8,
    },
    "ministral3": {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _MINISTRAL3},
    "ministral3_long": {
        "model_type": "ministral3",
        "head_dim": 32,
        "rope_parameters": {
            **_MINISTRAL3,
            "factor": 8.0,
            "original_max_position_embeddings": 12,
            "llama_4_scaling_beta": 1.0,
        },
    },
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 6,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    "gemma3": _GEMMA3,
    "gemma3_linear": {
        **_GEMMA3,
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 32,
        "rope_theta": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4": _GEMMA4,
    "gemma4_tied": _GEMMA4_TIED,
    "gemma4_moe": {
        **_GEMMA4_TIED,
        "num_hidden_layers": 3,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full")],
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
    "glm4_moe_lite": _GLM4_MOE_LITE,
    "glm4_moe_lite_whole": {**_GLM4_MOE_LITE, "q_lora_rank": None},
    "phi3": {"model_type": "phi3", "sliding_window": 7},
    "phi4": {
        "model_type": "phi3",
        **_PHI,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4 * CONTEXT,
        "original_max_position_embeddings": CONTEXT,
        "rope_scaling": _LONGROPE,
    },
}
"""What ``config.json`` says beside the common facts, by the name of the golden."""
NATIVE = tuple(
    case
    for case in CASES
    if case.startswith(("ministral3_long", "qwen35", "lfm", "gpt", "granite4_h", "nemotron"))
    or "_moe" in case
    or case in ("gemma4", "hunyuan", "apertus", "laguna", "nanbeige", "muse_glimmer")
)
"""Those that edgespec's own operators alone compute."""
PORTABLE = tuple(case for case in CASES if case not in NATIVE)
PLAIN = tuple(case for case in PORTABLE if case not in ("gemma2", "gemma4_tied"))
"""Those that graphs of fixed shapes and PyTorch compute too."""


def config_of(case: str) -> dict[str, Any]:
    """The ``config.json`` of a case."""
    facts = {**_COMMON, **CASES[case]}
    return {key: dict(value) if isinstance(value, dict) else value for key, value in facts.items()}


def convolves(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer is a short convolution."""
    attention = config.get("full_attn_idxs")
    if config["model_type"] not in ("lfm2", "lfm2_moe", "lfm3") or attention is not None:
        return attention is not None and layer not in attention
    return bool(config["layer_types"][layer] == "conv")


def mlp_width(config: Mapping[str, Any]) -> int:
    """Of the MLP; LFM2 states another number and a rule."""
    width = int(config.get("block_ff_dim", config.get("intermediate_size", 0)))
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    return width


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint with this ``config.json``, as its family's tables name them.

    The goldens have the names that transformers reads.
    """
    family, facts = model_of(Facts(config, "config.json"))
    decoder, kind = decoder_of(facts, family), config["model_type"]
    made, stacked = record(decoder), _STACKED.get(kind, ())
    shaped = made.tensors | (made.biases if kind in _BIASED else {})
    if facts.boolean("tie_word_embeddings", default=False):
        del shaped["lm_head"]
    for name, product in made.products.items():
        if name.rpartition(".")[2] in stacked:
            parts = [shaped.pop(matrix) for matrix in product.matrices]
            shaped[name] = sum(rows for rows, _ in parts), parts[0][1]
    count, tensors = decoder.experts.count if decoder.experts else 0, dict[str, tuple[int, ...]]()
    for own, (rows, *rest) in shaped.items():
        place, _, name = own.rpartition(".")
        first, *others = {**family.outer, **family.layer}.get(name, (name, ""))[0].split() or [name]
        fused = name.startswith("experts_") and "experts_gate_up" in stacked
        prefix = f"model.{place}." if place else ""
        if name in _UNSTORED.get(kind, ()):
            continue
        if fused:
            tensors[prefix + (others or [first])[-1]] = count, rows // count, *rest
        elif "*" in first:
            for number in range(count):
                tensors[prefix + first.replace("*", str(number))] = rows // count, *rest
        elif name == "conv":
            tensors[prefix + first] = rows, 1, *rest
        else:
            tensors[prefix + first] = rows, *rest
    return _as_published(config, tensors)


_BIASED = ("qwen2", "gpt_oss", "seed_oss", "glm4")
"""Those whose queries, keys and values have biases."""
_STACKED: Mapping[str, tuple[str, ...]] = {
    "glm4": ("gate_up",),
    "phi3": ("qkv", "gate_up"),
    "granitemoe": ("experts_gate_up",),
    "granitemoehybrid": ("gate_up", "shared_gate_up", "experts_gate_up"),
    "qwen3_5_moe_text": ("experts_gate_up",),
    "gemma4_text": ("experts_gate_up",),
}
"""The products whose matrices are one tensor; experts that are so have one for all."""
_UNSTORED: Mapping[str, tuple[str, ...]] = {
    "muse_glimmer_text": ("q_norm", "k_norm"),
    "gpt_oss": tuple(f"experts_{part}{end}" for part in ("gate", "up", "down") for end in ("", "_bias")),
    "glm4_moe_lite": ("v_b",),
}
"""What directories lack, or have otherwise (:func:`_as_published`)."""


def _as_published(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The tensors with what the tables of a family do not say."""
    kind, published = config["model_type"], dict[str, tuple[int, ...]]()
    for name, shape in tensors.items():
        layer, _, end = name.rpartition(".")
        if kind == "nemotron_h":
            published[name.replace("model.", "backbone.", 1)] = shape
        elif kind in ("laguna", "qwen3_5_moe_text"):
            renamed = name.replace("gate.e_score", "experts.e_score")
            published[renamed.replace("shared_experts", "shared_expert")] = shape
        elif kind == "glm4_moe_lite" and end == "k_b":
            heads, widths = config["num_attention_heads"], ("qk_nope_head_dim", "v_head_dim")
            rows = heads * sum(config[width] for width in widths)
            published[f"{layer}.self_attn.kv_b_proj.weight"] = rows, config["kv_lora_rank"]
        elif name.endswith("moe_statics.e_score_correction_bias"):
            published[name] = 1, *shape
        else:
            published[name] = shape
    for layer in map("model.layers.{}.".format, range(config["num_hidden_layers"])):
        if kind == "gpt_oss":
            hidden, width = config["hidden_size"], config["intermediate_size"]
            published |= _gpt_oss_experts(layer, hidden, config["num_local_experts"], width)
        elif kind == "apertus":
            published |= {f"{layer}mlp.act_fn.alpha_{sign}": (1,) for sign in "pn"}
            published |= {f"{layer}mlp.act_fn.{number}": () for number in ("beta", "eps")}
    return published


def _gpt_oss_experts(layer: str, hidden: int, count: int, width: int) -> dict[str, tuple[int, ...]]:
    tensors = dict[str, tuple[int, ...]]()
    for name, rows, columns in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        tensors |= {
            f"{layer}mlp.experts.{name}_proj_blocks": (count, rows, columns // 32, 16),
            f"{layer}mlp.experts.{name}_proj_scales": (count, rows, columns // 32),
            f"{layer}mlp.experts.{name}_proj_bias": (count, rows),
        }
    return tensors


def is_delta_net(config: Mapping[str, Any], layer: int) -> bool:
    """Whether ``layer`` of a Qwen3.5 is none of attention."""
    if not config["model_type"].startswith("qwen3_5"):
        return False
    return (layer + 1) % int(config["full_attention_interval"]) != 0


_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def nemotron_kinds(config: Mapping[str, Any]) -> list[str]:
    """What each layer of a Nemotron-H is."""
    types = config.get("layers_block_type", config.get("hybrid_override_pattern", ()))
    return [_LETTERS.get(kind, kind) for kind in types]


_ROUTERS = (
    "mixer.gate.weight",
    "mlp.gate.weight",
    "mlp.router.weight",
    "feed_forward.gate.weight",
    "router.layer.weight",
)


_WHOLE = "muse_glimmer_text", "model.norm.weight"  # a norm that is not stored less 1


def weights(config: Mapping[str, Any], seed: int = 0, without: tuple[str, ...] = ()) -> Tensors:
    """The values of every tensor, float32, but of those whose names end with one of ``without``."""
    # These store their norms' weights less 1.
    less = config["model_type"].startswith(("gemma2", "gemma3_text", "qwen3_5", "muse"))
    shaped = {name: shape for name, shape in shapes(config).items() if not name.endswith(without)}
    tensors = drawn(shaped, seed, norm=0 if less else 1)
    for name in tensors:
        if name.endswith(
            ("linear_attn.norm.weight", "layer_scalar", "norm_1.weight", "norm_2.weight", "scale")
        ):
            tensors[name] += 1
        elif config["model_type"] == "gemma4_text" and name.endswith("q_norm.weight"):
            tensors[name] /= 4  # whose products with keys are not scaled otherwise
        elif name.endswith("linear_attn.out_proj.weight"):
            # What random keys give is small, and its normalization makes what rounding did as large.
            tensors[name] /= 8
        elif name.endswith("act_fn.beta") or (config["model_type"], name) == _WHOLE:
            tensors[name] += 1
        elif name.endswith("act_fn.eps"):
            tensors[name][()] = -1e-6
        elif name.endswith(("_blocks", "_scales")):
            raw = np.random.PCG64(len(tensors[name].shape)).random_raw(tensors[name].size)
            few = np.asarray(raw, np.uint64).reshape(tensors[name].shape) >> np.uint64(40)
            codes = few % np.uint64(256) if name.endswith("_blocks") else few % np.uint64(3) + np.uint64(120)
            tensors[name] = codes.astype(np.uint8)
        elif name.endswith(_ROUTERS):
            # Choices hang on no rounding, but where the weights of the chosen have to be normalized.
            scales = {
                "lfm2_moe": 2,
                "qwen3_moe": 3,
                "exaone_moe": 3,
                "glm4_moe_lite": 8,
                "nemotron_h": 8,
                "laguna": 12,
            }
            tensors[name] *= scales.get(config["model_type"], 4)
        elif name.endswith("router.proj.weight"):
            tensors[name] *= 32
    return tensors


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int, norm: int = 1) -> Tensors:
    """Values for tensors of these shapes; norms' weights are about ``norm``."""
    stream = np.random.PCG64(seed)
    tensors: Tensors = {}
    for name, shape in sorted(shapes.items()):
        raw = np.asarray(stream.random_raw(int(np.prod(shape))), np.uint64)
        sevenths = ((raw >> np.uint64(57)).astype(np.float32) - 64) / 64  # in [-1, 1), steps of 1/64
        if name.endswith("norm.weight"):
            values = sevenths / 2 + norm
        else:
            values = sevenths * (0.5 if len(shape) < 2 else 2.0 ** -np.round(np.log2(shape[-1]) / 2 - 0.5))
        tensors[name] = values.reshape(shape).astype(np.float32)
    return tensors


def write_safetensors(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], dtype: str = "F32", scales: str = "U8"
) -> Path:
    """A safetensors file; floats that ``dtype`` cannot hold are cut off; int64, uint8 and bool stay.

    Bytes whose name ends with ``weight_scale`` are called ``scales``.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks, at = [], 0
    for name, values in tensors.items():
        form = {"int64": "I64", "bool": "BOOL", "uint8": "U8"}.get(values.dtype.name, dtype)
        data = _bytes(values, form)
        form = scales if form == "U8" and name.endswith("weight_scale") else form
        header[name] = {"dtype": form, "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        chunks.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))
    return path


def _bytes(values: npt.NDArray[Any], dtype: str) -> bytes:
    if dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2", "I64": "<i8", "BOOL": "?", "U8": "u1"}[dtype]).tobytes()


def write_with_tower(
    folder: Path,
    text: Mapping[str, Any],
    outer: Mapping[str, Any],
    others: Iterable[str],
    prefix: str = "model.language_model.",
) -> Path:
    """The text model of ``text`` in a directory whose ``config.json`` is ``outer``.

    Its tensors have ``prefix`` in place of ``model.``, and beside them lie small ones called ``others``.
    """
    tensors = {name.replace("model.", prefix, 1): values for name, values in weights(text).items()}
    small = dict.fromkeys(others, np.ones((2, 3), np.float32))
    return write_directory(folder, outer, tensors | small)


def write_directory(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]], dtype: str = "F32"
) -> Path:
    """``config.json`` and ``tensors`` in one file; no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    return folder


def write_with_tokenizer(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]
) -> Path:
    """The same with a tokenizer of one token less than ``VOCAB``."""
    write_directory(folder, config, tensors)
    (folder / "tokenizer.json").write_text(byte_level_json(size=VOCAB - 1), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}', encoding="utf-8")
    return folder


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], *, dtype: str = "F32", shards: int = 1, seed: int = 0
) -> Path:
    """``config.json`` and the weights, in one file or several; no tokenizer."""
    tensors = weights(config, seed)
    if shards == 1:
        return write_directory(folder, config, tensors, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
