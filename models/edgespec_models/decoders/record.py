"""What a decoder needs, written down by running it once without any numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.kept import (
    KeptTensor,
    KeptType,
    block_ends,
    delta_states,
    keys_and_values,
    last_inputs,
    latent_keys,
)
from edgespec_models.decoders.operations import (
    XIELU,
    Activation,
    Attention,
    Backend,
    DeltaNet,
    Experts,
    Mamba,
    Rope,
    Rows,
)
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import UnsupportedModelError

_Shape = tuple[int, ...]
_LANES: Final = 16  # of a delta net's states, which lie as its kernel reads them


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a decoder: the ``matrices`` whose rows it stacks, by their whole names.

    ``path`` is the product's name in graphs: ``layers.3.attention.qkv`` for ``layers.3.qkv``. ``part`` is
    the part of the decoder that it belongs to.
    """

    matrices: tuple[str, ...]
    path: str
    part: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A small parameter of graphs, in floats: rows of the tensors ``sources``, one below the other.

    ``path`` is its name in graphs, ``shape`` its shape there; ``transposed``, if that of the tensor is the
    other way round.
    """

    path: str
    sources: tuple[str, ...]
    shape: _Shape
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """The needs of a decoder.

    Attributes:
        tensors: shapes of all tensors, by name; matrices are ``(outputs, inputs)``, matrices of experts lie
            one below the other.
        biases: shapes of the biases that a file may have.
        products: by name; tables, of which a pass reads rows, are products too, but for the embedding.
        parameters: the small parameters, gains among them, by the name of their first tensor.
        gains: the tensors that normalizations multiply by.
        ropes: the rotary embeddings, by name.
        attentions: the facts of attention, by layer.
        routed: layers with experts.
        kept: tensors that a sequence keeps; keys and values have some float type.
        read: tensors of its target's sequences that an assistant reads.
        shares: how much of its products a row of a pass reads, by the part of the decoder in a manifest's
            classes, if not all once: ``experts``, ``lm_head``, ``attention``, ``mlp``.
        late: the layer from which only rows whose logits are wanted are computed; None if all compute all.
        uses: operations and facts that not every backend has, and the layer where each comes first, if any.
    """

    tensors: dict[str, _Shape] = field(default_factory=dict)
    biases: dict[str, _Shape] = field(default_factory=dict)
    products: dict[str, Product] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    gains: list[str] = field(default_factory=list)
    ropes: dict[str, Rope] = field(default_factory=dict)
    attentions: dict[int, Attention] = field(default_factory=dict)
    routed: list[int] = field(default_factory=list)
    kept: list[KeptTensor] = field(default_factory=list)
    read: list[KeptTensor] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    late: int | None = None
    uses: dict[str, str] = field(default_factory=dict)

    def kept_in(self, kind: KeptType) -> tuple[KeptTensor, ...]:
        """The tensors that a sequence keeps, layer by layer, with keys and values of the type ``kind``."""
        return tuple(_typed(self.kept, kind))

    def read_in(self, kind: KeptType) -> tuple[KeptTensor, ...]:
        """The tensors of its target's sequences that an assistant reads; none of other models."""
        return tuple(_typed(self.read, kind))

    def tables(self, positions: int, *, whole: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        """Cosines and sines of all rotary embeddings, by their names in graphs; see :meth:`Rope.tables`."""
        tables = dict[str, npt.NDArray[np.float32]]()
        for rope in self.ropes.values():
            tables |= rope.tables(positions, whole=whole)
        return tables

    def layer_tensors(self, index: int, *, biases: bool) -> list[str]:
        """The names of a layer's tensors, without its prefix; ``biases``: those that a file may have too."""
        prefix, names = f"layers.{index}.", [*self.tensors, *(self.biases if biases else ())]
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def refuse(self, backend: type[Backend], architecture: str) -> None:
        """Raise UnsupportedModelError if ``backend`` lacks what the decoder uses."""
        for use, layer in self.uses.items():
            operation, _, fact = use.partition(".")
            if getattr(backend, operation) is getattr(Backend, operation) or use in backend.lacks:
                owner = (
                    f"{layer} of this {architecture} model is" if layer else f"this {architecture} model has"
                )
                raise UnsupportedModelError(
                    f"{owner} {operation}{fact and f' with {fact}'}, which edgespec lacks for "
                    f"{backend.medium}; export it in another form, or take another model"
                )


def _typed(tensors: Sequence[KeptTensor], kind: KeptType) -> Iterator[KeptTensor]:
    yield from (replace(t, type=kind) if t.per == "token" else t for t in tensors)


@lru_cache(maxsize=8)
def record(config: Transformer) -> Record:
    """The record of a decoder; the same object for equal facts, so nobody changes it."""
    recording = _Recording()
    config.decode(recording)
    made = recording.record
    return replace(made, ropes=dict(sorted(made.ropes.items())), late=recording.late)


class _Recording(Backend):
    """Values are their widths."""

    medium = "records"

    def __init__(self) -> None:
        super().__init__()
        self.record, self.index, self.stored = Record(), 0, 0
        self.late: int | None = None

    def use(self, operation: str, **facts: object) -> None:
        where = self.prefix.removesuffix(".")
        for use in (operation, *(f"{operation}.{fact}" for fact, value in facts.items() if value)):
            self.record.uses.setdefault(use, where)

    def tensor(self, name: str, *shape: int) -> str:
        name = self.name(name)
        self.record.tensors[name] = shape
        return name

    def path(self, name: str, part: str) -> str:
        return f"{self.prefix}{part}.{name}" if part else self.name(name)

    def parameter(
        self, name: str, shape: _Shape, part: str = "", *, suffix: str = "", transposed: bool = False
    ) -> None:
        """A small parameter that is one tensor of the same shape."""
        whole = self.tensor(name, *(shape[::-1] if transposed else shape))
        path = f"{self.path(name, part)}{suffix}"
        self.record.parameters[whole] = Parameter(path, (whole,), shape, transposed)

    def gain(self, name: str, width: int, part: str = "") -> None:
        if self.name(name) not in self.record.tensors:
            self.parameter(name, (width,), part, suffix=".weight")
            self.record.gains.append(self.name(name))

    def product(self, name: str, matrices: Mapping[str, _Shape], part: str) -> None:
        names = tuple(self.tensor(matrix, *shape) for matrix, shape in matrices.items())
        self.record.products[self.name(name)] = Product(names, self.path(name, part), part)

    @contextmanager
    def layer(self, index: int, x: int) -> Iterator[int]:
        self.index = index
        with super().layer(index, x) as stream:
            yield stream

    def reuse_layer(self, index: int) -> None:
        super().reuse_layer(index)
        self.stored = max(self.stored, index + 1)
        runs = (self.index + 1) / self.stored
        self.record.shares.update(attention=runs, mlp=runs)

    def embed(self, rows: int, width: int, scale: float = 1.0) -> int:
        self.tensor("embed", rows, width)
        return width

    def norm(self, x: int, name: str) -> int:
        self.gain(name, x)
        return x

    def post_norm(self, y: int, name: str, epsilon: float | None = None) -> int:
        self.use("post_norm", epsilon=epsilon is not None)
        return self.norm(y, name)

    def linear(self, x: int, name: str, rows: Rows, *, biases: bool | None = False, part: str = "") -> int:
        stacked = {name: rows} if isinstance(rows, int) else rows
        self.product(name, {matrix: (count, x) for matrix, count in stacked.items()}, part)
        for matrix, count in stacked.items():
            if biases is not False:
                into = self.record.biases if biases is None else self.record.tensors
                into[self.name(f"{matrix}_bias")] = (count,)
        return sum(stacked.values())

    def gated(
        self, x: int, name: str, names: tuple[str, ...], rows: int, activation: Activation | XIELU
    ) -> int:
        self.use("gated", squares=activation == "relu2", xielu=isinstance(activation, XIELU))
        self.linear(x, name, dict.fromkeys(names, rows), part="mlp")
        return rows

    def add(self, x: int, y: int, name: str = "") -> int:
        return x

    def scale(self, x: int, name: str) -> int:
        self.use("scale")
        self.parameter(name, (1,))
        return x

    def attention(self, qkv: int | Iterable[int], facts: Attention, known: int | None = None) -> int:
        made = self.record
        if not isinstance(qkv, int):
            list(qkv)  # which makes the products
        made.attentions[self.index] = facts
        self.use(
            "attention",
            normed_values=facts.normed_values,
            cap=facts.cap,
            sinks=facts.sinks,
            gates=facts.gated,
            growth=facts.growth_step,
            keys_of_another_layer=facts.projections == "q",
            values_from_keys=facts.projections == "qk",
            known_rows=known is not None,
            norms_behind_rotation=facts.normed_last,
            tensors_of_another_layer=self.prefix != f"layers.{self.index}.",
        )
        if facts.rope is not None:
            made.ropes.setdefault(facts.rope.name, facts.rope)
            self.use("attention", unturned_pairs=facts.rope.pairs < facts.rope.width // 2)
        if facts.norms:
            wide = facts.norms == "wide"
            for name in facts.projections[:2]:
                self.gain(f"{name}_norm", facts.products[name] if wide else facts.width, "attention")
        if facts.sinks:
            self.parameter("sinks", (facts.heads,), "attention")
        if facts.latent:
            self.gain("k_norm", facts.latent, "attention")
            made.kept.append(latent_keys(facts.layer, facts.width))
            return facts.outputs
        pair = keys_and_values(facts.layer, facts.kv_heads, facts.width, "float16")
        if facts.projections != "q":
            made.kept.extend(pair)
        elif not {*pair} & {*made.kept, *made.read}:
            made.read.extend(pair)
        return facts.outputs

    def head_linear(self, x: int, name: str, heads: int, inputs: int, rows: int) -> int:
        self.use("head_linear")
        self.product(name, {name: (heads * rows, inputs)}, "attention")
        return x + heads * (rows - inputs)

    def head_gate(self, y: int, gates: int, *, softplus: bool = False) -> int:
        self.use("head_gate")
        return y

    def short_conv(self, x: int, channels: int, taps: int) -> int:
        self.use("short_conv")
        self.parameter("conv", (taps, channels), "mixer", transposed=True)
        self.record.kept.append(last_inputs(self.index, channels, taps))
        self.record.kept.append(block_ends(self.index, channels, taps))
        return channels

    def delta_net(self, x: int, net: DeltaNet, taps: int) -> int:
        self.use("delta_net")
        self.parameter("conv", (taps, net.channels), "mixer", transposed=True)
        self.parameter("delta_a", (net.value_heads,), "mixer")
        self.parameter("delta_bias", (net.value_heads,), "mixer")
        self.gain("delta_norm", net.value_width, "mixer")
        state = net.value_heads, net.value_width // _LANES, net.key_width, _LANES
        logged = net.keys + net.values + net.value_heads
        self.record.kept.extend(delta_states(self.index, state, logged, net.channels, taps))
        return net.values

    def mamba(self, x: int, mamba: Mamba, taps: int) -> int:
        self.use("mamba")
        self.parameter("conv", (taps, mamba.channels), "mixer", transposed=True)
        self.parameter("conv_bias", (mamba.channels,), "mixer")
        for name in ("mamba_a", "mamba_bias", "mamba_skip"):
            self.parameter(name, (mamba.heads,), "mixer")
        self.gain("mamba_norm", mamba.values, "mixer")
        state = mamba.heads, mamba.width // _LANES, mamba.key_width, _LANES
        logged = mamba.keys + mamba.values + mamba.heads
        self.record.kept.extend(delta_states(self.index, state, logged, mamba.channels, taps))
        return mamba.values

    def experts(self, x: int, experts: Experts, activation: Activation, *, shared: int | None = None) -> int:
        self.use("experts")
        count, width, made = experts.count, experts.width, self.record
        made.routed.append(self.index)
        made.shares["experts"] = experts.used / count
        routers = [self.tensor("router", count, x)]
        if experts.shared_gate:
            routers.append(self.tensor("shared_router", 1, x))
        rows = len(routers) - 1 + count
        path = self.path("router", "mlp")
        made.parameters[routers[0]] = Parameter(f"{path}.weight", tuple(routers), (rows, x))
        matrices = {"experts_gate": (count * width, x), "experts_up": (count * width, x)}
        if activation == "relu2":
            del matrices["experts_gate"]
        self.product("experts_gate_up", matrices, "mlp")
        self.product("experts_down", {"experts_down": (count * x, width)}, "mlp")
        if experts.biases:
            bias = self.tensor("router_bias", count)
            made.parameters[bias] = Parameter(f"{path}.bias", (bias,), (count,))
            for name, shape in (matrices | {"experts_down": (count * x, width)}).items():
                self.tensor(f"{name}_bias", *shape[:1])
        if experts.selection_bias:
            self.parameter("selection_bias", (count,), "mlp")
        if experts.beside_mlp:
            self.gain("router_norm", x)
            self.gain("post_experts_norm", x)
            self.parameter("expert_scale", (count,), "mlp")
        return x

    def layer_inputs(self, x: int, rows: int, layers: int, width: int) -> int:
        self.use("layer_inputs")
        self.product("inputs", {"inputs": (rows, layers * width)}, "embedding")
        self.linear(x, "inputs_in", layers * width, part="mlp")
        self.gain("inputs_norm", width)
        return width

    def input_gate(self, y: int, inputs: int, activation: Activation) -> int:
        return y

    def wanted(self, x: int) -> int:
        return x

    def alone(self, *streams: int) -> Sequence[int]:
        self.late = self.index + 1
        return streams

    def logits(self, x: int, rows: int, cap: float | None = None) -> int:
        self.use("logits", cap=cap)
        self.gain("final_norm", x)
        return self.linear(x, "lm_head", rows)

    def write(self, logits: int, choices: object = None) -> None:
        """Nothing is kept of it."""

    def features(self, width: int) -> int:
        self.use("features")
        return width

    def states(self, width: int) -> int:
        return width

    def normalized(self, x: int, name: str) -> int:
        self.use("normalized")
        return self.norm(x, name) if name else x

    def joined(self, first: int, second: int) -> int:
        return first

    def write_states(self, x: int, width: int) -> None:
        """Nothing is kept of it."""

    def chain(self, logits: int, x: int, rows: int, block: Any, candidates: int = 0) -> None:
        for name in ("chain_in", "chain_out"):
            self.product(name, {name: (rows, block.rank)}, "")
        if candidates:
            self.linear(x, "chain_gate", block.rank)
        if block.confident:
            self.parameter("confidence", (1, x + block.rank))
            self.parameter("confidence_bias", (1,))

    def block_taps(self, x: int, name: str, taps: int, group: int) -> int:
        self.use("block_taps")
        self.parameter(f"{name}_base", (2, taps, x), "mixer")
        return self.linear(x, name, 2 * taps * (x // group), part="mixer")

    def block_conv(self, y: int, weights: int, side: int) -> int:
        return y

    def clusters(self, x: int, rows: int, clusters: int, read: int) -> int:
        self.linear(x, "centroids", clusters)
        self.record.shares["lm_head"] = read / clusters
        return self.logits(x, rows)
