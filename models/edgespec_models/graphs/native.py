"""The decoder over edgespec's own operators (``runtimes/kernels``), for CPUs: five nodes a layer.

Besides the inputs of every graph (:mod:`.graph_decoder`) it takes ``sequences`` int64 (s, 2): ``input_ids``
are the next tokens of s sequences, one after the other. The numbers of a sequence are its tokens in the
cache and its new tokens. Last layers that read other layers' keys and values compute only rows with logits;
``wanted_sequences`` has the numbers for them. The cache is a pool of blocks of 32 tokens, float16 (blocks /
8, kv heads, 256, head_dim); a key cache holds 16 tokens channel by channel. ``blocks`` int64 (b,) has the
numbers of each sequence's blocks, as many as all its tokens take. Sequences may share blocks that the pass
only reads. With states, ``places`` int64 (s, 2) has the slot of each sequence's states, and the number of
tokens that they have read (:mod:`edgespec_models.decoders.kept`).

A row's bits depend neither on the other rows of a pass nor on the processor, except in the columns of
``context_tokens``: ONNX Runtime computes these. The residual stream that enters a layer, or leaves the last,
is the value that :func:`stream_name` says.

A head (:attr:`~edgespec_models.decoders.config.DecoderShape.is_head`) also takes ``features`` float32 (1, m,
width), the target's residual streams of the first m tokens side by side, and ``states`` float32 (1, k,
hidden), its own of the other k. It returns ``new_states`` float32 (1, r, hidden) of the rows with logits. An
assistant (:mod:`edgespec_models.families.gemma4_assistant`) attends to keys and values of two layers of its
target, which are inputs. Its states are as wide as the target.

A head that drafts blocks (:class:`~edgespec_models.decoders.config.Block`) takes ``features`` and
``injected_rows`` int64 (s). It reads only the features of that many first tokens of each sequence;
``input_ids`` are the tokens behind them. It has no states.

A decoder that reads pictures takes ``picture_vectors`` float32 (p, hidden), which replace the embeddings of
rows ``picture_rows`` int64 (p, 2), each 0 and the row's number. Where a picture's rows lie on a grid it also
takes ``row_positions`` int64 (n, 3), the time, row and column of each row: the frequencies of the rotary
embedding take turns among them (M-RoPE, Wang et al. 2024, arXiv 2409.12191; interleaved as in Qwen3-VL, Bai
et al. 2025, arXiv 2511.21631). Where rows of a picture see each other it also takes
``row_ends`` int64 (n): the number of its sequence's tokens that a row sees in windowed layers.

Where layers have experts, ``experts_read`` int64 (layers with some) says how many of each a pass used.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from edgespec_models.bundles.graph_contract import BLOCKS, EXPERTS_READ, NEW_STATES, stream_name
from edgespec_models.bundles.weight_format import WeightFormat, tile_bytes
from edgespec_models.decoders.config import Block
from edgespec_models.decoders.operations import (
    XIELU,
    Activation,
    Attention,
    DeltaNet,
    Experts,
    Mamba,
    Rope,
    Rows,
)
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.graphs.graph_decoder import FLOAT, INT64, GraphDecoder
from edgespec_models.graphs.plan import DecoderPlan

DOMAIN: Final = "edgespec"
OPSET: Final = 23
_GATES: Mapping[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu", "relu2": "squared"}


@dataclass(frozen=True, slots=True)
class _Normed:
    """A stream that the product which reads it normalizes."""

    x: ir.Value
    gain: str


@dataclass(frozen=True, slots=True)
class _Product:
    """A product that may still get a normalization of its result, and a stream to which it is added.

    ``first`` is the first of its matrices that is multiplied by.
    """

    x: Any
    name: str
    post_gain: str = ""
    epsilon: float | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class _Mixture:
    """A mixture of experts that may still get the same."""

    x: Any
    experts: Experts
    gate: str
    shared: ir.Value | None
    post_gain: str = ""
    epsilon: float | None = None


class _NativeDecoder(GraphDecoder):
    """Normalizations of what a product reads, and of what it returns, and its addition to the stream, become
    inputs of the product's operator: a product waits until its result is read or added.
    """

    medium, reads_blocks = "edgespec's kernels", True

    def __init__(self, config: Transformer, plan: DecoderPlan) -> None:
        super().__init__(config, {"": OPSET, DOMAIN: 1})
        self.plan, self.epsilon = plan, float(config.norm_epsilon)
        self.experts_read = list[ir.Value]()  # experts, of each layer with some
        self.caches = dict[int, list[ir.Value]]()  # keys and values behind the pass, by layer
        self.index, self.rows_alone = 0, False
        self.ends: ir.Value | None = None  # of what rows see in windowed layers
        self.within: ir.Value | None = None  # as :meth:`rows_within` makes it, for convolutions over a block
        self.turned = dict[str, list[ir.Value]]()  # rotary tables of the pass's rows, by name

    def build(self) -> ir.Model:
        self.ids = self.input("input_ids", INT64, [1, "n"])
        self.sequences = self.input("sequences", INT64, ["s", 2])
        self.blocks = self.input(BLOCKS, INT64, ["b"])
        if any(tensor.per != "token" for tensor in self.record.kept):
            self.places = self.input("places", INT64, ["s", 2])
        self.rows = self.input("logits_rows", INT64, ["r"])
        self.read_cache("float16")
        self.config.decode(self)
        return self.model()

    @contextmanager
    def layer(self, index: int, x: ir.Value) -> Iterator[ir.Value]:
        self.index, x.name = index, stream_name(index)
        with super().layer(index, x) as stream:
            yield stream

    def node(
        self, kind: str, *inputs: ir.Value | None, outputs: int = 1, domain: str = DOMAIN, **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """The outputs of a node, whose inputs are in the order of ``kInputs`` in its operator's header."""
        node = ir.node(kind, list(inputs), attributes=attributes, domain=domain, num_outputs=outputs)
        self.graph.append(node)
        return tuple(node.outputs)

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """A standard operator with one output."""
        return self.node(kind, *inputs, domain="", **attributes)[0]

    def constant(self, values: Sequence[Any]) -> ir.Value:
        """Whole numbers, int64."""
        return self.op("Constant", value=ir.tensor(np.array(values, np.int64)))

    def matrix(self, name: str, form: WeightFormat, rows: int, columns: int) -> ir.Value:
        return self.parameter(name, [tile_bytes(form.tiles, rows, columns)], ir.DataType.UINT8)

    def matrices(self, name: str) -> list[ir.Value]:
        """The matrices of a product, by its whole name, part by part."""
        spec, tied = self.plan.linears[name], name == "lm_head" and self.plan.tied
        return [
            self.matrix(
                "embedding.weight" if tied else f"{spec.path}.parts.{index}.weight",
                part.format,
                part.out_features,
                spec.in_features,
            )
            for index, part in enumerate(spec.parts)
        ]

    # ---- What waits, and what ends the waiting -------------------------------------------------------------

    def value(self, y: Any, residual: ir.Value | None = None) -> ir.Value:
        """``y`` as a value, plus ``residual``."""
        if isinstance(y, _Product):
            return self.multiplied(y, residual)
        if isinstance(y, _Mixture):
            assert residual is not None  # a mixture is always added
            return self.mixture(y, residual)
        return y if residual is None else self.op("Add", residual, y)

    def read(self, x: Any) -> tuple[ir.Value, ir.Value | None]:
        """What an operator reads, and the gain by which it normalizes that."""
        if isinstance(x, _Normed):
            return x.x, self.parameter_of(x.gain)
        return self.value(x), None

    def parameter_of(self, name: str) -> ir.Value:
        """A gain by its whole name."""
        parameter = self.record.parameters[name]
        return self.parameter(parameter.path, parameter.shape)

    def norm(self, x: Any, name: str) -> _Normed:
        return _Normed(self.value(x), self.name(name))

    def post_norm(self, y: Any, name: str, epsilon: float | None = None) -> Any:
        normed = replace(y, post_gain=self.name(name), epsilon=epsilon)
        return normed if self.prefix else self.value(normed)  # outside of layers nothing is added to it

    def linear(
        self, x: Any, name: str, rows: Rows, *, biases: bool | None = False, part: str = ""
    ) -> _Product:
        return _Product(x, self.name(name))

    def gated(
        self, x: Any, name: str, names: tuple[str, ...], rows: int, activation: Activation | XIELU
    ) -> ir.Value:
        product = _Product(x, self.name(name))
        if isinstance(activation, XIELU):
            return self.multiplied(product, gate="xielu", **activation._asdict())
        return self.multiplied(product, gate=_GATES[activation])

    def add(self, x: Any, y: Any, name: str = "") -> ir.Value:
        return self.value(y, self.value(x))

    def multiplied(
        self, y: _Product, residual: ir.Value | None = None, gate: str = "", **facts: Any
    ) -> ir.Value:
        """``[residual +] [norm of] gate(norm(x) W + bias)``."""
        spec, bias = self.plan.linears[y.name], None
        x = y.x if isinstance(y.x, _Normed) else self.value(y.x)
        if spec.parts[0].biases:
            bias = self.parameter(f"{spec.path}.bias", [spec.out_features])
        weights, parts = self.matrices(y.name)[y.first :], spec.parts[y.first :]
        x, gain = self.read(x)
        assert y.epsilon is None or gain is None  # a node has one
        return self.node(
            "Linear",
            *(x, gain, bias, self.parameter_of(y.post_gain) if y.post_gain else None, residual, *weights),
            inputs=spec.in_features,
            epsilon=self.epsilon if y.epsilon is None else float(y.epsilon),
            gate=gate,
            **facts,
            parts=",".join(f"{part.format.tiles}:{part.out_features}" for part in parts),
        )[0]

    # ---- Operations ----------------------------------------------------------------------------------------

    def embed(self, rows: int, width: int, scale: float = 1.0) -> ir.Value:
        self.shape_of_table = rows, width
        x = self.embedded(self.ids, float(scale))
        if not self.plan.pictures:
            return x
        if self.plan.whole_pictures:
            self.ends = self.input("row_ends", INT64, ["n"])
        places = self.input("picture_rows", INT64, ["p", 2])
        return self.op("ScatterND", x, places, self.input("picture_vectors", FLOAT, ["p", width]))

    def embedded(self, ids: ir.Value, factor: float) -> ir.Value:
        return self.rows_of("embedding.weight", self.plan.embedding.format, self.shape_of_table, ids, factor)

    def rows_of(
        self, name: str, form: WeightFormat, shape: tuple[int, int], ids: ir.Value, factor: float
    ) -> ir.Value:
        """Rows of a table with one for each token."""
        table = self.matrix(name, form, *shape)
        facts: dict[str, Any] = {"rows": shape[0], "width": shape[1], "factor": factor}
        return self.node("Embedding", ids, table, format=form.tiles, **facts)[0]

    def scale(self, x: ir.Value, name: str) -> ir.Value:
        return self.op("Mul", x, self.stored(name))

    def attention(self, qkv: Any, facts: Attention, known: Any = None) -> ir.Value:
        if facts.norms == "wide":
            query, key, value = qkv
            query, key = (replace(y, post_gain=self.name(f"{n}_norm")) for y, n in ((query, "q"), (key, "k")))
            packed = self.op("Concat", *map(self.value, (query, key, value)), axis=-1)
        elif facts.latent:
            packed = self.op("Concat", *map(self.value, qkv), axis=-1)
        else:
            packed = self.value(qkv)
        rope, own = facts.rope, facts.projections != "q"
        tables: list[ir.Value | None] = [None, None]
        if rope is not None:
            tables = [*self.rotary(rope)]
        gains: list[ir.Value | None] = [None, None]
        if facts.norms == "head":
            gains = [self.stored("q_norm"), self.stored("k_norm" if own else "q_norm")]  # no keys, no matter
        if facts.latent:
            gains = [None, self.stored("k_norm")]
        more: list[ir.Value | None] = [self.stored("sinks") if facts.sinks else None, None, None]
        if known is not None:
            more[1:] = self.value(replace(qkv, x=known, first=1)), self.counts
        more.append(self.ends if facts.window else None)
        while more and more[-1] is None:
            more.pop()
        others: dict[str, Any] = {"normed_values": 1} if facts.normed_values else {}
        others |= {"normed_last": 1} if facts.normed_last else {}
        if facts.cap is not None:
            others |= {"cap": float(facts.cap)}
        if facts.growth_step:
            others |= {"growth": float(facts.growth), "growth_step": facts.growth_step}
        if rope is not None and rope.pairs < rope.width // 2:
            others |= {"pair_distance": rope.width // 2}
        others |= {"bidirectional": 1} if facts.bidirectional else {}
        others |= {"row_tables": 1} if rope is not None and self.plan.axes > 1 else {}
        others |= {"value_dim": facts.latent} if facts.latent else {}
        y, *new = self.node(
            "Attention",
            packed,
            *self.caches.get(facts.layer, self.past[facts.layer]),
            *([None] if facts.latent else []),
            self.sequences,
            self.blocks,
            *tables,
            *gains,
            *more,
            outputs=(2 if facts.latent else 3) if own else 1,
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.width,
            window=facts.window or 0,
            interleaved=int(facts.rope is not None and facts.rope.interleaved),
            scale=float(facts.scale),
            epsilon=self.epsilon,
            **others,
        )
        self.caches |= {self.index: new} if own else {}
        self.present += new
        return y

    def rotary(self, rope: Rope) -> Sequence[ir.Value]:
        """Cosines and sines, float32 (positions, pairs), or (n, pairs) where positions have three axes."""
        shape, axes = [self.config.context_length, rope.pairs], self.plan.axes
        tables = [self.parameter(f"{rope.name}_{part}", shape) for part in ("cos", "sin")]
        if axes == 1:
            return tables
        if rope.name not in self.turned:
            turns = self.constant([pair % axes for pair in range(rope.pairs)])
            at = self.op("Gather", self.input("row_positions", INT64, ["n", axes]), turns, axis=1)
            self.turned[rope.name] = [self.op("GatherElements", table, at, axis=0) for table in tables]
        return self.turned[rope.name]

    def head_linear(self, x: Any, name: str, heads: int, inputs: int, rows: int) -> ir.Value:
        spec = self.plan.linears[self.name(name)]
        return self.node(
            "HeadLinear",
            self.value(x),
            *self.matrices(self.name(name)),
            heads=heads,
            inputs=inputs,
            width=rows,
            format=spec.parts[0].format.tiles,
        )[0]

    def head_gate(self, y: ir.Value, gates: _Product, *, softplus: bool = False) -> ir.Value:
        facts: dict[str, Any] = {"softplus": 1} if softplus else {}
        return self.node("HeadGate", y, self.value(gates), **facts)[0]

    def short_conv(self, x: Any, channels: int, taps: int) -> ir.Value:
        y, *new = self.node(
            "ShortConv",
            self.value(x),
            *self.past[self.index],
            self.sequences,
            self.blocks,
            self.places,
            self.stored("conv"),
            outputs=3,
            channels=channels,
            taps=taps,
        )
        self.present += new
        return y

    def delta_net(self, x: Any, net: DeltaNet, taps: int) -> ir.Value:
        y, *new = self.node(
            "Delta",
            self.value(x),
            *self.past[self.index],
            self.sequences,
            self.places,
            *(self.stored(name) for name in ("conv", "delta_a", "delta_bias", "delta_norm")),
            outputs=4,
            key_heads=net.key_heads,
            value_heads=net.value_heads,
            key_width=net.key_width,
            value_width=net.value_width,
            tiled=int(net.tiled),
            epsilon=self.epsilon,
        )
        self.present += new
        return y

    def mamba(self, x: Any, mamba: Mamba, taps: int) -> ir.Value:
        names = "conv", "conv_bias", "mamba_a", "mamba_bias", "mamba_skip", "mamba_norm"
        y, *new = self.node(
            "Mamba",
            self.value(x),
            *self.past[self.index],
            self.sequences,
            self.places,
            *map(self.stored, names),
            outputs=4,
            heads=mamba.heads,
            width=mamba.width,
            groups=mamba.groups,
            key_width=mamba.key_width,
            epsilon=self.epsilon,
        )
        self.present += new
        return y

    def experts(self, x: Any, experts: Experts, activation: Activation, *, shared: Any = None) -> _Mixture:
        gate = "clamped" if experts.clamped else _GATES[activation]
        return _Mixture(x, experts, gate, None if shared is None else self.value(shared))

    def mixture(self, y: _Mixture, residual: ir.Value) -> ir.Value:
        experts, count = y.experts, y.experts.count
        names = [self.name(f"experts_{name}") for name in ("gate_up", "down")]
        specs = [self.plan.linears[name] for name in names]
        width = specs[0].in_features
        biases: list[ir.Value | None] = [None, None, None]
        if experts.biases:
            shapes = [2, count, experts.width], [count, width]
            biases = [self.stored("router_bias")]
            biases += [
                self.parameter(f"{s.path}.bias", shape) for s, shape in zip(specs, shapes, strict=True)
            ]
        behind: list[ir.Value | None] = []
        if y.post_gain:
            behind = [None, None, None, self.parameter_of(y.post_gain)]
        if experts.beside_mlp:
            gain = self.stored("router_norm"), self.stored("post_experts_norm")
            behind[:3] = gain[0], self.stored("expert_scale"), gain[1]
        x, gain_of_x = self.read(y.x)
        result, different = self.node(
            "Experts",
            x,
            gain_of_x,
            residual,
            y.shared,
            self.stored("router"),
            *biases,
            self.stored("selection_bias") if experts.selection_bias else None,
            *([None] if y.gate == "squared" else []),
            *(weights for name in names for weights in self.matrices(name)),
            *behind,
            outputs=2,
            inputs=width,
            width=experts.width,
            experts=count,
            used=experts.used,
            gating=experts.gating,
            normalized=int(experts.normalized),
            scale=float(experts.scale),
            epsilon=self.epsilon,
            gate=y.gate,
            formats=",".join(part.format.tiles for spec in specs for part in spec.parts),
        )
        self.experts_read.append(different)
        return result

    def layer_inputs(self, x: ir.Value, rows: int, layers: int, width: int) -> ir.Value:
        spec = self.plan.linears["inputs"]
        (table,) = spec.parts
        return self.node(
            "LayerInputs",
            self.ids,
            self.matrix(f"{spec.path}.parts.0.weight", table.format, table.out_features, layers * width),
            self.multiplied(_Product(x, "inputs_in")),
            self.stored("inputs_norm"),
            format=table.format.tiles,
            rows=table.out_features,
            width=layers * width,
            part=width,
            factor=width**0.5,
            epsilon=self.epsilon * self.config.hidden_size,  # of the product over the root of its inputs
        )[0]

    def input_gate(self, y: Any, inputs: ir.Value, activation: Activation) -> ir.Value:
        facts: dict[str, Any] = {"layer": self.index, "gate": _GATES[activation]}
        return self.node("InputGate", self.value(y), inputs, **facts)[0]

    def alone(self, *streams: ir.Value | None) -> Sequence[ir.Value | None]:
        self.rows_alone = True
        alone = [x if x is None else self.op("Gather", x, self.rows, axis=1) for x in streams]
        self.ends = None if self.ends is None else self.op("Gather", self.ends, self.rows)
        self.sequences = self.input("wanted_sequences", INT64, ["s", 2])
        return alone

    def wanted(self, x: ir.Value) -> ir.Value:
        x.name = stream_name(self.config.num_layers)
        return x if self.rows_alone else self.op("Gather", x, self.rows, axis=1)

    def logits(self, x: ir.Value, rows: int, cap: float | None = None) -> ir.Value:
        self.columns: int | str = self.plan.linears["lm_head"].out_features
        if not self.plan.context:
            logits = self.multiplied(_Product(_Normed(x, "final_norm"), "lm_head"))
        else:
            normed = self.normalized(x, "final_norm")
            offered = self.embedded(self.input("context_tokens", INT64, ["m"]), 1.0)
            products = self.op("MatMul", normed, self.op("Transpose", offered))
            logits = self.op("Concat", self.multiplied(_Product(normed, "lm_head")), products, axis=-1)
            self.columns = "columns"
        return logits if cap is None else self.node("Cap", logits, most=float(cap))[0]

    def write(self, logits: ir.Value, choices: Any = None) -> None:
        self.write_outputs(logits, self.columns, choices or self.node("Choose", logits, outputs=2))
        if self.experts_read:
            read = self.op("Concat", *self.experts_read, axis=0)
            self.output(read, EXPERTS_READ, INT64, [len(self.experts_read)])

    # ---- Heads ---------------------------------------------------------------------------------------------

    def features(self, width: int) -> ir.Value:
        features = self.input("features", FLOAT, [1, "m", width])
        if self.config.block is not None:
            self.counts = self.input("injected_rows", INT64, ["s"])
        return features

    def states(self, width: int) -> ir.Value:
        return self.input("states", FLOAT, [1, "k", width])

    def normalized(self, x: ir.Value, name: str) -> ir.Value:
        facts = {"axis": -1, "epsilon": self.epsilon, "stash_type": 1}
        ones = np.ones(self.config.hidden_size, np.float32)
        gain = self.stored(name) if name else self.op("Constant", value=ir.tensor(ones))
        return self.op("SimplifiedLayerNormalization", x, gain, **facts)

    def joined(self, first: Any, second: ir.Value) -> ir.Value:
        return self.op("Concat", self.value(first), second, axis=1)

    def write_states(self, x: Any, width: int) -> None:
        self.output(self.value(x), NEW_STATES, FLOAT, [1, "r", width])

    def clusters(self, x: ir.Value, rows: int, clusters: int, read: int) -> ir.Value:
        spec = self.plan.linears["lm_head"]
        self.columns = rows
        return self.node(
            "Clusters",
            self.normalized(x, "final_norm"),
            self.multiplied(_Product(_Normed(x, "final_norm"), "centroids")),
            self.parameter("lm_head.tokens", [rows], INT64),
            *self.matrices("lm_head"),
            inputs=spec.in_features,
            clusters=clusters,
            read=read,
            format=spec.parts[0].format.tiles,
        )[0]

    def chain(
        self, logits: ir.Value, x: ir.Value, rows: int, block: Block, candidates: int = 0
    ) -> Sequence[ir.Value]:
        """Where the token before is a mask, it is the token that the row before chose. So rows are chosen one
        by one. With confidences these stand for the probabilities.
        """
        single = self.constant([1])
        places = self.rows if block.anchored else self.op("Sub", self.rows, single)
        before = self.op("Gather", self.ids, places, axis=1)
        scores = self.scores(x) if block.confident else None
        gates = self.multiplied(_Product(_Normed(x, "final_norm"), "chain_gate")) if candidates else None
        outer, self.graph = self.graph, ir.Graph([], [], nodes=[], name="chain")
        step = self.input("step", INT64, [])
        goes_on, last = self.input("goes_on", ir.DataType.BOOL, []), self.input("last", INT64, [1, 1])
        row = self.op("Reshape", step, single)
        token = self.op("Gather", before, row, axis=1)
        token = self.op("Where", self.op("Equal", token, self.constant([block.mask])), last, token)
        (table,) = self.plan.linears["chain_in"].parts
        shape = rows, block.rank
        chained = self.rows_of("chain_in.parts.0.weight", table.format, shape, token, 1.0)
        row_logits = self.op("Gather", logits, row, axis=1)
        if gates is None:
            best, probability = self.node(
                "Choose", self.value(_Product(chained, "chain_out"), row_logits), outputs=2
            )
        else:
            gated = self.op("Mul", chained, self.op("Gather", gates, row, axis=1))
            best, probability = self.chosen(row_logits, gated, candidates)
        if scores is not None:
            of_state, weights = self.op("Gather", scores, row, axis=1), self.confidence(end=True)
            probability = self.op("Sigmoid", self.op("Add", of_state, self.op("MatMul", chained, weights)))
        kept = self.plan.head_tokens or self.plan.columns
        written = best if kept is None else self.op("Gather", self.constant(kept), best)
        choice = [self.op("Reshape", value, single) for value in (best, probability)]
        self.graph.outputs.extend([self.op("Identity", goes_on), written, *choice])
        for at, node in enumerate(self.graph):  # names are of both graphs
            for value in node.outputs:
                value.name = f"chain.{at}.{value.name}"
        chain, self.graph = self.graph, outer
        count, first = self.op("Squeeze", self.op("Shape", self.rows)), self.constant([[block.mask]])
        _, *chosen = self.node("Loop", count, None, first, outputs=3, domain="", body=chain)
        return [self.op("Reshape", value, self.constant([1, -1])) for value in chosen]

    def chosen(self, logits: ir.Value, chained: ir.Value, candidates: int) -> Sequence[ir.Value]:
        """The best of a row's candidates, and how probable it is among these."""
        columns = self.plan.linears["chain_out"].out_features
        count, rank = min(candidates, columns), self.plan.linears["chain_out"].in_features
        highest, ids = self.node("TopK", logits, self.constant([count]), outputs=2, domain="")
        (table,) = self.plan.linears["chain_out"].parts
        ids = self.op("Reshape", ids, self.constant([1, -1]))
        rows = self.rows_of("chain_out.parts.0.weight", table.format, (columns, rank), ids, 1.0)
        bias = self.op("MatMul", chained, self.op("Transpose", rows, perm=[0, 2, 1]))
        best, probability = self.node("Choose", self.op("Add", highest, bias), outputs=2)
        return self.op("GatherElements", ids, best, axis=1), probability

    def block_taps(self, x: Any, name: str, taps: int, group: int) -> ir.Value:
        """Float32 (1, n, 2 * taps, width)."""
        width, self.taps = self.config.hidden_size, taps
        apart = self.constant([0, -1, 2 * taps, width // group, 1])
        own = self.op("Reshape", self.multiplied(_Product(x, self.name(name))), apart)
        base = self.op(
            "Reshape", self.stored(f"{name}_base"), self.constant([2 * taps, width // group, group])
        )
        return self.op("Reshape", self.op("Add", own, base), self.constant([0, 0, 2 * taps, width]))

    def block_conv(self, y: Any, weights: ir.Value, side: int) -> ir.Value:
        y, count = self.value(y), self.taps
        parts = [
            self.op("Gather", weights, self.constant([side * count + tap]), axis=2) for tap in range(count)
        ]
        first, *others = (self.op("Squeeze", part, self.constant([2])) for part in parts)
        total, back = self.op("Mul", first, y), self.constant([0, 1, 0, 0, -1, 0])
        self.within = self.within or self.rows_within()
        for weight in others:
            y = self.op("Mul", self.op("Pad", y, back), self.within)
            total = self.op("Add", total, self.op("Mul", weight, y))
        return total

    def rows_within(self) -> ir.Value:
        """0 for the first row of each block, 1 for the others: float32 (1, n, 1)."""
        zero, one = (self.op("Squeeze", self.constant([value])) for value in (0, 1))
        tokens = self.op("Sub", self.op("Gather", self.sequences, one, axis=1), self.counts)
        starts = self.op("CumSum", tokens, zero, exclusive=1)
        rows = self.op("Range", zero, self.op("Squeeze", self.op("Shape", self.ids, start=1)), one)
        first = self.op("Equal", self.op("Unsqueeze", starts, self.constant([1])), rows)
        others = self.op("Cast", self.op("Not", first), to=int(FLOAT))
        others = self.op("ReduceMin", others, self.constant([0]), keepdims=0)
        return self.op("Reshape", others, self.constant([1, -1, 1]))

    def scores(self, x: ir.Value) -> ir.Value:
        """The part of the confidences' scores that follows from the stream."""
        of_state = self.op("MatMul", self.normalized(x, "final_norm"), self.confidence(end=False))
        return self.op("Add", of_state, self.stored("confidence_bias"))

    def confidence(self, *, end: bool) -> ir.Value:
        """The weights of scores, of the stream or, at their end, of the chain."""
        width, last = self.config.hidden_size, self.record.tensors["confidence"][1]
        begin, stop = (width, last) if end else (0, width)
        whole = self.op("Transpose", self.stored("confidence"))
        return self.op("Slice", whole, self.constant([begin]), self.constant([stop]))


def build_native(config: Transformer, plan: DecoderPlan) -> ir.Model:
    """Build the graph; matrices are tiles (:mod:`edgespec_models.bundles.weight_format`), uint8.

    Parameters are named as :meth:`DecoderPlan.parts` says.
    """
    return _NativeDecoder(config, plan).build()
