"""Qwen3.5 and its successors, dense and with experts: delta nets among layers of gated attention, MTP layers.

GGUF files have the value heads of delta nets in tiles: value head h goes with key head ``h % key heads``.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from edgespec_models.decoders.operations import Attention, Backend, DeltaNet
from edgespec_models.decoders.transformer import FULL, Transformer
from edgespec_models.errors import ModelFileError, naming
from edgespec_models.families.family import Family
from edgespec_models.families.lfm2 import Taps
from edgespec_models.families.mtp import MTPLayer, mtp_layer_of
from edgespec_models.families.names import EXPERTS, LAYER, SHARED_EXPERT
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import every_nth_sees_all, last_layers, layer_count, layer_kinds
from edgespec_models.files.facts import Facts

LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen35(Transformer):
    """A decoder with delta nets among layers whose heads have gates beside their queries.

    Attributes:
        delta: the heads of delta nets; None without one.
        conv_taps: tokens that their convolutions see, the token itself included; None without one.
    """

    TYPES = (LINEAR, FULL)
    NEEDS = MappingProxyType({LINEAR: ("delta", "conv_taps")})
    norms = "head"
    delta: DeltaNet | None = None
    conv_taps: Taps | None = None

    @property
    def mtp_layer(self) -> Transformer:
        """With attention as in its own layers."""
        return mtp_layer_of(self, Qwen35MTP, MTP_LAYER.name, conv_taps=None, delta=None)

    def attention(self, index: int) -> Attention:
        return replace(super().attention(index), gated=True)

    def mixed(self, b: Backend, index: int, h: Any) -> Any:
        net, taps = self.delta, self.conv_taps
        if net is None or taps is None or self.layer_type(index) != LINEAR:
            return super().mixed(b, index, h)
        rows = {"delta_qkv": net.channels, "delta_gate": net.values}
        rows |= dict.fromkeys(("delta_decay", "delta_strength"), net.value_heads)
        y = b.delta_net(b.linear(h, "delta_in", rows, part="mixer"), net, taps)
        return b.linear(y, "delta_out", self.hidden_size, part="mixer")


@dataclass(frozen=True, kw_only=True)
class Qwen35MTP(MTPLayer, Qwen35):
    """Its MTP layer."""


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    changed, recurrent = dict[str, object](), keys.value("attention.recurrent_layers")
    if isinstance(recurrent, list):
        kinds = [f"{'linear' if is_linear else 'full'}_attention" for is_linear in recurrent]
        changed["layer_types"] = kinds[: keys.integer("block_count")]
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if heads < 1 or inner % heads:
        raise ModelFileError(
            f"{keys.where}: ssm.inner_size is {inner}, which {heads} heads (ssm.time_step_rank) cannot "
            "share; download or convert it again"
        )
    tiled = keys.boolean("ssm.v_head_reordered", default=True)  # as ollama's files state
    return changed | {"linear_value_head_dim": inner // heads, "linear_tiled": tiled}


def _read(facts: Facts, family: Family) -> Transformer:
    """The layers that are delta nets are listed, or attention layers have an interval."""
    own, types = dict[str, Any](), layer_kinds(facts, Qwen35.TYPES)
    if types is None:
        interval = facts.integer("full_attention_interval", 4)
        if interval < 1:
            raise ModelFileError(f"{facts.where}: full_attention_interval is {interval}; allowed: above 0")
        linear = every_nth_sees_all(layer_count(facts), interval)
        types = [LINEAR if is_linear else FULL for is_linear in linear]
    if LINEAR in types:
        with naming(facts.where):
            net = DeltaNet(
                key_heads=facts.integer("linear_num_key_heads"),
                value_heads=facts.integer("linear_num_value_heads"),
                key_width=facts.integer("linear_key_head_dim"),
                value_width=facts.integer("linear_value_head_dim"),
                tiled=facts.boolean("linear_tiled", default=False),
            )
        taps = facts.integer("linear_conv_kernel_dim")
        own = {"layer_types": tuple(types), "conv_taps": taps, "delta": net}
    return trunk(facts, family, sliding=last_layers(facts, family), **own)


MTP_LAYER = Family(name="qwen35-mtp", kind="head", decoder=Qwen35MTP)
QWEN35 = Family(
    name="qwen35",
    hub=("qwen3_5_text",),
    gguf="qwen35",
    theta=1e7,
    partial=True,
    less_one="(?<!delta_)norm",
    decoder=Qwen35,
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
    fixed={"attn_output_gate": True},
    keys={
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
    },
    layer={
        **LAYER,
        "mlp_norm": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
        "delta_qkv": ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight"),
        "delta_gate": ("linear_attn.in_proj_z.weight", "attn_gate.weight"),
        "delta_decay": ("linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
        "delta_strength": ("linear_attn.in_proj_b.weight", "ssm_beta.weight"),
        "conv": ("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
        "delta_a": ("linear_attn.A_log", "ssm_a"),
        "delta_bias": ("linear_attn.dt_bias", "ssm_dt.bias ssm_dt"),
        "delta_norm": ("linear_attn.norm.weight", "ssm_norm.weight"),
        "delta_out": ("linear_attn.out_proj.weight", "ssm_out.weight"),
    },
    mtp={
        "both": ("mtp.fc.weight", "nextn.eh_proj.weight"),
        "embed_norm": ("mtp.pre_fc_norm_embedding.weight", "nextn.enorm.weight"),
        "fuse_norm": ("mtp.pre_fc_norm_hidden.weight", "nextn.hnorm.weight"),
        "final_norm": ("mtp.norm.weight", "nextn.shared_head_norm.weight"),
        "own_lm_head": ("", "nextn.shared_head_head.weight"),
        "own_embed": ("", "nextn.embed_tokens.weight"),
    },
    from_gguf=_from_gguf,
    read=_read,
)
QWEN35_MOE = QWEN35._replace(
    hub=("qwen3_5_moe_text",),
    gguf="qwen35moe",
    experts={"shared_gate": True},
    defaults={
        **QWEN35.defaults,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    layer={
        **QWEN35.layer,
        **EXPERTS,
        **SHARED_EXPERT,
        "shared_router": ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    },
)
