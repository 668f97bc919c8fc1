"""Tiny Hugging Face checkpoints, written on the spot.

Needs numpy only: ``tools/make_hf_golden.py`` imports it where nothing else of edgespec is.
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
_POST_NORMED = ("olmo2", "olmo3", "exaone4")
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
    or case == "gemma4"
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
    """The tensors of a checkpoint with this ``config.json``."""
    if config["model_type"] == "nemotron_h":
        return _nemotron(config)
    hidden, kind = config["hidden_size"], config["model_type"]
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        f"model.{'embedding_' * kind.startswith('lfm')}norm.weight": (hidden,),
    }
    if not config.get("tie_embedding", config["tie_word_embeddings"]):
        tensors["lm_head.weight"] = (config["vocab_size"], hidden)
    if width := config.get("hidden_size_per_layer_input", 0) * config["num_hidden_layers"]:
        tensors["model.embed_tokens_per_layer.weight"] = config["vocab_size"], width
        tensors["model.per_layer_model_projection.weight"] = width, hidden
        tensors["model.per_layer_projection_norm.weight"] = (config["hidden_size_per_layer_input"],)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        if is_delta_net(config, layer):
            shaped = _delta_net(config)
        elif config.get("layer_types", ())[layer:][:1] == ["mamba"]:
            shaped = _mamba(config)
        else:
            own = {"lfm2": _lfm2_layer, "lfm2_moe": _lfm2_layer, "lfm3": _lfm3_layer}.get(kind)
            own = {"gemma4_text": _gemma4_layer, "glm4_moe_lite": _latent_layer}.get(kind, own)
            named = _layer(config) if own is None else own(config, layer)
            shaped = {f"{name}.weight": shape for name, shape in named.items()}
        if kind == "gemma4_text":
            tensors[f"{prefix}layer_scalar"] = (1,)
            if config.get("enable_moe_block"):
                shaped |= _gemma4_experts(config)
        dense = config.get("num_dense_layers", config.get("first_k_dense_replace", 0))
        if layer >= dense and "num_experts_per_tok" in config:
            shaped = {name: shape for name, shape in shaped.items() if not name.startswith(_DENSE)}
            shaped |= _experts(config)
        tensors |= {f"{prefix}{name}": shape for name, shape in shaped.items()}
        if kind in ("qwen2", "gpt_oss", "seed_oss", "glm4"):
            rows = {name: _layer(config)[f"self_attn.{name}_proj"][0] for name in "qkv"}
            tensors |= {f"{prefix}self_attn.{name}_proj.bias": (width,) for name, width in rows.items()}
    return tensors


def is_delta_net(config: Mapping[str, Any], layer: int) -> bool:
    """Whether ``layer`` of a Qwen3.5 is none of attention."""
    if not config["model_type"].startswith("qwen3_5"):
        return False
    return (layer + 1) % int(config["full_attention_interval"]) != 0


_DENSE = ("mlp.", "feed_forward.")


def _gpt_oss_experts(hidden: int, count: int, width: int) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"self_attn.o_proj.bias": (hidden,), "self_attn.sinks": (4,)}
    tensors |= {"mlp.router.weight": (count, hidden), "mlp.router.bias": (count,)}
    for name, rows, columns in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        tensors |= {
            f"mlp.experts.{name}_proj_blocks": (count, rows, columns // 32, 16),
            f"mlp.experts.{name}_proj_scales": (count, rows, columns // 32),
            f"mlp.experts.{name}_proj_bias": (count, rows),
        }
    return tensors


def _granite_experts(hidden: int, count: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        "block_sparse_moe.router.layer.weight": (count, hidden),
        "block_sparse_moe.input_linear.weight": (count, 2 * width, hidden),
        "block_sparse_moe.output_linear.weight": (count, hidden, width),
    }


def _experts(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a layer has instead of an MLP, as the family's published files name it."""
    hidden = config["hidden_size"]
    if config["model_type"] == "gpt_oss":
        return _gpt_oss_experts(hidden, config["num_local_experts"], config["intermediate_size"])
    if config["model_type"].startswith("granitemoe"):
        return _granite_experts(hidden, config["num_local_experts"], config["intermediate_size"])
    width = config["moe_intermediate_size"]
    if config["model_type"] == "glm4_moe_lite":
        return _latent_experts(hidden, config["n_routed_experts"], width, config["n_shared_experts"] * width)
    count = config["num_experts"]
    if config["model_type"] == "qwen3_5_moe_text":
        shared = config["shared_expert_intermediate_size"]
        tensors: dict[str, tuple[int, ...]] = {
            "mlp.gate.weight": (count, hidden),
            "mlp.experts.gate_up_proj": (count, 2 * width, hidden),
            "mlp.experts.down_proj": (count, hidden, width),
            "mlp.shared_expert_gate.weight": (1, hidden),
            "mlp.shared_expert.gate_proj.weight": (shared, hidden),
            "mlp.shared_expert.up_proj.weight": (shared, hidden),
            "mlp.shared_expert.down_proj.weight": (hidden, shared),
        }
        return tensors
    lfm2 = config["model_type"] == "lfm2_moe"
    place = "feed_forward" if lfm2 else "mlp"
    names = ("w1", "w3", "w2") if lfm2 else ("gate_proj", "up_proj", "down_proj")
    tensors = {f"{place}.gate.weight": (count, hidden)} | ({f"{place}.expert_bias": (count,)} if lfm2 else {})
    if config["model_type"] in ("exaone_moe", "ernie4_5_moe"):
        ernie = config["model_type"] == "ernie4_5_moe"
        bias = "moe_statics.e_score_correction_bias" if ernie else "gate.e_score_correction_bias"
        tensors[f"mlp.{bias}"] = (1, count) if ernie else (count,)
        shared = config["moe_num_shared_experts" if ernie else "num_shared_experts"] * width
        tensors |= {f"mlp.shared_experts.{name}.weight": (shared, hidden) for name in names[:2]}
        tensors["mlp.shared_experts.down_proj.weight"] = (hidden, shared)
    for expert in range(count):
        for name, shape in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            tensors[f"{place}.experts.{expert}.{name}.weight"] = shape
    return tensors


def _delta_net(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, mlp, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "linear_num_value_heads")
    )
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    width, taps = config["linear_value_head_dim"], config["linear_conv_kernel_dim"]
    values = heads * width
    tensors: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "linear_attn.in_proj_qkv.weight": (2 * keys + values, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, taps),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (width,),
        "linear_attn.out_proj.weight": (hidden, values),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    return tensors


def _mamba(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, hidden = config["mamba_n_heads"], config["hidden_size"]
    inner, taps = heads * config["mamba_d_head"], config["mamba_d_conv"]
    channels = inner + 2 * config["mamba_d_state"]
    tensors = {f"{name}.weight": shape for name, shape in _layer(config).items() if "self_attn" not in name}
    return tensors | {
        "mamba.in_proj.weight": (inner + channels + heads, hidden),
        "mamba.conv1d.weight": (channels, 1, taps),
        "mamba.conv1d.bias": (channels,),
        "mamba.A_log": (heads,),
        "mamba.D": (heads,),
        "mamba.dt_bias": (heads,),
        "mamba.norm.weight": (inner,),
        "mamba.out_proj.weight": (hidden, inner),
    }


_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def nemotron_kinds(config: Mapping[str, Any]) -> list[str]:
    """What each layer of a Nemotron-H is."""
    types = config.get("layers_block_type", config.get("hybrid_override_pattern", ()))
    return [_LETTERS.get(kind, kind) for kind in types]


def _nemotron(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, mlp, head = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    query, kv = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    heads = config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    count = config.get("n_routed_experts", 0)
    width, shared = (config.get(f"moe_{kind}intermediate_size", 0) for kind in ("", "shared_expert_"))
    experts = {f"experts.{n}.up_proj.weight": (width, hidden) for n in range(count)}
    experts |= {f"experts.{n}.down_proj.weight": (hidden, width) for n in range(count)}
    kinds: Mapping[str, dict[str, tuple[int, ...]]] = {
        "linear_attention": {
            "in_proj.weight": (inner + channels + heads, hidden),
            "conv1d.weight": (channels, 1, config["conv_kernel"]),
            "conv1d.bias": (channels,),
            **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        },
        "full_attention": {
            "q_proj.weight": (query, hidden),
            **dict.fromkeys(("k_proj.weight", "v_proj.weight"), (kv, hidden)),
            "o_proj.weight": (hidden, query),
        },
        "mlp": {"up_proj.weight": (mlp, hidden), "down_proj.weight": (hidden, mlp)},
        "moe": {
            "gate.weight": (count, hidden),
            "gate.e_score_correction_bias": (count,),
            "shared_experts.up_proj.weight": (shared, hidden),
            "shared_experts.down_proj.weight": (hidden, shared),
            **experts,
        },
    }
    tensors: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (config["vocab_size"], hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer, kind in enumerate(nemotron_kinds(config)):
        tensors[f"backbone.layers.{layer}.norm.weight"] = (hidden,)
        named = kinds[kind].items()
        tensors |= {f"backbone.layers.{layer}.mixer.{name}": shape for name, shape in named}
    return tensors


def _layer(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, mlp, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim", hidden // heads)
    query, kv = heads * head, config["num_key_value_heads"] * head
    tensors: dict[str, tuple[int, ...]] = {} if kind in _POST_NORMED else {"input_layernorm": (hidden,)}
    tensors |= {
        "post_attention_layernorm": (hidden,),
        "self_attn.o_proj": (hidden, query),
        "mlp.down_proj": (hidden, mlp),
    }
    if kind == "phi3":
        tensors |= {"self_attn.qkv_proj": (query + 2 * kv, hidden), "mlp.gate_up_proj": (2 * mlp, hidden)}
    else:
        tensors |= {
            f"self_attn.{name}_proj": (rows, hidden)
            for name, rows in zip("qkv", (query * (1 + kind.startswith("qwen3_5")), kv, kv), strict=True)
        }
        tensors |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden)}
    if kind == "glm4":
        tensors |= dict.fromkeys(("post_self_attn_layernorm", "post_mlp_layernorm"), (hidden,))
        del tensors["mlp.gate_proj"], tensors["mlp.up_proj"]
        tensors["mlp.gate_up_proj"] = (2 * mlp, hidden)
    if kind == "granitemoehybrid":
        tensors = {name: shape for name, shape in tensors.items() if not name.startswith("mlp.")}
        mlp = config["shared_intermediate_size"]
        tensors |= {"shared_mlp.input_linear": (2 * mlp, hidden), "shared_mlp.output_linear": (hidden, mlp)}
    if kind in (
        "qwen3",
        "qwen3_moe",
        "gemma3_text",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "exaone4",
        "exaone_moe",
    ):
        tensors |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    if kind in ("gemma2", "gemma3_text"):
        tensors["pre_feedforward_layernorm"] = (hidden,)
    if kind in ("gemma2", "gemma3_text", *_POST_NORMED):
        tensors["post_feedforward_layernorm"] = (hidden,)
    if kind in ("olmo2", "olmo3"):
        tensors |= {"self_attn.q_norm": (query,), "self_attn.k_norm": (kv,)}
    return tensors


def _gemma4_layer(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    full = config["layer_types"][layer] == "full_attention"
    tied, head = full and config.get("attention_k_eq_v"), config["global_head_dim" if full else "head_dim"]
    shared = layer >= config["num_hidden_layers"] - config["num_kv_shared_layers"]
    kv = config["num_global_key_value_heads"] if tied else kv
    mlp, inputs = config["intermediate_size"], config["hidden_size_per_layer_input"]
    mlp *= 1 + (shared and config["use_double_wide_mlp"])
    tensors: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,), "self_attn.q_norm": (head,)}
    tensors |= {"self_attn.q_proj": (heads * head, hidden), "self_attn.o_proj": (hidden, heads * head)}
    if not shared:
        tensors |= {"self_attn.k_proj": (kv * head, hidden), "self_attn.k_norm": (head,)}
        tensors |= {} if tied else {"self_attn.v_proj": (kv * head, hidden)}
    names = ("post_attention", "pre_feedforward", "post_feedforward")
    tensors |= {f"{name}_layernorm": (hidden,) for name in names}
    tensors |= {f"mlp.{name}_proj": (mlp, hidden) for name in ("gate", "up")} | {
        "mlp.down_proj": (hidden, mlp)
    }
    if inputs:
        tensors |= {"per_layer_input_gate": (inputs, hidden), "per_layer_projection": (hidden, inputs)}
        tensors |= {"post_per_layer_input_norm": (hidden,)}
    return tensors


def _gemma4_experts(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a layer has beside its MLP."""
    count, hidden, width = (config[key] for key in ("num_experts", "hidden_size", "moe_intermediate_size"))
    norms = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    return {f"{name}.weight": (hidden,) for name in norms} | {
        "router.proj.weight": (count, hidden),
        "router.scale": (hidden,),
        "router.per_expert_scale": (count,),
        "experts.gate_up_proj": (count, 2 * width, hidden),
        "experts.down_proj": (count, hidden, width),
    }


def _latent_layer(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    keys = "hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"
    hidden, mlp, heads, query_rank, rank = (config[key] for key in keys)
    still, turned, values = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    tensors: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("input_layernorm", "post_attention_layernorm"), (hidden,)
    )
    if query_rank is None:
        tensors["self_attn.q_proj"] = heads * (still + turned), hidden
    else:
        tensors["self_attn.q_a_proj"] = query_rank, hidden
        tensors["self_attn.q_a_layernorm"] = (query_rank,)
        tensors["self_attn.q_b_proj"] = heads * (still + turned), query_rank
    return tensors | {
        "self_attn.kv_a_proj_with_mqa": (rank + turned, hidden),
        "self_attn.kv_a_layernorm": (rank,),
        "self_attn.kv_b_proj": (heads * (still + values), rank),
        "self_attn.o_proj": (hidden, heads * values),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }


def _latent_experts(hidden: int, count: int, width: int, shared: int) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (count, hidden),
        "mlp.gate.e_score_correction_bias": (count,),
    }
    places = {f"experts.{number}": width for number in range(count)} | {"shared_experts": shared}
    for place, rows in places.items():
        tensors |= {f"mlp.{place}.{name}_proj.weight": (rows, hidden) for name in ("gate", "up")}
        tensors[f"mlp.{place}.down_proj.weight"] = hidden, rows
    return tensors


def _lfm2_layer(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, mlp, heads = config["hidden_size"], mlp_width(config), config["num_attention_heads"]
    head = hidden // heads
    kv = config["num_key_value_heads"] * head
    tensors: dict[str, tuple[int, ...]] = {"operator_norm": (hidden,), "ffn_norm": (hidden,)}
    tensors |= {"feed_forward.w1": (mlp, hidden), "feed_forward.w3": (mlp, hidden)}
    tensors |= {"feed_forward.w2": (hidden, mlp)}
    if convolves(config, layer):
        tensors |= {"conv.in_proj": (3 * hidden, hidden), "conv.out_proj": (hidden, hidden)}
        return tensors | {"conv.conv": (hidden, 1, config["conv_L_cache"])}
    tensors |= {"self_attn.q_layernorm": (head,), "self_attn.k_layernorm": (head,)}
    tensors |= {
        f"self_attn.{name}_proj": (rows, hidden) for name, rows in (("q", hidden), ("k", kv), ("v", kv))
    }
    return tensors | {"self_attn.out_proj": (hidden, hidden)}


def _lfm3_layer(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, mlp, heads, head = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    )
    names = ("operator_norm", "ffn_norm", "post_operator_norm", "post_ffn_norm")
    tensors: dict[str, tuple[int, ...]] = dict.fromkeys(names, (hidden,))
    tensors |= {"feed_forward.w1": (mlp, hidden), "feed_forward.w3": (mlp, hidden)}
    tensors |= {"feed_forward.w2": (hidden, mlp)}
    if convolves(config, layer):
        tensors |= {"conv.in_proj": (3 * hidden, hidden), "conv.out_proj": (hidden, hidden)}
        return tensors | {"conv.conv": (hidden, 1, config["conv_L_cache"])}
    tensors |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    kv = config["num_key_value_heads"] * head
    rows = {"q": heads * head, "k": kv, "v": kv, "g": heads}
    tensors |= {f"self_attn.{name}_proj": (count, hidden) for name, count in rows.items()}
    return tensors | {"self_attn.o_proj": (hidden, heads * head)}


_ROUTERS = (
    "mixer.gate.weight",
    "mlp.gate.weight",
    "mlp.router.weight",
    "feed_forward.gate.weight",
    "router.layer.weight",
)


def weights(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """The values of every tensor, float32."""
    # These store their norms' weights less 1.
    less = config["model_type"].startswith(("gemma2", "gemma3_text", "qwen3_5"))
    tensors = drawn(shapes(config), seed, norm=0 if less else 1)
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
        elif name.endswith(("_blocks", "_scales")):
            raw = np.random.PCG64(len(tensors[name].shape)).random_raw(tensors[name].size)
            few = np.asarray(raw, np.uint64).reshape(tensors[name].shape) >> np.uint64(40)
            codes = few % np.uint64(256) if name.endswith("_blocks") else few % np.uint64(3) + np.uint64(120)
            tensors[name] = codes.astype(np.uint8)
        elif name.endswith(_ROUTERS):
            # Choices hang on no rounding, but where the weights of the chosen have to be normalized.
            scales = {"lfm2_moe": 2, "qwen3_moe": 3, "exaone_moe": 3, "glm4_moe_lite": 8, "nemotron_h": 8}
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
            values = sevenths * (0.5 if len(shape) == 1 else 2.0 ** -np.round(np.log2(shape[-1]) / 2 - 0.5))
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


def write_with_eyes(
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
