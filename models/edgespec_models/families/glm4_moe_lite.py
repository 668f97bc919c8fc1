"""GLM-4.7-Flash: latent attention (DeepSeek-AI 2024, arXiv 2405.04434) and experts.

Latent attention is computed in its absorbed form: queries and results of heads are multiplied by the matrices
that other forms multiply keys and values by, and all heads share one head of keys. GGUF files of DeepSeek's
models have the same architecture. All norms have one epsilon, as in llama.cpp; transformers has 1e-6 for two.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from edgespec_models.decoders.config import Count
from edgespec_models.decoders.operations import Attention, Backend
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import ModelFileError, UnsupportedModelError, naming
from edgespec_models.families.experts import dense_layers
from edgespec_models.families.family import Family
from edgespec_models.families.mtp import MTPLayer, mtp_layer_of
from edgespec_models.families.names import EXPERTS, LAYER, SHARED_EXPERT
from edgespec_models.families.reading import trunk
from edgespec_models.families.rope import kind_of, scaling_of
from edgespec_models.files.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Latent(Transformer):
    """A decoder with latent attention; ``head_dim`` is the width of a key: its latent part, and what rotates.

    Attributes:
        query_rank: width of the latent queries; None if queries have one product.
        key_width: elements of a head's queries that do not rotate.
        value_width: width of a head of values.
    """

    query_rank: Count | None = None
    key_width: Count
    value_width: Count

    @property
    def rank(self) -> int:
        """Width of what keys and values are made of."""
        return self.head_dim - self.rope.width

    @property
    def mtp_layer(self) -> Transformer:
        """With attention and experts as its last layers."""
        experts = self.experts and replace(self.experts, dense_layers=0)
        return mtp_layer_of(self, LatentMTP, MTP_LAYER.name, experts=experts)

    def attention(self, index: int) -> Attention:
        return replace(super().attention(index), latent=self.rank)

    def mixed(self, b: Backend, index: int, h: Any) -> Any:
        heads, turned, rows = self.num_heads, self.rope.width, self.num_heads * self.key_width
        if self.query_rank is None:
            q = b.linear(h, "q", rows + heads * turned, part="attention")
        else:
            q = b.norm(b.linear(h, "q_a", self.query_rank, part="attention"), "q_norm")
            q = b.linear(q, "q_b", rows + heads * turned, part="attention")
        q = b.head_linear(q, "k_b", heads, self.key_width, self.rank)
        keys = b.linear(h, "kv_a", self.head_dim, part="attention")
        y = b.attention((q, keys), self.attention(index))
        y = b.head_linear(y, "v_b", heads, self.rank, self.value_width)
        return b.linear(y, "o", self.hidden_size, part="attention")


@dataclass(frozen=True, kw_only=True)
class LatentMTP(MTPLayer, Latent):
    """Its MTP layer."""


def _usual(facts: Facts) -> Facts:
    width, shared = facts.integer("moe_intermediate_size", 1536), facts.integer("n_shared_experts", 1)
    dense = dense_layers(facts, facts.integer("first_k_dense_replace", 1))
    experts = facts.integer("n_routed_experts", facts.integer("num_local_experts", 64))
    return facts.changed(
        {
            "num_experts": experts,
            "num_dense_layers": dense,
            "shared_expert_intermediate_size": shared * width,
            "rotary_dim": facts.integer("qk_rope_head_dim", 64),
            "q_lora_rank": facts.integer("q_lora_rank", 0 if "q_lora_rank" in facts.keys else 768),
        }
    )


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    """Older files state the widths of the form that is not absorbed.

    Many lack ``expert_gating_func``: experts whose choice has a bias have sigmoids then. llama.cpp tells
    GLM-4.7-Flash by 47 layers and 154,880 tokens instead.
    """
    rank, turned = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    widths = [keys.integer(f"attention.{kind}_length") for kind in ("key", "value")]
    if keys.value("attention.key_length_mla") is not None:
        if widths != [rank + turned, rank] or keys.integer("attention.head_count_kv") != 1:
            raise ModelFileError(
                f"{keys.where}: keys and values are {widths[0]} and {widths[1]} wide, in "
                f"{keys.integer('attention.head_count_kv')} heads; attention.kv_lora_rank {rank} and "
                f"rope.dimension_count {turned} ask for {rank + turned} and {rank} in one. Download or "
                "convert it again"
            )
        widths = [keys.integer(f"attention.{kind}_length_mla") for kind in ("key", "value")]
    chosen = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    shared = keys.integer("expert_shared_count", 0) * keys.integer("expert_feed_forward_length")
    return {
        "qk_nope_head_dim": widths[0] - turned,
        "v_head_dim": widths[1],
        "attention.value_length": rank,
        "expert_shared_feed_forward_length": shared,
        "expert_gating_func": keys.integer("expert_gating_func", 0) or 1 + chosen,
        "expert_weights_norm": keys.boolean("expert_weights_norm", default=False),
        "use_expert_bias": chosen,
    }


def _read(facts: Facts, family: Family) -> Transformer:
    if kind_of(scaling_of(facts)) != "default":
        raise UnsupportedModelError(
            f"{facts.where} scales the rotary embedding by {kind_of(scaling_of(facts))!r}; {family.name} is "
            "supported without"
        )
    names = "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "rotary_dim"
    rank, width, values, turned = (facts.integer(name) for name in names)
    if min(rank, width, values, turned) < 1 or rank % 32 or width % 32 or values % 16 or turned % 16:
        raise UnsupportedModelError(
            f"{facts.where}: kv_lora_rank is {rank}, qk_nope_head_dim {width}, v_head_dim {values}, and "
            f"{turned} elements of a head rotate; allowed: multiples of 32 for the first two and of 16 for "
            "the others"
        )
    with naming(facts.where):
        return trunk(
            facts,
            family,
            num_kv_heads=1,
            head_dim=rank + turned,
            attention_scale=1 / sqrt(width + turned),
            query_rank=facts.integer("q_lora_rank", 0) or None,
            key_width=width,
            value_width=values,
        )


MTP_LAYER = Family(name="glm4_moe_lite-mtp", kind="head", decoder=LatentMTP)
GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    hub=("glm4_moe_lite",),
    gguf="deepseek2",
    interleaved=True,
    cut="glm4",
    decoder=Latent,
    experts={"gating": "sigmoid", "shared_gate": False},
    defaults={
        "vocab_size": 154_880,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    fixed={"rope_interleave": True, "attention_bias": False},
    keys={"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"},
    layer={
        **LAYER,
        **EXPERTS,
        **SHARED_EXPERT,
        "q_a": ("self_attn.q_a_proj.weight", "attn_q_a.weight"),
        "q_norm": ("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"),
        "q_b": ("self_attn.q_b_proj.weight", "attn_q_b.weight"),
        "kv_a": ("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"),
        "k_norm": ("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
        "kv_b": ("self_attn.kv_b_proj.weight", "attn_kv_b.weight"),
        "k_b": ("", "attn_k_b.weight"),
        "v_b": ("", "attn_v_b.weight"),
    },
    mtp={
        "both": ("eh_proj.weight", "nextn.eh_proj.weight"),
        "embed_norm": ("enorm.weight", "nextn.enorm.weight"),
        "fuse_norm": ("hnorm.weight", "nextn.hnorm.weight"),
        "final_norm": ("shared_head.norm.weight", "nextn.shared_head_norm.weight"),
        "own_lm_head": ("shared_head.head.weight", "nextn.shared_head_head.weight"),
        "own_embed": ("embed_tokens.weight", "nextn.embed_tokens.weight"),
    },
    usual=_usual,
    from_gguf=_from_gguf,
    read=_read,
)
