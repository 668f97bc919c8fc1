"""The decoder over edgespec's own operators (``runtimes/kernels``), for CPUs: five nodes a layer.

Inputs: ``input_ids`` int64 (1, n); ``past_length`` int64 (1), tokens in the cache; ``logits_rows`` int64 (r),
the rows whose logits are wanted; ``past_key_values.L.key/value`` float16 (1, kv heads, capacity, head_dim),
written in place, capacity a multiple of 16. Within a key cache 16 tokens lie channel by channel.
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
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from edgespec_models.config import ModelConfig
from edgespec_models.graphs.names import module_path
from edgespec_models.tiles import tile_bytes

__all__ = ["DOMAIN", "Matrix", "NativePlan", "build_native"]

DOMAIN: Final = "edgespec"
_OPSET, _IR_VERSION = 23, 10
_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_INT64, _UINT8 = ir.DataType.INT64, ir.DataType.UINT8


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the checkpoint as it is stored: its name there, its format, its rows and columns."""

    source: str
    format: str
    rows: int
    columns: int

    @property
    def n_bytes(self) -> int:
        """Bytes of its tiles."""
        return tile_bytes(self.format, self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class NativePlan:
    """How each weight is stored.

    Attributes:
        embedding: the token embedding.
        linears: the matrices of ``layers.L.qkv``, ``layers.L.o``, ``layers.L.gate_up``, ``layers.L.down`` and
            ``lm_head``, whose products stand side by side. The embedding's own matrix as LM head is stored
            once.
        biases: whether queries, keys and values have biases.
        tunable: whether gains may be replaced at run time.
        head_tokens: the tokens, ascending, whose rows a trimmed LM head keeps; None keeps all.
        context: give such a graph ``context_tokens``, for which the embedding serves as LM head.
    """

    embedding: Matrix
    linears: Mapping[str, tuple[Matrix, ...]]
    biases: bool = False
    tunable: bool = False
    head_tokens: tuple[int, ...] | None = None
    context: bool = False

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding's matrix."""
        return self.linears["lm_head"] == (self.embedding,)

    def matrices(self) -> dict[str, Matrix]:
        """Every stored matrix by its parameter's name."""
        named = {"embedding.weight": self.embedding}
        for linear, parts in self.linears.items():
            if linear == "lm_head" and self.tied:
                continue
            path = module_path(linear)
            named |= {f"{path}.parts.{index}.weight": part for index, part in enumerate(parts)}
        return named


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

    def parameter(self, name: str, shape: Sequence[int], kind: ir.DataType = _FLOAT) -> ir.Value:
        known = self.graph.initializers.get(name)
        if known is not None:
            return known
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
        self.graph.initializers[name] = value
        return value

    def matrix(self, name: str, matrix: Matrix) -> ir.Value:
        return self.parameter(name, [matrix.n_bytes], _UINT8)

    def input(self, name: str, kind: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, kind: ir.DataType, shape: Sequence[int | str]) -> None:
        value.name, value.type, value.shape = name, ir.TensorType(kind), ir.Shape(shape)
        self.graph.outputs.append(value)


class _Decoder:
    def __init__(self, config: ModelConfig, plan: NativePlan) -> None:
        self.config, self.plan, self.g = config, plan, _Graph()

    def build(self) -> ir.Graph:
        g, config, plan = self.g, self.config, self.plan
        ids = g.input("input_ids", _INT64, [1, "n"])
        self.past_length = g.input("past_length", _INT64, [1])
        rows = g.input("logits_rows", _INT64, ["r"])
        cache: list[int | str] = [1, config.num_kv_heads, "capacity", config.head_dim]
        present = []
        x = self.embed(ids, float(config.embedding_scale))
        for layer in range(config.num_layers):
            names = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
            past = [g.input(name, _HALF, cache) for name in names]
            x, *kept = self.layer(layer, x, past)
            present.append(kept)
        logits, columns = self.head(g.one("Gather", x, rows, axis=1))
        best, likely = g.add("Choose", [logits], outputs=2)
        g.output(logits, "logits", _FLOAT, [1, "r", columns])
        g.output(best, "best_columns", _INT64, [1, "r"])
        g.output(likely, "best_probabilities", _FLOAT, [1, "r"])
        for layer, kept in enumerate(present):
            for kind, value in zip(("key", "value"), kept, strict=True):
                g.output(value, f"present.{layer}.{kind}", _HALF, cache)
        if plan.tunable:
            gains = [value for name, value in g.graph.initializers.items() if name.endswith("norm.weight")]
            g.graph.inputs.extend(gains)  # as inputs that have a default
        return g.graph

    def embed(self, ids: ir.Value, factor: float) -> ir.Value:
        table = self.plan.embedding
        attributes: dict[str, int | float | str] = {
            "format": table.format,
            "rows": table.rows,
            "width": table.columns,
            "factor": factor,
        }
        return self.g.add("Embedding", [ids, self.g.matrix("embedding.weight", table)], attributes)[0]

    def gain(self, name: str, width: int | None = None) -> ir.Value:
        return self.g.parameter(f"{name}.weight", [width or self.config.hidden_size])

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
        g, parts, path = self.g, self.plan.linears[name], module_path(name)
        bias = None
        if name.endswith("qkv") and self.plan.biases:
            bias = g.parameter(f"{path}.bias", [sum(part.rows for part in parts)])
        tied = name == "lm_head" and self.plan.tied
        names = ["embedding.weight"] if tied else [f"{path}.parts.{i}.weight" for i in range(len(parts))]
        weights = [g.matrix(at, part) for at, part in zip(names, parts, strict=True)]
        gains = [None if each is None else self.gain(each) for each in (gain, post_gain)]
        attributes: dict[str, int | float | str] = {
            "inputs": parts[0].columns,
            "epsilon": float(self.config.norm_epsilon),
            "gate": gate,
            "parts": ",".join(f"{part.format}:{part.rows}" for part in parts),
        }
        return g.add("Linear", [x, gains[0], bias, gains[1], residual, *weights], attributes)[0]

    def attention(self, layer: int, packed: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        config, name = self.config, f"layers.{layer}.attention"
        is_global, half = config.is_global(layer), config.rotary_width // 2
        tables: list[ir.Value | None] = [None, None]
        if layer not in config.unrotated_layers:
            kind = "rope" if is_global or config.rope_local_theta is None else "rope_local"
            tables = [self.g.parameter(f"{kind}_{f}", [config.context_length, half]) for f in ("cos", "sin")]
        gains: list[ir.Value | None] = [None, None]
        if config.qk_norm:
            gains = [self.gain(f"{name}.{each}_norm", config.head_dim) for each in ("q", "k")]
        attributes: dict[str, int | float | str] = {
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "window": 0 if is_global or config.sliding_window is None else config.sliding_window,
            "interleaved": int(config.rope_interleaved),
            "scale": float(config.attention_scale),
            "epsilon": float(config.norm_epsilon),
        }
        inputs = [packed, *past, self.past_length, *tables, *gains]
        return self.g.add("Attention", inputs, attributes, outputs=3)

    def layer(self, layer: int, x: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        name, post = f"layers.{layer}", self.config.post_norms
        after = [f"{name}.post_{each}_norm" if post else None for each in ("attn", "mlp")]
        packed = self.linear(f"{name}.qkv", x, gain=f"{name}.attn_norm")
        attended, key, value = self.attention(layer, packed, past)
        x = self.linear(f"{name}.o", attended, post_gain=after[0], residual=x)
        gate = "silu" if self.config.activation == "silu" else "gelu"
        gated = self.linear(f"{name}.gate_up", x, gain=f"{name}.mlp_norm", gate=gate)
        return self.linear(f"{name}.down", gated, post_gain=after[1], residual=x), key, value

    def head(self, x: ir.Value) -> tuple[ir.Value, int | str]:
        """Logits, and how many columns they have."""
        g, columns = self.g, sum(part.rows for part in self.plan.linears["lm_head"])
        if not self.plan.context:
            return self.linear("lm_head", x, gain="final_norm"), columns
        attributes = {"axis": -1, "epsilon": float(self.config.norm_epsilon), "stash_type": 1}
        inputs = [x, self.gain("final_norm")]
        normed = g.add("SimplifiedLayerNormalization", inputs, attributes, domain="")[0]
        offered = self.embed(g.input("context_tokens", _INT64, ["m"]), 1.0)
        products = g.one("MatMul", normed, g.one("Transpose", offered))
        return g.one("Concat", self.linear("lm_head", normed), products, axis=-1), "columns"


def build_native(config: ModelConfig, plan: NativePlan) -> ir.Model:
    """Build the graph; its weights are parameters without data, for the exporter to fill.

    Matrices are uint8 tensors of tiles (:mod:`edgespec_models.tiles`), named as
    :meth:`NativePlan.matrices` says.
    """
    return ir.Model(_Decoder(config, plan).build(), ir_version=_IR_VERSION, producer_name="edgespec")
