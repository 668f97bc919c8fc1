"""gpt-oss: sinks beside scores, experts with biases, whose gates and factors have bounds."""

from dataclasses import dataclass, replace

from edgespec_models.decoders.operations import Attention
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.family import Family
from edgespec_models.families.names import EXPERTS, LAYER


@dataclass(frozen=True, kw_only=True)
class GptOss(Transformer):
    """Each head has a sink, and the product behind them a bias."""

    def attention(self, index: int) -> Attention:
        return replace(super().attention(index), sinks=True)


GPT_OSS = Family(
    name="gpt-oss",
    hub=("gpt_oss",),
    gguf="gpt-oss",
    theta=1.5e5,
    windowed=True,
    pattern=2,
    decoder=GptOss,
    experts={"biases": True, "clamped": True},
    alternating=True,
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
    unstated={"truncate": False},
    layer={
        **LAYER,
        **EXPERTS,
        "mlp_norm": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
        "o_bias": ("self_attn.o_proj.bias", "attn_output.bias"),
        "sinks": ("self_attn.sinks", "attn_sinks.weight"),
        "router": ("mlp.router.weight", "ffn_gate_inp.weight"),
        "router_bias": ("mlp.router.bias", "ffn_gate_inp.bias"),
        "experts_gate_bias": ("", "ffn_gate_exps.bias"),
        "experts_up_bias": ("", "ffn_up_exps.bias"),
        "experts_down_bias": ("", "ffn_down_exps.bias"),
    },
)
