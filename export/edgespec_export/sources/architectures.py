"""The architectures that edgespec exports, as data: the facts that each fixes for all its models.

A new architecture is an entry of :data:`FAMILIES`, and a row of the tests that compare it with transformers.
Fields and defaults: ``configuration_*.py`` of github.com/huggingface/transformers; names in GGUF files:
github.com/ggml-org/llama.cpp, ``src/llama-arch.cpp``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from edgespec_models.bundles.config import Architecture
from edgespec_models.errors import UnsupportedModelError

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Family(NamedTuple):
    """The fixed facts of an architecture.

    Attributes:
        name: the family in manifests.
        gguf: its name in GGUF files; empty if it has none of its own.
        fixed: fields of :class:`ModelConfig` that no file states.
        defaults: transformers' defaults of a ``config.json``.
        theta: default base of the rotary embedding.
        windowed: whether a sliding window needs no switch.
        pattern: with a sliding window, by default every n-th layer sees the whole context; the others have a
            rotary embedding of their own, never scaled. 0 if a window changes no rotation.
        local_theta: its default base; 0 for the base of the other layers.
        alike: whether all layers rotate alike in spite of a ``pattern``.
        neighbours: whether GGUF files have the rows of queries and keys in the order for rotations of
            neighbouring elements.
        tensors: names of tensors in GGUF files with another meaning than in other families.
        partial: whether ``partial_rotary_factor`` counts; others have it of a model that they came from.
        experts: fields of :class:`Experts` that no file states; None where layers have none. With
            ``beside_mlp`` some models have none.
    """

    name: Architecture
    gguf: str = ""
    fixed: Mapping[str, Any] = _NOTHING
    defaults: Mapping[str, Any] = _NOTHING
    theta: float = 1e4
    windowed: bool = False
    pattern: int = 0
    local_theta: float = 0.0
    alike: bool = False
    neighbours: bool = False
    tensors: Mapping[str, str] = _NOTHING
    partial: bool = False
    experts: Mapping[str, Any] | None = None


_OLMO: Final = Family(
    name="olmo2",
    gguf="olmo2",
    windowed=True,
    pattern=4,
    fixed={"qk_norm": True, "wide_qk_norm": True, "pre_norms": False, "post_norms": True},
    defaults={"rms_norm_eps": 1e-5},
)
_GEMMA4: Final = Family(
    name="gemma4",
    gguf="gemma4",
    theta=1e6,
    windowed=True,
    pattern=6,
    local_theta=1e4,
    fixed={
        "qk_norm": True,
        "normed_values": True,
        "post_norms": True,
        "scaled_layers": True,
        "activation": "gelu_tanh",
    },
    experts={"beside_mlp": True},
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    },
)
_QWEN35: Final = Family(
    name="qwen35",
    gguf="qwen35",
    theta=1e7,
    partial=True,
    fixed={"qk_norm": True, "gated_attention": True},
    tensors={
        "attn_qkv.weight": "delta_qkv",
        "attn_gate.weight": "delta_gate",
        "post_attention_norm.weight": "mlp_norm",
    },
    defaults={
        "vocab_size": 248_320,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
_LFM2: Final = Family(
    name="lfm2",
    gguf="lfm2",
    theta=1e6,
    windowed=True,
    fixed={"qk_norm": True},
    defaults={
        "vocab_size": 65_536,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
    },
    tensors={"token_embd_norm.weight": "final_norm"},
)
_GRANITE: Final = Family(
    name="granite", gguf="granite", neighbours=True, defaults={"attention_multiplier": 1.0}
)
_GRANITE_MOE: Final = _GRANITE._replace(
    gguf="granitemoe",
    experts={"normalized": True, "shared_gate": False},
    defaults={**_GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
)
_MIXED: Final = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_QWEN3: Final = Family(name="qwen3", gguf="qwen3", fixed={"qk_norm": True}, defaults={"head_dim": 128})
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": Family(name="llama", gguf="llama", neighbours=True),
        "mistral": Family(name="mistral", windowed=True),
        "smollm3": Family(
            name="smollm3",
            gguf="smollm3",
            theta=2e6,
            neighbours=True,
            defaults={"tie_word_embeddings": True},
        ),
        "qwen2": Family(name="qwen2", gguf="qwen2"),
        "qwen3": _QWEN3,
        "qwen3_moe": _QWEN3._replace(
            gguf="qwen3moe", experts={}, defaults={**_QWEN3.defaults, **_MIXED, "norm_topk_prob": False}
        ),
        "qwen3_5_text": _QWEN35,
        "qwen3_5_moe_text": _QWEN35._replace(
            gguf="qwen35moe",
            experts={"shared_gate": True},
            defaults={
                **_QWEN35.defaults,
                **_MIXED,
                "num_key_value_heads": 2,
                "num_experts": 256,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
            },
        ),
        "gemma2": Family(
            name="gemma2",
            gguf="gemma2",
            windowed=True,
            pattern=2,
            alike=True,
            fixed={"post_norms": True, "activation": "gelu_tanh"},
            defaults={
                "vocab_size": 256_000,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 8192,
                "sliding_window": 4096,
                "query_pre_attn_scalar": 256.0,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "tie_word_embeddings": True,
            },
        ),
        "gemma3_text": Family(
            name="gemma3",
            gguf="gemma3",
            theta=1e6,
            windowed=True,
            pattern=6,
            local_theta=1e4,
            fixed={"qk_norm": True, "post_norms": True, "activation": "gelu_tanh"},
            defaults={
                "vocab_size": 262_208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 131_072,
                "sliding_window": 4096,
                "query_pre_attn_scalar": 256.0,
                "tie_word_embeddings": True,
            },
        ),
        "gemma4_text": _GEMMA4,
        "gemma4_unified_text": _GEMMA4._replace(
            gguf="",
            defaults={
                **_GEMMA4.defaults,
                "hidden_size_per_layer_input": 0,
                "max_position_embeddings": 262_144,
                "sliding_window": 1024,
            },
        ),
        "phi3": Family(
            name="phi3",
            gguf="phi3",
            windowed=True,
            partial=True,
            defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
            tensors={"ffn_up.weight": "gate_up"},
        ),
        "granite": _GRANITE,
        "granitemoe": _GRANITE_MOE,
        "granitemoeshared": _GRANITE_MOE._replace(gguf=""),
        "granitemoehybrid": _GRANITE_MOE._replace(gguf=""),
        "exaone4": Family(
            name="exaone4",
            gguf="exaone4",
            windowed=True,
            fixed={"qk_norm": True, "pre_norms": False, "post_norms": True},
            defaults={"rms_norm_eps": 1e-5},
        ),
        "gpt_oss": Family(
            name="gpt-oss",
            gguf="gpt-oss",
            theta=1.5e5,
            windowed=True,
            pattern=2,
            alike=True,
            fixed={"sinks": True},
            experts={"biases": True, "clamped": True},
            defaults={
                "rms_norm_eps": 1e-5,
                "head_dim": 64,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "sliding_window": 128,
                "num_experts_per_tok": 4,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
            tensors={"post_attention_norm.weight": "mlp_norm"},
        ),
        "olmo2": _OLMO,
        "olmo3": _OLMO._replace(gguf="", theta=5e5, defaults={**_OLMO.defaults, "sliding_window": 4096}),
        "lfm2": _LFM2,
        "lfm2_moe": _LFM2._replace(
            gguf="lfm2moe",
            experts={"gating": "sigmoid"},
            defaults={
                **_LFM2.defaults,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1792,
                "num_dense_layers": 2,
            },
        ),
        "ministral3": Family(
            name="ministral3",
            gguf="mistral3",
            windowed=True,
            neighbours=True,
            defaults={
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "original_max_position_embeddings": 16_384,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            },
        ),
    }
)
"""By ``model_type`` in ``config.json``."""

GGUF_FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {family.gguf: family for family in FAMILIES.values() if family.gguf}
)
"""By ``general.architecture`` in GGUF files."""

HEAD: Final = Family(name="eagle3", gguf="eagle3", neighbours=True)
"""EAGLE-3's heads, whose files state their inputs from a target (:mod:`edgespec_export.sources.heads`)."""
ASSISTANT: Final = _GEMMA4._replace(gguf="gemma4-assistant")
"""Gemma 4's assistants (:mod:`edgespec_export.sources.assistants`)."""
BLOCKS: Final = Family(name="dflash", gguf="dflash", fixed={"qk_norm": True})
"""DFlash's and DSpark's heads, likewise (:mod:`edgespec_export.sources.dflash`)."""
NEEDS_TARGET: Final = (
    "is a head, which drafts for one target: give it as the drafter, or export it with --target and its "
    "target's source"
)

_EXPERTS = "experts in this family's form"
_LATENT = "latent attention"
_MAMBA = "Mamba layers"
_VISION = "images (M-RoPE, vision layers)"
_LACKING: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = MappingProxyType(
    {
        "Qwen3-30B-A3B": (_EXPERTS, ("qwen2moe", "qwen2_moe", "olmoe")),
        "Qwen3-30B-A3B or gpt-oss-20b": (_LATENT, ("deepseek2", "deepseek_v2", "deepseek_v3")),
        "gpt-oss-20b or a dense Llama or Mistral": (_EXPERTS, ("mixtral", "llama4", "llama4_text")),
        "Phi-4-mini": (_EXPERTS, ("phimoe",)),
        "llama.cpp's file of gpt-oss": ("experts in ollama's own form", ("gptoss",)),
        "Qwen3.6-35B-A3B": ("delta nets in this family's form", ("qwen3next", "qwen3_next")),
        "Qwen3.5 of its size": (_MAMBA, ("mamba", "mamba2", "falcon-h1", "falcon_h1", "jamba")),
        "Qwen3.6-35B-A3B or Qwen3.5 of its size": (_MAMBA, ("nemotron_h", "nemotron_h_moe")),
        "LFM2 of its size": ("RWKV layers", ("rwkv7",)),
        "a Granite 4 without them, such as Granite-4.0-Micro,": (_MAMBA, ("granitehybrid",)),
        "the Qwen3 of its size": (_VISION, ("qwen2vl", "qwen2_vl", "qwen2_5_vl", "qwen3vl", "qwen3_vl")),
        "a dense EXAONE 4": (_EXPERTS, ("exaone-moe", "exaone_moe")),
        "Gemma 4 of its size": ("AltUp and Laurel", ("gemma3n", "gemma3n_text")),
        "Phi-4-mini-instruct": ("parallel sublayers", ("phi2", "phi")),
        "a Llama of its size": ("parallel sublayers", ("command-r", "cohere", "cohere2", "falcon")),
    }
)
"""By a model that works: the lacking features of similar models, under their names in GGUF and on the hub."""


def unknown(where: str, name: str, known: str) -> UnsupportedModelError:
    """The error for an architecture outside the table; ``known`` says how it may be exported instead."""
    near = "; ".join(
        f"it needs {missing}, which edgespec lacks; use {model} instead"
        for model, (missing, names) in _LACKING.items()
        if name in names
    )
    return UnsupportedModelError(f"{where} is of the architecture {name!r}{near and f': {near}'}. {known}")
