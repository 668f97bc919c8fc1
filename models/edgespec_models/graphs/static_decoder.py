"""The decoder for devices that compile fixed shapes: standard operators, attention taken apart.

A graph runs ``rows`` tokens behind at most ``capacity`` cached ones. Inputs: ``input_ids`` int32 (1, rows);
``attention_mask`` float32 (1, 1, rows, capacity + rows), added to the scores, and ``sliding_mask`` for
layers with a window; ``rope_cos``, ``rope_sin`` float32 (1, 1, rows, rotary width / 2), the tables' rows of
the tokens' positions, and ``rope_local_cos/sin`` where windowed layers have another base; ``wanted_rows``
float32 (1, 1, rows) if one row's logits are wanted: 1 for that row, else 0; ``past_key_values.L.key`` (1, kv
heads, head_dim, capacity), ``past_key_values.L.value`` (1, kv heads, capacity, head_dim). Outputs: ``logits``
float32 (1, rows or 1, vocab); ``present.L.key/value``, of the new rows only. Keys are transposed for the
product with the queries.

Every intermediate value has the name of its *point*. If a plan has the range of a point, the value is rounded
there to 16 bits (keys and values to 8), between QuantizeLinear and DequantizeLinear, the form in which
compilers expect quantized graphs. The KV cache is then uint8.

A plan may have some layers only. A piece behind another takes its ``residual_out``, the residual stream,
float32 (1, rows, hidden), as ``residual_in``. It rounds the stream once more, which changes nothing, so it
has every quantized operator of a whole graph.

Queries arrive scaled and, like keys, with the halves of a rotation apart: see
:mod:`edgespec_export.devices.static_weights`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder

from edgespec_models.decoders.kept import KeptTensor, KeptType
from edgespec_models.decoders.operations import UNUSUAL, XIELU, Activation, Attention, Rows
from edgespec_models.decoders.record import Record, record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.graphs.graph_decoder import FLOAT, GraphDecoder, scoped

_OPSET = 23
_KV = (".key", ".value")


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlan:
    """One graph of a bundle.

    Attributes:
        all_logits: whether the graph returns all rows' logits, or one row's.
        int8: whether weights are int8 with a scale for each output, the embedding uint16; else float32.
        ranges: the least and the largest value of every point, to quantize; empty for floating point.
        wide_keys: layers whose keys are rounded to 16 bits, like all other points, and not to 8.
        watched: return every point's values too, as outputs ``NUMBER:POINT``, to find those ranges.
        parts: the parts of a piece of the graph: a part for each layer, the embedding with the first, and a
            last part with final norm and LM head; None has all.
    """

    rows: int
    capacity: int
    all_logits: bool
    int8: bool = False
    biases: bool = False
    ranges: Mapping[str, tuple[float, float]] | None = None
    wide_keys: tuple[int, ...] = ()
    watched: bool = False
    parts: range | None = None

    def parts_of(self, num_layers: int) -> range:
        """The parts of the graph, for a model of this many layers."""
        return range(num_layers + 1) if self.parts is None else self.parts

    def kept(self, config: Transformer) -> tuple[KeptTensor, ...]:
        """The tensors that a sequence keeps."""
        kept = record(config).kept_in("float32")
        points = [(tensor, tensor.input.replace("past_key_values", "layers")) for tensor in kept]
        return tuple(
            replace(tensor, type=cast(KeptType, self.type_at(point).__name__)) for tensor, point in points
        )

    def type_at(self, name: str) -> type[np.generic]:
        """The integer type behind the point ``name``; a float type if nothing is quantized."""
        if self.ranges is None:
            return np.float32
        wide = [f"layers.{layer}.key" for layer in self.wide_keys]
        return np.uint8 if name.endswith(_KV) and name not in wide else np.uint16


def encoding(low: float, high: float, kind: type[np.unsignedinteger[Any]]) -> tuple[np.float32, int]:
    """Scale and zero point of the integers ``kind`` for values from ``low`` to ``high``, zero among them."""
    low, high = min(low, 0.0), max(high, 0.0)
    steps = int(np.iinfo(kind).max)
    scale = np.float32(max(high - low, 1e-6) / steps)
    return scale, int(np.clip(round(-low / float(scale)), 0, steps))


class _StaticDecoder(GraphDecoder):
    """Every value has the name of its point."""

    medium = "graphs of fixed shapes"
    lacks = UNUSUAL

    def __init__(self, config: Transformer, plan: StaticPlan) -> None:
        super().__init__(config, {"": _OPSET})
        self.plan, self.parts = plan, plan.parts_of(config.num_layers)
        self.builder = GraphBuilder(self.graph)
        self.op = self.builder.op
        self.encodings: dict[str, tuple[ir.Value, ir.Value]] = {}
        self.watched: list[ir.Value] = []

    def build(self) -> ir.Model:
        config, plan = self.config, self.plan
        self.start = self.input("input_ids", ir.DataType.INT32, [1, plan.rows])
        self.masks, self.ropes = self.mask_inputs(), self.rope_inputs()
        self.picked: ir.Value | None = None
        if not plan.all_logits:
            self.picked = self.point(self.input("wanted_rows", FLOAT, [1, 1, plan.rows]), "probabilities")
        self.past_inputs()
        if 0 not in self.parts:
            self.start = self.input("residual_in", FLOAT, [1, plan.rows, config.hidden_size])
        with scoped(self.builder, "", "_StaticDecoder"):
            config.decode(self)
        for value in self.watched:
            assert value.name is not None
            self.output(value, value.name, FLOAT, None)
        return self.model()

    @contextmanager
    def layer(self, index: int, x: ir.Value) -> Iterator[ir.Value | None]:
        self.index = index
        with scoped(self.builder, f"layers.{index}", "_StaticLayer"), super().layer(index, x):
            yield x if index in self.parts else None

    def point(self, value: ir.Value, name: str) -> ir.Value:
        """``value`` behind the point ``name``; several values may share a point."""
        if self.plan.ranges is None:
            self.watch(value, name)
        return self.rounded(value, name)

    def rounded(self, value: ir.Value, name: str) -> ir.Value:
        """``value`` rounded to the point's integers; unchanged in floating point."""
        return self.dequantize(self.quantize(value, name), name)

    def quantize(self, value: ir.Value, name: str) -> ir.Value:
        if self.plan.ranges is None:
            return value
        return self.op.QuantizeLinear(value, *self.encoding(name, self.plan.ranges[name]))

    def dequantize(self, value: ir.Value, name: str) -> ir.Value:
        if self.plan.ranges is None:
            return value
        return self.op.DequantizeLinear(value, *self.encoding(name, self.plan.ranges[name]))

    def watch(self, value: ir.Value, name: str) -> None:
        """Make ``value`` an output of the graph, if the plan says so."""
        if self.plan.watched:
            self.watched.append(self.op.Identity(value, _outputs=[f"{len(self.watched)}:{name}"]))

    def encoding(self, name: str, ends: tuple[float, float]) -> tuple[ir.Value, ir.Value]:
        if name not in self.encodings:
            kind = self.plan.type_at(name)
            assert issubclass(kind, np.unsignedinteger)
            scale, zero = encoding(*ends, kind)
            first = ir.tensor(np.array(scale), name=f"{name}.scale")
            second = ir.tensor(np.array(zero, kind), name=f"{name}.zero")
            self.encodings[name] = (
                self.builder.initializer(first, qualify=False),
                self.builder.initializer(second, qualify=False),
            )
        return self.encodings[name]

    def mask_inputs(self) -> dict[bool, ir.Value]:
        """The masks of layers that see all, and of layers with a window."""
        shape, masks = [1, 1, self.plan.rows, self.plan.capacity + self.plan.rows], {}
        attentions = self.record.attentions.values()
        for windowed in sorted({facts.window is not None for facts in attentions}, reverse=True):
            name = "sliding_mask" if windowed else "attention_mask"
            masks[windowed] = self.point(self.input(name, FLOAT, shape), "mask")
        return masks

    def rope_inputs(self) -> dict[str, list[ir.Value]]:
        inputs = {}
        for rope, facts in self.record.ropes.items():
            shape = [1, 1, self.plan.rows, facts.pairs]
            tables = [self.input(f"{rope}_{part}", FLOAT, shape) for part in ("cos", "sin")]
            inputs[rope] = [self.point(table, "rope") for table in tables]
        return inputs

    def past_inputs(self) -> None:
        """The caches of the graph's layers."""
        capacity = self.plan.capacity
        for layer, facts in self.record.attentions.items():
            shapes = {"key": [facts.width, capacity], "value": [capacity, facts.width]}
            if layer in self.parts:
                self.past[layer] = [
                    self.input(
                        f"past_key_values.{layer}.{kind}",
                        self.cache_type(layer, kind),
                        [1, facts.kv_heads, *shape],
                    )
                    for kind, shape in shapes.items()
                ]

    def cache_type(self, layer: int, kind: str) -> ir.DataType:
        return ir.DataType.from_numpy(np.dtype(self.plan.type_at(f"layers.{layer}.{kind}")))

    def embed(self, rows: int, width: int, scale: float = 1.0) -> ir.Value:
        """The residual stream: from token ids, or from the piece before."""
        op, kind = self.op, ir.DataType.UINT16 if self.plan.int8 else FLOAT
        if 0 not in self.parts:
            return self.point(self.start, f"layers.{self.parts.start - 1}.residual")
        table = self.parameter("embedding", [rows, width], kind)
        if self.plan.int8:
            stored = self.parameter("embedding_scale", []), self.parameter("embedding_zero", [], kind)
            x = op.Gather(op.DequantizeLinear(table, *stored), self.start, axis=0)
            if self.plan.ranges is not None:  # Qualcomm's compiler wants rows with the table's own encoding
                x = op.DequantizeLinear(op.QuantizeLinear(x, *stored), *stored)
        else:
            x = op.Gather(table, self.start, axis=0)
        if scale == 1.0:
            return x
        factor = op.Constant(value_float=float(scale))
        return self.point(op.Mul(x, self.rounded(factor, "embedding_scale")), "embedded")

    def wanted(self, x: ir.Value) -> ir.Value:
        return x  # they are picked behind the last normalization

    def logits(self, x: ir.Value, rows: int, cap: float | None = None) -> ir.Value:
        """Of one row or of all; without the last part, the residual stream."""
        if self.config.num_layers not in self.parts:
            return x
        x = self.norm(x, "final_norm")
        if self.picked is not None:
            # This is a product, because Qualcomm's compiler fails on a Gather of rows.
            x = self.point(self.op.MatMul(self.picked, x), "final_norm")
        return self.product("lm_head", x, "logits")

    def write(self, logits: ir.Value, choices: Any = None) -> None:
        config, rows = self.config, self.plan.rows
        if config.num_layers in self.parts:
            shape = [1, rows if self.plan.all_logits else 1, config.vocab_size]
            self.output(logits, "logits", FLOAT, shape)
        else:
            self.output(logits, "residual_out", FLOAT, [1, rows, config.hidden_size])
        for (layer, kind), value in zip(product(self.past, ("key", "value")), self.present, strict=True):
            facts = self.record.attentions[layer]
            shape = [facts.width, rows] if kind == "key" else [rows, facts.width]
            heads = [1, facts.kv_heads, *shape]
            self.output(value, f"present.{layer}.{kind}", self.cache_type(layer, kind), heads)

    def product(self, name: str, x: ir.Value, point: str = "", *, bias: bool = False) -> ir.Value:
        """A product with the matrix ``name``, by its whole name, which is stored (inputs, outputs)."""
        op, int8, point = self.op, self.plan.int8, point or name
        outputs, inputs = self.record.tensors[name]
        path = matrix_path(self.record, name)
        with scoped(self.builder, name.rpartition(".")[2], "_StaticMatrix"):
            weight = self.parameter(f"{path}.weight", [inputs, outputs], ir.DataType.INT8 if int8 else FLOAT)
            if int8:
                scale = self.parameter(f"{path}.scale", [outputs])
                zero = self.parameter(f"{path}.zero", [outputs], ir.DataType.INT8)
            added = self.parameter(f"{path}.bias", [outputs]) if bias else None
            if int8:
                weight = op.DequantizeLinear(weight, scale, zero, axis=1)
            y = self.point(op.MatMul(x, weight), point if added is None else f"{point}.product")
            if added is None:
                return y
            return self.point(op.Add(y, self.rounded(added, f"{point}.bias")), point)

    def linear(
        self, x: ir.Value, name: str, rows: Rows, *, biases: bool | None = False, part: str = ""
    ) -> Any:
        """One value a matrix; several are made one by one, as they are read."""
        if isinstance(rows, int):
            with scoped(self.builder, part, "_StaticPart") if part else nullcontext():
                return self.product(self.name(name), x)
        bias = biases is None and self.plan.biases
        return (self.product(self.name(matrix), x, bias=bias) for matrix in rows)

    def norm(self, x: ir.Value, name: str) -> ir.Value:
        return self.rms(x, name, self.name(name))

    def post_norm(self, y: ir.Value, name: str, epsilon: float | None = None) -> ir.Value:
        return self.norm(y, name)

    def rms(self, x: ir.Value, name: str, point: str) -> ir.Value:
        op, epsilon = self.op, self.config.norm_epsilon
        with scoped(self.builder, name, "_StaticNorm"):
            weight = self.stored(name)
            if self.plan.ranges is not None:  # taken apart, the squares would need more than 16 bits
                weight = self.rounded(weight, f"{point}.weight")
                return self.point(op.RMSNormalization(x, weight, axis=-1, epsilon=epsilon), point)
            mean = op.ReduceMean(op.Mul(x, x), [-1], keepdims=1)
            scaled = op.Div(x, op.Sqrt(op.Add(mean, float(epsilon))))
            return self.point(op.Mul(scaled, weight), point)

    def add(self, x: ir.Value, y: ir.Value, name: str = "") -> ir.Value:
        return self.point(self.op.Add(x, y), self.name(name))

    def gated(
        self, x: ir.Value, name: str, names: tuple[str, ...], rows: int, activation: Activation | XIELU
    ) -> ir.Value:
        op, (of_gate, of_up) = self.op, names
        with scoped(self.builder, "mlp", "_StaticPart"):
            gate = self.product(self.name(of_gate), x)
            if activation == "silu":
                gate = op.Mul(gate, self.point(op.Sigmoid(gate), "probabilities"))
            else:
                gate = op.Gelu(gate, approximate="tanh")
            gate = self.point(gate, self.name("gated"))
            return self.point(op.Mul(gate, self.product(self.name(of_up), x)), self.name("mlp"))

    def attention(self, qkv: Iterable[ir.Value], facts: Attention, known: Any = None) -> ir.Value:
        with scoped(self.builder, "attention", "_StaticPart"):
            return self.attend(facts, *self.heads(qkv, facts))

    def heads(self, qkv: Iterable[ir.Value], facts: Attention) -> Iterator[ir.Value]:
        """Queries, keys and values, normalized and turned."""
        for which, flat in zip("qkv", qkv, strict=True):
            point, normed = self.name(which), bool(facts.norms) and which != "v"
            if normed and facts.norms == "wide":
                point = f"{point}.norm"
                part = self.apart(self.rms(flat, f"{which}_norm", point), facts, point)
            else:
                part = self.apart(flat, facts, point)
            if normed and facts.norms == "head":
                part = self.head_norm(part, facts, which)
            if which != "v" and facts.rope is not None:
                part = self.rotate(part, facts, f"{self.name(which)}.norm" if normed else point)
            yield part

    def apart(self, flat: ir.Value, facts: Attention, point: str) -> ir.Value:
        """``(1, heads, rows, width)``."""
        shaped = self.op.Reshape(flat, [1, self.plan.rows, -1, facts.width])
        return self.point(self.op.Transpose(self.point(shaped, point), perm=[0, 2, 1, 3]), point)

    def head_norm(self, heads: ir.Value, facts: Attention, which: str) -> ir.Value:
        # In three dimensions: of four, the emulated Hexagon processor normalizes the wrong one at times.
        op, rows, width, point = self.op, self.plan.rows, facts.width, self.name(which)
        count = facts.products[which] // width
        flat = self.point(op.Reshape(heads, [1, count * rows, width]), point)
        normed = self.rms(flat, f"{which}_norm", f"{point}.norm")
        return self.point(op.Reshape(normed, [1, count, rows, width]), f"{point}.norm")

    def rotate(self, heads: ir.Value, facts: Attention, entered: str) -> ir.Value:
        assert facts.rope is not None
        op, half = self.op, facts.rope.pairs
        sizes = [half, half, rest] if (rest := facts.width - 2 * half) else [half, half]
        split = op.Split(heads, sizes, axis=-1, _outputs=len(sizes))
        first, second, *others = (self.point(part, entered) for part in split)
        products, turned = f"{entered}.products", f"{entered}.rotated"
        tables = self.ropes[facts.rope.name]
        terms = [self.point(op.Mul(a, b), products) for a in (first, second) for b in tables]
        left = self.point(op.Sub(terms[0], terms[3]), turned)
        right = self.point(op.Add(terms[2], terms[1]), turned)
        return self.point(op.Concat(left, right, *others, axis=-1), turned)

    def attend(self, facts: Attention, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
        op, joined = self.op, []
        turned = op.Transpose(key, perm=[0, 1, 3, 2])
        pairs = zip((turned, value), self.past[self.index], (("key", 3), ("value", 2)), strict=True)
        for new, old, (kind, axis) in pairs:
            point = self.name(kind)
            self.present.append(self.quantize(new, point))
            self.watch(new, point)
            both = [self.dequantize(part, point) for part in (old, self.present[-1])]
            whole = op.Concat(*both, axis=axis)
            joined.append(self.dequantize(self.quantize(whole, point), point))
        attended = self.mixed(facts, query, *joined)
        back = self.point(op.Transpose(attended, perm=[0, 2, 1, 3]), self.name("attended"))
        flat = op.Reshape(back, [1, self.plan.rows, facts.outputs])
        return self.point(flat, self.name("attended"))

    def mixed(self, facts: Attention, query: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
        op, plan, kv, width = self.op, self.plan, facts.kv_heads, facts.width
        length, rows = plan.capacity + plan.rows, plan.rows
        group, mask = facts.heads // kv * rows, self.masks[facts.window is not None]
        query = self.point(op.Reshape(query, [1, kv, group, width]), self.name("q.queries"))
        scores = self.point(op.MatMul(query, keys), self.name("scores"))
        scores = op.Reshape(scores, [1, facts.heads, rows, length])
        scores = self.point(op.Add(self.point(scores, self.name("scores")), mask), self.name("masked"))
        shares = self.point(op.Softmax(scores, axis=-1), "probabilities")
        shares = self.point(op.Reshape(shares, [1, kv, group, length]), "probabilities")
        attended = self.point(op.MatMul(shares, values), self.name("attended"))
        attended = op.Reshape(attended, [1, facts.heads, rows, width])
        return self.point(attended, self.name("attended"))


def matrix_path(made: Record, name: str) -> str:
    """The name of the single matrix ``name`` in graphs of fixed shapes."""
    product = next(product for product in made.products.values() if name in product.matrices)
    return f"{product.path.rpartition('.')[0]}.{name.rpartition('.')[2]}".lstrip(".")


def build_static_decoder(config: Transformer, plan: StaticPlan) -> ir.Model:
    """Build one graph; weights have the same names in every one, such as ``layers.3.attention.q.weight``."""
    return _StaticDecoder(config, plan).build()
