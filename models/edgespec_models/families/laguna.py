"""Laguna: heads whose number differs by layer, each with a gate, and experts behind the first layers."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from edgespec_models.decoders.config import Count
from edgespec_models.decoders.operations import Attention, Backend
from edgespec_models.decoders.transformer import FULL, SLIDING, Transformer, attend_gated
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.families.experts import dense_layers
from edgespec_models.families.family import Family
from edgespec_models.families.names import EXPERTS, LAYER, SHARED_EXPERT
from edgespec_models.families.qwen3 import Qwen3
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import layer_count
from edgespec_models.files.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Laguna(Qwen3):
    """A decoder whose heads are multiplied by softplus of gates. ``layer_heads`` are query heads by layer."""

    layer_heads: tuple[Count, ...]

    def attention(self, index: int) -> Attention:
        return replace(super().attention(index), heads=self.layer_heads[index])

    def mixed(self, b: Backend, index: int, h: Any) -> Any:
        facts = self.attention(index)
        return attend_gated(b, facts, h, self.hidden_size, facts.heads, softplus=True)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if len(self.layer_heads) != self.num_layers or any(n % self.num_kv_heads for n in self.layer_heads):
            yield (
                f"layer_heads are {self.layer_heads}; allowed: a multiple of {self.num_kv_heads} for each of "
                f"{self.num_layers} layers"
            )


def _usual(facts: Facts) -> Facts:
    """In layers with a window another part of a head rotates."""
    local = facts.section("rope_parameters").section("sliding_attention")
    width = int(facts.integer("head_dim", 128) * local.positive("partial_rotary_factor", 1.0))
    return facts.changed(
        {
            "layer_types": facts.value("layer_types") or [FULL] * layer_count(facts),
            "local_rotary_dim": width,
            "num_dense_layers": dense_layers(facts, 1),
            "mlp_only_layers": None,
            "routed_scaling_factor": facts.number("moe_routed_scaling_factor", 1.0),
        }
    )


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    """Files list the heads of layers, but not which have a window: layers 0, 4, 8 and so on have none."""
    changed, heads = dict[str, object](), keys.value("num_attention_heads")
    if isinstance(heads, list):
        most = max((count for count in heads if type(count) is int), default=0)
        changed = {"num_attention_heads_per_layer": heads, "attention.head_count": most}
    if keys.value("sliding_window_pattern") is None:
        kinds = [SLIDING if layer % 4 else FULL for layer in range(layer_count(keys))]
        changed["layer_types"] = kinds if keys.integer("sliding_window", 0) else [FULL] * len(kinds)
    return changed


def _read(facts: Facts, family: Family) -> Transformer:
    if facts.value("gating") not in (None, True, "per-head", "per_head"):
        raise UnsupportedModelError(
            f"{facts.where}: gating is {facts.value('gating')!r}; allowed: 'per-head', as in Laguna XS and S"
        )
    layers = layer_count(facts)
    heads = facts.numbers("num_attention_heads_per_layer", layers)
    heads = heads or (facts.integer("num_attention_heads"),) * layers
    return trunk(facts, family, num_heads=int(max(heads)), layer_heads=tuple(map(int, heads)))


LAGUNA = Family(
    name="laguna",
    hub=("laguna",),
    gguf="laguna",
    theta=5e5,
    local_theta=1e4,
    partial=True,
    windowed=True,
    decoder=Laguna,
    experts={"gating": "sigmoid", "selection_bias": True, "shared_gate": False},
    defaults={
        "sliding_window": 512,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    fixed={"moe_router_logit_softcapping": 0, "moe_apply_router_weight_on_input": False},
    keys={"local_rotary_dim": "rope.dimension_count_swa"},
    layer={
        **LAYER,
        **EXPERTS,
        **SHARED_EXPERT,
        "head_gate": ("self_attn.g_proj.weight", "attn_gate.weight"),
    },
    usual=_usual,
    from_gguf=_from_gguf,
    read=_read,
)
