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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from edgespec_models.bundles.config import FloatType, ModelConfig
from edgespec_models.bundles.graph_contract import cache_names
from edgespec_models.graphs.definition import (
    IR_VERSION,
    Decoder,
    Pair,
    add_output,
    parameter,
    scoped,
    tune_gains,
)
from edgespec_models.graphs.linear import FLOATS, MICROSOFT, Embedding, Linear
from edgespec_models.graphs.plan import DecoderPlan

__all__ = ["build_decoder", "rotary_rows"]

# CUDA's provider takes an operator at the versions it lists only, of which the older ones are complete (issue
# microsoft/onnxruntime#27729): 20 is the first with Gelu.
_OPSETS: Mapping[FloatType, int] = MappingProxyType({"float32": 23, "float16": 20})
_INT32, _INT64 = ir.DataType.INT32, ir.DataType.INT64


def rotary_rows(config: ModelConfig) -> int:
    """Rows of the rotary tables: a pass over the context's last token may run it twice."""
    return config.context_length + 1


@dataclass(slots=True)
class _Stream:
    """The residual stream, and what is yet to be added to it: by the normalization that reads the sum."""

    value: ir.Value
    branch: ir.Value | None = None


class _StandardDecoder(Decoder):
    def __init__(self, config: ModelConfig, plan: DecoderPlan) -> None:
        self.config, self.plan, self.precision = config, plan, plan.precision
        opset = _OPSETS[plan.precision.activations]
        graph = ir.Graph([], [], nodes=[], opset_imports={"": opset, "com.microsoft": 1}, name="decoder")
        self.graph, self.builder = graph, GraphBuilder(graph)
        self.op, self.floats = self.builder.op, FLOATS[plan.precision.activations]
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, plan.embedding, plan.precision.residual, "embedding"
        )

    def build(self) -> ir.Graph:
        config, plan, op, graph, float32 = self.config, self.plan, self.op, self.graph, ir.DataType.FLOAT
        ids = self.builder.input("input_ids", _INT64, [1, "n"])
        self.seqlens_k = self.builder.input("seqlens_k", _INT32, [1])
        self.total = self.builder.input("total_sequence_length", _INT32, [])
        rows = self.builder.input("logits_rows", _INT64, ["r"])
        cache: list[int | str] = [1, config.num_kv_heads, "capacity", config.head_dim]
        names = cache_names(config.num_layers)
        past = [self.builder.input(name, self.floats, cache) for name, _ in names]
        context = self.builder.input("context_tokens", _INT64, ["m"]) if plan.context else None
        pairs = dict(enumerate(zip(past[::2], past[1::2], strict=True)))
        with self.scope("", "Decoder"):
            tables = ["rope_cos", "rope_sin", "rope_local_cos", "rope_local_sin"]
            shape = [rotary_rows(config), config.rotary_width // 2]
            wanted = tables if config.rope_local_theta is not None else tables[:2]
            self.tables = {name: parameter(graph, name, shape, self.floats) for name in wanted}
            x, present = self.layers(self.embed(ids), pairs)
            logits = self.head(op.Gather(self.norm(x, "final_norm"), rows, axis=1), context)
        columns = "columns" if plan.context else plan.linears["lm_head"].out_features
        if plan.choices:
            best, likely = _choose(op, logits, self.builder.input("column_order", float32, [columns]))
        add_output(graph, logits, "logits", float32, [1, "r", columns])
        if plan.choices:
            add_output(graph, best, "best_columns", _INT64, [1, "r"])
            add_output(graph, likely, "best_probabilities", float32, [1, "r"])
        for (_, name), value in zip(names, present, strict=True):
            add_output(graph, value, name, self.floats, cache)
        if plan.tunable:
            tune_gains(graph)
        return graph

    def scope(self, name: str, kind: str) -> AbstractContextManager[None]:
        return scoped(self.builder, name, f"_{kind}")

    def embed(self, ids: ir.Value) -> _Stream:
        x = self.embedding(self.op, ids)
        scale = self.config.embedding_scale
        return _Stream(x if scale == 1.0 else self.op.Mul(x, float(scale)))

    def add(self, x: _Stream, y: ir.Value, name: str) -> _Stream:
        return _Stream(x.value, y)

    def norm(self, x: _Stream, name: str) -> ir.Value:
        op, residual = self.op, FLOATS[self.precision.residual]
        with self.scope(name.rpartition(".")[2], "StreamNorm"):
            if x.branch is None:
                y = self.rms(x.value, name, self.config.hidden_size, residual)
            else:
                weight = parameter(self.graph, f"{name}.weight", [self.config.hidden_size], residual)
                y, _, _, x.value = op.SkipSimplifiedLayerNormalization(
                    x.branch, x.value, weight, epsilon=self.config.norm_epsilon, _outputs=4, **MICROSOFT
                )
            return op.Cast(y, to=self.floats) if self.precision.mixed else y

    def post_norm(self, y: ir.Value, name: str) -> ir.Value:
        with self.scope(name.rpartition(".")[2], "Norm"):
            return self.rms(y, name, self.config.hidden_size, FLOATS[self.precision.residual])

    def rms(self, x: ir.Value, name: str, width: int, kind: ir.DataType) -> ir.Value:
        weight = parameter(self.graph, f"{name}.weight", [width], kind)
        epsilon = self.config.norm_epsilon
        return self.op.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=epsilon, stash_type=1)

    def attention(self, layer: int, x: ir.Value, past: Pair) -> tuple[ir.Value, ir.Value, ir.Value]:
        config, name, rope = self.config, f"layers.{layer}", self.config.rope_of(layer)
        with self.scope("attention", "Attention"):
            packed = self.linear(f"{name}.qkv", x)
            query, key, value = self.heads(name, packed) if config.qk_norm else (packed, None, None)
            attended, present_key, present_value = self.op.GroupQueryAttention(
                query,
                key,
                value,
                *past,
                self.seqlens_k,
                self.total,
                *(() if rope is None else (self.tables[f"{rope}_cos"], self.tables[f"{rope}_sin"])),
                num_heads=config.num_heads,
                kv_num_heads=config.num_kv_heads,
                scale=config.attention_scale,
                do_rotary=int(rope is not None),
                rotary_interleaved=int(config.rope_interleaved),
                # The attribute counts the current token (since microsoft/onnxruntime#25927).
                local_window_size=config.window_of(layer) or -1,
                _outputs=3,
                **MICROSOFT,
            )
            y = self.linear(f"{name}.o", attended)
        return self.to_stream(y), present_key, present_value

    def heads(self, name: str, packed: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values; the first two normalized head by head."""
        config, op = self.config, self.op
        widths = [config.query_width, config.kv_width, config.kv_width]
        query, key, value = op.Split(packed, widths, axis=-1, _outputs=3)
        normed = []
        for which, x, width in (("q_norm", query, widths[0]), ("k_norm", key, widths[1])):
            apart = op.Reshape(x, [1, -1, width // config.head_dim, config.head_dim])
            with self.scope(which, "Norm"):
                apart = self.rms(apart, f"{name}.attention.{which}", config.head_dim, self.floats)
            normed.append(op.Reshape(apart, [1, -1, width]))
        return normed[0], normed[1], value

    def mlp(self, layer: int, x: ir.Value) -> ir.Value:
        width, name, op = self.config.intermediate_size, f"layers.{layer}", self.op
        with self.scope("mlp", "MLP"):
            gate, up = op.Split(self.linear(f"{name}.gate_up", x), [width, width], axis=-1, _outputs=2)
            if self.config.activation == "silu":
                gate = op.QuickGelu(gate, alpha=1.0, **MICROSOFT)
            else:
                gate = op.Gelu(gate, approximate="tanh")
            y = self.linear(f"{name}.down", op.Mul(gate, up))
        return self.to_stream(y)

    def linear(self, name: str, x: ir.Value) -> ir.Value:
        return Linear(self.plan.linears[name], self.precision.activations, name.rpartition(".")[2])(
            self.op, x
        )

    def to_stream(self, y: ir.Value) -> ir.Value:
        """What a sublayer adds, in the residual stream's type."""
        return self.op.Cast(y, to=FLOATS[self.precision.residual]) if self.precision.mixed else y

    def head(self, x: ir.Value, context: ir.Value | None) -> ir.Value:
        op, logits = self.op, self.linear("lm_head", x)
        if context is not None:
            rows = self.embedding(op, op.Unsqueeze(context, [0]))
            if self.precision.mixed:
                rows = op.Cast(rows, to=self.floats)
            logits = op.Concat(logits, op.MatMul(x, op.Transpose(rows, perm=[0, 2, 1])), axis=-1)
        return logits if self.floats == ir.DataType.FLOAT else op.Cast(logits, to=ir.DataType.FLOAT)


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
    return ir.Model(_StandardDecoder(config, plan).build(), ir_version=IR_VERSION, producer_name="edgespec")
