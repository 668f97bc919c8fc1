"""The decoder for devices that compile fixed shapes: standard operators, attention taken apart.

A graph runs ``rows`` tokens behind at most ``capacity`` cached ones. Inputs: ``input_ids`` int32 (1, rows);
``attention_mask`` float32 (1, 1, rows, capacity + rows), added to the scores, and ``sliding_mask`` for
layers with a window; ``rope_cos``, ``rope_sin`` float32 (1, 1, rows, rotary width / 2), the tables' rows of
the tokens' positions, and ``rope_local_cos/sin`` where windowed layers have another base; ``wanted_rows``
float32 (1, 1, rows) where one row's logits are wanted: 1 for that row, else 0;
``past_key_values.L.key`` (1, kv heads, head_dim, capacity), ``past_key_values.L.value`` (1, kv heads,
capacity, head_dim). Outputs: ``logits`` float32 (1, rows or 1, vocab); ``present.L.key/value``, of the new
rows only. Keys lie transposed, as the product with the queries takes them.

Every intermediate value has the name of its *point*. Where a plan says what values a point takes, it is
rounded there to 16 bits (keys and values to 8), between QuantizeLinear and DequantizeLinear, the form in
which compilers expect quantized graphs. The KV cache is then uint8.

A plan may ask for some layers only: a piece that starts behind another takes what that one returns as
``residual_out``, the residual stream, float32 (1, rows, hidden), as ``residual_in``, rounds it once more,
which changes nothing, and so contains every quantized operator that a whole graph would.

Queries arrive scaled and, like keys, with the halves of a rotation apart: see
:mod:`edgespec_export.devices.static_weights`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import product

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder

from edgespec_models.bundles.config import ModelConfig
from edgespec_models.graphs.definition import IR_VERSION, Decoder, Pair, add_output, parameter, scoped
from edgespec_models.graphs.static_points import Points, StaticPlan

__all__ = ["build_static_decoder"]

_OPSET, _FLOAT = 23, ir.DataType.FLOAT


class _StaticDecoder(Decoder):
    """Every value leaves the point that it is named after; see :class:`Points`."""

    def __init__(self, config: ModelConfig, plan: StaticPlan) -> None:
        self.config, self.plan, self.parts = config, plan, plan.parts_of(config.num_layers)
        graph = ir.Graph([], [], nodes=[], opset_imports={"": _OPSET}, name="decoder")
        self.graph, self.builder = graph, GraphBuilder(graph)
        self.op, self.points = self.builder.op, Points(self.builder, plan)

    def build(self) -> ir.Graph:
        config, plan = self.config, self.plan
        start = self.builder.input("input_ids", ir.DataType.INT32, [1, plan.rows])
        self.masks, self.ropes = self.mask_inputs(), self.rope_inputs()
        wanted = None
        if not plan.all_logits:
            wanted = self.builder.input("wanted_rows", _FLOAT, [1, 1, plan.rows])
            wanted = self.point(wanted, "probabilities")
        heads, width = config.num_kv_heads, config.head_dim
        past = self.past_inputs([1, heads, width, plan.capacity], [1, heads, plan.capacity, width])
        stream = [1, plan.rows, config.hidden_size]
        if 0 not in self.parts:
            start = self.builder.input("residual_in", _FLOAT, stream)
        with self.scope("", "Decoder"):
            x, present = self.layers(self.embed(start), past)
            whole = config.num_layers in self.parts
            end = self.head(x, wanted) if whole else x
        logits = [1, plan.rows if plan.all_logits else 1, config.vocab_size]
        self.output(end, "logits" if whole else "residual_out", logits if whole else stream)
        kinds = ("key", [width, plan.rows]), ("value", [plan.rows, width])
        for (layer, (kind, shape)), value in zip(product(past, kinds), present, strict=True):
            name, cache = f"present.{layer}.{kind}", self.cache_type(layer, kind)
            self.output(value, name, [1, heads, *shape], cache)
        for value in self.points.watched:
            assert value.name is not None
            self.output(value, value.name, None)
        return self.graph

    def scope(self, name: str, kind: str) -> AbstractContextManager[None]:
        return scoped(self.builder, name, f"_Static{kind}")

    def point(self, value: ir.Value, name: str) -> ir.Value:
        return self.points(self.op, value, name)

    def output(
        self, value: ir.Value, name: str, shape: Sequence[int] | None, kind: ir.DataType = _FLOAT
    ) -> None:
        add_output(self.graph, value, name, kind, shape)

    def mask_inputs(self) -> dict[bool, ir.Value]:
        """Of layers that see all, and of those with a window."""
        shape, found = [1, 1, self.plan.rows, self.plan.capacity + self.plan.rows], {}
        for is_global in sorted({self.config.is_global(layer) for layer in range(self.config.num_layers)}):
            name = "attention_mask" if is_global else "sliding_mask"
            found[is_global] = self.point(self.builder.input(name, _FLOAT, shape), "mask")
        return found

    def rope_inputs(self) -> dict[str, Pair]:
        shape = [1, 1, self.plan.rows, self.config.rotary_width // 2]
        found = {}
        for name in ("rope", "rope_local") if self.config.rope_local_theta is not None else ("rope",):
            cos, sin = (self.builder.input(f"{name}_{part}", _FLOAT, shape) for part in ("cos", "sin"))
            found[name] = self.point(cos, "rope"), self.point(sin, "rope")
        return found

    def past_inputs(self, keys: Sequence[int], values: Sequence[int]) -> dict[int, Pair]:
        """Of each layer that the graph has."""

        def tensor(layer: int, kind: str, shape: Sequence[int]) -> ir.Value:
            return self.builder.input(f"past_key_values.{layer}.{kind}", self.cache_type(layer, kind), shape)

        layers = [part for part in self.parts if part < self.config.num_layers]
        return {layer: (tensor(layer, "key", keys), tensor(layer, "value", values)) for layer in layers}

    def cache_type(self, layer: int, kind: str) -> ir.DataType:
        return ir.DataType.from_numpy(np.dtype(self.plan.type_at(f"layers.{layer}.{kind}")))

    def embed(self, start: ir.Value) -> ir.Value:
        """The residual stream: of token ids, or as the piece before has left it."""
        config, op, kind = self.config, self.op, ir.DataType.UINT16 if self.plan.int8 else _FLOAT
        if 0 not in self.parts:
            return self.point(start, f"layers.{self.parts.start - 1}.residual")
        table = parameter(self.graph, "embedding", [config.vocab_size, config.hidden_size], kind)
        if self.plan.int8:
            stored = (
                parameter(self.graph, "embedding_scale", [], _FLOAT),
                parameter(self.graph, "embedding_zero", [], kind),
            )
            x = op.Gather(op.DequantizeLinear(table, *stored), start, axis=0)
            if self.points.quantized:  # Qualcomm's compiler wants rows with the table's own encoding
                x = op.DequantizeLinear(op.QuantizeLinear(x, *stored), *stored)
        else:
            x = op.Gather(table, start, axis=0)
        if config.embedding_scale == 1.0:
            return x
        factor = op.Constant(value_float=float(config.embedding_scale))
        return self.point(op.Mul(x, self.points.constant(op, factor, "embedding_scale")), "embedded")

    def head(self, x: ir.Value, wanted: ir.Value | None) -> ir.Value:
        x = self.norm(x, "final_norm")
        if wanted is not None:
            # A product, since Qualcomm's compiler fails on a Gather of rows.
            x = self.point(self.op.MatMul(wanted, x), "final_norm")
        return self.matrix("lm_head", x, "logits", self.config.vocab_size)

    def matrix(self, path: str, x: ir.Value, name: str, outputs: int, *, bias: bool = False) -> ir.Value:
        """A product with a matrix stored (inputs, outputs); ``name`` is of the point it leaves."""
        op, int8 = self.op, self.plan.int8
        widths = {"o": self.config.query_width, "down": self.config.intermediate_size}
        shape = [widths.get(last := path.rpartition(".")[2], self.config.hidden_size), outputs]
        with scoped(self.builder, last, "_Matrix"):
            kind = ir.DataType.INT8 if int8 else _FLOAT
            weight = parameter(self.graph, f"{path}.weight", shape, kind)
            if int8:
                scale = parameter(self.graph, f"{path}.scale", [outputs], _FLOAT)
                zero = parameter(self.graph, f"{path}.zero", [outputs], kind)
            added = parameter(self.graph, f"{path}.bias", [outputs], _FLOAT) if bias else None
            if int8:
                weight = op.DequantizeLinear(weight, scale, zero, axis=1)
            y = self.point(op.MatMul(x, weight), name if added is None else f"{name}.product")
            if added is None:
                return y
            return self.point(op.Add(y, self.points.constant(op, added, f"{name}.bias")), name)

    def norm(self, x: ir.Value, name: str) -> ir.Value:
        return self.rms(x, name, name, self.config.hidden_size)

    def post_norm(self, y: ir.Value, name: str) -> ir.Value:
        return self.norm(y, name)

    def rms(self, x: ir.Value, path: str, name: str, width: int) -> ir.Value:
        op, epsilon = self.op, self.config.norm_epsilon
        with self.scope(path.rpartition(".")[2], "Norm"):
            weight = parameter(self.graph, f"{path}.weight", [width], _FLOAT)
            if self.points.quantized:  # taken apart, the squares would need more than 16 bits
                weight = self.points.constant(op, weight, f"{name}.weight")
                return self.point(op.RMSNormalization(x, weight, axis=-1, epsilon=epsilon), name)
            mean = op.ReduceMean(op.Mul(x, x), [-1], keepdims=1)
            scaled = op.Div(x, op.Sqrt(op.Add(mean, float(epsilon))))
            return self.point(op.Mul(scaled, weight), name)

    def add(self, x: ir.Value, y: ir.Value, name: str) -> ir.Value:
        return self.point(self.op.Add(x, y), name)

    def mlp(self, layer: int, x: ir.Value) -> ir.Value:
        op, config, name = self.op, self.config, f"layers.{layer}"
        with self.scope("mlp", "MLP"):
            gate = self.matrix(f"{name}.mlp.gate", x, f"{name}.gate", config.intermediate_size)
            if config.activation == "silu":
                gate = op.Mul(gate, self.point(op.Sigmoid(gate), "probabilities"))
            else:
                gate = op.Gelu(gate, approximate="tanh")
            gate = self.point(gate, f"{name}.gated")
            up = self.matrix(f"{name}.mlp.up", x, f"{name}.up", config.intermediate_size)
            gated = self.point(op.Mul(gate, up), f"{name}.mlp")
            return self.matrix(f"{name}.mlp.down", gated, f"{name}.down", config.hidden_size)

    def attention(self, layer: int, x: ir.Value, past: Pair) -> tuple[ir.Value, ir.Value, ir.Value]:
        with self.scope("attention", "Attention"):
            return self.attended(layer, x, past)

    def attended(self, layer: int, x: ir.Value, past: Pair) -> tuple[ir.Value, ir.Value, ir.Value]:
        op, points, config, name = self.op, self.points, self.config, f"layers.{layer}"
        query = self.rotated(layer, self.heads(layer, x, "q"), "q")
        key = self.rotated(layer, self.heads(layer, x, "k"), "k")
        value = self.heads(layer, x, "v")
        turned = op.Transpose(key, perm=[0, 1, 3, 2])
        present, joined = [], []
        for new, old, kind, axis in ((turned, past[0], "key", 3), (value, past[1], "value", 2)):
            point = f"{name}.{kind}"
            present.append(points.quantize(op, new, point))
            points.watch(new, point)
            both = [points.dequantize(op, old, point), points.dequantize(op, present[-1], point)]
            whole = op.Concat(*both, axis=axis)
            joined.append(points.dequantize(op, points.quantize(op, whole, point), point))
        attended = self.attend(layer, query, (joined[0], joined[1]))
        back = self.point(op.Transpose(attended, perm=[0, 2, 1, 3]), f"{name}.attended")
        flat = self.point(op.Reshape(back, [1, self.plan.rows, config.query_width]), f"{name}.attended")
        y = self.matrix(f"{name}.attention.o", flat, f"{name}.o", config.hidden_size)
        return y, present[0], present[1]

    def heads(self, layer: int, x: ir.Value, which: str) -> ir.Value:
        """Queries, keys or values of each head: (1, heads, rows, head_dim); the first two normalized."""
        op, config, name = self.op, self.config, f"layers.{layer}.{which}"
        width = config.query_width if which == "q" else config.kv_width
        x = self.matrix(f"layers.{layer}.attention.{which}", x, name, width, bias=self.plan.biases)
        parts = self.point(op.Reshape(x, [1, self.plan.rows, -1, config.head_dim]), name)
        heads = self.point(op.Transpose(parts, perm=[0, 2, 1, 3]), name)
        if which == "v" or not config.qk_norm:
            return heads
        # In three dimensions: of four, the emulated Hexagon processor normalizes the wrong one at times.
        shape, count = [config.head_dim], width // config.head_dim
        flat = self.point(op.Reshape(heads, [1, count * self.plan.rows, *shape]), name)
        path = f"layers.{layer}.attention.{which}_norm"
        normed = self.rms(flat, path, f"{name}.norm", config.head_dim)
        return self.point(op.Reshape(normed, [1, count, self.plan.rows, *shape]), f"{name}.norm")

    def rotated(self, layer: int, x: ir.Value, which: str) -> ir.Value:
        op, config, rope = self.op, self.config, self.config.rope_of(layer)
        if rope is None:
            return x
        name = f"layers.{layer}.{which}{'.norm' if config.qk_norm else ''}"
        half = config.rotary_width // 2
        sizes = [half, half, rest] if (rest := config.head_dim - 2 * half) else [half, half]
        split = op.Split(x, sizes, axis=-1, _outputs=len(sizes))
        first, second, *others = (self.point(part, name) for part in split)
        products, turned = f"{name}.products", f"{name}.rotated"
        terms = [self.point(op.Mul(a, b), products) for a in (first, second) for b in self.ropes[rope]]
        left = self.point(op.Sub(terms[0], terms[3]), turned)
        right = self.point(op.Add(terms[2], terms[1]), turned)
        return self.point(op.Concat(left, right, *others, axis=-1), turned)

    def attend(self, layer: int, query: ir.Value, cache: Pair) -> ir.Value:
        op, config, plan, name = self.op, self.config, self.plan, f"layers.{layer}"
        length, kv, width = plan.capacity + plan.rows, config.num_kv_heads, config.head_dim
        group, mask = config.num_heads // kv * plan.rows, self.masks[config.is_global(layer)]
        query = self.point(op.Reshape(query, [1, kv, group, width]), f"{name}.q.queries")
        scores = self.point(op.MatMul(query, cache[0]), f"{name}.scores")
        scores = op.Reshape(scores, [1, config.num_heads, plan.rows, length])
        scores = self.point(op.Add(self.point(scores, f"{name}.scores"), mask), f"{name}.masked")
        shares = self.point(op.Softmax(scores, axis=-1), "probabilities")
        shares = self.point(op.Reshape(shares, [1, kv, group, length]), "probabilities")
        attended = self.point(op.MatMul(shares, cache[1]), f"{name}.attended")
        attended = op.Reshape(attended, [1, config.num_heads, plan.rows, width])
        return self.point(attended, f"{name}.attended")


def build_static_decoder(config: ModelConfig, plan: StaticPlan) -> ir.Model:
    """Build one graph; its weights are parameters without data, of the same names in every graph.

    Names follow the checkpoint's: ``layers.3.attention.q.weight``, ``layers.3.attn_norm.weight``.
    """
    return ir.Model(_StaticDecoder(config, plan).build(), ir_version=IR_VERSION, producer_name="edgespec")
