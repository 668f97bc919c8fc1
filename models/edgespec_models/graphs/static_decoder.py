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
:mod:`edgespec_export.static_weights`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder, nn

from edgespec_models.config import ModelConfig
from edgespec_models.graphs.static_points import Points, StaticPlan

__all__ = ["build_static_decoder"]

_OPSET = 23
_IR_VERSION = 10
_Pair = tuple[ir.Value, ir.Value]


class _Matrix(nn.Module):
    """A product with a matrix stored (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int, *, int8: bool, bias: bool = False) -> None:
        super().__init__()
        self.int8 = int8
        self.weight = nn.Parameter([inputs, outputs], dtype=ir.DataType.INT8 if int8 else ir.DataType.FLOAT)
        if int8:
            self.scale = nn.Parameter([outputs])
            self.zero = nn.Parameter([outputs], dtype=ir.DataType.INT8)
        self.bias = nn.Parameter([outputs]) if bias else None

    def forward(self, op: OpBuilder, x: ir.Value, name: str, points: Points) -> ir.Value:
        weight = self.weight
        if self.int8:
            weight = op.DequantizeLinear(weight, self.scale, self.zero, axis=1)
        y = points(op, op.MatMul(x, weight), f"{name}.product" if self.bias is not None else name)
        if self.bias is None:
            return y
        return points(op, op.Add(y, points.constant(op, self.bias, f"{name}.bias")), name)


class _StaticNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter([width])
        self.epsilon = epsilon

    def forward(self, op: OpBuilder, x: ir.Value, name: str, points: Points) -> ir.Value:
        if points.quantized:  # taken apart, the squares would need more than 16 bits
            weight = points.constant(op, self.weight, f"{name}.weight")
            return points(op, op.RMSNormalization(x, weight, axis=-1, epsilon=self.epsilon), name)
        mean = op.ReduceMean(op.Mul(x, x), [-1], keepdims=1)
        scaled = op.Div(x, op.Sqrt(op.Add(mean, float(self.epsilon))))
        return points(op, op.Mul(scaled, self.weight), name)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What every layer of a pass shares."""

    points: Points
    masks: Mapping[str, ir.Value]
    ropes: Mapping[str, _Pair]


class _StaticAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, plan: StaticPlan) -> None:
        super().__init__()
        self.config, self.layer, self.plan = config, layer, plan
        bias, hidden = config.architecture == "qwen2", config.hidden_size
        self.q = _Matrix(hidden, config.query_width, int8=plan.int8, bias=bias)
        self.k = _Matrix(hidden, config.kv_width, int8=plan.int8, bias=bias)
        self.v = _Matrix(hidden, config.kv_width, int8=plan.int8, bias=bias)
        self.o = _Matrix(config.query_width, hidden, int8=plan.int8)
        if config.qk_norm:
            self.q_norm = _StaticNorm(config.head_dim, config.norm_epsilon)
            self.k_norm = _StaticNorm(config.head_dim, config.norm_epsilon)

    def forward(self, op: OpBuilder, x: ir.Value, shared: _Shared, past: _Pair) -> list[ir.Value]:
        config, points, name = self.config, shared.points, f"layers.{self.layer}"
        query = self._heads(op, self.q(op, x, f"{name}.q", points), f"{name}.q", shared)
        key = self._heads(op, self.k(op, x, f"{name}.k", points), f"{name}.k", shared)
        value = self._split(op, self.v(op, x, f"{name}.v", points), f"{name}.v", points)
        turned = op.Transpose(key, perm=[0, 1, 3, 2])
        present, joined = [], []
        for new, old, kind, axis in ((turned, past[0], "key", 3), (value, past[1], "value", 2)):
            point = f"{name}.{kind}"
            present.append(points.quantize(op, new, point))
            points.watch(new, point)
            both = [points.dequantize(op, old, point), points.dequantize(op, present[-1], point)]
            whole = op.Concat(*both, axis=axis)
            joined.append(points.dequantize(op, points.quantize(op, whole, point), point))
        attended = self._attend(op, query, (joined[0], joined[1]), shared)
        back = points(op, op.Transpose(attended, perm=[0, 2, 1, 3]), f"{name}.attended")
        flat = points(op, op.Reshape(back, [1, self.plan.rows, config.query_width]), f"{name}.attended")
        return [self.o(op, flat, f"{name}.o", points), *present]

    def _split(self, op: OpBuilder, x: ir.Value, name: str, points: Points) -> ir.Value:
        """(1, rows, heads * head_dim) to (1, heads, rows, head_dim)."""
        parts = points(op, op.Reshape(x, [1, self.plan.rows, -1, self.config.head_dim]), name)
        return points(op, op.Transpose(parts, perm=[0, 2, 1, 3]), name)

    def _heads(self, op: OpBuilder, x: ir.Value, name: str, shared: _Shared) -> ir.Value:
        config, points = self.config, shared.points
        heads = self._split(op, x, name, points)
        if config.qk_norm:
            heads, name = self._normed(op, heads, name, points), f"{name}.norm"
        if self.layer in config.unrotated_layers:
            return heads
        local = not config.is_global(self.layer) and "rope_local" in shared.ropes
        return self._rotate(op, heads, name, (points, shared.ropes["rope_local" if local else "rope"]))

    def _normed(self, op: OpBuilder, heads: ir.Value, name: str, points: Points) -> ir.Value:
        """In three dimensions: of four, the emulated Hexagon processor normalizes the wrong one at times."""
        norm, count = (self.k_norm, self.config.num_kv_heads)
        if name.endswith(".q"):
            norm, count = self.q_norm, self.config.num_heads
        width = self.config.head_dim
        flat = points(op, op.Reshape(heads, [1, count * self.plan.rows, width]), name)
        normed = norm(op, flat, f"{name}.norm", points)
        return points(op, op.Reshape(normed, [1, count, self.plan.rows, width]), f"{name}.norm")

    def _rotate(self, op: OpBuilder, x: ir.Value, name: str, how: tuple[Points, _Pair]) -> ir.Value:
        points, (cos, sin) = how
        half, width = self.config.rotary_width // 2, self.config.head_dim
        rest = width - 2 * half
        sizes = [half, half, rest] if rest else [half, half]
        first, second, *others = (
            points(op, part, name) for part in op.Split(x, sizes, axis=-1, _outputs=len(sizes))
        )
        product, turned = f"{name}.products", f"{name}.rotated"
        terms = [points(op, op.Mul(a, b), product) for a in (first, second) for b in (cos, sin)]
        left = points(op, op.Sub(terms[0], terms[3]), turned)
        right = points(op, op.Add(terms[2], terms[1]), turned)
        return points(op, op.Concat(left, right, *others, axis=-1), turned)

    def _attend(self, op: OpBuilder, query: ir.Value, cache: _Pair, shared: _Shared) -> ir.Value:
        config, plan, points = self.config, self.plan, shared.points
        name, length = f"layers.{self.layer}", plan.capacity + plan.rows
        group = config.num_heads // config.num_kv_heads * plan.rows
        sliding = not config.is_global(self.layer)
        mask = shared.masks["sliding_mask" if sliding else "attention_mask"]
        asked = f"{name}.q.queries"
        query = points(op, op.Reshape(query, [1, config.num_kv_heads, group, config.head_dim]), asked)
        scores = points(op, op.MatMul(query, cache[0]), f"{name}.scores")
        scores = op.Reshape(scores, [1, config.num_heads, plan.rows, length])
        scores = points(op, op.Add(points(op, scores, f"{name}.scores"), mask), f"{name}.masked")
        shares = points(op, op.Softmax(scores, axis=-1), "probabilities")
        shares = points(op, op.Reshape(shares, [1, config.num_kv_heads, group, length]), "probabilities")
        attended = points(op, op.MatMul(shares, cache[1]), f"{name}.attended")
        attended = op.Reshape(attended, [1, config.num_heads, plan.rows, config.head_dim])
        return points(op, attended, f"{name}.attended")


class _StaticMLP(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, plan: StaticPlan) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gelu, self.point = config.activation != "silu", f"layers.{layer}"
        self.gate = _Matrix(hidden, width, int8=plan.int8)
        self.up = _Matrix(hidden, width, int8=plan.int8)
        self.down = _Matrix(width, hidden, int8=plan.int8)

    def forward(self, op: OpBuilder, x: ir.Value, points: Points) -> ir.Value:
        name = self.point
        gate = self.gate(op, x, f"{name}.gate", points)
        if self.gelu:
            gate = op.Gelu(gate, approximate="tanh")
        else:
            gate = op.Mul(gate, points(op, op.Sigmoid(gate), "probabilities"))
        gate = points(op, gate, f"{name}.gated")
        up = self.up(op, x, f"{name}.up", points)
        return self.down(op, points(op, op.Mul(gate, up), f"{name}.mlp"), f"{name}.down", points)


class _StaticLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, plan: StaticPlan) -> None:
        super().__init__()
        self.point, self.post_norms = f"layers.{layer}", config.post_norms
        width, epsilon = config.hidden_size, config.norm_epsilon
        self.attn_norm = _StaticNorm(width, epsilon)
        self.attention = _StaticAttention(config, layer, plan)
        self.mlp_norm = _StaticNorm(width, epsilon)
        self.mlp = _StaticMLP(config, layer, plan)
        if config.post_norms:
            self.post_attn_norm = _StaticNorm(width, epsilon)
            self.post_mlp_norm = _StaticNorm(width, epsilon)

    def forward(self, op: OpBuilder, x: ir.Value, shared: _Shared, past: _Pair) -> list[ir.Value]:
        points, name = shared.points, self.point
        normed = self.attn_norm(op, x, f"{name}.attn_norm", points)
        y, key, value = self.attention(op, normed, shared, past)
        if self.post_norms:
            y = self.post_attn_norm(op, y, f"{name}.post_attn_norm", points)
        x = points(op, op.Add(x, y), f"{name}.middle")
        y = self.mlp(op, self.mlp_norm(op, x, f"{name}.mlp_norm", points), points)
        if self.post_norms:
            y = self.post_mlp_norm(op, y, f"{name}.post_mlp_norm", points)
        return [points(op, op.Add(x, y), f"{name}.residual"), key, value]


class _StaticDecoder(nn.Module):
    def __init__(self, config: ModelConfig, plan: StaticPlan) -> None:
        super().__init__()
        self.config, self.plan, self.parts = config, plan, plan.parts_of(config.num_layers)
        kind = ir.DataType.UINT16 if plan.int8 else ir.DataType.FLOAT
        if 0 in self.parts:
            self.embedding = nn.Parameter([config.vocab_size, config.hidden_size], dtype=kind)
            if plan.int8:
                self.embedding_scale = nn.Parameter([])
                self.embedding_zero = nn.Parameter([], dtype=kind)
        self.layers = nn.ModuleList([_StaticLayer(config, i, plan) for i in range(config.num_layers)])
        self.final_norm = _StaticNorm(config.hidden_size, config.norm_epsilon)
        self.lm_head = _Matrix(config.hidden_size, config.vocab_size, int8=plan.int8)

    def forward(
        self,
        op: OpBuilder,
        start: ir.Value,
        wanted: ir.Value | None,
        shared: _Shared,
        past: Mapping[int, _Pair],
    ) -> tuple[ir.Value, list[ir.Value]]:
        """From token ids, or the residual stream before the first part, to logits or the stream."""
        points, present = shared.points, list[ir.Value]()
        if 0 in self.parts:
            x = self._embed(op, start, points)
        else:
            x = points(op, start, f"layers.{self.parts.start - 1}.residual")
        for layer, kv in past.items():
            x, key, value = self.layers[layer](op, x, shared, kv)
            present += [key, value]
        if self.config.num_layers not in self.parts:
            return x, present
        x = self.final_norm(op, x, "final_norm", points)
        if wanted is not None:
            # A product, since Qualcomm's compiler fails on a Gather of rows.
            x = points(op, op.MatMul(wanted, x), "final_norm")
        return self.lm_head(op, x, "logits", points), present

    def _embed(self, op: OpBuilder, ids: ir.Value, points: Points) -> ir.Value:
        if self.plan.int8:
            stored = self.embedding_scale, self.embedding_zero
            x = op.Gather(op.DequantizeLinear(self.embedding, *stored), ids, axis=0)
            if points.quantized:  # Qualcomm's compiler wants rows with the table's own encoding
                x = op.DequantizeLinear(op.QuantizeLinear(x, *stored), *stored)
        else:
            x = op.Gather(self.embedding, ids, axis=0)
        if self.config.embedding_scale == 1.0:
            return x
        factor = op.Constant(value_float=float(self.config.embedding_scale))
        return points(op, op.Mul(x, points.constant(op, factor, "embedding_scale")), "embedded")


def build_static_decoder(config: ModelConfig, plan: StaticPlan) -> ir.Model:
    """Build one graph; its weights are parameters without data, of the same names in every graph.

    Names follow the checkpoint's: ``layers.3.attention.q.weight``, ``layers.3.attn_norm.weight``.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": _OPSET}, name="decoder")
    builder = GraphBuilder(graph)
    points = Points(builder, plan)
    ids = builder.input("input_ids", ir.DataType.INT32, [1, plan.rows])
    shared = _Shared(points, _masks(builder, config, plan, points), _ropes(builder, config, plan, points))
    wanted = None
    if not plan.all_logits:
        wanted = builder.input("wanted_rows", ir.DataType.FLOAT, [1, 1, plan.rows])
        wanted = points(builder.op, wanted, "probabilities")
    past, parts, start = _past(builder, config, plan), plan.parts_of(config.num_layers), ids
    stream = [1, plan.rows, config.hidden_size]
    if 0 not in parts:
        start = builder.input("residual_in", ir.DataType.FLOAT, stream)
    end, present = _StaticDecoder(config, plan)(builder.op, start, wanted, shared, past)
    if config.num_layers in parts:
        _output(builder, end, "logits", [1, plan.rows if plan.all_logits else 1, config.vocab_size])
    else:
        _output(builder, end, "residual_out", stream)
    shapes = [
        [1, config.num_kv_heads, *s] for s in ([config.head_dim, plan.rows], [plan.rows, config.head_dim])
    ]
    for index, value in enumerate(present):
        name = f"present.{parts.start + index // 2}.{'key' if index % 2 == 0 else 'value'}"
        _output(builder, value, name, shapes[index % 2], _cache_type(plan, name))
    for value in points.watched:
        assert value.name is not None
        _output(builder, value, value.name, None)
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="edgespec")


def _masks(
    builder: GraphBuilder, config: ModelConfig, plan: StaticPlan, points: Points
) -> dict[str, ir.Value]:
    kinds = {config.is_global(layer) for layer in range(config.num_layers)}
    shape = [1, 1, plan.rows, plan.capacity + plan.rows]
    names = {True: "attention_mask", False: "sliding_mask"}
    found = {}
    for is_global in sorted(kinds):
        mask = builder.input(names[is_global], ir.DataType.FLOAT, shape)
        found[names[is_global]] = points(builder.op, mask, "mask")
    return found


def _ropes(builder: GraphBuilder, config: ModelConfig, plan: StaticPlan, points: Points) -> dict[str, _Pair]:
    shape = [1, 1, plan.rows, config.rotary_width // 2]
    found = {}
    for name in ("rope", "rope_local") if config.rope_local_theta is not None else ("rope",):
        cos, sin = (builder.input(f"{name}_{part}", ir.DataType.FLOAT, shape) for part in ("cos", "sin"))
        found[name] = points(builder.op, cos, "rope"), points(builder.op, sin, "rope")
    return found


def _past(builder: GraphBuilder, config: ModelConfig, plan: StaticPlan) -> dict[int, _Pair]:
    """Of each layer that the graph has."""
    heads, width, capacity = config.num_kv_heads, config.head_dim, plan.capacity
    shapes = {"key": [1, heads, width, capacity], "value": [1, heads, capacity, width]}

    def tensor(layer: int, kind: str) -> ir.Value:
        name = f"past_key_values.{layer}.{kind}"
        return builder.input(name, _cache_type(plan, name), shapes[kind])

    layers = [part for part in plan.parts_of(config.num_layers) if part < config.num_layers]
    return {layer: (tensor(layer, "key"), tensor(layer, "value")) for layer in layers}


def _cache_type(plan: StaticPlan, name: str) -> ir.DataType:
    """Of the input or output ``name``, which ends in layer and kind."""
    layer, kind = name.split(".")[1:]
    return ir.DataType.from_numpy(np.dtype(plan.type_at(f"layers.{layer}.{kind}")))


def _output(
    builder: GraphBuilder,
    value: ir.Value,
    name: str,
    shape: list[int] | None,
    kind: ir.DataType = ir.DataType.FLOAT,
) -> None:
    value.type = ir.TensorType(kind)
    value.shape = None if shape is None else ir.Shape(shape)
    builder.add_output(value, name)
