"""GGUF files with the shapes of models that people run, and random weights in the mix of Q4_K_M.

A pass takes as long as with the published weights; what the model writes has no meaning. Usage, from the
repository's root: ``python -m tools.shapes NAME... --into FOLDER``, with the extra ``dev``, which has gguf
and safetensors. Then, for example, ``edgespec export
FOLDER/qwen3-4b.gguf -o BUNDLE`` and ``python -m tools.peers.passes --gguf FOLDER/qwen3-4b.gguf
--bundle BUNDLE --peer llama.cpp=PEERS/llama.cpp/bin``. ``NAME.head`` is an EAGLE-3 head of that model, with
32,000 tokens, ``NAME.dflash`` a DFlash head of it, ``NAME.dspark`` a DSpark head as LFM2.5 has it, whose
matrices are all of one format in ``NAME.dspark.Q8_0`` and ``NAME.dspark.F16``; of a Qwen3.5 ``NAME.mtp`` is
the file ``mtp-NAME.gguf`` with its MTP layer; of a Gemma 4 E ``NAME.assistant`` is the directory of its
assistant; ``NAME.mmproj`` is the file ``mmproj-NAME.gguf`` with its tower in float16. Models with experts
have a quarter of their layers, so a pass takes a quarter of the time but for embedding and LM head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from edgespec_models.families.gemma4_vision import (
    GEMMA4_EMBEDDER,
    GEMMA4_VISION,
    Gemma4Embedder,
    Gemma4Tower,
)
from edgespec_models.families.qwen3_5_vision import QWEN35_VISION, Qwen35Tower
from edgespec_models.families.towers import Tower, TowerFamily
from edgespec_models.graphs.tower import build_tower
from tests.kit import assistants
from tools.arguments import arguments


@dataclass(frozen=True)
class Shape:
    """A model's widths; ``facts`` are further keys of its architecture."""

    architecture: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    theta: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> "Shape":
        """An EAGLE-3 head of it."""
        layers = [2, self.layers // 2, self.layers - 3]
        read = {"target_layers": layers, "target_hidden_size": self.hidden}
        return replace(self, architecture="eagle3", layers=1, facts=read)

    @property
    def dflash(self) -> "Shape":
        """A DFlash head of it."""
        read = [2 + layer * (self.layers - 5) // 4 for layer in range(5)]
        return replace(self, architecture="dflash", layers=5, facts={"target_layers": read, "block_size": 16})

    @property
    def dspark(self) -> "Shape":
        """A DSpark head of it, as LFM2.5's are."""
        facts = self.dflash.facts | {"block_size": 9, "sample_from_anchor": True}
        return replace(self.dflash, mlp=6144, heads=32, kv_heads=8, head_dim=64, facts=facts)

    @property
    def mtp(self) -> "Shape":
        """Its MTP layer, which is one block more."""
        return replace(self, layers=self.layers + 1, facts=self.facts | {"nextn_predict_layers": 1})


_DRAFTED = 32_000  # tokens of a head
_LOCAL = {"attention.sliding_window": 512}
_SCALED = {"attention.sliding_window": 1024, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
_ATTENDS = (2, 5, 8, 10, 12, 14)
_CONVOLVES = {
    "attention.head_count_kv": [8 * (layer in _ATTENDS) for layer in range(16)],
    "shortconv.l_cache": 3,
}
_LONG = {"rope.dimension_count": 96, "rope.scaling.original_context_length": 4096}


def _delta_nets(value_heads: int) -> dict[str, Any]:
    """The keys of Qwen3.5's layers; 16 key heads, all heads 128 wide, every fourth layer attention."""
    facts = {"group_count": 16, "time_step_rank": value_heads, "inner_size": 128 * value_heads}
    facts |= {"state_size": 128, "conv_kernel": 4}
    rope = {"rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0]}
    return {f"ssm.{key}": value for key, value in facts.items()} | rope | {"full_attention_interval": 4}


def _gemma4(layers: int, every: int, shared: int, mlp: int, wide: int) -> dict[str, Any]:
    """The keys of Gemma 4 E: every so many layers see all, the last ``shared`` have no keys of their own."""
    widths = {"key_length": 512, "value_length": 512, "key_length_swa": 256, "value_length_swa": 256}
    facts = {f"attention.{key}": width for key, width in widths.items()} | {
        "attention.sliding_window": 512,
        "attention.shared_kv_layers": shared,
        "attention.sliding_window_pattern": [(layer + 1) % every != 0 for layer in range(layers)],
        "feed_forward_length": [wide if layer >= layers - shared else mlp for layer in range(layers)],
        "embedding_length_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
        "rope.freq_base_swa": 1e4,
    }
    return facts | {"rope.dimension_count": 512, "rope.dimension_count_swa": 256}


_GEMMA_12B = _gemma4(48, 6, 0, 15_360, 15_360) | {
    "attention.sliding_window": 1024,
    "attention.head_count_kv": [8, 8, 8, 8, 8, 1] * 8,
    "embedding_length_per_layer_input": 0,
}
"""Gemma 4 12B, whose layers that see all have one head of keys, which are values too."""


def _experts(count: int, used: int, width: int, **more: Any) -> dict[str, Any]:
    """The keys of layers of experts."""
    facts = {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}
    return facts | more


def _mamba(
    hidden: int, heads: int, attends: tuple[int, ...], layers: int = 40, kv_heads: int = 8
) -> dict[str, Any]:
    """The keys of Granite 4 H: heads of 64 in layers of Mamba-2, and attention in few."""
    facts = {"group_count": 1, "time_step_rank": heads, "inner_size": 2 * hidden}
    facts |= {"state_size": 128, "conv_kernel": 4}
    kv = {"attention.head_count_kv": [kv_heads * (layer in attends) for layer in range(layers)]}
    scales = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 1 / 64}
    return (
        {f"ssm.{key}": value for key, value in facts.items()}
        | kv
        | scales
        | {"rope.scaling.finetuned": False}
    )


def _nemotron(pattern: str, heads: int, width: int, kv: int, mlp: int, **more: Any) -> dict[str, Any]:
    """The keys of a Nemotron-H; ``pattern`` has a letter for each layer, as in its ``config.json``."""
    facts = {"group_count": 8, "time_step_rank": heads, "inner_size": heads * width}
    facts |= {"state_size": 128, "conv_kernel": 4}
    return {f"ssm.{key}": value for key, value in facts.items()} | {
        "attention.head_count_kv": [kv * (kind == "*") for kind in pattern],
        "feed_forward_length": [mlp * (kind in "-E") for kind in pattern],
        "attention.layer_norm_epsilon": 1e-5,
        "rope.scaling.finetuned": False,
        **more,
    }


_NEMOTRON_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
_NEMOTRON_30B = "MEMEM*EMEMEM*"
_NEMOTRON_EXPERTS = {
    "expert_count": 128,
    "expert_used_count": 6,
    "expert_feed_forward_length": 1856,
    "expert_shared_feed_forward_length": 3712,
    "expert_shared_count": 1,
    "expert_group_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
}
_SHARED = _experts(256, 8, 512, expert_shared_feed_forward_length=512)
_SIGMOID = _experts(32, 4, 1792, expert_gating_func=2, leading_dense_block_count=1)
_FEW_CONVOLVE = {"attention.head_count_kv": [8 * (layer in (2, 5)) for layer in range(6)]}
_YARN = {"type": "yarn", "factor": 32.0, "original_context_length": 4096}
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 768, "key_length_mla": 256, "value_length_mla": 256}
_LATENT |= {"key_length": 576, "value_length": 512}
_GLM = _experts(64, 4, 1536, expert_gating_func=2, leading_dense_block_count=1, expert_shared_count=1)
_GLM |= {"expert_weights_scale": 1.8, "expert_weights_norm": True, "rope.dimension_count": 64}
_GLM |= {f"attention.{key}": width for key, width in _LATENT.items()}
_OSS = _experts(32, 4, 2880) | {f"rope.scaling.{key}": value for key, value in _YARN.items()}
SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151_936, 1e6),
    "qwen3-1.7b": Shape("qwen3", 28, 2048, 6144, 16, 8, 128, 151_936, 1e6),
    "qwen3-4b": Shape("qwen3", 36, 2560, 9728, 32, 8, 128, 151_936, 1e6),
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128_256, 5e5),
    "llama-3.2-3b": Shape("llama", 28, 3072, 8192, 24, 8, 128, 128_256, 5e5),
    "lfm2-1.2b": Shape("lfm2", 16, 2048, 8192, 32, 8, 64, 65_536, 1e6, _CONVOLVES),
    "gemma-3-1b": Shape("gemma3", 26, 1152, 6912, 4, 1, 256, 262_144, 1e6, _LOCAL),
    "gemma-3-4b": Shape("gemma3", 34, 2560, 10_240, 8, 4, 256, 262_208, 1e6, _SCALED),
    "gemma-4-e2b": Shape("gemma4", 35, 1536, 6144, 8, 1, 512, 262_144, 1e6, _gemma4(35, 5, 20, 6144, 12_288)),
    "gemma-4-e4b": Shape(
        "gemma4", 42, 2560, 10_240, 8, 2, 512, 262_144, 1e6, _gemma4(42, 6, 18, 10_240, 10_240)
    ),
    "gemma-4-12b": Shape("gemma4", 48, 3840, 15_360, 16, 8, 512, 262_144, 1e6, _GEMMA_12B),
    "phi-4-mini": Shape("phi3", 32, 3072, 8192, 24, 8, 128, 200_064, 1e4, _LONG),
    "qwen3.5-0.8b": Shape("qwen35", 24, 1024, 3584, 8, 2, 256, 248_320, 1e7, _delta_nets(16)),
    "qwen3.5-4b": Shape("qwen35", 32, 2560, 9216, 16, 4, 256, 248_320, 1e7, _delta_nets(32)),
    "qwen3.5-9b": Shape("qwen35", 32, 4096, 12_288, 16, 4, 256, 248_320, 1e7, _delta_nets(32)),
    "qwen3-30b-a3b": Shape("qwen3moe", 12, 2048, 6144, 32, 4, 128, 151_936, 1e6, _experts(128, 8, 768)),
    "qwen3.5-35b-a3b": Shape("qwen35moe", 8, 2048, 512, 16, 2, 256, 248_320, 1e7, _delta_nets(32) | _SHARED),
    "lfm2-8b-a1b": Shape(
        "lfm2moe", 6, 2048, 7168, 32, 8, 64, 65_536, 1e6, _CONVOLVES | _FEW_CONVOLVE | _SIGMOID
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss", 6, 2880, 2880, 64, 8, 64, 201_088, 1.5e5, _OSS | {"attention.sliding_window": 128}
    ),
    "granite-4-h-micro": Shape(
        "granitehybrid", 40, 2048, 8192, 32, 8, 64, 100_352, 1e4, _mamba(2048, 64, (5, 15, 25, 35))
    ),
    "granite-4-h-tiny": Shape(
        *("granitehybrid", 10, 1536, 512, 12, 4, 128, 100_352, 1e4),
        _mamba(1536, 48, (5,), 10, 4) | _experts(64, 6, 512, expert_shared_feed_forward_length=1024),
    ),
    "nemotron-3-nano-4b": Shape(
        *("nemotron_h", len(_NEMOTRON_4B), 3136, 12_544, 40, 8, 128, 131_072, 1e4),
        _nemotron(_NEMOTRON_4B, 96, 80, 8, 12_544),
    ),
    "nemotron-3-nano-30b-a3b": Shape(
        *("nemotron_h_moe", len(_NEMOTRON_30B), 2688, 1856, 32, 2, 128, 131_072, 1e4),
        _nemotron(_NEMOTRON_30B, 64, 64, 2, 1856, **_NEMOTRON_EXPERTS),
    ),
    "glm-4.7-flash": Shape("deepseek2", 12, 2048, 10_240, 20, 1, 576, 154_880, 1e6, _GLM),
    "smollm3-3b": Shape("smollm3", 36, 2048, 11_008, 16, 4, 128, 128_256, 5e6),
}
_IN_QWEN = {"patch": 16, "merged": 2, "positions": 48, "frames": True, "epsilon": 1e-6, "theta": 1e4}
_IN_GEMMA = {"patch": 16, "pool": 3, "positions": 10_240, "in_gguf": True, "epsilon": 1e-6}
_SMALL = {"hidden_size": 768, "mlp_width": 3072, "heads": 12, "marker": 0}


def _gemma4_tower(width: int) -> tuple[TowerFamily, Tower]:
    facts: dict[str, Any] = _SMALL | _IN_GEMMA | {"num_layers": 16, "head_dim": 64}
    facts |= {"clipped": True, "theta": 100.0}
    return GEMMA4_VISION, Gemma4Tower(
        architecture=GEMMA4_VISION.name, width=width, standardized=False, **facts
    )


def _gemma4_embedder(width: int) -> tuple[TowerFamily, Tower]:
    facts: dict[str, Any] = _IN_GEMMA | {"hidden_size": width, "positions": 1120, "marker": 0}
    return GEMMA4_EMBEDDER, Gemma4Embedder(architecture=GEMMA4_EMBEDDER.name, width=width, **facts)


def _qwen_tower(width: int, layers: int, **sizes: int) -> tuple[TowerFamily, Tower]:
    facts: dict[str, Any] = _SMALL | _IN_QWEN | sizes
    return QWEN35_VISION, Qwen35Tower(
        architecture=QWEN35_VISION.name, width=width, num_layers=layers, **facts
    )


TOWERS = {
    "qwen3.5-0.8b": _qwen_tower(1024, 12),
    "qwen3.5-4b": _qwen_tower(2560, 24, hidden_size=1024, mlp_width=4096, heads=16),
    "gemma-4-e2b": _gemma4_tower(1536),
    "gemma-4-e4b": _gemma4_tower(2560),
    "gemma-4-12b": _gemma4_embedder(3840),
}
_MARKERS = {
    "qwen35": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "gemma4": ("<|image>", "<|image|>", "<image|>"),
}
Tensors = Iterator[tuple[str, tuple[int, ...], str]]


def tensors(shape: Shape) -> Tensors:
    """Name, shape and format of each: Q6_K where llama.cpp's mix has more bits."""
    if shape.architecture == "eagle3" or "nextn_predict_layers" in shape.facts:
        yield from (_head if shape.architecture == "eagle3" else _mtp)(shape)
        return
    oss, lfm2 = shape.architecture == "gpt-oss", shape.architecture.startswith("lfm2")
    if shape.architecture == "dflash":  # embedding and LM head are the target's
        yield "fc.weight", (shape.hidden, 5 * shape.hidden), "Q4_K"
        yield "enc.output_norm.weight", (shape.hidden,), "F32"
        if "sample_from_anchor" in shape.facts:
            yield from ((f"markov_w{which}.weight", (shape.vocabulary, 256), "Q8_0") for which in (1, 2))
            yield from (("conf_proj.weight", (1, shape.hidden + 256), "F32"), ("conf_proj.bias", (1,), "F32"))
    else:
        yield "token_embd.weight", (shape.vocabulary, shape.hidden), "Q8_0" if oss else "Q6_K"
    yield f"{'token_embd' if lfm2 else 'output'}_norm.weight", (shape.hidden,), "F32"
    if shape.architecture in (
        "qwen3moe",
        "qwen35moe",
        "gpt-oss",
        "nemotron_h",
        "nemotron_h_moe",
        "deepseek2",
    ):
        yield "output.weight", (shape.vocabulary, shape.hidden), "Q8_0" if oss else "Q6_K"
    if shape.architecture == "llama":
        yield "rope_freqs.weight", (shape.head_dim // 2,), "F32"
    if shape.architecture == "gemma4":
        if width := shape.layers * shape.facts["embedding_length_per_layer_input"]:
            yield "per_layer_token_embd.weight", (shape.vocabulary, width), "Q4_K"
            yield "per_layer_model_proj.weight", (width, shape.hidden), "Q8_0"
            yield "per_layer_proj_norm.weight", (width // shape.layers,), "F32"
        yield "rope_freqs.weight", (shape.head_dim // 2,), "F32"
    if shape.architecture == "phi3":
        for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
            yield name, (shape.facts["rope.dimension_count"] // 2,), "F32"
    for layer in range(shape.layers):
        more = shape.layers // 8
        dear = layer < more or layer >= 7 * more or (layer - more) % 3 == 2
        linear = (
            shape.architecture.startswith("qwen35") and (layer + 1) % shape.facts["full_attention_interval"]
        )
        kv_heads = shape.facts.get("attention.head_count_kv", [shape.kv_heads] * shape.layers)[layer]
        kind = _delta_net if linear else _layer if kv_heads else _MIXERS.get(shape.architecture, _layer)
        rows, facts = kind(shape, "Q6_K" if dear else "Q4_K"), shape.facts
        if shape.architecture.startswith("nemotron"):
            rows = _nemotron_layer(shape, layer, "Q6_K" if dear else "Q4_K")
        elif shape.architecture == "gemma4":
            rows = _gemma4_layer(shape, layer, "Q6_K" if dear else "Q4_K")
        elif shape.architecture == "deepseek2":
            rows = _latent_layer(shape, "Q6_K" if dear else "Q4_K")
        has_own = shape.architecture.startswith("nemotron")  # experts in layers of their own
        if "expert_count" in facts and layer >= facts.get("leading_dense_block_count", 0) and not has_own:
            dense = ("ffn_gate", "ffn_up", "ffn_down")
            rows = chain((row for row in rows if row[0] not in dense), _mixture(shape, dear))
        for name, size, form in rows:
            suffix = "" if name.endswith(".bias") else _SUFFIXES.get(name, ".weight")
            yield f"blk.{layer}.{name}{suffix}", size, "Q8_0" if oss and form[0] == "Q" else form


_SUFFIXES = {"ssm_a": "", "ssm_d": "", "ssm_dt": ".bias"}


def _mixture(shape: Shape, dear: bool) -> Tensors:
    """Experts: the published file of gpt-oss has MXFP4, the others the mix of Q4_K_M."""
    hidden, count, width = (
        shape.hidden,
        shape.facts["expert_count"],
        shape.facts["expert_feed_forward_length"],
    )
    oss = shape.architecture == "gpt-oss"
    down = "MXFP4" if oss else "Q6_K" if dear else "Q4_K"
    yield "ffn_gate_inp", (count, hidden), "F32"
    yield "ffn_gate_exps", (count, width, hidden), "MXFP4" if oss else "Q4_K"
    yield "ffn_up_exps", (count, width, hidden), "MXFP4" if oss else "Q4_K"
    yield "ffn_down_exps", (count, hidden, width), down
    if oss:
        biases = {"ffn_gate_inp": (count,), "ffn_gate_exps": (count, width), "ffn_up_exps": (count, width)}
        biases |= {"ffn_down_exps": (count, hidden), "attn_output": (hidden,), "attn_q": (64 * shape.heads,)}
        biases |= dict.fromkeys(("attn_k", "attn_v"), (64 * shape.kv_heads,))
        yield from ((f"{name}.bias", size, "F32") for name, size in biases.items())
        yield "attn_sinks", (shape.heads,), "F32"
    if shape.architecture in ("lfm2moe", "deepseek2"):
        yield "exp_probs_b.bias", (count,), "F32"
    if shape.architecture in ("deepseek2", "granitehybrid"):
        shared = shape.facts.get("expert_shared_feed_forward_length", width)
        yield from ((f"ffn_{part}_shexp", (shared, hidden), "Q4_K") for part in ("gate", "up"))
        yield "ffn_down_shexp", (hidden, shared), down
    if shape.architecture == "qwen35moe":
        shared = shape.facts["expert_shared_feed_forward_length"]
        yield "ffn_gate_inp_shexp", (hidden,), "F32"
        yield from ((f"ffn_{part}_shexp", (shared, hidden), "Q8_0") for part in ("gate", "up"))
        yield "ffn_down_shexp", (hidden, shared), "Q8_0"


def _delta_net(shape: Shape, dear: str) -> Tensors:
    heads, hidden = shape.facts["ssm.time_step_rank"], shape.hidden
    keys, values = 128 * shape.facts["ssm.group_count"], 128 * heads
    yield from (("attn_qkv", (2 * keys + values, hidden), "Q4_K"), ("attn_gate", (values, hidden), "Q4_K"))
    yield from ((name, (heads, hidden), "Q8_0") for name in ("ssm_alpha", "ssm_beta"))
    yield from (("ssm_conv1d", (2 * keys + values, 4), "F32"), ("ssm_out", (hidden, values), "Q4_K"))
    yield from (("ssm_a", (heads,), "F32"), ("ssm_dt", (heads,), "F32"), ("ssm_norm", (128,), "F32"))
    yield from ((name, (shape.mlp, hidden), "Q4_K") for name in ("ffn_gate", "ffn_up"))
    yield "ffn_down", (hidden, shape.mlp), dear
    yield from ((name, (hidden,), "F32") for name in ("attn_norm", "post_attention_norm"))


def _layer(shape: Shape, dear: str) -> Tensors:
    query, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    if shape.architecture == "phi3":
        yield "attn_qkv", (query + 2 * kv, hidden), "Q5_K"
        yield "ffn_up", (2 * shape.mlp, hidden), "Q4_K"
    else:
        gates = shape.architecture.startswith("qwen35")
        yield from (("attn_q", (query * (1 + gates), hidden), "Q4_K"), ("attn_k", (kv, hidden), "Q4_K"))
        yield "attn_v", (kv, hidden), dear
        yield from ((name, (shape.mlp, hidden), "Q4_K") for name in ("ffn_gate", "ffn_up"))
    yield "attn_output", (hidden, query), "Q4_K"
    yield "ffn_down", (hidden, shape.mlp), dear
    behind = shape.architecture.startswith(("qwen35", "gpt-oss"))
    norms = ["attn_norm", "post_attention_norm" if behind else "ffn_norm"]
    norms += ["post_attention_norm", "post_ffw_norm"] if shape.architecture == "gemma3" else []
    yield from ((name, (hidden,), "F32") for name in norms)
    if shape.architecture.startswith(("qwen3", "gemma3", "lfm2", "dflash")):
        yield from ((name, (shape.head_dim,), "F32") for name in ("attn_q_norm", "attn_k_norm"))


def _gemma4_layer(shape: Shape, layer: int, dear: str) -> Tensors:
    facts, hidden = shape.facts, shape.hidden
    head = 256 if facts["attention.sliding_window_pattern"][layer] else 512
    mlp, inputs = facts["feed_forward_length"][layer], facts["embedding_length_per_layer_input"]
    yield from (("attn_q", (shape.heads * head, hidden), "Q4_K"), ("attn_q_norm", (head,), "F32"))
    if layer < shape.layers - facts["attention.shared_kv_layers"]:
        kv_heads = facts.get("attention.head_count_kv", [shape.kv_heads] * shape.layers)[layer]
        for name in ("attn_k", "attn_v")[: 1 if kv_heads == 1 < shape.kv_heads else 2]:
            yield name, (kv_heads * head, hidden), "Q4_K"
        yield "attn_k_norm", (head,), "F32"
    yield "attn_output", (hidden, shape.heads * head), "Q4_K"
    yield from ((name, (mlp, hidden), "Q4_K") for name in ("ffn_gate", "ffn_up"))
    yield "ffn_down", (hidden, mlp), dear
    if inputs:
        yield from (("inp_gate", (inputs, hidden), "Q8_0"), ("proj", (hidden, inputs), "Q8_0"))
        yield "post_norm", (hidden,), "F32"
    norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    yield from ((name, (hidden,), "F32") for name in norms)
    yield "layer_output_scale", (1,), "F32"


def _latent_layer(shape: Shape, dear: str) -> Tensors:
    hidden, mlp, heads = shape.hidden, shape.mlp, shape.heads
    names = "kv_lora_rank", "q_lora_rank", "key_length_mla", "value_length_mla"
    rank, query_rank, key, value = (shape.facts[f"attention.{name}"] for name in names)
    turned = shape.facts["rope.dimension_count"]
    yield from ((name, (hidden,), "F32") for name in ("attn_norm", "ffn_norm"))
    yield from (("attn_q_a_norm", (query_rank,), "F32"), ("attn_kv_a_norm", (rank,), "F32"))
    yield "attn_q_a", (query_rank, hidden), "Q4_K"
    yield "attn_q_b", (heads * key, query_rank), "Q4_K"
    yield "attn_kv_a_mqa", (rank + turned, hidden), "Q8_0"
    yield "attn_k_b", (heads, rank, key - turned), "Q8_0"
    yield "attn_v_b", (heads, value, rank), "Q8_0"
    yield "attn_output", (hidden, heads * value), "Q4_K"
    yield from ((name, (mlp, hidden), "Q4_K") for name in ("ffn_gate", "ffn_up"))
    yield "ffn_down", (hidden, mlp), dear


def _mamba_layer(shape: Shape, dear: str) -> Tensors:
    facts, hidden, mlp = shape.facts, shape.hidden, shape.mlp
    heads, inner = facts["ssm.time_step_rank"], facts["ssm.inner_size"]
    groups = facts["ssm.group_count"]
    channels = inner + 2 * groups * facts["ssm.state_size"]
    yield from ((name, (hidden,), "F32") for name in ("attn_norm", "ffn_norm"))
    yield "ssm_in", (inner + channels + heads, hidden), "Q4_K"
    yield from (("ssm_conv1d", (channels, 4), "F32"), ("ssm_conv1d.bias", (channels,), "F32"))
    yield from (("ssm_a", (heads, 1), "F32"), ("ssm_d", (heads, 1), "F32"), ("ssm_dt", (heads,), "F32"))
    yield from (("ssm_norm", (groups, inner // groups), "F32"), ("ssm_out", (hidden, inner), "Q4_K"))
    yield from ((name, (mlp, hidden), "Q4_K") for name in ("ffn_gate", "ffn_up"))
    yield "ffn_down", (hidden, mlp), dear


def _nemotron_layer(shape: Shape, layer: int, dear: str) -> Tensors:
    facts, hidden = shape.facts, shape.hidden
    mlp = facts["feed_forward_length"][layer]
    kind = _layer if facts["attention.head_count_kv"][layer] else _mamba_layer
    rows = [row for row in kind(shape, dear) if not row[0].startswith("ffn_")]
    if not mlp:
        yield from rows
        return
    yield "attn_norm", (hidden,), "F32"
    if "expert_count" not in facts:
        yield from (("ffn_up", (mlp, hidden), "Q4_K"), ("ffn_down", (hidden, mlp), dear))
        return
    count, shared = facts["expert_count"], facts["expert_shared_feed_forward_length"]
    yield from (("ffn_gate_inp", (count, hidden), "F32"), ("exp_probs_b.bias", (count,), "F32"))
    yield from (("ffn_up_exps", (count, mlp, hidden), "Q4_K"), ("ffn_down_exps", (count, hidden, mlp), dear))
    yield from (("ffn_up_shexp", (shared, hidden), "Q4_K"), ("ffn_down_shexp", (hidden, shared), dear))


def _convolution(shape: Shape, dear: str) -> Tensors:
    hidden, mlp = shape.hidden, shape.mlp
    yield from ((name, (hidden,), "F32") for name in ("attn_norm", "ffn_norm"))
    yield "shortconv.conv", (hidden, shape.facts["shortconv.l_cache"]), "F32"
    yield from (
        ("shortconv.in_proj", (3 * hidden, hidden), "Q4_K"),
        ("shortconv.out_proj", (hidden, hidden), "Q4_K"),
    )
    yield from ((name, (mlp, hidden), "Q4_K") for name in ("ffn_gate", "ffn_up"))
    yield "ffn_down", (hidden, mlp), dear


_MIXERS = {"lfm2": _convolution, "lfm2moe": _convolution, "granitehybrid": _mamba_layer}


def _head(shape: Shape) -> Tensors:
    hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
    yield "output_norm.weight", (hidden,), "F32"
    yield "output.weight", (_DRAFTED, hidden), "Q4_K"
    yield "fc.weight", (hidden, 3 * hidden), "Q4_K"
    for name, size, form in _layer(shape, "Q4_K"):
        wide = {"attn_q": size[0], "attn_k": kv, "attn_v": kv}
        yield f"blk.0.{name}.weight", (wide[name], 2 * hidden) if name in wide else size, form
    yield "blk.0.attn_norm_2.weight", (hidden,), "F32"


def _mtp(shape: Shape) -> Tensors:
    hidden = shape.hidden
    yield "token_embd.weight", (shape.vocabulary, hidden), "Q6_K"
    yield "output_norm.weight", (hidden,), "F32"
    block = f"blk.{shape.layers - 1}"
    yield from ((f"{block}.{name}.weight", size, form) for name, size, form in _layer(shape, "Q6_K"))
    yield f"{block}.nextn.eh_proj.weight", (hidden, 2 * hidden), "Q4_K"
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield f"{block}.nextn.{name}.weight", (hidden,), "F32"


def stored(size: tuple[int, ...], form: str) -> GGMLQuantizationType:
    """The format itself, or that which llama.cpp takes for rows without whole blocks of 256."""
    odd = form in ("Q4_K", "Q6_K") and size[-1] % 256
    return GGMLQuantizationType[{"Q4_K": "Q5_0", "Q6_K": "Q8_0"}[form] if odd else form]


def weights(name: str, size: tuple[int, ...], kind: GGMLQuantizationType, seed: int) -> npt.NDArray[Any]:
    """Routers are random, other floats ones or less; else random blocks whose scales keep a product small.

    Matrices have a mean of 0: with another, rows become alike, and routers send all to the same experts.
    """
    if name.endswith("ffn_gate_inp.weight"):
        return np.random.default_rng(seed).normal(0, size[-1] ** -0.5, size).astype(np.float32)
    if kind == GGMLQuantizationType.F32:
        return np.full(
            size, -1.0 if name.endswith("ssm_a") else 1 / size[-1] if len(size) > 1 else 1, np.float32
        )
    if kind == GGMLQuantizationType.F16:
        random = np.random.default_rng(seed).normal(0, size[-1] ** -0.5, size).astype(np.float16)
        return np.frombuffer(random.tobytes(), np.uint8).reshape(*size[:-1], -1)
    rng, (block, n_bytes) = np.random.default_rng(seed), GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (prod(size) // block, n_bytes), np.uint8)
    for place, spread in _FACTORS[kind.name].items():
        raw[:, place : place + 2] = np.frombuffer(np.float16(spread / size[-1] ** 0.5).tobytes(), np.uint8)
    if kind == GGMLQuantizationType.MXFP4:
        raw[:, 0] = 120
    return raw.reshape(*size[:-1], -1)


_FACTORS: dict[str, dict[int, float]] = {
    "Q4_K": {0: 0.004, 2: 0.03},
    "Q5_K": {0: 0.002, 2: 0.03},
    "Q6_K": {208: 0.0007},
    "Q5_0": {0: 0.1},
    "Q8_0": {0: 0.012},
    "MXFP4": {},
}
"""Where a block has its float16 factors, and how large they are for an input of one."""


def tokenizer(writer: GGUFWriter, shape: Shape) -> None:
    """As many tokens as the model has, made of bytes, pairs of these, and so on."""
    letters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
    pairs = list(product(letters, repeat=2))
    triples = product(map("".join, pairs), letters[:8])
    special = [*_MARKERS.get(shape.architecture, ()), "<|bos|>", "<|end|>"]
    merges = [*islice(chain(pairs, triples), shape.vocabulary - len(special) - len(letters))]
    tokens = [*letters, *map("".join, merges), *special]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - len(special)) + [3] * len(special))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)


def write_tower(name: str, path: Path) -> None:
    """Write the tower of the model called ``name`` as llama.cpp's converter does."""
    family, tower = TOWERS[name]
    facts: Any = tower
    writer = GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", family.gguf)
    for key in ("has_vision_encoder", "use_gelu"):
        writer.add_bool(f"clip.{key}", True)
    numbers = {
        "embedding_length": facts.hidden_size,
        "feed_forward_length": getattr(tower, "mlp_width", 0),
        "block_count": getattr(tower, "num_layers", 0),
        "attention.head_count": getattr(tower, "heads", 0),
        "projection_dim": tower.width,
        "patch_size": facts.patch,
        "image_size": 768,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", facts.epsilon)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5] * 3)
    for seed, (own, size) in enumerate(build_tower(tower)[1].items()):
        stored = family.gguf_name(own)
        floats = len(size) != 2 or "embd" in stored
        kind = GGMLQuantizationType.F32 if floats else GGMLQuantizationType.F16
        values = weights(stored, size or (1,), kind, seed)
        if not size:
            values *= -100 if stored.endswith("min") else 100
        if stored.startswith("v.patch_embd.weight") and family is not GEMMA4_EMBEDDER:
            values = values.reshape(-1, 3, facts.patch, facts.patch)
        elif size and size[0] == 2 * facts.positions:
            values = values.reshape(2, facts.positions, -1)
        writer.add_tensor(stored, values if floats else values.view(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(name: str, path: Path) -> None:
    """Write the model called ``name``, tensor by tensor."""
    name, _, only = name.partition(".dspark.") if ".dspark." in name else (name, "", "")
    name += ".dspark" if only else ""
    target, part = name.rpartition(".")[::2] if name not in SHAPES else (name, "")
    head, shape = part == "head", getattr(SHAPES[target], part) if part else SHAPES[target]
    writer = GGUFWriter(path, shape.architecture)
    writer.add_block_count(shape.layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.hidden)
    if "feed_forward_length" not in shape.facts:
        writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    if "attention.head_count_kv" not in shape.facts:
        writer.add_head_count_kv(shape.kv_heads)
    if "attention.key_length" not in shape.facts:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.theta)
    for key, value in shape.facts.items():
        kinds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add: Any = (kinds | {list: writer.add_array})[type(value)]
        add(f"{shape.architecture}.{key}", value)
    tokenizer(writer, shape)
    writer.add_mask_token_id(shape.vocabulary - 3)
    rows = [
        (tensor, size, stored(size, only if only and form != "F32" else form))
        for tensor, size, form in tensors(shape)
    ]
    for tensor, size, kind in rows:
        block, n_bytes = GGML_QUANT_SIZES[kind]
        floats = kind == GGMLQuantizationType.F32
        raw_shape = size if floats else (*size[:-1], size[-1] // block * n_bytes)
        dtype = np.dtype(np.float32 if floats else np.uint8)
        total = prod(raw_shape) * dtype.itemsize
        writer.add_tensor_info(tensor, raw_shape, dtype, total, None if floats else kind)
    if head:
        writer.add_tensor_info("d2t", (_DRAFTED,), np.dtype(np.int64), 8 * _DRAFTED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for seed, (tensor, size, kind) in enumerate(rows):
        writer.write_tensor_data(weights(tensor, size, kind, seed))
    if head:
        writer.write_tensor_data(np.arange(_DRAFTED, dtype=np.int64))
    writer.close()


def write_assistant(shape: Shape, folder: Path) -> None:
    """Write the assistant of E2B or of E4B."""
    facts = assistants.config(
        num_hidden_layers=4,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "sliding", "full")],
        num_kv_shared_layers=4,
        hidden_size=256,
        intermediate_size=2048,
        num_attention_heads=4,
        num_key_value_heads=shape.kv_heads,
        head_dim=256,
        global_head_dim=512,
        vocab_size=shape.vocabulary,
        sliding_window=shape.facts["attention.sliding_window"],
        max_position_embeddings=32_768,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    clusters = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}
    assistants.write(folder, facts | clusters | {"backbone_hidden_size": shape.hidden})


def main() -> None:
    """Read the command line; write the files."""
    options = arguments(__doc__, "names...", into=Path)
    options.into.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        if name.endswith(".assistant"):
            write_assistant(SHAPES[name.removesuffix(".assistant")], options.into / name)
            continue
        if name.endswith(".mmproj"):
            own = name.removesuffix(".mmproj")
            write_tower(own, options.into / f"mmproj-{own}.gguf")
            continue
        path = options.into / (
            f"mtp-{name.removesuffix('.mtp')}.gguf" if name.endswith(".mtp") else f"{name}.gguf"
        )
        write(name, path)
        print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
