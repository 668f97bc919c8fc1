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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder

from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.kept import KeptTensor, KeptType
from edgespec_models.bundles.layers import Layer, graph_name, kept_by, rotary_thetas
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

    def kept(self, config: ModelConfig) -> tuple[KeptTensor, ...]:
        """The tensors that a sequence keeps."""
        points = [(t, t.input.replace("past_key_values", "layers")) for t in kept_by(config, "float32")]
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

    def __init__(self, config: ModelConfig, plan: StaticPlan) -> None:
        super().__init__(config, {"": _OPSET})
        self.plan, self.parts = plan, plan.parts_of(config.num_layers)
        self.builder = GraphBuilder(self.graph)
        self.op = self.builder.op
        self.encodings: dict[str, tuple[ir.Value, ir.Value]] = {}
        self.watched: list[ir.Value] = []

    def build(self) -> ir.Model:
        config, plan = self.config, self.plan
        start = self.input("input_ids", ir.DataType.INT32, [1, plan.rows])
        self.masks, self.ropes = self.mask_inputs(), self.rope_inputs()
        wanted = None
        if not plan.all_logits:
            wanted = self.point(self.input("wanted_rows", FLOAT, [1, 1, plan.rows]), "probabilities")
        heads, width = config.num_kv_heads, config.head_dim
        self.past_inputs({"key": [1, heads, width, plan.capacity], "value": [1, heads, plan.capacity, width]})
        stream = [1, plan.rows, config.hidden_size]
        if 0 not in self.parts:
            start = self.input("residual_in", FLOAT, stream)
        with self.scope("", "Decoder"):
            x = self.through_layers(self.embed(start))
            whole = config.num_layers in self.parts
            end = self.lm_head(x, wanted) if whole else x
        logits = [1, plan.rows if plan.all_logits else 1, config.vocab_size]
        self.output(end, *(("logits", FLOAT, logits) if whole else ("residual_out", FLOAT, stream)))
        kinds = ("key", [width, plan.rows]), ("value", [plan.rows, width])
        for (layer, (kind, shape)), value in zip(product(self.past, kinds), self.present, strict=True):
            self.output(value, f"present.{layer}.{kind}", self.cache_type(layer, kind), [1, heads, *shape])
        for value in self.watched:
            assert value.name is not None
            self.output(value, value.name, FLOAT, None)
        return self.model()

    def scope(self, name: str, kind: str) -> AbstractContextManager[None]:
        return scoped(self.builder, name, f"_Static{kind}")

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
        for windowed in sorted({layer.window is not None for layer in self.all_layers}, reverse=True):
            name = "sliding_mask" if windowed else "attention_mask"
            masks[windowed] = self.point(self.input(name, FLOAT, shape), "mask")
        return masks

    def rope_inputs(self) -> dict[str, list[ir.Value]]:
        shape = [1, 1, self.plan.rows, self.config.rotary_width // 2]
        inputs = {}
        for rope in rotary_thetas(self.config):
            tables = [self.input(f"{rope}_{part}", FLOAT, shape) for part in ("cos", "sin")]
            inputs[rope] = [self.point(table, "rope") for table in tables]
        return inputs

    def past_inputs(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """The caches of the graph's layers."""
        for layer in self.parts:
            if layer < self.config.num_layers:
                self.past[layer] = [
                    self.input(f"past_key_values.{layer}.{kind}", self.cache_type(layer, kind), shape)
                    for kind, shape in shapes.items()
                ]

    def cache_type(self, layer: int, kind: str) -> ir.DataType:
        return ir.DataType.from_numpy(np.dtype(self.plan.type_at(f"layers.{layer}.{kind}")))

    def embed(self, start: ir.Value) -> ir.Value:
        """The residual stream: from token ids, or from the piece before."""
        config, op, kind = self.config, self.op, ir.DataType.UINT16 if self.plan.int8 else FLOAT
        if 0 not in self.parts:
            return self.point(start, f"layers.{self.parts.start - 1}.residual")
        table = self.parameter("embedding", [config.vocab_size, config.hidden_size], kind)
        if self.plan.int8:
            stored = self.parameter("embedding_scale", []), self.parameter("embedding_zero", [], kind)
            x = op.Gather(op.DequantizeLinear(table, *stored), start, axis=0)
            if self.plan.ranges is not None:  # Qualcomm's compiler wants rows with the table's own encoding
                x = op.DequantizeLinear(op.QuantizeLinear(x, *stored), *stored)
        else:
            x = op.Gather(table, start, axis=0)
        if config.embedding_scale == 1.0:
            return x
        factor = op.Constant(value_float=float(config.embedding_scale))
        return self.point(op.Mul(x, self.rounded(factor, "embedding_scale")), "embedded")

    def lm_head(self, x: ir.Value, wanted: ir.Value | None) -> ir.Value:
        x = self.norm(x, "final_norm")
        if wanted is not None:
            # This is a product, because Qualcomm's compiler fails on a Gather of rows.
            x = self.point(self.op.MatMul(wanted, x), "final_norm")
        return self.product("lm_head", x, "logits")

    def product(self, name: str, x: ir.Value, point: str = "", *, bias: bool = False) -> ir.Value:
        """A product with a matrix stored (inputs, outputs)."""
        op, int8, path, point = self.op, self.plan.int8, graph_name(name), point or name
        kind = name.rpartition(".")[2]
        outputs, inputs = self.shapes[name]
        with scoped(self.builder, kind, "_Matrix"):
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

    def norm(self, x: ir.Value, name: str, point: str = "") -> ir.Value:
        op, epsilon, point = self.op, self.config.norm_epsilon, point or name
        with self.scope(name.rpartition(".")[2], "Norm"):
            weight = self.gain(name)
            if self.plan.ranges is not None:  # taken apart, the squares would need more than 16 bits
                weight = self.rounded(weight, f"{point}.weight")
                return self.point(op.RMSNormalization(x, weight, axis=-1, epsilon=epsilon), point)
            mean = op.ReduceMean(op.Mul(x, x), [-1], keepdims=1)
            scaled = op.Div(x, op.Sqrt(op.Add(mean, float(epsilon))))
            return self.point(op.Mul(scaled, weight), point)

    def add(self, x: ir.Value, y: ir.Value, name: str) -> ir.Value:
        return self.point(self.op.Add(x, y), name)

    def gated(self, layer: Layer, x: ir.Value) -> ir.Value:
        op, name = self.op, layer.name
        gate = self.product(f"{name}.gate", x)
        if self.config.activation == "silu":
            gate = op.Mul(gate, self.point(op.Sigmoid(gate), "probabilities"))
        else:
            gate = op.Gelu(gate, approximate="tanh")
        gate = self.point(gate, f"{name}.gated")
        return self.point(op.Mul(gate, self.product(f"{name}.up", x)), f"{name}.mlp")

    def projected(self, layer: Layer, x: ir.Value) -> Iterator[tuple[str, ir.Value]]:
        for which in "qkv":
            yield which, self.product(f"{layer.name}.{which}", x, bias=self.plan.biases)

    def apart(self, flat: ir.Value, name: str) -> ir.Value:
        """``(1, heads, rows, head_dim)``."""
        point = f"{name}.norm" if self.config.wide_qk_norm and not name.endswith(".v") else name
        shaped = self.op.Reshape(flat, [1, self.plan.rows, -1, self.config.head_dim])
        return self.point(self.op.Transpose(self.point(shaped, point), perm=[0, 2, 1, 3]), point)

    def head_norm(self, heads: ir.Value, name: str) -> ir.Value:
        if self.config.wide_qk_norm:
            return self.norm(heads, name, f"{name.removesuffix('_norm')}.norm")
        # In three dimensions: of four, the emulated Hexagon processor normalizes the wrong one at times.
        op, rows, width = self.op, self.plan.rows, self.config.head_dim
        name_of_heads = name.removesuffix("_norm")
        count = self.shapes[name_of_heads][0] // width
        flat = self.point(op.Reshape(heads, [1, count * rows, width]), name_of_heads)
        normed = self.norm(flat, name, f"{name_of_heads}.norm")
        return self.point(op.Reshape(normed, [1, count, rows, width]), f"{name_of_heads}.norm")

    def rotate(self, layer: Layer, heads: ir.Value, which: str) -> ir.Value:
        assert layer.rope is not None
        op, config, name = self.op, self.config, f"{layer.name}.{which}"
        half = config.rotary_width // 2
        sizes = [half, half, rest] if (rest := config.head_dim - 2 * half) else [half, half]
        split = op.Split(heads, sizes, axis=-1, _outputs=len(sizes))
        entered = f"{name}.norm" if config.qk_norm else name
        first, second, *others = (self.point(part, entered) for part in split)
        products, turned = f"{entered}.products", f"{entered}.rotated"
        terms = [self.point(op.Mul(a, b), products) for a in (first, second) for b in self.ropes[layer.rope]]
        left = self.point(op.Sub(terms[0], terms[3]), turned)
        right = self.point(op.Add(terms[2], terms[1]), turned)
        return self.point(op.Concat(left, right, *others, axis=-1), turned)

    def attend(self, layer: Layer, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
        op, name, joined = self.op, layer.name, []
        turned = op.Transpose(key, perm=[0, 1, 3, 2])
        pairs = zip((turned, value), self.past[layer.index], (("key", 3), ("value", 2)), strict=True)
        for new, old, (kind, axis) in pairs:
            point = f"{name}.{kind}"
            self.present.append(self.quantize(new, point))
            self.watch(new, point)
            both = [self.dequantize(part, point) for part in (old, self.present[-1])]
            whole = op.Concat(*both, axis=axis)
            joined.append(self.dequantize(self.quantize(whole, point), point))
        attended = self.mixed(layer, query, *joined)
        back = self.point(op.Transpose(attended, perm=[0, 2, 1, 3]), f"{name}.attended")
        flat = op.Reshape(back, [1, self.plan.rows, self.config.query_width])
        return self.point(flat, f"{name}.attended")

    def mixed(self, layer: Layer, query: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
        op, config, plan, name = self.op, self.config, self.plan, layer.name
        length, kv, width = plan.capacity + plan.rows, config.num_kv_heads, config.head_dim
        group, mask = config.num_heads // kv * plan.rows, self.masks[layer.window is not None]
        query = self.point(op.Reshape(query, [1, kv, group, width]), f"{name}.q.queries")
        scores = self.point(op.MatMul(query, keys), f"{name}.scores")
        scores = op.Reshape(scores, [1, config.num_heads, plan.rows, length])
        scores = self.point(op.Add(self.point(scores, f"{name}.scores"), mask), f"{name}.masked")
        shares = self.point(op.Softmax(scores, axis=-1), "probabilities")
        shares = self.point(op.Reshape(shares, [1, kv, group, length]), "probabilities")
        attended = self.point(op.MatMul(shares, values), f"{name}.attended")
        attended = op.Reshape(attended, [1, config.num_heads, plan.rows, width])
        return self.point(attended, f"{name}.attended")


def build_static_decoder(config: ModelConfig, plan: StaticPlan) -> ir.Model:
    """Build one graph; weights have the same names in every one, such as ``layers.3.attention.q.weight``."""
    return _StaticDecoder(config, plan).build()
