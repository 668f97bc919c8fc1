"""The decoder over ONNX Runtime's operators: for GPUs, and as the portable form on CPUs.

Inputs: ``input_ids`` int64 (1, n); ``seqlens_k`` int32 (1) and ``total_sequence_length`` int32 (), as
GroupQueryAttention defines them; ``logits_rows`` int64 (r), the rows whose logits are wanted;
``past_key_values.L.key/value`` float32 (1, kv heads, capacity, head_dim), written in place.
Outputs: ``logits`` float32 (1, r, rows of the LM head); ``present.L.key/value``.

Trimmed drafters with tied embeddings also have ``context_tokens`` int64 (m): m more columns of the logits.

The gains of a drafter's normalizations, such as ``layers.3.attn_norm.weight``, are inputs with a default: a
session may run with others (:mod:`edgespec.learning`).

Graphs for GPUs (:class:`Precision`) compute in float16 and have a float16 cache; logits are float32 all the
same. So that logits need not leave the GPU, two more outputs say what most readers want of them:
``best_columns`` int64 (1, r), the most likely column of each row and the lowest of equals, and
``best_probabilities`` float32 (1, r), NaN where a row has NaN or its largest logit is not finite. They take
one more input, ``column_order`` float32 (columns): 0, -1, -2 and so on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder, nn

from edgespec_models.config import FloatType, ModelConfig
from edgespec_models.graphs.linear import FLOATS, MICROSOFT, Embedding, EmbeddingSpec, Linear, LinearSpec

__all__ = ["FULL", "DecoderPlan", "Precision", "build_decoder", "rotary_rows"]

# CUDA's provider takes an operator at the versions it lists only, of which the older ones are complete (issue
# microsoft/onnxruntime#27729): 20 is the first with Gelu.
_OPSETS: Mapping[FloatType, int] = MappingProxyType({"float32": 23, "float16": 20})
_IR_VERSION = 10
_GAIN = "norm.weight"


@dataclass(frozen=True, slots=True)
class Precision:
    """What a graph computes in.

    Attributes:
        activations: projections, attention and the KV cache.
        residual: embedding, the residual stream, and the normalizations that read it or add to it. Its sums
            grow from layer to layer, in some models (Gemma 3) beyond what float16 holds.
    """

    activations: FloatType
    residual: FloatType

    @property
    def mixed(self) -> bool:
        """Whether values change their type on the way into a layer and out of it."""
        return self.activations != self.residual


FULL = Precision("float32", "float32")
"""What graphs for the CPU compute in."""


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """How each weight is stored.

    ``linears`` has ``layers.L.qkv``, ``layers.L.o``, ``layers.L.gate_up``, ``layers.L.down``, ``lm_head``.
    ``head_tokens`` names the tokens, ascending, whose rows a trimmed LM head keeps; None keeps all.
    ``context`` gives such a graph the input ``context_tokens``: tokens it can write besides, for which the
    token embedding serves as LM head. ``tunable`` lets the gains of normalizations be replaced at run time.
    """

    embedding: EmbeddingSpec
    linears: Mapping[str, LinearSpec]
    head_tokens: tuple[int, ...] | None = None
    context: bool = False
    tunable: bool = False
    precision: Precision = FULL

    @property
    def choices(self) -> bool:
        """Whether the graph says which columns are the most likely: those for GPUs do."""
        return self.precision.activations != "float32"


def rotary_rows(config: ModelConfig) -> int:
    """Rows of the rotary tables: a pass over the context's last token may run it twice."""
    return config.context_length + 1


class _Norm(nn.Module):
    """RMSNorm, with the residual addition before it where ``skip`` is given; returns (normed, sum)."""

    def __init__(self, width: int, epsilon: float, floats: FloatType) -> None:
        super().__init__()
        self.weight = nn.Parameter([width], dtype=FLOATS[floats])
        self.epsilon = epsilon

    def forward(self, op: OpBuilder, x: ir.Value, skip: ir.Value | None = None) -> tuple[ir.Value, ir.Value]:
        if skip is None:
            y = op.SimplifiedLayerNormalization(x, self.weight, axis=-1, epsilon=self.epsilon, stash_type=1)
            return y, x
        y, _, _, total = op.SkipSimplifiedLayerNormalization(
            x, skip, self.weight, epsilon=self.epsilon, _outputs=4, **MICROSOFT
        )
        return y, total


class _StreamNorm(_Norm):
    """A norm of the residual stream, for a sublayer to read."""

    def __init__(self, width: int, epsilon: float, precision: Precision) -> None:
        super().__init__(width, epsilon, precision.residual)
        self.precision = precision

    def forward(self, op: OpBuilder, x: ir.Value, skip: ir.Value | None = None) -> tuple[ir.Value, ir.Value]:
        y, total = super().forward(op, x, skip)
        return (op.Cast(y, to=FLOATS[self.precision.activations]) if self.precision.mixed else y), total


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of a pass shares."""

    seqlens_k: ir.Value
    total: ir.Value
    rope: tuple[ir.Value, ir.Value]
    local_rope: tuple[ir.Value, ir.Value] | None


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, plan: DecoderPlan) -> None:
        super().__init__()
        self.config, self.layer, floats = config, layer, plan.precision.activations
        self.qkv = Linear(plan.linears[f"layers.{layer}.qkv"], floats)
        self.o = Linear(plan.linears[f"layers.{layer}.o"], floats)
        if config.qk_norm:
            self.q_norm = _Norm(config.head_dim, config.norm_epsilon, floats)
            self.k_norm = _Norm(config.head_dim, config.norm_epsilon, floats)

    def forward(
        self, op: OpBuilder, x: ir.Value, step: _Step, past: tuple[ir.Value, ir.Value]
    ) -> list[ir.Value]:
        config = self.config
        packed = self.qkv(op, x)
        query, key, value = self._split(op, packed) if config.qk_norm else (packed, None, None)
        is_global = config.is_global(self.layer)
        rope = step.rope if is_global or step.local_rope is None else step.local_rope
        rotates = self.layer not in config.unrotated_layers
        attended, present_key, present_value = op.GroupQueryAttention(
            query,
            key,
            value,
            *past,
            step.seqlens_k,
            step.total,
            *(rope if rotates else ()),
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            scale=config.attention_scale,
            do_rotary=int(rotates),
            rotary_interleaved=int(config.rope_interleaved),
            # The attribute counts the current token (since microsoft/onnxruntime#25927).
            local_window_size=-1 if is_global or config.sliding_window is None else config.sliding_window,
            _outputs=3,
            **MICROSOFT,
        )
        return [self.o(op, attended), present_key, present_value]

    def _split(self, op: OpBuilder, packed: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        config = self.config
        widths = [config.query_width, config.kv_width, config.kv_width]
        query, key, value = op.Split(packed, widths, axis=-1, _outputs=3)
        heads = []
        for norm, x, width in ((self.q_norm, query, widths[0]), (self.k_norm, key, widths[1])):
            normed, _ = norm(op, op.Reshape(x, [1, -1, width // config.head_dim, config.head_dim]))
            heads.append(op.Reshape(normed, [1, -1, width]))
        return heads[0], heads[1], value


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, plan: DecoderPlan) -> None:
        super().__init__()
        self.config, floats = config, plan.precision.activations
        self.gate_up = Linear(plan.linears[f"layers.{layer}.gate_up"], floats)
        self.down = Linear(plan.linears[f"layers.{layer}.down"], floats)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        width = self.config.intermediate_size
        gate, up = op.Split(self.gate_up(op, x), [width, width], axis=-1, _outputs=2)
        if self.config.activation == "silu":
            gate = op.QuickGelu(gate, alpha=1.0, **MICROSOFT)
        else:
            gate = op.Gelu(gate, approximate="tanh")
        return self.down(op, op.Mul(gate, up))


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, plan: DecoderPlan) -> None:
        super().__init__()
        width, epsilon, precision = config.hidden_size, config.norm_epsilon, plan.precision
        self.post_norms, self.precision = config.post_norms, precision
        self.attn_norm = _StreamNorm(width, epsilon, precision)
        self.attention = _Attention(config, layer, plan)
        self.mlp_norm = _StreamNorm(width, epsilon, precision)
        self.mlp = _MLP(config, layer, plan)
        if config.post_norms:
            self.post_attn_norm = _Norm(width, epsilon, precision.residual)
            self.post_mlp_norm = _Norm(width, epsilon, precision.residual)

    def forward(
        self, op: OpBuilder, x: ir.Value, skip: ir.Value | None, step: _Step, past: tuple[ir.Value, ir.Value]
    ) -> list[ir.Value]:
        normed, x = self.attn_norm(op, x, skip)
        attended, key, value = self.attention(op, normed, step, past)
        attended = self._to_stream(op, attended)
        if self.post_norms:
            attended, _ = self.post_attn_norm(op, attended)
        normed, x = self.mlp_norm(op, attended, x)
        y = self._to_stream(op, self.mlp(op, normed))
        if self.post_norms:
            y, _ = self.post_mlp_norm(op, y)
        return [y, x, key, value]

    def _to_stream(self, op: OpBuilder, y: ir.Value) -> ir.Value:
        """What a sublayer adds, in the residual stream's type."""
        return op.Cast(y, to=FLOATS[self.precision.residual]) if self.precision.mixed else y


class _Decoder(nn.Module):
    def __init__(self, config: ModelConfig, plan: DecoderPlan) -> None:
        super().__init__()
        self.config, self.precision = config, plan.precision
        floats = plan.precision.activations
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, plan.embedding, plan.precision.residual
        )
        self.layers = nn.ModuleList([_Layer(config, i, plan) for i in range(config.num_layers)])
        self.final_norm = _StreamNorm(config.hidden_size, config.norm_epsilon, plan.precision)
        self.lm_head = Linear(plan.linears["lm_head"], floats)
        shape = [rotary_rows(config), config.rotary_width // 2]
        self.rope_cos, self.rope_sin = (nn.Parameter(shape, dtype=FLOATS[floats]) for _ in range(2))
        if config.rope_local_theta is not None:
            self.rope_local_cos, self.rope_local_sin = (
                nn.Parameter(shape, dtype=FLOATS[floats]) for _ in range(2)
            )

    def forward(
        self,
        op: OpBuilder,
        ids: ir.Value,
        lengths: tuple[ir.Value, ir.Value],
        rows: ir.Value,
        past: list[tuple[ir.Value, ir.Value]],
        context: ir.Value | None,
    ) -> tuple[ir.Value, list[tuple[ir.Value, ir.Value]]]:
        local = self.config.rope_local_theta is not None
        step = _Step(
            seqlens_k=lengths[0],
            total=lengths[1],
            rope=(self.rope_cos, self.rope_sin),
            local_rope=(self.rope_local_cos, self.rope_local_sin) if local else None,
        )
        x = self.embedding(op, ids)
        if self.config.embedding_scale != 1.0:
            x = op.Mul(x, float(self.config.embedding_scale))
        skip, present = None, []
        for layer, kv in zip(self.layers, past, strict=True):
            x, skip, key, value = layer(op, x, skip, step, kv)
            present.append((key, value))
        hidden, _ = self.final_norm(op, x, skip)
        hidden = op.Gather(hidden, rows, axis=1)
        logits = self.lm_head(op, hidden)
        if context is not None:
            table_rows = self.embedding(op, op.Unsqueeze(context, [0]))
            if self.precision.mixed:
                table_rows = op.Cast(table_rows, to=FLOATS[self.precision.activations])
            products = op.MatMul(hidden, op.Transpose(table_rows, perm=[0, 2, 1]))
            logits = op.Concat(logits, products, axis=-1)
        if self.precision.activations != "float32":
            logits = op.Cast(logits, to=ir.DataType.FLOAT)
        return logits, present


def _choose(op: OpBuilder, logits: ir.Value, order: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The most likely column of each row, the lowest of equals, and its probability.

    CUDA's ArgMax and TopK promise nothing about equals, of which float16 has many. The largest value is the
    same in whatever order it is looked for; so is the largest of ``order`` among the columns that have it.
    """
    largest = op.ReduceMax(logits, [-1])
    kept = op.Where(op.Less(logits, largest), float("-inf"), order)
    columns = op.Cast(op.Neg(op.ReduceMax(kept, [-1], keepdims=0)), to=ir.DataType.INT64)
    total = op.ReduceSum(op.Exp(op.Sub(logits, largest)), [-1], keepdims=0)
    return columns, op.Reciprocal(total)


def build_decoder(config: ModelConfig, plan: DecoderPlan) -> ir.Model:
    """Build the graph; its weights are parameters without data, for the exporter to fill.

    Parameter names follow the plan: ``layers.3.attention.qkv.parts.0.weight``, ``layers.3.attn_norm.weight``.
    """
    opset, floats = _OPSETS[plan.precision.activations], FLOATS[plan.precision.activations]
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset, "com.microsoft": 1}, name="decoder")
    builder = GraphBuilder(graph)
    float32, int32, int64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
    ids = builder.input("input_ids", int64, [1, "n"])
    seqlens_k = builder.input("seqlens_k", int32, [1])
    total = builder.input("total_sequence_length", int32, [])
    rows = builder.input("logits_rows", int64, ["r"])
    kv_shape: list[int | str | None] = [1, config.num_kv_heads, "capacity", config.head_dim]
    past = [
        (
            builder.input(f"past_key_values.{i}.key", floats, kv_shape),
            builder.input(f"past_key_values.{i}.value", floats, kv_shape),
        )
        for i in range(config.num_layers)
    ]
    context = builder.input("context_tokens", int64, ["m"]) if plan.context else None
    logits, present = _Decoder(config, plan)(builder.op, ids, (seqlens_k, total), rows, past, context)
    columns = "columns" if plan.context else plan.linears["lm_head"].out_features
    outputs: list[tuple[str, ir.Value, list[int | str | None]]] = [("logits", logits, [1, "r", columns])]
    if plan.choices:
        best, likely = _choose(builder.op, logits, builder.input("column_order", float32, [columns]))
        outputs += [("best_columns", best, [1, "r"]), ("best_probabilities", likely, [1, "r"])]
    for i, (key, value) in enumerate(present):
        outputs += [(f"present.{i}.key", key, kv_shape), (f"present.{i}.value", value, kv_shape)]
    for name, output, shape in outputs:
        kind = int64 if name == "best_columns" else floats if name.startswith("present.") else float32
        output.type, output.shape = ir.TensorType(kind), ir.Shape(shape)
        builder.add_output(output, name)
    if plan.tunable:
        gains = (value for name, value in graph.initializers.items() if name.endswith(_GAIN))
        graph.inputs.extend(gains)  # as inputs that have a default
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="edgespec")
