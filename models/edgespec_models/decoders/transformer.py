"""The decoder of most families: its facts, and its pass from the tokens through the layers to the logits.

A family states what it has besides as fields of a class of its own, and what it computes otherwise as
methods. Tensors are named here, once; graphs also name the part of a layer that a product belongs to.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, TypeVar

from edgespec_models.decoders.config import Count, DecoderShape, Factor
from edgespec_models.decoders.operations import Activation, Attention, Backend, Experts, Rope
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.schema import check_fields

T = TypeVar("T", bound="Transformer")
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Transformer(DecoderShape):
    """A decoder whose layers are attention and an MLP or experts.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        norm_epsilon: epsilon of every RMSNorm.
        attention_scale: factor on the query-key products.
        embedding_scale: factor on the token embeddings.
        rope: the rotary embedding.
        local_rope: that of layers with a sliding window; None for ``rope``.
        unrotated_layers: layers without one (Yang et al. 2025, "RoPE to NoPE and Back Again").
        layer_types: the part of each layer in which tokens see each other, one of ``TYPES``; empty if all are
            attention to the whole context.
        sliding_window: tokens that a token sees in layers with a window, itself included; None without such.
        experts: the experts that layers have instead of an MLP; None without them.
    """

    TYPES: ClassVar[tuple[str, ...]] = (FULL, SLIDING)
    NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """Fields that layers of a type need, and that are None without such layers."""
    DRAFTS: ClassVar[bool] = False
    """Whether it is a head."""
    activation: ClassVar[Activation] = "silu"
    norms: ClassVar[Literal["", "head", "wide"]] = ""
    """RMSNorm on queries and keys, as in :class:`~edgespec_models.decoders.operations.Attention`."""

    hidden_size: Count
    intermediate_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    norm_epsilon: Factor
    attention_scale: Factor
    embedding_scale: Factor = 1.0
    rope: Rope
    local_rope: Rope | None = None
    unrotated_layers: tuple[int, ...] = ()
    layer_types: tuple[str, ...] = ()
    sliding_window: Count | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        check_fields(self, UnsupportedModelError)
        for problem in self.problems():
            raise UnsupportedModelError(problem)

    def problems(self) -> Iterator[str]:
        """What fields contradict each other in."""
        for width in dict.fromkeys(self.heads(windowed)[1] for windowed in (False, True)):
            if width % 2:
                yield f"head_dim is {width}; a rotary embedding needs an even one"
        width = self.rope.width
        # ONNX Runtime's GroupQueryAttention takes rotary tables whose width is a multiple of 8.
        if width != self.head_dim and (width % 16 or width > self.head_dim):
            yield f"rotary_dim is {width}; it must be a multiple of 16 up to {self.head_dim}"
        for count in (self.heads(windowed)[0] for windowed in (False, True)):
            if self.num_heads % count:
                yield f"{self.num_heads} query heads cannot share {count} key-value heads evenly"
        if len(self.layer_types) not in (0, self.num_layers):
            yield f"there are {len(self.layer_types)} layer_types for {self.num_layers} layers"
        for kind in sorted({*self.layer_types}.difference(self.TYPES)):
            yield f"layer_types has {kind!r}; allowed for {self.architecture}: {', '.join(self.TYPES)}"
        if SLIDING in self.layer_types and self.sliding_window is None:
            yield f"layers are {SLIDING}; they need a sliding_window"
        for kind, names in self.NEEDS.items():
            for name, value in ((name, getattr(self, name)) for name in names):
                if (kind in self.layer_types) != (value is not None):
                    yield f"{name} is {value}; layers that are {kind} need it, and others have none"
        if {bool(self.feature_layers), bool(self.feature_width)} != {self.DRAFTS}:
            yield (
                f"feature_layers are {self.feature_layers} and feature_width is {self.feature_width}; "
                f"{self.architecture} {'needs both' if self.DRAFTS else 'is no head and has neither'}"
            )

    def become(self, kind: type[T], **changes: Any) -> T:
        """A decoder of another class with these facts, but for ``changes``."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(self)} | changes)

    @property
    def mtp_layer(self) -> "Transformer | None":
        """The layer that drafts for it, in a model that was trained with one."""
        return None

    @property
    def without_growth(self) -> "Transformer":
        """The decoder for graphs whose operators know no positions: its context ends where queries grow."""
        return self

    def layer_type(self, index: int) -> str:
        """The part of layer ``index`` in which tokens see each other."""
        return self.layer_types[index] if self.layer_types else FULL

    def heads(self, windowed: bool) -> tuple[int, int]:
        """Heads of keys and values in layers with a window or without one, and the width of heads there."""
        return self.num_kv_heads, self.head_dim

    def attended(self, tokens: int) -> float:
        """As in any decoder, but windows bound the tokens, and only attention counts."""
        window = tokens if self.sliding_window is None else min(tokens, self.sliding_window)
        seen = {FULL: tokens, SLIDING: window}
        kinds = map(self.layer_type, range(self.num_layers))
        return sum(seen.get(kind, 0) for kind in kinds) / self.num_layers

    # ---- The pass ----------------------------------------------------------------------------------------

    def decode(self, b: Backend) -> None:
        """A pass from the tokens to the logits, in the medium of ``b``."""
        x = b.embed(self.vocab_size, self.hidden_size, self.embedding_scale)
        x = b.wanted(self.through_layers(b, x))
        b.write(self.logits(b, x))

    def logits(self, b: Backend, x: Any) -> Any:
        """The logits of the wanted rows ``x``."""
        return b.logits(x, self.vocab_size)

    def through_layers(self, b: Backend, x: Any) -> Any:
        """The stream behind all layers."""
        for index in range(self.num_layers):
            x = in_layer(b, index, x, partial(self.layer, b, index))
        return x

    def layer(self, b: Backend, index: int, x: Any) -> Any:
        """The stream behind a layer."""
        x = b.add(x, self.mixed(b, index, b.norm(x, "attn_norm")), "middle")
        return b.add(x, self.mlp(b, index, b.norm(x, "mlp_norm")), "residual")

    def mixed(self, b: Backend, index: int, h: Any) -> Any:
        """The output of the part of a layer in which tokens see each other."""
        return attend(b, self.attention(index), h, self.hidden_size)

    def attention(self, index: int) -> Attention:
        """The facts of a layer's attention."""
        windowed = self.layer_type(index) == SLIDING
        kv_heads, width = self.heads(windowed)
        rope = self.local_rope if windowed and self.local_rope is not None else self.rope
        return Attention(
            layer=index,
            heads=self.num_heads,
            kv_heads=kv_heads,
            width=width,
            scale=self.attention_scale,
            rope=None if index in self.unrotated_layers else rope,
            window=self.sliding_window if windowed else None,
            norms=self.norms,
        )

    def mlp(self, b: Backend, index: int, h: Any) -> Any:
        """The output of the MLP, or of a mixture of experts."""
        experts = self.experts
        if experts is None or index < experts.dense_layers:
            return self.dense(b, h, self.intermediate_size)
        shared = self.dense(b, h, experts.shared_width, "shared_") if experts.shared_width else None
        return b.experts(h, experts, self.activation, shared=shared)

    def dense(self, b: Backend, h: Any, width: int, prefix: str = "") -> Any:
        """The output of an MLP of this width."""
        gate = self.activation != "relu2"
        names = (f"{prefix}gate", f"{prefix}up")[not gate :]
        y = b.gated(h, f"{prefix}{'gate_' * gate}up", names, width, self.activation)
        return b.linear(y, f"{prefix}down", self.hidden_size, part="mlp")


def in_layer(b: Backend, index: int, x: Any, layer: Callable[[Any], Any]) -> Any:
    """The stream behind ``layer``; ``x`` where a backend leaves it out."""
    with b.layer(index, x) as stream:
        return x if stream is None else b.computed(layer, stream)


def attend(b: Backend, facts: Attention, h: Any, outputs: int, known: Any = None) -> Any:
    """The output of attention; rows of ``known`` have keys and values alone."""
    products: Any = facts.products
    if facts.norms == "wide":  # a product that is normalized as a whole stands alone
        qkv = (b.linear(h, name, rows, biases=None, part="attention") for name, rows in products.items())
    else:
        qkv = b.linear(h, "qkv", products, biases=None, part="attention")
    return b.linear(b.attention(qkv, facts, known), "o", outputs, biases=facts.sinks, part="attention")


def attend_gated(
    b: Backend, facts: Attention, h: Any, outputs: int, gates: int, *, softplus: bool = False
) -> Any:
    """The output of attention whose heads' outputs are multiplied by functions of so many ``gates``."""
    y = b.attention(b.linear(h, "qkv", facts.products, part="attention"), facts)
    y = b.head_gate(y, b.linear(h, "head_gate", gates, part="attention"), softplus=softplus)
    return b.linear(y, "o", outputs, part="attention")


def with_post_norms(f: Transformer, b: Backend, index: int, x: Any, epsilon: float | None = None) -> Any:
    """The stream behind a layer whose sublayers have norms before and behind them.

    ``epsilon`` is of the latter; None for the model's.
    """
    y = f.mixed(b, index, b.norm(x, "attn_norm"))
    x = b.add(x, b.post_norm(y, "post_attn_norm", epsilon), "middle")
    y = f.mlp(b, index, b.norm(x, "mlp_norm"))
    return b.add(x, b.post_norm(y, "post_mlp_norm", epsilon), "residual")


def with_post_norms_alone(f: Transformer, b: Backend, index: int, x: Any) -> Any:
    """The stream behind a layer whose sublayers have norms behind them."""
    x = b.add(x, b.post_norm(f.mixed(b, index, x), "post_attn_norm"), "middle")
    return b.add(x, b.post_norm(f.mlp(b, index, x), "post_mlp_norm"), "residual")
