"""Hunyuan, dense: heads of queries and keys are normalized behind their rotation."""

from dataclasses import dataclass, replace

from edgespec_models.decoders.operations import Attention
from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER
from edgespec_models.families.qwen3 import Qwen3
from edgespec_models.families.rope import kind_of, scaling_of
from edgespec_models.files.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Hunyuan(Qwen3):
    """Its gains follow the rotation."""

    def attention(self, index: int) -> Attention:
        return replace(super().attention(index), normed_last=True)


def _usual(facts: Facts) -> Facts:
    """Where "dynamic" scaling has an ``alpha``, it is a larger base, the same for all texts."""
    scaling = scaling_of(facts)
    if kind_of(scaling) != "dynamic" or scaling.value("alpha") is None:
        return facts
    width = max(facts.integer("head_dim"), 4)
    theta = scaling.positive("rope_theta", facts.positive("rope_theta", 1e4))
    theta *= scaling.positive("alpha") ** (width / (width - 2))
    return facts.changed({"rope_theta": theta, "rope_scaling": None, "rope_parameters": None})


HUNYUAN = Family(
    name="hunyuan",
    hub=("hunyuan_v1_dense",),
    gguf="hunyuan-dense",
    decoder=Hunyuan,
    defaults={"rms_norm_eps": 1e-5},
    layer={
        **LAYER,
        "q_norm": ("self_attn.query_layernorm.weight", "attn_q_norm.weight"),
        "k_norm": ("self_attn.key_layernorm.weight", "attn_k_norm.weight"),
    },
    usual=_usual,
)
