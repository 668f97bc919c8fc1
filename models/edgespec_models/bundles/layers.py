"""The structure of decoders, and their computation: the one description that every backend reads.

In :class:`Decoder` is the order of operations, in :func:`layers_of` the facts of each layer, in
:func:`layer_shapes` its tensors. A backend adds the operations of its medium: ONNX Runtime's operators,
edgespec's own and those of fixed shapes (:mod:`edgespec_models.graphs`), PyTorch
(:mod:`edgespec_export.align.decoder`). A new architecture is facts in :class:`ModelConfig` and their
consequences here.

Tensors have edgespec's own names: the names in :func:`outer_shapes`, and the names in :func:`layer_shapes`
behind ``layers.3.``. Graphs also name the sublayer (:func:`graph_name`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.config import Experts, ModelConfig
from edgespec_models.bundles.kept import (
    KeptTensor,
    KeptType,
    block_ends,
    delta_states,
    keys_and_values,
    last_inputs,
)
from edgespec_models.errors import UnsupportedModelError

_MLP: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"gate_up": ("gate", "up"), "down": ("down",)})
PRODUCTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"qkv": ("q", "k", "v"), "o": ("o",), **_MLP}
)
"""The products of most layers, and the matrices whose rows each stacks; see :func:`products_of`."""
_MIXERS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = MappingProxyType(
    {
        "short_conv": {"conv_in": ("conv_in",), "conv_out": ("conv_out",)},
        "delta_net": {
            "delta_in": tuple(f"delta_{part}" for part in ("qkv", "gate", "decay", "strength")),
            "delta_out": ("delta_out",),
        },
    }
)
"""The products of mixers without queries, keys and values."""
_EXPERTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"experts_gate_up": ("experts_gate", "experts_up"), "experts_down": ("experts_down",)}
)
_SHARED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"shared_gate_up": ("shared_gate", "shared_up"), "shared_down": ("shared_down",)}
)

_NORMS_BESIDE: Final = ("post_dense_norm", "router_norm", "pre_experts_norm", "post_experts_norm")
_EMBED_QKV: Final = ("embed_q", "embed_k", "embed_v")

_SUBLAYERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("qkv", "q", "k", "v", "o", "q_norm", "k_norm", "sinks"), "attention."),
        **dict.fromkeys(("embed_qkv", *_EMBED_QKV), "attention."),
        **dict.fromkeys(("conv_in", "conv", "conv_out"), "mixer."),
        **dict.fromkeys(("delta_in", "delta_out", "delta_norm", "delta_a", "delta_bias"), "mixer."),
        **dict.fromkeys(("gate_up", "gate", "up", "down"), "mlp."),
        **dict.fromkeys((*_EXPERTS, *_SHARED, "router", "selection_bias", "expert_scale"), "mlp."),
        **dict.fromkeys(("input_gate", "input_out", "inputs_in"), "mlp."),
        "inputs": "embedding.",
    }
)


@dataclass(frozen=True, slots=True)
class Layer:
    """The facts of one layer.

    Attributes:
        mixer: the part in which tokens see each other: a method of :class:`Decoder`.
        mlp: the part behind the mixer, likewise.
        mlp_width: width of the MLP.
        kv_heads: the number of heads of keys, and of values.
        head_dim: width of a head.
        kv_layer: the layer whose keys and values it attends to, mostly itself; for an assistant it
            is a layer of the target.
        projections: its products for queries, keys and values: ``qkv``; ``qk`` if values are keys before
            their normalization; ``q`` if keys and values belong to another layer.
        rope: the rotary tables of its queries and keys (:func:`rotary_tables`); None where nothing rotates.
        window: tokens that it sees, the token itself included; None for the whole context.
    """

    index: int
    rope: str | None
    window: int | None
    mixer: str
    mlp: str
    mlp_width: int
    kv_heads: int
    head_dim: int
    kv_layer: int
    projections: str

    @property
    def name(self) -> str:
        """The prefix of its tensors, such as ``layers.3``."""
        return f"layers.{self.index}"


def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """All layers, from the embedding's side."""
    layers = []
    for index in range(config.num_layers):
        window = None if config.is_global(index) else config.sliding_window
        rope = "rope" if window is None or config.rope_local_theta is None else "rope_local"
        rotated = None if index in config.unrotated_layers else rope
        kv_layer, sees_all = config.kv_layer(index), window is None
        assert kv_layer is not None  # which a config sees to
        layers.append(
            Layer(
                index,
                rotated,
                window,
                config.mixer(index),
                config.mlp(index),
                mlp_width=config.mlp_widths[index] if config.mlp_widths else config.intermediate_size,
                kv_heads=config.num_kv_heads if sees_all else config.local_kv_heads or config.num_kv_heads,
                head_dim=config.head_dim if sees_all else config.local_head_dim or config.head_dim,
                kv_layer=kv_layer,
                projections="q"
                if config.assistant is not None or kv_layer != index
                else "qk"
                if config.tied_values and sees_all
                else "qkv",
            )
        )
    return tuple(layers)


def products_of(config: ModelConfig, layer: Layer) -> Mapping[str, tuple[str, ...]]:
    """The products of a layer. A product that is normalized as a whole stands alone.

    In heads of EAGLE-3 queries, keys and values are sums of two products, with the state and with the
    embedding. In MTP layers the input of the layer is such a sum.
    """
    apart = {name: (name,) for name in layer.projections}
    attention = {**(apart if config.wide_qk_norm else {"qkv": tuple(layer.projections)}), "o": ("o",)}
    mixing = _MIXERS.get(layer.mixer, attention)
    more: dict[str, tuple[str, ...]] = {"embed_qkv": _EMBED_QKV} if config.architecture == "eagle3" else {}
    if config.layer_inputs:
        more |= {name: (name,) for name in ("input_gate", "input_out")}
    if layer.mlp == "gated_mlp":
        return {**mixing, **_MLP, **more}
    assert config.experts is not None  # which a config with such a layer has
    beside = _SHARED if config.experts.shared_width else _MLP if config.experts.beside_mlp else {}
    return {**mixing, **_EXPERTS, **beside, **more}


def outer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors outside of the layers."""
    matrix = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed": matrix, "final_norm": matrix[1:], "lm_head": matrix}
    if config.assistant is not None:
        known = config.hidden_size, config.feature_width
        shapes |= {"embed": (config.vocab_size, config.feature_width), "target_norm": known[1:]}
        shapes |= {"fuse": known, "embed_fuse": known, "next_state": known[::-1]}
        if config.assistant.clusters:
            shapes |= {"centroids": (config.assistant.clusters, config.hidden_size)}
    elif config.architecture == "mtp":
        square = config.hidden_size, config.hidden_size
        shapes |= {"fuse": square, "embed_fuse": square}
        shapes |= dict.fromkeys(("target_norm", "fuse_norm", "embed_norm"), matrix[1:])
    elif config.block is not None:
        width, rank = len(config.feature_layers) * config.feature_width, config.block.rank
        shapes |= {"fuse": (config.hidden_size, width), "fuse_norm": matrix[1:]}
        shapes |= dict.fromkeys(("chain_in", "chain_out"), (config.vocab_size, rank)) if rank else {}
        if config.block.confident:
            shapes |= {"confidence": (1, config.hidden_size + rank), "confidence_bias": (1,)}
    elif config.is_head:
        width = len(config.feature_layers) * config.feature_width
        shapes |= {"fuse": (config.hidden_size, width)}
        shapes |= {"fuse_norm": (width,)} if config.normed_features else {}
    if config.layer_inputs:
        width = config.num_layers * config.layer_inputs
        shapes |= {"inputs": (config.vocab_size, width), "inputs_in": (width, config.hidden_size)}
        shapes |= {"inputs_norm": (config.layer_inputs,)}
    return shapes


def layer_shapes(config: ModelConfig, layer: Layer, *, biases: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer, without the prefix; ``biases``: whether queries, keys and values have some.

    Matrices are ``(outputs, inputs)``; matrices of experts lie one below the other.
    """
    hidden = (config.hidden_size,)
    shapes: dict[str, tuple[int, ...]] = {}
    if config.pre_norms:
        shapes |= {"attn_norm": hidden, "mlp_norm": hidden}
    shapes |= _MIXER_SHAPES[layer.mixer](config, layer)
    if config.experts is not None and layer.mlp == "experts":
        shapes |= _experts_shapes(config.hidden_size, config.experts)
    if layer.mlp == "gated_mlp" or (config.experts is not None and config.experts.beside_mlp):
        shapes |= _mlp_shapes(config.hidden_size, layer.mlp_width)
    if biases and layer.mixer == "attention":
        shapes |= {f"{name}_bias": shapes[name][:1] for name in layer.projections}
    if config.post_norms:
        shapes |= {"post_attn_norm": hidden, "post_mlp_norm": hidden}
    if config.layer_inputs:
        shapes |= {"input_gate": (config.layer_inputs, *hidden), "input_out": (*hidden, config.layer_inputs)}
        shapes |= {"post_input_norm": hidden}
    if config.scaled_layers:
        shapes |= {"scale": (1,)}
    if config.architecture == "eagle3":
        shapes |= {"embed_norm": hidden, **{f"embed_{name}": shapes[name] for name in "qkv"}}
    return shapes


def _attention_shapes(config: ModelConfig, layer: Layer) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    query, kv = config.num_heads * layer.head_dim, layer.kv_heads * layer.head_dim
    rows = {"q": query * (1 + config.gated_attention), "k": kv, "v": kv}
    shapes: dict[str, tuple[int, ...]] = {name: (rows[name], hidden) for name in layer.projections}
    shapes |= {"o": (hidden, query)}
    if config.qk_norm:
        widths = (query, kv) if config.wide_qk_norm else (layer.head_dim,) * 2
        shapes |= {"q_norm": widths[:1]} | ({"k_norm": widths[1:]} if "k" in layer.projections else {})
    if config.sinks:
        shapes |= {"sinks": (config.num_heads,), "o_bias": (hidden,)}
    return shapes


def _convolution_shapes(config: ModelConfig, _: Layer) -> dict[str, tuple[int, ...]]:
    hidden, taps = config.hidden_size, config.conv_taps or 0
    return {"conv_in": (3 * hidden, hidden), "conv": (hidden, taps), "conv_out": (hidden, hidden)}


def _delta_net_shapes(config: ModelConfig, _: Layer) -> dict[str, tuple[int, ...]]:
    hidden, net, taps = config.hidden_size, config.delta, config.conv_taps or 0
    assert net is not None  # which a config with such a layer has
    shapes: dict[str, tuple[int, ...]] = {
        "delta_qkv": (net.channels, hidden),
        "delta_gate": (net.values, hidden),
    }
    shapes |= dict.fromkeys(("delta_decay", "delta_strength"), (net.value_heads, hidden))
    shapes |= {
        "conv": (net.channels, taps),
        "delta_norm": (net.value_width,),
        "delta_out": (hidden, net.values),
    }
    return shapes | dict.fromkeys(("delta_a", "delta_bias"), (net.value_heads,))


def _mlp_shapes(hidden: int, width: int, prefix: str = "", count: int = 1) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (count * width, hidden), "up": (count * width, hidden), "down": (count * hidden, width)}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def _experts_shapes(hidden: int, experts: Experts) -> dict[str, tuple[int, ...]]:
    count, matrices = experts.count, _mlp_shapes(hidden, experts.width, "experts_", experts.count)
    shapes: dict[str, tuple[int, ...]] = {"router": (count, hidden), **matrices}
    if experts.biases:
        shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
    if experts.selection_bias:
        shapes |= {"selection_bias": (count,)}
    if experts.shared_width:
        shapes |= _mlp_shapes(hidden, experts.shared_width, "shared_")
    if experts.beside_mlp:
        shapes |= dict.fromkeys(_NORMS_BESIDE, (hidden,)) | {"expert_scale": (count,)}
    return shapes | ({"shared_router": (1, hidden)} if experts.shared_gate else {})


_Shapes = Callable[[ModelConfig, Layer], dict[str, tuple[int, ...]]]
_MIXER_SHAPES: Final[Mapping[str, _Shapes]] = MappingProxyType(
    {"attention": _attention_shapes, "short_conv": _convolution_shapes, "delta_net": _delta_net_shapes}
)


def gain_names(config: ModelConfig) -> Iterator[str]:
    """The tensors that normalizations multiply by, layer by layer."""
    names = (f"{layer.name}.{kind}" for layer in layers_of(config) for kind in layer_shapes(config, layer))
    yield from (name for name in (*names, *outer_shapes(config)) if name.endswith("_norm"))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors, but for biases."""
    shapes = outer_shapes(config)
    for layer in layers_of(config):
        shapes |= {f"{layer.name}.{kind}": shape for kind, shape in layer_shapes(config, layer).items()}
    return shapes


def kept_by(config: ModelConfig, kind: KeptType) -> tuple[KeptTensor, ...]:
    """The tensors that a sequence keeps, layer by layer, in a graph of any shape that edgespec builds."""
    kept = list[KeptTensor]()
    for layer in layers_of(config):
        if layer.mixer == "short_conv":
            place = layer.index, config.hidden_size, config.conv_taps or 0
            kept += [last_inputs(*place), block_ends(*place)]
        elif (net := config.delta) is not None and layer.mixer == "delta_net":
            state = net.value_heads, net.value_width // 16, net.key_width, 16
            logged, taps = net.keys + net.values + net.value_heads, config.conv_taps or 0
            kept += delta_states(layer.index, state, logged, net.channels, taps)
        elif layer.projections != "q":
            kept += keys_and_values(layer.index, layer.kv_heads, layer.head_dim, kind)
    return tuple(kept)


def read_by(config: ModelConfig, kind: KeptType) -> tuple[KeptTensor, ...]:
    """The tensors of its target's sequences that an assistant reads; none of other models."""
    layers = {} if config.assistant is None else {layer.kv_layer: layer for layer in layers_of(config)}
    pairs = (keys_and_values(n, layer.kv_heads, layer.head_dim, kind) for n, layer in layers.items())
    return tuple(chain.from_iterable(pairs))


def graph_name(name: str) -> str:
    """The name of a tensor or a product in graphs: ``layers.3.qkv`` is ``layers.3.attention.qkv`` there."""
    layer, dot, kind = name.rpartition(".")
    return f"{layer}{dot}{_SUBLAYERS.get(kind, '')}{kind}"


def rotary_thetas(config: ModelConfig) -> dict[str, float]:
    """The base of each pair of rotary tables, by its name in :attr:`Layer.rope`."""
    thetas = {"rope": config.rope_theta, "rope_local": config.rope_local_theta}
    tables = {layer.rope for layer in layers_of(config)}
    return {name: theta for name, theta in thetas.items() if theta is not None and name in tables}


def rotary_tables(config: ModelConfig, positions: int) -> dict[str, npt.NDArray[np.float32]]:
    """Cosines and sines of ``positions`` from 0 on (Su et al. 2021, section 3.4.2), by their names in graphs.

    ``rope_cos`` and ``rope_sin``, and where windowed layers have a base of their own ``rope_local_cos`` and
    ``rope_local_sin``: float32 ``(positions, pairs that turn)`` each. An assistant's tables begin at position
    1, because it stands at the last token in its target's cache, and its queries belong to the token behind.
    """
    tables, first = {}, int(config.assistant is not None)
    for name, theta in rotary_thetas(config).items():
        width, magnitude = config.rotary_width, 1.0
        if name == "rope_local":  # the base of windowed layers is not scaled
            width = config.local_head_dim or width
        frequencies = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        if name == "rope":
            magnitude, frequencies = config.rope_magnitude, frequencies[: config.turning_pairs]
            frequencies /= config.rope_factors or 1.0
        angles = np.outer(np.arange(first, first + positions, dtype=np.float64), frequencies)
        for part, function in (("cos", np.cos), ("sin", np.sin)):
            tables[f"{name}_{part}"] = (function(angles) * magnitude).astype(np.float32)
    return tables


class Decoder(ABC):
    """The computation of a layer; a backend adds the operations.

    ``x`` is the residual stream or the input of a sublayer, ``y`` the output of a sublayer, in the backend's
    medium. ``name`` is a tensor's, such as ``layers.3.attn_norm``. Backends whose operators compute attention
    as a whole override :meth:`attended`; the others need :meth:`projected`, :meth:`apart`, :meth:`head_norm`,
    :meth:`rotate` and :meth:`attend`. ``medium`` is the name of the backend's medium, for messages.
    """

    medium: ClassVar[str]
    lacks: ClassVar[tuple[str, ...]] = (
        *("shared_layers", "local_head_dim", "local_kv_heads", "mlp_widths", "layer_inputs", "rotary_pairs"),
        *("normed_values", "tied_values", "scaled_layers", "attention_cap", "logit_cap"),
    )
    """Facts of a config that the backend cannot compute."""

    def __init__(self, config: ModelConfig) -> None:
        """Raise UnsupportedModelError if a layer has a fact that this backend lacks."""
        self.config, self.all_layers = config, layers_of(config)
        for layer in self.all_layers:
            for sublayer in (layer.mixer, layer.mlp):
                if not hasattr(self, sublayer):
                    raise UnsupportedModelError(
                        f"{layer.name} of this {config.architecture} model is {sublayer}, which edgespec has "
                        f"not for {self.medium}; export it in another form, or take another model"
                    )
        for fact in self.lacks:
            if getattr(config, fact):
                raise UnsupportedModelError(
                    f"this {config.architecture} model has {fact}, which edgespec lacks for {self.medium}; "
                    "export it in another form, or take another model"
                )
        self.shapes = tensor_shapes(config)

    def layer(self, layer: Layer, x: Any) -> Any:
        """The residual stream behind ``layer``."""
        norm = self.norm if self.config.pre_norms else self.bare
        with self.scope(layer.name, "Layer"):
            for kind, sublayer, end in (("attn", layer.mixer, "middle"), ("mlp", layer.mlp, "residual")):
                y = getattr(self, sublayer)(layer, norm(x, f"{layer.name}.{kind}_norm"))
                if self.config.post_norms:
                    y = self.post_norm(y, f"{layer.name}.post_{kind}_norm")
                x = self.add(x, y, f"{layer.name}.{end}")
            if self.config.layer_inputs:
                y = self.post_norm(self.layer_input(layer, x), f"{layer.name}.post_input_norm")
                x = self.add(x, y, f"{layer.name}.with_input")
            return self.scaled(x, f"{layer.name}.scale") if self.config.scaled_layers else x

    def attention(self, layer: Layer, x: Any) -> Any:
        """The output of attention, which is added to the stream."""
        with self.scope("attention", "Attention"):
            return self.product(f"{layer.name}.o", self.attended(layer, x))

    def attended(self, layer: Layer, x: Any) -> Any:
        """Attention without its last product."""
        parts, wide = [], self.config.wide_qk_norm
        for which, flat in self.projected(layer, x):
            name = f"{layer.name}.{which}"
            normed = which != "v" and self.config.qk_norm
            part = self.apart(self.head_norm(flat, f"{name}_norm") if normed and wide else flat, name)
            if normed and not wide:
                part = self.head_norm(part, f"{name}_norm")
            if which != "v" and layer.rope is not None:
                part = self.rotate(layer, part, which)
            parts.append(part)
        return self.attend(layer, *parts)

    def layer_input(self, layer: Layer, x: Any) -> Any:
        """The input of the layer from the token itself, which is added to the stream."""
        raise NotImplementedError

    def scaled(self, x: Any, name: str) -> Any:
        """The stream times the number ``name``."""
        raise NotImplementedError

    def gated_mlp(self, layer: Layer, x: Any) -> Any:
        """The output of the MLP, which is added to the stream."""
        with self.scope("mlp", "MLP"):
            return self.product(f"{layer.name}.down", self.gated(layer, x))

    def scope(self, name: str, kind: str) -> AbstractContextManager[None]:
        """Name the nodes within after a part of the model; most backends have no names for them."""
        return nullcontext()

    @abstractmethod
    def norm(self, x: Any, name: str) -> Any:
        """The residual stream, normalized for a sublayer to read."""

    def bare(self, x: Any, name: str) -> Any:
        """The residual stream for a sublayer to read as it is."""
        return x

    def post_norm(self, y: Any, name: str) -> Any:
        """The output of a sublayer, normalized."""
        return self.norm(y, name)

    @abstractmethod
    def add(self, x: Any, y: Any, name: str) -> Any:
        """The stream plus the output of a sublayer; ``name`` is the name of the sum."""

    @abstractmethod
    def product(self, name: str, x: Any) -> Any:
        """The last product of a sublayer, or an object that will compute it."""

    @abstractmethod
    def gated(self, layer: Layer, x: Any) -> Any:
        """The MLP without its last product: ``activation(gate(x)) * up(x)``."""

    def projected(self, layer: Layer, x: Any) -> Iterator[tuple[str, Any]]:
        """Queries ``q``, keys ``k`` and values ``v``, all heads of a token side by side."""
        raise NotImplementedError

    def apart(self, flat: Any, name: str) -> Any:
        """The heads of a product such as ``layers.3.q``."""
        raise NotImplementedError

    def head_norm(self, heads: Any, name: str) -> Any:
        """Queries or keys, normalized head by head, or all heads together if they are not apart yet."""
        return self.norm(heads, name)

    def rotate(self, layer: Layer, heads: Any, which: str) -> Any:
        """Queries or keys, turned by their positions."""
        raise NotImplementedError

    def attend(self, layer: Layer, query: Any, key: Any, value: Any) -> Any:
        """The outputs of the heads, side by side."""
        raise NotImplementedError
