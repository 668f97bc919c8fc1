"""The decoder over ONNX Runtime's operators: for GPUs, and as the portable form on CPUs.

Besides the inputs of every graph (:mod:`.graph_decoder`) it takes ``seqlens_k`` int32 (1) and
``total_sequence_length`` int32 (), as GroupQueryAttention defines them. The cache is (1, kv heads, capacity,
head_dim).

Graphs for GPUs (:class:`Precision`) compute in float16 and have a float16 cache. They return the best
columns, so that logits need not leave the GPU, and take ``column_order`` float32 (columns) for that: 0, -1,
-2 and so on.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from edgespec_models.decoders.config import FloatType
from edgespec_models.decoders.operations import XIELU, Activation, Attention, Rows
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.graphs.graph_decoder import FLOAT, INT64, GraphDecoder, scoped
from edgespec_models.graphs.linear import FLOATS, MICROSOFT, embedding, linear
from edgespec_models.graphs.plan import DecoderPlan

# CUDA's provider takes an operator only at versions that it lists, and lists all operators of older versions
# (issue microsoft/onnxruntime#27729): 20 is the first with Gelu.
_OPSETS: Mapping[FloatType, int] = MappingProxyType({"float32": 23, "float16": 20})
_INT32 = ir.DataType.INT32


def rotary_rows(config: Transformer) -> int:
    """Rows of the rotary tables: a pass over the context's last token may run it twice."""
    return config.context_length + 1


@dataclass(slots=True)
class _Stream:
    """The residual stream, and an addend that the next normalization adds."""

    value: ir.Value
    branch: ir.Value | None = None


@dataclass(frozen=True, slots=True)
class _Output:
    """The output of a sublayer in the residual stream's type."""

    value: ir.Value


class _StandardDecoder(GraphDecoder):
    medium = "ONNX Runtime's operators"
    lacks = frozenset(
        f"attention.{fact}"
        for fact in ("gates", "growth", "keys_of_another_layer", "known_rows", "norms_behind_rotation")
    ) | {"gated.squares", "gated.xielu", "post_norm.epsilon"}

    def __init__(self, config: Transformer, plan: DecoderPlan) -> None:
        self.plan, self.precision = plan, plan.precision
        super().__init__(config, {"": _OPSETS[self.precision.activations], "com.microsoft": 1})
        self.builder = GraphBuilder(self.graph)
        self.op = self.builder.op
        self.floats, self.residual = FLOATS[self.precision.activations], FLOATS[self.precision.residual]
        self.index = 0

    def build(self) -> ir.Model:
        config, plan = self.config, self.plan
        self.ids = self.input("input_ids", INT64, [1, "n"])
        lengths: dict[str, list[int | str]] = {"seqlens_k": [1], "total_sequence_length": []}
        self.lengths = [self.input(name, _INT32, shape) for name, shape in lengths.items()]
        self.rows = self.input("logits_rows", INT64, ["r"])
        self.read_cache(plan.precision.activations)
        self.context = self.input("context_tokens", INT64, ["m"]) if plan.context else None
        with scoped(self.builder, "", "_Decoder"):
            self.tables = {
                name: [
                    self.parameter(f"{name}_{part}", [rotary_rows(config), rope.width // 2], self.floats)
                    for part in ("cos", "sin")
                ]
                for name, rope in self.record.ropes.items()
            }
            config.decode(self)
        return self.model()

    @contextmanager
    def layer(self, index: int, x: _Stream) -> Iterator[_Stream]:
        self.index = index
        with scoped(self.builder, f"layers.{index}", "_Layer"), super().layer(index, x) as stream:
            yield stream

    def embed(self, rows: int, width: int, scale: float = 1.0) -> _Stream:
        self.shape_of_table = rows, width
        x = self.embedded(self.ids)
        return _Stream(x if scale == 1.0 else self.op.Mul(x, float(scale)))

    def embedded(self, ids: ir.Value) -> ir.Value:
        return embedding(self.op, ids, self.plan.embedding, self.shape_of_table, self.precision.residual)

    def add(self, x: _Stream, y: ir.Value | _Output, name: str = "") -> _Stream:
        return _Stream(x.value, self.to_stream(y))

    def to_stream(self, y: ir.Value | _Output) -> ir.Value:
        if isinstance(y, _Output):
            return y.value
        return self.op.Cast(y, to=self.residual) if self.precision.mixed else y

    def norm(self, x: _Stream, name: str) -> ir.Value:
        with scoped(self.builder, name, "_StreamNorm"):
            if x.branch is None:
                y = self.rms(x.value, name, self.residual)
            else:
                weight, epsilon = self.stored(name, self.residual), self.config.norm_epsilon
                y, _, _, x.value = self.op.SkipSimplifiedLayerNormalization(
                    x.branch, x.value, weight, epsilon=epsilon, _outputs=4, **MICROSOFT
                )
            return self.op.Cast(y, to=self.floats) if self.precision.mixed else y

    def read(self, x: ir.Value | _Stream) -> ir.Value:
        """A product's input."""
        if not isinstance(x, _Stream):
            return x
        return self.op.Cast(self.whole(x), to=self.floats) if self.precision.mixed else self.whole(x)

    def whole(self, x: _Stream) -> ir.Value:
        """A stream that nothing normalizes: a sum by the operator behind which graphs are cut and watched,
        whose other result is unused.
        """
        if x.branch is not None:
            gain = self.parameter("final_norm.weight", [self.config.hidden_size], self.residual)
            *_, x.value = self.op.SkipSimplifiedLayerNormalization(
                x.branch, x.value, gain, _outputs=4, **MICROSOFT
            )
            x.branch = None
        return x.value

    def scale(self, x: _Stream, name: str) -> _Stream:
        return _Stream(self.op.Mul(self.whole(x), self.stored(name, self.residual)))

    def post_norm(self, y: ir.Value, name: str, epsilon: float | None = None) -> _Output:
        value = self.to_stream(y)
        with scoped(self.builder, name, "_Norm"):
            return _Output(self.rms(value, name, self.residual))

    def rms(self, x: ir.Value, name: str, kind: ir.DataType) -> ir.Value:
        weight, epsilon = self.stored(name, kind), self.config.norm_epsilon
        return self.op.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=epsilon, stash_type=1)

    def attention(self, qkv: Any, facts: Attention, known: Any = None) -> ir.Value:
        more = [] if facts.rope is None else list[ir.Value | None](self.tables[facts.rope.name])
        if facts.sinks:
            more = [*(more or (None, None)), None, None, self.stored("sinks", self.floats)]
        y, *new = self.op.GroupQueryAttention(
            *self.heads(qkv, facts),
            *self.past[facts.layer],
            *self.lengths,
            *more,
            num_heads=facts.heads,
            kv_num_heads=facts.kv_heads,
            scale=facts.scale,
            do_rotary=int(facts.rope is not None),
            rotary_interleaved=int(facts.rope is not None and facts.rope.interleaved),
            # The attribute counts the current token (since microsoft/onnxruntime#25927).
            local_window_size=facts.window or -1,
            _outputs=3,
            **({} if facts.cap is None else {"softcap": facts.cap}),
            **MICROSOFT,
        )
        self.present += new
        return y

    def heads(self, qkv: Any, facts: Attention) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        """Queries, keys and values, packed if nothing stands between."""
        if facts.norms == "wide":
            query, key, value = qkv
            return self.head_norm(query, "q_norm"), self.head_norm(key, "k_norm"), value
        if not facts.norms and not facts.normed_values and facts.projections == "qkv":
            return qkv, None, None
        widths, kv_heads = [*facts.products.values()], facts.kv_heads
        query, key, *values = self.op.Split(qkv, widths, axis=-1, _outputs=len(widths))
        value = values[0] if values else key
        if facts.norms:
            query = self.normed_heads(query, "q_norm", facts.heads, facts.width)
            key = self.normed_heads(key, "k_norm", kv_heads, facts.width)
        if facts.normed_values:
            value = self.normed_heads(value, "", kv_heads, facts.width)
        return query, key, value

    def head_norm(self, heads: ir.Value, name: str) -> ir.Value:
        with scoped(self.builder, name, "_Norm"):
            return self.rms(heads, name, self.floats)

    def normed_heads(self, x: ir.Value, name: str, heads: int, width: int) -> ir.Value:
        """Each of the heads normalized; without a gain if ``name`` is empty."""
        op, apart = self.op, self.op.Reshape(x, [1, -1, heads, width])
        if name:
            normed = self.head_norm(apart, name)
        else:
            gain = op.Constant(value=ir.tensor(np.ones(width, self.floats.numpy())))
            epsilon = self.config.norm_epsilon
            normed = op.SimplifiedLayerNormalization(apart, gain, axis=-1, epsilon=epsilon, stash_type=1)
        return op.Reshape(normed, [1, -1, heads * width])

    def linear(
        self, x: Any, name: str, rows: Rows, *, biases: bool | None = False, part: str = ""
    ) -> ir.Value:
        spec = self.plan.linears[self.name(name)]
        return linear(self.op, self.read(x), spec, self.precision.activations)

    def gated(
        self, x: Any, name: str, names: tuple[str, ...], rows: int, activation: Activation | XIELU
    ) -> ir.Value:
        op, both = self.op, self.linear(x, name, dict.fromkeys(names, rows))
        gate, up = op.Split(both, [rows, rows], axis=-1, _outputs=2)
        if activation == "silu":
            gate = op.QuickGelu(gate, alpha=1.0, **MICROSOFT)
        else:
            gate = op.Gelu(gate, approximate="tanh")
        return op.Mul(gate, up)

    def wanted(self, x: _Stream) -> _Stream:
        return x  # the normalization before the LM head also adds

    def logits(self, x: _Stream, rows: int, cap: float | None = None) -> ir.Value:
        op, x_rows = self.op, self.op.Gather(self.norm(x, "final_norm"), self.rows, axis=1)
        logits = self.linear(x_rows, "lm_head", rows)
        if self.context is not None:
            offered = self.embedded(op.Unsqueeze(self.context, [0]))
            if self.precision.mixed:
                offered = op.Cast(offered, to=self.floats)
            logits = op.Concat(logits, op.MatMul(x_rows, op.Transpose(offered, perm=[0, 2, 1])), axis=-1)
        logits = logits if self.floats == FLOAT else op.Cast(logits, to=FLOAT)
        return logits if cap is None else op.Mul(op.Tanh(op.Div(logits, float(cap))), float(cap))

    def write(self, logits: ir.Value, choices: Any = None) -> None:
        plan = self.plan
        columns = "columns" if plan.context else plan.linears["lm_head"].out_features
        if plan.choices:
            choices = choose(self.op, logits, self.input("column_order", FLOAT, [columns]))
        self.write_outputs(logits, columns, choices or ())


def choose(op: OpBuilder, logits: ir.Value, order: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The most likely column of each row, the lowest of equals, and its probability.

    CUDA's ArgMax promises nothing about equals, which are frequent in float16. The value that it finds is the
    largest all the same, and the largest of ``order`` among its columns has no equal. ReduceMax took 2.4 ms
    for two rows of 49,152 columns, ArgMax 0.02 ms.
    """
    largest = op.GatherElements(logits, op.ArgMax(logits, axis=-1, keepdims=1), axis=-1)
    kept = op.Where(op.Less(logits, largest), float("-inf"), order)
    columns = op.ArgMax(kept, axis=-1, keepdims=0)
    total = op.ReduceSum(op.Exp(op.Sub(logits, largest)), [-1], keepdims=0)
    return columns, op.Reciprocal(total)


def check_standard(config: Transformer) -> None:
    """Raise UnsupportedModelError for a model that ONNX Runtime's operators cannot compute."""
    record(config).refuse(_StandardDecoder, config.architecture)


def build_decoder(config: Transformer, plan: DecoderPlan) -> ir.Model:
    """Build the graph; parameters are named as :meth:`DecoderPlan.parts` says."""
    return _StandardDecoder(config, plan).build()
