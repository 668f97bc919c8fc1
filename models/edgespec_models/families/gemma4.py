"""Gemma 4: layers that see the whole context have other heads than windowed ones, the last none of keys.

The keys of a ``config.json`` without a prefix give heads of windowed layers and their width. Layers that see
the whole context have others (``global_head_dim``, ``num_global_key_value_heads``, or an entry for each layer
of ``per_layer_config``). The last ``num_kv_shared_layers`` have no keys and values.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from edgespec_models.decoders.config import Count
from edgespec_models.decoders.operations import Attention, Backend
from edgespec_models.decoders.transformer import FULL, SLIDING, Transformer, in_layer
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.families.gemma2 import Gemma, capped
from edgespec_models.families.names import LAYER, OUTER, POST_NORMS
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import sliding_layers, window_of
from edgespec_models.files.facts import Facts
from edgespec_models.schema import within

_LONGEST = 4096  # lists have an entry for each layer
_AGAIN = "download or convert it again"


@dataclass(frozen=True, kw_only=True)
class Gemma4(Gemma):
    """A decoder whose last layers have no keys and values, and whose layers may read inputs from the tokens.

    Attributes:
        local_kv_heads: key and value heads in layers with a window.
        local_head_dim: width of a head there.
        shared_layers: the number of last layers that attend to keys and values of an earlier layer: the last
            one before them with the same window, or like them without one.
        mlp_widths: width of each layer's MLP; empty if all are ``intermediate_size``.
        layer_inputs: numbers of each token that every layer reads besides the stream; 0 for none.
        tied_values: layers that see the whole context have no product of values, but use that of their keys.
    """

    norms = "head"
    local_kv_heads: Count
    local_head_dim: Count
    shared_layers: Annotated[int, within(0, 4095)] = 0
    mlp_widths: tuple[Count, ...] = ()
    layer_inputs: Annotated[int, within(0, 2**31 - 1)] = 0
    tied_values: bool = False

    def heads(self, windowed: bool) -> tuple[int, int]:
        return (self.local_kv_heads, self.local_head_dim) if windowed else super().heads(windowed)

    def kv_layer(self, index: int) -> int | None:
        """The layer whose keys and values layer ``index`` attends to; None if it is missing."""
        whole = range(self.num_layers - self.shared_layers)
        if index in whole:
            return index
        kind = self.layer_type(index)
        return next((layer for layer in reversed(whole) if self.layer_type(layer) == kind), None)

    def attention(self, index: int) -> Attention:
        facts, layer = super().attention(index), self.kv_layer(index)
        assert layer is not None  # which the checks see to
        tied = self.tied_values and self.layer_type(index) == FULL
        products: Literal["qkv", "qk", "q"] = "q" if layer != index else "qk" if tied else "qkv"
        return replace(facts, layer=layer, projections=products, normed_values=True)

    def through_layers(self, b: Backend, x: Any) -> Any:
        inputs, layers = None, self.num_layers
        if self.layer_inputs:
            inputs = b.layer_inputs(x, self.vocab_size, layers, self.layer_inputs)
        for index in range(layers):
            if index == layers - self.shared_layers:  # nothing reads the other rows behind here
                x, inputs = b.alone(x, inputs)
            x = in_layer(b, index, x, partial(self.layer, b, index, inputs=inputs))
        return x

    def layer(self, b: Backend, index: int, x: Any, inputs: Any = None) -> Any:
        y = self.mixed(b, index, b.norm(x, "attn_norm"))
        x = b.add(x, b.post_norm(y, "post_attn_norm"), "middle")
        width = self.mlp_widths[index] if self.mlp_widths else self.intermediate_size
        y = self.dense(b, b.norm(x, "mlp_norm"), width)
        if self.experts is not None:
            y = b.post_norm(y, "post_dense_norm")
            y = b.experts(b.norm(x, "pre_experts_norm"), self.experts, self.activation, shared=y)
        x = b.add(x, b.post_norm(y, "post_mlp_norm"), "residual")
        if self.layer_inputs:
            y = b.linear(x, "input_gate", self.layer_inputs, part="mlp")
            y = b.linear(b.input_gate(y, inputs, self.activation), "input_out", self.hidden_size, part="mlp")
            x = b.add(x, b.post_norm(y, "post_input_norm"), "with_input")
        return b.scale(x, "scale")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if len(self.mlp_widths) not in (0, self.num_layers):
            yield f"there are {len(self.mlp_widths)} mlp_widths for {self.num_layers} layers"
        if self.shared_layers >= self.num_layers:
            shared = f"shared_layers is {self.shared_layers} of {self.num_layers} layers"
            yield f"{shared}; allowed: fewer than all"
        for layer in range(self.num_layers):
            if self.kv_layer(layer) is None:
                kind = "a window" if self.layer_type(layer) == SLIDING else "the whole context"
                yield (
                    f"layer {layer} reads the keys and values of an earlier layer that sees {kind}; there is "
                    f"none before the last {self.shared_layers} layers (shared_layers)"
                )


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    where, layers = keys.where, keys.integer("block_count")
    windowed = keys.value("attention.sliding_window_pattern")
    if not 0 < layers <= _LONGEST or not isinstance(windowed, list) or len(windowed) != layers:
        raise ModelFileError(
            f"{where}: attention.sliding_window_pattern must have an entry for each of {layers} "
            f"layers; {_AGAIN}"
        )
    local, whole = (_heads(keys, windowed, kind) for kind in (True, False))
    for suffix in ("", "_swa"):
        width = keys.integer(f"attention.key_length{suffix}")
        for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
            if keys.integer(key, width) != width:
                raise UnsupportedModelError(
                    f"{where}: {key} is {keys.value(key)}; allowed: {width}, the width of heads"
                )
    mlp, changed = keys.value("feed_forward_length"), dict[str, object]()
    if isinstance(mlp, list):
        changed |= {"mlp_widths": mlp, "feed_forward_length": next(iter(mlp), 0)}
    first = min(max(layers - keys.integer("attention.shared_kv_layers", 0), 0), layers)
    full = [layer for layer in range(first) if not windowed[layer]]
    own_values = [f"blk.{layer}.attn_v.weight" in tensors for layer in full]
    if len({*own_values}) > 1:
        raise ModelFileError(f"{where} has values in some layers and none in others; {_AGAIN}")
    width = keys.integer("attention.key_length")
    return changed | {
        "attention.head_count_kv": local,
        "num_global_key_value_heads": whole,
        "attention.key_length": keys.integer("attention.key_length_swa"),
        "attention.value_length": width,
        "global_head_dim": width,
        "rope.dimension_count": width,
        "attention_k_eq_v": False in own_values,
        "enable_moe_block": keys.integer("expert_count", 0) > 0,
    }


def _heads(keys: Facts, windowed: list[object], kind: bool) -> int:
    """Heads of keys and values in layers with a window, or in layers without one."""
    stated = keys.value("attention.head_count_kv")
    if not isinstance(stated, list):
        return keys.integer("attention.head_count_kv")
    if len(stated) != len(windowed):
        raise ModelFileError(
            f"{keys.where}: attention.head_count_kv has {len(stated)} entries for {len(windowed)} layers; "
            f"{_AGAIN}"
        )
    counts = {heads for heads, has_window in zip(stated, windowed, strict=True) if bool(has_window) == kind}
    if len(counts) > 1 or not all(type(heads) is int for heads in counts):
        raise UnsupportedModelError(
            f"{keys.where}: attention.head_count_kv has {sorted(map(str, counts))} for layers "
            f"{'with' if kind else 'without'} a window; one number is supported"
        )
    return next((heads for heads in counts if isinstance(heads, int)), 1)


def _read(facts: Facts, family: Family) -> Transformer:
    sliding = sliding_layers(facts, family)
    window = window_of(facts, family, sliding)
    full = [window is None or not is_sliding for is_sliding in sliding]
    cap = capped(facts, "final_logit_softcapping")
    return trunk(facts, family, sliding=sliding, logit_cap=cap, **_widths(facts, full))


def _widths(facts: Facts, full: list[bool]) -> dict[str, Any]:
    """Fields of the decoder; ``full`` are the layers that see the whole context.

    Raises:
        ModelFileError: facts contradict each other.
        UnsupportedModelError: layers of one kind differ.
    """
    layers, tied = len(full), facts.boolean("attention_k_eq_v", default=False)
    head_dim, heads = facts.integer("head_dim"), facts.integer("num_key_value_heads")
    whole = {"head_dim": facts.integer("global_head_dim", 512), "num_key_value_heads": heads}
    if tied:
        whole["num_key_value_heads"] = facts.integer("num_global_key_value_heads", heads)
    apart = facts.section("per_layer_config")
    for key in apart.keys:
        own = apart.section(key)
        if not (key.isdecimal() and int(key) < layers and full[int(key)]):
            raise UnsupportedModelError(f"{own.where}: only layers that see the whole context may differ")
        stated = {name: own.integer(name, value) for name, value in whole.items()}
        if key != apart.keys[0] and stated != whole:
            raise UnsupportedModelError(
                f"{own.where} says {stated}, and those before it {whole}; allowed: the same for all"
            )
        whole = stated
    if apart.keys and len(apart.keys) != sum(full):
        raise ModelFileError(
            f"{apart.where} has {len(apart.keys)} layers, and {sum(full)} layers see the whole context; "
            f"{_AGAIN}"
        )
    shared, width = facts.integer("num_kv_shared_layers", 0), facts.integer("intermediate_size")
    widths = tuple(map(int, facts.numbers("mlp_widths", layers)))
    if facts.boolean("use_double_wide_mlp", default=False):
        widths = tuple(width * (1 + (layer >= layers - shared)) for layer in range(layers))
    rows, inputs = facts.integer("vocab_size"), facts.integer("hidden_size_per_layer_input", 0)
    if inputs and facts.integer("vocab_size_per_layer_input", rows) != rows:
        raise UnsupportedModelError(
            f"{facts.where}: vocab_size_per_layer_input is {facts.value('vocab_size_per_layer_input')}; "
            f"supported is vocab_size, {rows}"
        )
    return {
        "head_dim": whole["head_dim"],
        "num_kv_heads": whole["num_key_value_heads"],
        "local_head_dim": head_dim,
        "local_kv_heads": heads,
        "shared_layers": shared,
        "mlp_widths": () if set(widths) <= {width} else widths,
        "layer_inputs": inputs,
        "tied_values": tied,
    }


GEMMA4 = Family(
    name="gemma4",
    hub=("gemma4_text",),
    gguf="gemma4",
    theta=1e6,
    windowed=True,
    pattern=6,
    local_theta=1e4,
    grows=True,
    decoder=Gemma4,
    experts={"beside_mlp": True},
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "query_pre_attn_scalar": 1.0,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    },
    keys={
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "top_k_experts": "expert_used_count",
    },
    unstated={"query_pre_attn_scalar": 1.0},
    outer={
        **OUTER,
        "inputs": ("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
        "inputs_in": ("model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
        "inputs_norm": ("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
    },
    layer={
        **LAYER,
        **POST_NORMS,
        "input_gate": ("per_layer_input_gate.weight", "inp_gate.weight"),
        "input_out": ("per_layer_projection.weight", "proj.weight"),
        "post_input_norm": ("post_per_layer_input_norm.weight", "post_norm.weight"),
        "scale": ("layer_scalar", "layer_output_scale.weight"),
        "router": ("router.proj.weight", "ffn_gate_inp.weight"),
        "router_norm": ("router.scale", "ffn_gate_inp.scale"),
        "expert_scale": (
            "router.per_expert_scale",
            "ffn_down_exps.scale ffn_gate_inp.per_expert_scale",
        ),
        "post_dense_norm": ("post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight"),
        "pre_experts_norm": ("pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight"),
        "post_experts_norm": ("post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight"),
        "experts_gate": ("experts.*.gate_proj.weight", "ffn_gate_exps.weight"),
        "experts_up": ("experts.*.up_proj.weight", "ffn_up_exps.weight"),
        "experts_gate_up": ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        "experts_down": ("experts.*.down_proj.weight experts.down_proj", "ffn_down_exps.weight"),
    },
    from_gguf=_from_gguf,
    read=_read,
)
GEMMA4_UNIFIED = GEMMA4._replace(
    hub=("gemma4_unified_text",),
    gguf="",
    defaults={
        **GEMMA4.defaults,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
    },
)
