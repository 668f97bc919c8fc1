"""The decoder of most families, from the tokens through the layers to the logits, and its parts.

Tensors are named here, once; graphs also name the part of a layer that a product belongs to.
"""

from functools import partial
from typing import Any

from edgespec_models.bundles.config import ModelConfig
from edgespec_models.decoders.operations import Attention, Backend, Rope


def decode(b: Backend, f: ModelConfig) -> None:
    """A pass of a decoder with the facts ``f``, in the medium of ``b``."""
    x = b.embed(f.vocab_size, f.hidden_size, f.embedding_scale)
    x = b.wanted(through_layers(b, f, x))
    b.write(b.logits(x, f.vocab_size, f.logit_cap))


def through_layers(b: Backend, f: ModelConfig, x: Any, known: Any = None) -> Any:
    """The stream behind all layers."""
    inputs = b.layer_inputs(x, f.vocab_size, f.num_layers, f.layer_inputs) if f.layer_inputs else None
    for index in range(f.num_layers):
        if index == f.whole_layers:  # nothing reads the other rows behind here
            x, inputs = b.alone(x, inputs)
        with b.layer(index, x) as stream:
            if stream is not None:
                x = b.computed(partial(layer, b, f, index, inputs=inputs, known=known), stream)
    return x


def layer(b: Backend, f: ModelConfig, index: int, x: Any, inputs: Any = None, known: Any = None) -> Any:
    """The stream behind a layer; ``inputs`` are from the tokens, ``known`` are a target's features."""
    h = b.norm(x, "attn_norm") if f.pre_norms else x
    y = mixed(b, f, index, h, known)
    x = b.add(x, b.post_norm(y, "post_attn_norm") if f.post_norms else y, "middle")
    h = b.norm(x, "mlp_norm") if f.pre_norms else x
    y = routed(b, f, x, h) if f.mlp(index) == "experts" else dense(b, f, index, h)
    x = b.add(x, b.post_norm(y, "post_mlp_norm") if f.post_norms else y, "residual")
    if f.layer_inputs:
        y = b.input_gate(b.linear(x, "input_gate", f.layer_inputs, part="mlp"), inputs, f.activation)
        y = b.linear(y, "input_out", f.hidden_size, part="mlp")
        x = b.add(x, b.post_norm(y, "post_input_norm"), "with_input")
    return b.scale(x, "scale") if f.scaled_layers else x


def mixed(b: Backend, f: ModelConfig, index: int, h: Any, known: Any = None) -> Any:
    """The output of the part of a layer in which tokens see each other."""
    taps = f.conv_taps or 0
    if f.mixer(index) == "short_conv":
        y = b.short_conv(b.linear(h, "conv_in", 3 * f.hidden_size, part="mixer"), f.hidden_size, taps)
        return b.linear(y, "conv_out", f.hidden_size, part="mixer")
    if f.mixer(index) == "delta_net":
        net = f.delta
        assert net is not None  # which facts with such a layer have
        rows = {"delta_qkv": net.channels, "delta_gate": net.values}
        rows |= dict.fromkeys(("delta_decay", "delta_strength"), net.value_heads)
        y = b.delta_net(b.linear(h, "delta_in", rows, part="mixer"), net, taps)
        return b.linear(y, "delta_out", f.hidden_size, part="mixer")
    facts = attention_of(f, index)
    products: Any = facts.products
    if facts.norms == "wide":  # a product that is normalized as a whole stands alone
        qkv = (b.linear(h, name, rows, biases=None, part="attention") for name, rows in products.items())
    else:
        qkv = b.linear(h, "qkv", products, biases=None, part="attention")
    y = b.attention(qkv, facts, known)
    return b.linear(y, "o", f.hidden_size, biases=f.sinks, part="attention")


def dense(b: Backend, f: ModelConfig, index: int, h: Any) -> Any:
    """The output of the MLP."""
    width = f.mlp_widths[index] if f.mlp_widths else f.intermediate_size
    y = b.gated(h, "gate_up", ("gate", "up"), width, f.activation)
    return b.linear(y, "down", f.hidden_size, part="mlp")


def routed(b: Backend, f: ModelConfig, x: Any, h: Any) -> Any:
    """The output of a mixture of experts; ``h`` is the stream ``x`` as an MLP reads it."""
    experts, shared = f.experts, None
    assert experts is not None  # which facts with such a layer have
    if experts.beside_mlp:
        shared = b.post_norm(dense(b, f, 0, h), "post_dense_norm")
        h = b.norm(x, "pre_experts_norm")
    elif experts.shared_width:
        names = "shared_gate", "shared_up"
        y = b.gated(h, "shared_gate_up", names, experts.shared_width, f.activation)
        shared = b.linear(y, "shared_down", f.hidden_size, part="mlp")
    return b.experts(h, experts, f.activation, shared=shared)


def attention_of(f: ModelConfig, index: int) -> Attention:
    """The attention of a layer."""
    layer, sees_all = f.kv_layer(index), f.is_global(index)
    assert layer is not None  # which a config sees to
    kv_heads, width = f.num_kv_heads, f.head_dim
    if not sees_all:
        kv_heads, width = f.local_kv_heads or kv_heads, f.local_head_dim or width
    tied = f.tied_values and sees_all
    of_windows = f.block is not None and f.block.causal_windows and not sees_all
    return Attention(
        layer=layer,
        heads=f.num_heads,
        kv_heads=kv_heads,
        width=width,
        scale=f.attention_scale,
        projections="q" if f.assistant is not None or layer != index else "qk" if tied else "qkv",
        rope=None if index in f.unrotated_layers else _rope(f, windowed=not sees_all),
        window=None if sees_all else f.sliding_window,
        norms="" if not f.qk_norm else "wide" if f.wide_qk_norm else "head",
        normed_values=f.normed_values,
        cap=f.attention_cap,
        sinks=f.sinks,
        gated=f.gated_attention,
        growth=f.query_growth,
        growth_step=f.query_step,
        bidirectional=f.block is not None and not (f.block.causal or of_windows),
    )


def _rope(f: ModelConfig, *, windowed: bool) -> Rope:
    """An assistant's tables begin at position 1, because it stands at the last token in its target's cache,
    and its queries belong to the token behind.
    """
    first, interleaved = int(f.assistant is not None), f.rope_interleaved
    if windowed and f.rope_local_theta is not None:  # which is never scaled
        width, theta = f.local_head_dim or f.rotary_width, f.rope_local_theta
        return Rope(
            name="rope_local",
            theta=theta,
            width=width,
            pairs=width // 2,
            interleaved=interleaved,
            first=first,
        )
    return Rope(
        name="rope",
        theta=f.rope_theta,
        width=f.rotary_width,
        pairs=f.turning_pairs,
        factors=f.rope_factors,
        magnitude=f.rope_magnitude,
        interleaved=interleaved,
        first=first,
    )
