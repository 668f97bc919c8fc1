"""Granite 3 and 4, dense and with experts: factors on what is added up. Granite 4 H has layers of Mamba-2."""

from collections.abc import Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from edgespec_models.decoders.operations import Backend, Mamba
from edgespec_models.decoders.transformer import FULL, Transformer
from edgespec_models.errors import UnsupportedModelError, naming
from edgespec_models.families.family import Family
from edgespec_models.families.lfm2 import Taps, kinds_by_heads
from edgespec_models.families.names import EXPERTS, LAYER
from edgespec_models.families.reading import expect, trunk
from edgespec_models.families.windows import last_layers, layer_kinds
from edgespec_models.files.facts import Facts

MAMBA = "mamba"


@dataclass(frozen=True, kw_only=True)
class Granite(Transformer):
    """A decoder that may have layers of Mamba-2.

    Attributes:
        mamba: the heads of these layers; None without one.
        conv_taps: tokens that their convolutions see, the token itself included; None without one.
    """

    TYPES: ClassVar[tuple[str, ...]] = (FULL, MAMBA)
    NEEDS = MappingProxyType({MAMBA: ("mamba", "conv_taps")})
    mamba: Mamba | None = None
    conv_taps: Taps | None = None

    def mixed(self, b: Backend, index: int, h: Any) -> Any:
        mamba, taps = self.mamba, self.conv_taps
        if mamba is None or taps is None or self.layer_type(index) != MAMBA:
            return super().mixed(b, index, h)
        rows = mamba.values + mamba.channels + mamba.heads
        y = b.mamba(b.linear(h, "mamba_in", rows, part="mixer"), mamba, taps)
        return b.linear(y, "mamba_out", self.hidden_size, part="mixer")


def _usual(facts: Facts) -> Facts:
    """With an MLP that all tokens share; without experts this is the MLP of a Granite 3."""
    model_type = facts.value("model_type")
    if model_type == "granitemoe":
        return facts
    hybrid = model_type == "granitemoehybrid"
    shared = facts.integer("shared_intermediate_size", 1024 if hybrid else 0)
    changed: dict[str, object] = {"shared_expert_intermediate_size": shared}
    if hybrid:
        names = {"attention": FULL, "linear_attention": MAMBA}
        types = facts.value("layer_types") or facts.value("layers_block_type")
        if not isinstance(types, list):  # transformers' default
            types = [MAMBA] * facts.integer("num_hidden_layers")
        changed["layer_types"] = [names.get(str(kind), kind) for kind in types]
        changed["rotates"] = facts.value("position_embedding_type") == "rope"
    if facts.integer("num_local_experts", 8) == 0:
        changed["intermediate_size"] = shared
    return facts.changed(changed)


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    heads, inner = max(keys.integer("mamba_n_heads"), 1), keys.integer("ssm.inner_size")
    return kinds_by_heads(keys, MAMBA) | {"mamba_d_head": inner // heads, "mamba_width": inner}


def _read(facts: Facts, family: Family) -> Transformer:
    types = layer_kinds(facts, Granite.TYPES) or []
    if MAMBA not in types:
        return trunk(facts, family)
    expect(facts, family, "mamba_n_groups", 1)
    fields = {"layer_types": tuple(types), **mamba_fields(facts, family)}
    return trunk(facts, family, sliding=last_layers(facts, family), **fields)


def mamba_fields(facts: Facts, family: Family) -> dict[str, Any]:
    """The layers of Mamba-2 as fields of a decoder."""
    for key, value in {"mamba_conv_bias": True, "mamba_proj_bias": False}.items():
        expect(facts, family, key, value)
    heads, width = facts.integer("mamba_n_heads", 128), facts.value("mamba_d_head")
    inner = facts.integer("mamba_width", facts.integer("mamba_expand", 2) * facts.integer("hidden_size"))
    own = inner // max(heads, 1)
    if own * heads != inner or width not in (None, "auto", own):
        raise UnsupportedModelError(
            f"{facts.where}: {heads} heads of Mamba-2 are {width} wide; allowed: {inner} in all"
        )
    with naming(facts.where):
        mamba = Mamba(
            heads=heads,
            width=own,
            groups=facts.integer("mamba_n_groups", 1),
            key_width=facts.integer("mamba_d_state", 256),
        )
    return {"mamba": mamba, "conv_taps": facts.integer("mamba_d_conv", 4)}


MAMBA_NAMES = {
    "mamba_in": ("mamba.in_proj.weight", "ssm_in.weight"),
    "conv": ("mamba.conv1d.weight", "ssm_conv1d.weight"),
    "conv_bias": ("mamba.conv1d.bias", "ssm_conv1d.bias"),
    "mamba_a": ("mamba.A_log", "ssm_a"),
    "mamba_bias": ("mamba.dt_bias", "ssm_dt.bias"),
    "mamba_skip": ("mamba.D", "ssm_d"),
    "mamba_norm": ("mamba.norm.weight", "ssm_norm.weight"),
    "mamba_out": ("mamba.out_proj.weight", "ssm_out.weight"),
}
GRANITE = Family(
    name="granite",
    hub=("granite",),
    gguf="granite",
    neighbours=True,
    decoder=Granite,
    defaults={"attention_multiplier": 1.0},
    keys={
        "mamba_n_heads": "ssm.time_step_rank",
        "mamba_n_groups": "ssm.group_count",
        "mamba_d_state": "ssm.state_size",
        "mamba_d_conv": "ssm.conv_kernel",
    },
)
GRANITE_MOE = GRANITE._replace(
    hub=("granitemoe", "granitemoeshared", "granitemoehybrid"),
    gguf="granitemoe",
    experts={"normalized": True, "shared_gate": False},
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    layer={
        **LAYER,
        **EXPERTS,
        **MAMBA_NAMES,
        "router": ("block_sparse_moe.router.layer.weight", "ffn_gate_inp.weight"),
        "experts_gate_up": ("block_sparse_moe.input_linear.weight", "ffn_gate_up_exps.weight"),
        "experts_down": ("block_sparse_moe.output_linear.weight", "ffn_down_exps.weight"),
        "shared_gate_up": ("shared_mlp.input_linear.weight", ""),
        "shared_gate": ("", "ffn_gate_shexp.weight"),
        "shared_up": ("", "ffn_up_shexp.weight"),
        "shared_down": ("shared_mlp.output_linear.weight", "ffn_down_shexp.weight"),
    },
    dense=GRANITE._replace(
        layer={
            **LAYER,
            **MAMBA_NAMES,
            "gate_up": ("shared_mlp.input_linear.weight", ""),
            "down": ("shared_mlp.output_linear.weight", "ffn_down.weight"),
        },
        read=_read,
    ),
    usual=_usual,
    read=_read,
)
GRANITE_HYBRID = GRANITE_MOE._replace(
    hub=(),
    gguf="granitehybrid",
    dense=GRANITE_MOE.dense and GRANITE_MOE.dense._replace(gguf="granitehybrid", from_gguf=_from_gguf),
    from_gguf=_from_gguf,
)
