"""Nemotron-H and Nemotron 3 nano: a layer is Mamba-2, attention, an MLP or experts, with one norm.

transformers raises small time steps to ``time_step_min`` in passes of several tokens, but not of one. As in
llama.cpp they stay as they are here, because the bits of a token must not depend on how a text is cut.

The last norm of an MTP layer is an RMSNorm, as in NVIDIA's TensorRT-LLM and in vLLM; llama.cpp b11434 also
subtracts the mean.
"""

from collections.abc import Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import FULL, Transformer
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.families.granite import GRANITE, MAMBA, MAMBA_NAMES, Granite, mamba_fields
from edgespec_models.families.mtp import MTPLayer, mtp_layer_of
from edgespec_models.families.names import OUTER
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import last_layers, layer_kinds
from edgespec_models.files.facts import Facts

MLP: Final = "mlp"
MOE: Final = "moe"
_KINDS: Final = {"M": MAMBA, "*": FULL, "-": MLP, "E": MOE, "linear_attention": MAMBA, "attention": FULL}
_USUAL: Final = {
    "rms_norm_eps": "layer_norm_epsilon",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}


@dataclass(frozen=True, kw_only=True)
class NemotronH(Granite):
    """A decoder whose layers are one sublayer each."""

    TYPES = (FULL, MAMBA, MLP, MOE)
    NEEDS = MappingProxyType({**Granite.NEEDS, MOE: ("experts",)})
    activation = "relu2"

    @property
    def mtp_layer(self) -> Transformer | None:
        """With attention and experts as in its own layers; None without experts."""
        if self.experts is None:
            return None
        return mtp_layer_of(self, NemotronMTP, MTP_LAYER.name, mamba=None, conv_taps=None)

    def layer(self, b: Backend, index: int, x: Any) -> Any:
        h = b.norm(x, "attn_norm")
        sublayer = self.mlp if self.layer_type(index) in (MLP, MOE) else self.mixed
        return b.add(x, sublayer(b, index, h), "residual")

    def mlp(self, b: Backend, index: int, h: Any) -> Any:
        if self.layer_type(index) == MLP:
            return self.dense(b, h, self.intermediate_size)
        return super().mlp(b, index, h)


@dataclass(frozen=True, kw_only=True)
class NemotronMTP(MTPLayer, NemotronH):
    """Its MTP layer, which is attention and experts, with a norm each."""

    NEEDS = Granite.NEEDS
    layer = Transformer.layer


def _usual(facts: Facts) -> Facts:
    """Older files have a letter for each layer."""
    types = facts.value("layers_block_type") or facts.value("hybrid_override_pattern")
    kinds = [_KINDS.get(str(kind), kind) for kind in types] if isinstance(types, list | str) else []
    changed = {name: facts.value(key) for name, key in _USUAL.items() if facts.value(key) is not None}
    heads, width = facts.integer("mamba_num_heads", 128), facts.integer("mamba_head_dim", 64)
    changed |= {"layer_types": kinds, "num_hidden_layers": len(kinds), "mamba_width": heads * width}
    experts = facts.integer("n_routed_experts", facts.integer("num_local_experts", 8))
    if MLP not in kinds:  # the width of layers that a GGUF file states
        changed["intermediate_size"] = facts.integer("moe_intermediate_size", 7688)
    return facts.changed(changed | {"rotates": False, "num_local_experts": experts * (MOE in kinds)})


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    """A layer with heads of keys and values is attention, and one with a width is an MLP or experts."""
    heads, inner = max(keys.integer("mamba_n_heads"), 1), keys.integer("ssm.inner_size")
    changed: dict[str, object] = {"mamba_d_head": inner // heads, "mamba_width": inner}
    changed["rope.scaling.finetuned"] = False
    changed["attention.layer_norm_rms_epsilon"] = keys.number(
        "attention.layer_norm_rms_epsilon", keys.number("attention.layer_norm_epsilon", 1e-5)
    )
    counts, widths = keys.value("attention.head_count_kv"), keys.value("feed_forward_length")
    if not isinstance(counts, list) or not isinstance(widths, list) or len(counts) != len(widths):
        raise UnsupportedModelError(
            f"{keys.where}: attention.head_count_kv and feed_forward_length must be lists with a number for "
            "each layer; download or convert it again"
        )
    fed = MOE if keys.integer("expert_count", 0) else MLP
    kinds = list[str]()
    for index, (count, width) in enumerate(zip(counts, widths, strict=True)):
        if count and width and index < keys.integer("block_count"):  # blocks behind are for MTP
            raise UnsupportedModelError(
                f"{keys.where}: layer {index} has {count} heads of keys and is {width} wide; allowed: either"
            )
        kinds.append(FULL if count else fed if width else MAMBA)
    changed["layer_types"] = kinds[: keys.integer("block_count")]
    for key, numbers in (("attention.head_count_kv", counts), ("feed_forward_length", widths)):
        several = sorted({n for n in numbers if n})
        if len(several) > 1:
            raise UnsupportedModelError(f"{keys.where}: {key} is {several}; allowed: one number, and 0")
        changed[key] = several[0] if several else 0
    return changed


def _read(facts: Facts, family: Family) -> Transformer:
    types = layer_kinds(facts, NemotronH.TYPES) or []
    if facts.value("moe_latent_size"):
        raise UnsupportedModelError(
            f"{facts.where}: moe_latent_size is {facts.value('moe_latent_size')}; {family.name} is supported "
            "with experts as wide as the stream"
        )
    fields: dict[str, Any] = {"layer_types": tuple(types)}
    if MAMBA in types:
        fields |= mamba_fields(facts, family)
    return trunk(facts, family, sliding=last_layers(facts, family), **fields)


MTP_LAYER = Family(name="nemotron_h-mtp", kind="head", decoder=NemotronMTP)
NEMOTRON_H = Family(
    name="nemotron_h",
    gguf="nemotron_h",
    decoder=NemotronH,
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
    },
    fixed={
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
    },
    keys={**GRANITE.keys, "moe_latent_size": "moe_latent_size"},
    outer={
        **OUTER,
        "embed": ("model.embeddings.weight", "token_embd.weight"),
        "final_norm": ("model.norm_f.weight", "output_norm.weight"),
    },
    layer={
        **{own: (hub.replace("mamba.", "mixer."), gguf) for own, (hub, gguf) in MAMBA_NAMES.items()},
        "attn_norm": ("norm.weight", "attn_norm.weight"),
        **{name: (f"mixer.{name}_proj.weight", f"attn_{name}.weight") for name in "qkv"},
        "o": ("mixer.o_proj.weight", "attn_output.weight"),
        "up": ("mixer.up_proj.weight", "ffn_up.weight"),
        "down": ("mixer.down_proj.weight", "ffn_down.weight"),
        "router": ("mixer.gate.weight", "ffn_gate_inp.weight"),
        "selection_bias": (
            "mixer.gate.e_score_correction_bias mixer.gate.e_score_correction.bias",
            "exp_probs_b.bias",
        ),
        "experts_up": ("mixer.experts.*.up_proj.weight mixer.experts.up_proj", "ffn_up_exps.weight"),
        "experts_down": ("mixer.experts.*.down_proj.weight mixer.experts.down_proj", "ffn_down_exps.weight"),
        "shared_up": ("mixer.shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
        "shared_down": ("mixer.shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
    },
    usual=_usual,
    from_gguf=_from_gguf,
    read=_read,
)
NEMOTRON_H_MOE = NEMOTRON_H._replace(
    hub=("nemotron_h",),
    gguf="nemotron_h_moe",
    experts={"gating": "sigmoid", "shared_gate": False},
    defaults={
        **NEMOTRON_H.defaults,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "shared_expert_intermediate_size": 7688,
    },
    mtp={
        "both": ("mtp.layers.0.eh_proj.weight", "nextn.eh_proj.weight"),
        "embed_norm": ("mtp.layers.0.enorm.weight", "nextn.enorm.weight"),
        "fuse_norm": ("mtp.layers.0.hnorm.weight", "nextn.hnorm.weight"),
        "final_norm": ("mtp.layers.1.final_layernorm.weight", "nextn.shared_head_norm.weight"),
        "layers.0.mlp_norm": ("mtp.layers.1.norm.weight", "post_attention_norm.weight"),
    },
    dense=NEMOTRON_H,
)
