"""Where a graph of fixed shapes rounds its values, or shows them; what tells one graph from another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

__all__ = ["Points", "StaticPlan", "encoding"]

_KV = (".key", ".value")
_Pair = tuple[ir.Value, ir.Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlan:
    """One graph of a bundle.

    Attributes:
        rows: tokens of a pass.
        capacity: tokens the KV cache holds.
        all_logits: whether all rows' logits are returned, or one's.
        int8: whether weights are int8 with a scale for each output, the embedding uint16; else float32.
        biases: whether queries, keys and values have biases.
        ranges: the least and the largest value of every point, to quantize; empty for floating point.
        wide_keys: layers whose keys are rounded to 16 bits, as all other points are, and not to 8.
        watched: return every point's values too, as outputs ``NUMBER:POINT``, to find those ranges.
        parts: which parts a piece of the graph has: a layer each, the embedding with the first, and behind
            the last, as a part of their own, final norm and LM head; None has all.
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
        """Those that the graph has, of a model of so many layers."""
        return range(num_layers + 1) if self.parts is None else self.parts

    def type_at(self, name: str) -> type[np.generic]:
        """Of the integers that leave the point ``name``; of floats, where nothing is quantized."""
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


class Points:
    """Where values are quantized, or watched."""

    def __init__(self, builder: GraphBuilder, plan: StaticPlan) -> None:
        self._builder, self._plan = builder, plan
        self._encodings: dict[str, _Pair] = {}
        self.watched: list[ir.Value] = []

    @property
    def quantized(self) -> bool:
        """Whether points round."""
        return self._plan.ranges is not None

    def __call__(self, op: OpBuilder, value: ir.Value, name: str) -> ir.Value:
        """``value`` as it leaves the point ``name``; several values may share one."""
        if self.quantized:
            return op.DequantizeLinear(self.quantize(op, value, name), *self._encoding(name))
        self.watch(value, name)
        return value

    def constant(self, op: OpBuilder, value: ir.Value, name: str) -> ir.Value:
        """The same for a weight, whose values are known."""
        if not self.quantized:
            return value
        return op.DequantizeLinear(self.quantize(op, value, name), *self._encoding(name))

    def quantize(self, op: OpBuilder, value: ir.Value, name: str) -> ir.Value:
        """``value`` as integers; in floating point as it is."""
        if self.quantized:
            return op.QuantizeLinear(value, *self._encoding(name))
        return value

    def dequantize(self, op: OpBuilder, value: ir.Value, name: str) -> ir.Value:
        """What :meth:`quantize` made, back."""
        return op.DequantizeLinear(value, *self._encoding(name)) if self.quantized else value

    def watch(self, value: ir.Value, name: str) -> None:
        """Return ``value`` from the graph, if the plan says so."""
        if self._plan.watched:
            op = self._builder.op
            self.watched.append(op.Identity(value, _outputs=[f"{len(self.watched)}:{name}"]))

    def _encoding(self, name: str) -> _Pair:
        if name not in self._encodings:
            assert self._plan.ranges is not None
            kind = self._plan.type_at(name)
            assert issubclass(kind, np.unsignedinteger)
            scale, zero = encoding(*self._plan.ranges[name], kind)
            tensors = (("scale", np.array(scale)), ("zero", np.array(zero, kind)))
            first, second = (
                self._builder.initializer(ir.tensor(array, name=f"{name}.{what}"), qualify=False)
                for what, array in tensors
            )
            self._encodings[name] = first, second
        return self._encodings[name]
