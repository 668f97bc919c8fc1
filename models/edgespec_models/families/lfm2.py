"""LFM2 and LFM2.5, dense and with experts: short convolutions between layers of attention."""

from collections.abc import Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import FULL, Transformer
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.families.names import EXPERTS, LAYER, OUTER
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import last_layers, layer_kinds
from edgespec_models.files.facts import Facts
from edgespec_models.schema import within

_MAX_LAYERS = 4096  # there is a list with an entry for each; a damaged count may be huge
CONV = "conv"
Taps = Annotated[int, within(2, 16)]


@dataclass(frozen=True, kw_only=True)
class Lfm2(Transformer):
    """A decoder with short convolutions among its layers.

    ``conv_taps`` are the tokens that a convolution sees, the token itself included; None without one.
    """

    TYPES: ClassVar[tuple[str, ...]] = (FULL, CONV)
    NEEDS = MappingProxyType({CONV: ("conv_taps",)})
    norms = "head"
    conv_taps: Taps | None = None

    def mixed(self, b: Backend, index: int, h: Any) -> Any:
        if self.conv_taps is None or self.layer_type(index) != CONV:
            return super().mixed(b, index, h)
        width = self.hidden_size
        y = b.short_conv(b.linear(h, "conv_in", 3 * width, part="mixer"), width, self.conv_taps)
        return b.linear(y, "conv_out", width, part="mixer")


def _usual(facts: Facts) -> Facts:
    """Older keys take precedence. By default a dense one's MLP has another width than the stated one."""
    dense = facts.value("model_type") == "lfm2"
    names = {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"}
    changed = {name: facts.value(key) for name, key in names.items() if facts.value(key) is not None}
    width = facts.integer("block_ff_dim", facts.integer("intermediate_size", 12_288 if dense else 7168))
    multiplier = facts.value("block_ffn_dim_multiplier")
    if facts.boolean("block_auto_adjust_ff_dim", default=dense):
        width = int(2 * width / 3)
        if multiplier is not None or "block_ffn_dim_multiplier" not in facts.keys:
            multiple = max(facts.integer("block_multiple_of", 256), 1)
            width = int(facts.positive("block_ffn_dim_multiplier", 1.0) * width)
            width = -(-width // multiple) * multiple
    if facts.value("layer_types") is None and facts.value("full_attn_idxs") is not None:
        layers = min(max(facts.integer("num_hidden_layers", 32), 0), _MAX_LAYERS)
        attention = facts.value("full_attn_idxs")
        places = attention if isinstance(attention, list) else []
        changed["layer_types"] = ["full_attention" if n in places else "conv" for n in range(layers)]
    changed |= {"intermediate_size": width, "block_ff_dim": None, "block_auto_adjust_ff_dim": False}
    return facts.changed(changed)


def kinds_by_heads(keys: Facts, other: str) -> dict[str, object]:
    """Layers without heads of keys and values are ``other``."""
    heads = keys.value("attention.head_count_kv")
    if not isinstance(heads, list) or any(type(count) is not int for count in heads):
        return {}
    counts, kinds = {*heads} - {0}, [FULL if count else other for count in heads]
    return {"attention.head_count_kv": counts.pop() if len(counts) == 1 else heads, "layer_types": kinds}


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    return kinds_by_heads(keys, CONV)


def _read(facts: Facts, family: Family) -> Transformer:
    need = "layer_types, or heads of keys and values, must say attention or convolution"
    fields, types = dict[str, Any](), layer_kinds(facts, Lfm2.TYPES, need) or []
    if CONV in types:
        if facts.boolean("conv_bias", default=False):
            raise UnsupportedModelError(f"{facts.where}: conv_bias is true; allowed: false")
        fields = {"layer_types": tuple(types), "conv_taps": facts.integer("conv_L_cache")}
    return trunk(facts, family, sliding=last_layers(facts, family), **fields)


LFM2 = Family(
    name="lfm2",
    hub=("lfm2",),
    gguf="lfm2",
    theta=1e6,
    windowed=True,
    cut="lfm2",
    decoder=Lfm2,
    defaults={
        "vocab_size": 65_536,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
    },
    keys={"conv_L_cache": "shortconv.l_cache"},
    outer={
        **OUTER,
        "final_norm": ("model.embedding_norm.weight", "token_embd_norm.weight output_norm.weight"),
    },
    layer={
        **LAYER,
        "attn_norm": ("operator_norm.weight", "attn_norm.weight"),
        "o": ("self_attn.out_proj.weight", "attn_output.weight"),
        "q_norm": ("self_attn.q_layernorm.weight", "attn_q_norm.weight"),
        "k_norm": ("self_attn.k_layernorm.weight", "attn_k_norm.weight"),
        "conv_in": ("conv.in_proj.weight", "shortconv.in_proj.weight"),
        "conv": ("conv.conv.weight", "shortconv.conv.weight"),
        "conv_out": ("conv.out_proj.weight", "shortconv.out_proj.weight"),
        "mlp_norm": ("ffn_norm.weight", "ffn_norm.weight"),
        "gate": ("feed_forward.w1.weight", "ffn_gate.weight"),
        "up": ("feed_forward.w3.weight", "ffn_up.weight"),
        "down": ("feed_forward.w2.weight", "ffn_down.weight"),
    },
    usual=_usual,
    from_gguf=_from_gguf,
    read=_read,
)
LFM2_MOE = LFM2._replace(
    hub=("lfm2_moe",),
    gguf="lfm2moe",
    experts={"gating": "sigmoid"},
    defaults={
        **LFM2.defaults,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
    },
    layer={
        **LFM2.layer,
        **EXPERTS,
        "router": ("feed_forward.gate.weight", "ffn_gate_inp.weight"),
        "selection_bias": ("feed_forward.expert_bias", "exp_probs_b.bias"),
        "experts_gate": ("feed_forward.experts.*.w1.weight", "ffn_gate_exps.weight"),
        "experts_up": ("feed_forward.experts.*.w3.weight", "ffn_up_exps.weight"),
        "experts_gate_up": ("feed_forward.experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        "experts_down": (
            "feed_forward.experts.*.w2.weight feed_forward.experts.down_proj",
            "ffn_down_exps.weight",
        ),
    },
)
