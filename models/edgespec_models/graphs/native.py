"""The decoder over edgespec's own operators (``runtimes/kernels``), for CPUs: five nodes a layer.

Inputs: ``input_ids`` int64 (1, n), the next tokens of s sequences, of each as many; ``past_length`` int64
(s), tokens in their caches; ``logits_rows`` int64 (r), the rows whose logits are wanted;
``past_key_values.L.key/value`` float16 (s, kv heads, capacity, head_dim), written in place, capacity a
multiple of 16. Within a key cache 16 tokens lie channel by channel.
Outputs: ``logits`` float32 (1, r, rows of the LM head); ``best_columns`` int64 (1, r), the most likely column
of each row, the lowest of equals, and ``best_probabilities`` float32 (1, r), NaN where a row has NaN or its
largest logit is not finite; ``present.L.key/value``.

Trimmed drafters with tied embeddings also have ``context_tokens`` int64 (m): m more columns of the logits.
The gains of normalizations, such as ``layers.3.attn_norm.weight``, are inputs with a default in drafters'
graphs: a session may run with others (:mod:`edgespec.learning`).

A row's bits depend neither on the other rows of a pass nor on the processor; but for the columns of
``context_tokens``, whose product is ONNX Runtime's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import onnx_ir as ir

from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.graph_contract import cache_names
from edgespec_models.bundles.weight_format import WeightFormat, tile_bytes
from edgespec_models.graphs.definition import (
    IR_VERSION,
    Decoder,
    Pair,
    add_output,
    parameter,
    tune_gains,
)
from edgespec_models.graphs.plan import DecoderPlan, module_path

__all__ = ["DOMAIN", "build_native"]

DOMAIN: Final = "edgespec"
_OPSET = 23
_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_INT64, _UINT8 = ir.DataType.INT64, ir.DataType.UINT8


class _Graph:
    """A graph that grows node by node."""

    def __init__(self) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": _OPSET, DOMAIN: 1}, name="decoder")

    def add(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int | float | str] | None = None,
        *,
        outputs: int = 1,
        domain: str = DOMAIN,
    ) -> tuple[ir.Value, ...]:
        node = ir.node(kind, list(inputs), attributes=attributes, domain=domain, num_outputs=outputs)
        self.graph.append(node)
        return tuple(node.outputs)

    def one(self, kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        """A standard operator with one output."""
        return self.add(kind, inputs, attributes, domain="")[0]

    def matrix(self, name: str, form: WeightFormat, rows: int, columns: int) -> ir.Value:
        return parameter(self.graph, name, [tile_bytes(form.tiles, rows, columns)], _UINT8)

    def input(self, name: str, kind: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
        self.graph.inputs.append(value)
        return value


@dataclass(frozen=True, slots=True)
class _Normed:
    """The stream, to be normalized with a gain by the product that reads it."""

    x: ir.Value
    gain: str


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of a sublayer, to be normalized and added by the operator that computes it."""

    name: str
    x: ir.Value
    gain: str | None = None


class _NativeDecoder(Decoder):
    def __init__(self, config: ModelConfig, plan: DecoderPlan) -> None:
        self.config, self.plan, self.g = config, plan, _Graph()

    def build(self) -> ir.Graph:
        g, config, graph = self.g, self.config, self.g.graph
        ids = g.input("input_ids", _INT64, [1, "n"])
        self.past_length = g.input("past_length", _INT64, ["s"])
        rows = g.input("logits_rows", _INT64, ["r"])
        cache: list[int | str] = ["s", config.num_kv_heads, "capacity", config.head_dim]
        names = cache_names(config.num_layers)
        past = [g.input(name, _HALF, cache) for name, _ in names]
        pairs = dict(enumerate(zip(past[::2], past[1::2], strict=True)))
        x, present = self.layers(self.embed(ids, float(config.embedding_scale)), pairs)
        logits, columns = self.head(g.one("Gather", x, rows, axis=1))
        best, likely = g.add("Choose", [logits], outputs=2)
        add_output(graph, logits, "logits", _FLOAT, [1, "r", columns])
        add_output(graph, best, "best_columns", _INT64, [1, "r"])
        add_output(graph, likely, "best_probabilities", _FLOAT, [1, "r"])
        for (_, name), value in zip(names, present, strict=True):
            add_output(graph, value, name, _HALF, cache)
        if self.plan.tunable:
            tune_gains(graph)
        return graph

    def embed(self, ids: ir.Value, factor: float) -> ir.Value:
        form, rows, width = self.plan.embedding.format, self.config.vocab_size, self.config.hidden_size
        attributes: dict[str, int | float | str] = {
            "format": form.tiles,
            "rows": rows,
            "width": width,
            "factor": factor,
        }
        table = self.g.matrix("embedding.weight", form, rows, width)
        return self.g.add("Embedding", [ids, table], attributes)[0]

    def norm(self, x: ir.Value, name: str) -> _Normed:
        return _Normed(x, name)

    def post_norm(self, y: _Product, name: str) -> _Product:
        return replace(y, gain=name)

    def add(self, x: ir.Value, y: _Product, name: str) -> ir.Value:
        return self.linear(y.name, y.x, post_gain=y.gain, residual=x)

    def attention(self, layer: int, x: _Normed, past: Pair) -> tuple[_Product, ir.Value, ir.Value]:
        config, name = self.config, f"layers.{layer}"
        packed = self.linear(f"{name}.qkv", x.x, gain=x.gain)
        tables: list[ir.Value | None] = [None, None]
        rope, shape = config.rope_of(layer), [config.context_length, config.rotary_width // 2]
        if rope is not None:
            tables = [parameter(self.g.graph, f"{rope}_{f}", shape, _FLOAT) for f in ("cos", "sin")]
        gains: list[ir.Value | None] = [None, None]
        if config.qk_norm:
            gains = [self.gain(f"{name}.attention.{each}_norm", config.head_dim) for each in ("q", "k")]
        attributes: dict[str, int | float | str] = {
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "window": config.window_of(layer) or 0,
            "interleaved": int(config.rope_interleaved),
            "scale": float(config.attention_scale),
            "epsilon": float(config.norm_epsilon),
        }
        inputs = [packed, *past, self.past_length, *tables, *gains]
        y, key, value = self.g.add("Attention", inputs, attributes, outputs=3)
        return _Product(f"{name}.o", y), key, value

    def mlp(self, layer: int, x: _Normed) -> _Product:
        gate = "silu" if self.config.activation == "silu" else "gelu"
        gated = self.linear(f"layers.{layer}.gate_up", x.x, gain=x.gain, gate=gate)
        return _Product(f"layers.{layer}.down", gated)

    def gain(self, name: str, width: int) -> ir.Value:
        return parameter(self.g.graph, f"{name}.weight", [width], _FLOAT)

    def linear(
        self,
        name: str,
        x: ir.Value,
        *,
        gain: str | None = None,
        post_gain: str | None = None,
        residual: ir.Value | None = None,
        gate: str = "",
    ) -> ir.Value:
        """``[residual +] [norm of] gate(norm(x) W + bias)``."""
        g, spec, path = self.g, self.plan.linears[name], module_path(name)
        parts, columns = spec.parts, spec.in_features
        bias = None
        if name.endswith("qkv") and self.plan.biases:
            bias = parameter(g.graph, f"{path}.bias", [spec.out_features], _FLOAT)
        tied = name == "lm_head" and self.plan.tied
        names = ["embedding.weight"] if tied else [f"{path}.parts.{i}.weight" for i in range(len(parts))]
        shapes = ((part.format, part.out_features, columns) for part in parts)
        weights = [g.matrix(at, *shape) for at, shape in zip(names, shapes, strict=True)]
        width = self.config.hidden_size
        gains = [None if each is None else self.gain(each, width) for each in (gain, post_gain)]
        attributes: dict[str, int | float | str] = {
            "inputs": columns,
            "epsilon": float(self.config.norm_epsilon),
            "gate": gate,
            "parts": ",".join(f"{part.format.tiles}:{part.out_features}" for part in parts),
        }
        return g.add("Linear", [x, gains[0], bias, gains[1], residual, *weights], attributes)[0]

    def head(self, x: ir.Value) -> tuple[ir.Value, int | str]:
        """Logits, and how many columns they have."""
        g, columns = self.g, self.plan.linears["lm_head"].out_features
        if not self.plan.context:
            return self.linear("lm_head", x, gain="final_norm"), columns
        attributes = {"axis": -1, "epsilon": float(self.config.norm_epsilon), "stash_type": 1}
        inputs = [x, self.gain("final_norm", self.config.hidden_size)]
        normed = g.add("SimplifiedLayerNormalization", inputs, attributes, domain="")[0]
        offered = self.embed(g.input("context_tokens", _INT64, ["m"]), 1.0)
        products = g.one("MatMul", normed, g.one("Transpose", offered))
        return g.one("Concat", self.linear("lm_head", normed), products, axis=-1), "columns"


def build_native(config: ModelConfig, plan: DecoderPlan) -> ir.Model:
    """Build the graph; its weights are parameters without data, for the exporter to fill.

    Matrices are uint8 tensors of tiles (:mod:`edgespec_models.bundles.weight_format`), named as
    :meth:`DecoderPlan.parts` says.
    """
    return ir.Model(_NativeDecoder(config, plan).build(), ir_version=IR_VERSION, producer_name="edgespec")
