"""The decoder over ONNX Runtime's operators: for GPUs, and as the portable form on CPUs.

Besides the inputs of every graph (:mod:`.graph_decoder`) it takes ``seqlens_k`` int32 (1) and
``total_sequence_length`` int32 (), as GroupQueryAttention defines them. The cache is (1, kv heads, capacity,
head_dim).

Graphs for GPUs (:class:`Precision`) compute in float16 and have a float16 cache. They return the best
columns, so that logits need not leave the GPU, and take ``column_order`` float32 (columns) for that: 0, -1,
-2 and so on.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from edgespec_models.bundles.config import FloatType, ModelConfig
from edgespec_models.bundles.layers import Decoder, Layer, graph_name, rotary_thetas
from edgespec_models.graphs.graph_decoder import FLOAT, INT64, GraphDecoder, scoped
from edgespec_models.graphs.linear import FLOATS, MICROSOFT, embedding, linear
from edgespec_models.graphs.plan import DecoderPlan

# CUDA's provider takes an operator only at versions that it lists, and lists all operators of older versions
# (issue microsoft/onnxruntime#27729): 20 is the first with Gelu.
_OPSETS: Mapping[FloatType, int] = MappingProxyType({"float32": 23, "float16": 20})
_INT32 = ir.DataType.INT32


def rotary_rows(config: ModelConfig) -> int:
    """Rows of the rotary tables: a pass over the context's last token may run it twice."""
    return config.context_length + 1


@dataclass(slots=True)
class _Stream:
    """The residual stream, and an addend that the next normalization adds."""

    value: ir.Value
    branch: ir.Value | None = None


def check_standard(config: ModelConfig) -> None:
    """Raise UnsupportedModelError for a model that ONNX Runtime's operators cannot compute."""
    Decoder.__init__(_StandardDecoder.__new__(_StandardDecoder), config)


class _StandardDecoder(GraphDecoder):
    medium = "ONNX Runtime's operators"

    def __init__(self, config: ModelConfig, plan: DecoderPlan) -> None:
        self.plan, self.precision = plan, plan.precision
        super().__init__(config, {"": _OPSETS[self.precision.activations], "com.microsoft": 1})
        self.builder = GraphBuilder(self.graph)
        self.op = self.builder.op
        self.floats, self.residual = FLOATS[self.precision.activations], FLOATS[self.precision.residual]

    def build(self) -> ir.Model:
        config, plan, op = self.config, self.plan, self.op
        ids = self.input("input_ids", INT64, [1, "n"])
        lengths: dict[str, list[int | str]] = {"seqlens_k": [1], "total_sequence_length": []}
        self.lengths = [self.input(name, _INT32, shape) for name, shape in lengths.items()]
        rows = self.input("logits_rows", INT64, ["r"])
        self.read_cache(plan.precision.activations)
        context = self.input("context_tokens", INT64, ["m"]) if plan.context else None
        with self.scope("", "Decoder"):
            shape = [rotary_rows(config), config.rotary_width // 2]
            self.tables = {
                rope: [self.parameter(f"{rope}_{part}", shape, self.floats) for part in ("cos", "sin")]
                for rope in rotary_thetas(config)
            }
            x = self.through_layers(self.embed(ids))
            logits = self.lm_head(op.Gather(self.norm(x, "final_norm"), rows, axis=1), context)
        columns = "columns" if plan.context else plan.linears["lm_head"].out_features
        choices = choose(op, logits, self.input("column_order", FLOAT, [columns])) if plan.choices else ()
        self.write_outputs(logits, columns, choices)
        return self.model()

    def scope(self, name: str, kind: str) -> AbstractContextManager[None]:
        return scoped(self.builder, name, f"_{kind}")

    def embedded(self, ids: ir.Value) -> ir.Value:
        shape = self.config.vocab_size, self.config.hidden_size
        return embedding(self.op, ids, self.plan.embedding, shape, self.precision.residual)

    def embed(self, ids: ir.Value) -> _Stream:
        x, scale = self.embedded(ids), self.config.embedding_scale
        return _Stream(x if scale == 1.0 else self.op.Mul(x, float(scale)))

    def add(self, x: _Stream, y: ir.Value, name: str) -> _Stream:
        return _Stream(x.value, y)

    def norm(self, x: _Stream, name: str) -> ir.Value:
        with self.scope(name.rpartition(".")[2], "StreamNorm"):
            if x.branch is None:
                y = self.rms(x.value, name, self.residual)
            else:
                weight, epsilon = self.gain(name, self.residual), self.config.norm_epsilon
                y, _, _, x.value = self.op.SkipSimplifiedLayerNormalization(
                    x.branch, x.value, weight, epsilon=epsilon, _outputs=4, **MICROSOFT
                )
            return self.op.Cast(y, to=self.floats) if self.precision.mixed else y

    def bare(self, x: _Stream, name: str) -> ir.Value:
        """The sum, by the operator behind which graphs are cut and watched; its other result is unused."""
        if x.branch is not None:
            *_, x.value = self.op.SkipSimplifiedLayerNormalization(
                x.branch, x.value, self.gain("final_norm", self.residual), _outputs=4, **MICROSOFT
            )
        return self.op.Cast(x.value, to=self.floats) if self.precision.mixed else x.value

    def post_norm(self, y: ir.Value, name: str) -> ir.Value:
        with self.scope(name.rpartition(".")[2], "Norm"):
            return self.rms(y, name, self.residual)

    def rms(self, x: ir.Value, name: str, kind: ir.DataType) -> ir.Value:
        weight, epsilon = self.gain(name, kind), self.config.norm_epsilon
        return self.op.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=epsilon, stash_type=1)

    def attention(self, layer: Layer, x: ir.Value) -> ir.Value:
        return self.to_stream(super().attention(layer, x))

    def gated_mlp(self, layer: Layer, x: ir.Value) -> ir.Value:
        return self.to_stream(super().gated_mlp(layer, x))

    def to_stream(self, y: ir.Value) -> ir.Value:
        """The output of a sublayer, in the residual stream's type."""
        return self.op.Cast(y, to=self.residual) if self.precision.mixed else y

    def attended(self, layer: Layer, x: ir.Value) -> ir.Value:
        config = self.config
        y, *new = self.op.GroupQueryAttention(
            *self.attention_inputs(layer.name, x),
            *self.past[layer.index],
            *self.lengths,
            *(() if layer.rope is None else self.tables[layer.rope]),
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            scale=config.attention_scale,
            do_rotary=int(layer.rope is not None),
            rotary_interleaved=int(config.rope_interleaved),
            # The attribute counts the current token (since microsoft/onnxruntime#25927).
            local_window_size=layer.window or -1,
            _outputs=3,
            **MICROSOFT,
        )
        self.present += new
        return y

    def attention_inputs(self, name: str, x: ir.Value) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        """Queries, keys and values, packed if nothing stands between."""
        if self.config.wide_qk_norm:
            query, key, value = (self.product(f"{name}.{which}", x) for which in "qkv")
            return self.head_norm(query, f"{name}.q_norm"), self.head_norm(key, f"{name}.k_norm"), value
        packed = self.product(f"{name}.qkv", x)
        return self.normed_heads(name, packed) if self.config.qk_norm else (packed, None, None)

    def head_norm(self, heads: ir.Value, name: str) -> ir.Value:
        with self.scope(name.rpartition(".")[2], "Norm"):
            return self.rms(heads, name, self.floats)

    def normed_heads(self, name: str, packed: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values; the first two normalized head by head."""
        config, op = self.config, self.op
        widths = [config.query_width, config.kv_width, config.kv_width]
        query, key, value = op.Split(packed, widths, axis=-1, _outputs=3)
        normed = []
        for which, x, width in (("q_norm", query, widths[0]), ("k_norm", key, widths[1])):
            apart = op.Reshape(x, [1, -1, width // config.head_dim, config.head_dim])
            normed.append(op.Reshape(self.head_norm(apart, f"{name}.{which}"), [1, -1, width]))
        return normed[0], normed[1], value

    def gated(self, layer: Layer, x: ir.Value) -> ir.Value:
        op, width = self.op, self.config.intermediate_size
        both = self.product(f"{layer.name}.gate_up", x)
        gate, up = op.Split(both, [width, width], axis=-1, _outputs=2)
        if self.config.activation == "silu":
            gate = op.QuickGelu(gate, alpha=1.0, **MICROSOFT)
        else:
            gate = op.Gelu(gate, approximate="tanh")
        return op.Mul(gate, up)

    def product(self, name: str, x: ir.Value) -> ir.Value:
        return linear(self.op, x, self.plan.linears[name], graph_name(name), self.precision.activations)

    def lm_head(self, x: ir.Value, context: ir.Value | None) -> ir.Value:
        op, logits = self.op, self.product("lm_head", x)
        if context is not None:
            rows = self.embedded(op.Unsqueeze(context, [0]))
            if self.precision.mixed:
                rows = op.Cast(rows, to=self.floats)
            logits = op.Concat(logits, op.MatMul(x, op.Transpose(rows, perm=[0, 2, 1])), axis=-1)
        return logits if self.floats == FLOAT else op.Cast(logits, to=FLOAT)


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


def build_decoder(config: ModelConfig, plan: DecoderPlan) -> ir.Model:
    """Build the graph; parameters are named as :meth:`DecoderPlan.parts` says."""
    return _StandardDecoder(config, plan).build()
