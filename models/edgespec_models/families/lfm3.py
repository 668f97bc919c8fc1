"""LFM3: LFM2 with norms behind sublayers, windows in some layers, and a gate for each head of attention."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import FULL, SLIDING, Transformer, attend_gated, with_post_norms
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.families.lfm2 import CONV, LFM2, Lfm2
from edgespec_models.families.names import LAYER
from edgespec_models.families.reading import trunk
from edgespec_models.families.rope import kind_of
from edgespec_models.families.windows import layer_count, layer_kinds
from edgespec_models.files.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Lfm3(Lfm2):
    """A decoder with a gate for each head, and norms before and behind sublayers."""

    TYPES = (FULL, SLIDING, CONV)

    layer = with_post_norms

    def mixed(self, b: Backend, index: int, h: Any) -> Any:
        if self.layer_type(index) == CONV:
            return super().mixed(b, index, h)
        facts = self.attention(index)
        return attend_gated(b, facts, h, self.hidden_size, facts.heads)


_NEED: Final = f"layer_types must say {', '.join(Lfm3.TYPES)}"
_DIFFUSES: Final = (
    "reads prompts in both directions and writes by diffusion, as LFM3's d1 variant does; use the plain one"
)


def _usual(facts: Facts) -> Facts:
    """Where a part of a head is rotated, the first pairs turn, and pairs lie half a head apart.

    Published files call this "default", by which transformers would turn all pairs.
    """
    if not facts.boolean("causal_attn", default=True):
        raise UnsupportedModelError(f"{facts.where} {_DIFFUSES}")
    changed = dict[str, object]()
    if facts.value("norm_eps") is not None:
        changed["rms_norm_eps"] = facts.value("norm_eps")
    if facts.value("layer_types") is None:
        changed["layer_types"] = [_by_default(layer) for layer in range(layer_count(facts))]
    rope = facts.section("rope_parameters")
    full = rope.section("full_attention") if "full_attention" in rope.keys else rope
    for scaling in (full, facts.section("rope_scaling")):
        if kind_of(scaling) not in ("default", "proportional"):
            raise UnsupportedModelError(
                f"{scaling.where}: rope_type is {kind_of(scaling)!r}; allowed: 'default' and 'proportional'"
            )
    if rope.keys:
        windowed = rope.section("sliding_attention")
        if windowed.positive("partial_rotary_factor", 1.0) != 1:
            raise UnsupportedModelError(
                f"{windowed.where}: partial_rotary_factor is {windowed.value('partial_rotary_factor')}; "
                "allowed in layers with a window: 1"
            )
        factor = full.positive("partial_rotary_factor", facts.positive("partial_rotary_factor", 1.0))
        stated = {key: full.value(key) for key in full.keys}
        stated |= {"rope_type": "proportional", "partial_rotary_factor": factor}
        changed["rope_parameters"] = {
            "full_attention": stated,
            "sliding_attention": {key: windowed.value(key) for key in windowed.keys},
        }
    return facts.changed(changed)


def _by_default(layer: int) -> str:
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer % 4 == 0 and layer > 0 else CONV


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    """Convolutions are the layers without heads of keys and values; a tensor says which pairs turn."""
    if not keys.boolean("is_causal", default=True):
        raise UnsupportedModelError(f"{keys.where} {_DIFFUSES}")
    if "rope_freqs.weight" not in tensors:
        raise UnsupportedModelError(
            f"{keys.where} lacks rope_freqs.weight, which says how much of a head is rotated; export the "
            "model's directory from the hub instead"
        )
    width = keys.integer("head_dim")
    if keys.integer("rotary_dim", width) != width:
        raise UnsupportedModelError(
            f"{keys.where}: rope.dimension_count is {keys.value('rotary_dim')}; allowed: {width}, the width "
            "of heads"
        )
    changed, windowed = (
        dict(LFM2.from_gguf(keys, tensors)),
        keys.value("attention.sliding_window_pattern"),
    )
    kinds = changed.get("layer_types")
    if not isinstance(windowed, list) or any(type(has_window) is not bool for has_window in windowed):
        windowed = []
    if not isinstance(kinds, list) or len(kinds) != len(windowed):
        raise ModelFileError(
            f"{keys.where}: attention.head_count_kv must have a number and attention.sliding_window_pattern "
            "true or false for each layer; download or convert it again"
        )
    changed["layer_types"] = [
        "sliding_attention" if has_window and kind != CONV else kind
        for kind, has_window in zip(kinds, windowed, strict=True)
    ]
    return changed


def _read(facts: Facts, family: Family) -> Transformer:
    types = tuple(layer_kinds(facts, Lfm3.TYPES, _NEED) or ())
    taps = facts.integer("conv_L_cache") if CONV in types else None
    sliding = [SLIDING in types] * len(types)  # if any, which the types say
    return trunk(facts, family, sliding=sliding, layer_types=types, conv_taps=taps)


LFM3 = LFM2._replace(
    name="lfm3",
    hub=("lfm3",),
    gguf="lfm3",
    pattern=4,
    local_theta=1e4,
    decoder=Lfm3,
    defaults={
        "vocab_size": 128_000,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e6,
            },
        },
    },
    fixed={
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "attention_bias": False,
        "conv_bias": False,
    },
    outer={**LFM2.outer, "final_norm": ("model.embedding_norm.weight", "output_norm.weight")},
    layer={
        **LFM2.layer,
        "post_attn_norm": ("post_operator_norm.weight", "post_attention_norm.weight"),
        "o": LAYER["o"],
        "q_norm": LAYER["q_norm"],
        "k_norm": LAYER["k_norm"],
        "head_gate": ("self_attn.g_proj.weight", "attn_gate.weight"),
        "post_mlp_norm": ("post_ffn_norm.weight", "post_ffw_norm.weight"),
    },
    usual=_usual,
    from_gguf=_from_gguf,
    read=_read,
)
