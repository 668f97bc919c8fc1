"""GLM-4-0414: norms behind sublayers too; neighbouring elements of half a head are rotated."""

from collections.abc import Collection
from dataclasses import dataclass

from edgespec_models.decoders.transformer import Transformer, with_post_norms
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER
from edgespec_models.files.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Glm4(Transformer):
    """Its sublayers have norms before and behind them."""

    layer = with_post_norms


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    """Files of models that see have the rows of queries and keys in another order."""
    if keys.value("rope.dimension_sections") is not None:
        raise UnsupportedModelError(
            f"{keys.where} has rope.dimension_sections: it is of a model that sees (GLM-4.1V, GLM-OCR), and "
            "edgespec lacks these; use GLM-4-0414, which reads text alone"
        )
    return {}


GLM4 = Family(
    name="glm4",
    hub=("glm4",),
    gguf="glm4",
    partial=True,
    interleaved=True,
    decoder=Glm4,
    defaults={
        "vocab_size": 151_552,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131_072,
        "partial_rotary_factor": 0.5,
    },
    layer={
        **LAYER,
        "post_attn_norm": ("post_self_attn_layernorm.weight", "post_attention_norm.weight"),
        "gate_up": ("mlp.gate_up_proj.weight", "ffn_up.weight"),
        "post_mlp_norm": ("post_mlp_layernorm.weight", "post_ffw_norm.weight"),
    },
    from_gguf=_from_gguf,
)
