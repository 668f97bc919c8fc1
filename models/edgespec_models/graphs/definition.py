"""What a decoder computes: the one definition, whatever operators its graph has.

:class:`Decoder` says what follows what. What nodes that takes is a backend's: edgespec's own operators
(:mod:`.native`), ONNX Runtime's (:mod:`.decoder`), or standard ones of fixed shapes (:mod:`.static_decoder`).
What goes from one part to the next may be more than a value of the graph, where a backend's operators fuse
what stands apart here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import onnx_ir as ir
from onnxscript import GraphBuilder

from edgespec_models.bundles.config import ModelConfig

__all__ = ["IR_VERSION", "Decoder", "Pair", "add_output", "parameter", "scoped", "tune_gains"]

IR_VERSION = 10
Pair = tuple[ir.Value, ir.Value]
_GAIN = "norm.weight"


class Decoder(ABC):
    """A backend's nodes for the parts of a decoder; ``name`` is a part's, such as ``layers.3.attn_norm``."""

    config: ModelConfig

    def layers(self, x: Any, past: Mapping[int, Pair]) -> tuple[Any, list[ir.Value]]:
        """The residual stream ``x`` behind the layers of ``past``, and the keys and values these leave."""
        present: list[ir.Value] = []
        for layer, kept in past.items():
            name = f"layers.{layer}"
            with self.scope(name, "Layer"):
                y, *new = self.attention(layer, self.norm(x, f"{name}.attn_norm"), kept)
                x = self.add(x, self.after(y, f"{name}.post_attn_norm"), f"{name}.middle")
                y = self.mlp(layer, self.norm(x, f"{name}.mlp_norm"))
                x = self.add(x, self.after(y, f"{name}.post_mlp_norm"), f"{name}.residual")
            present += new
        return x, present

    def after(self, y: Any, name: str) -> Any:
        """What a sublayer adds: normalized, in models that do so."""
        return self.post_norm(y, name) if self.config.post_norms else y

    def scope(self, name: str, kind: str) -> AbstractContextManager[None]:
        """Name the nodes within after a part; backends may leave them without names."""
        return nullcontext()

    @abstractmethod
    def norm(self, x: Any, name: str) -> Any:
        """The residual stream, normalized for a sublayer to read."""

    @abstractmethod
    def post_norm(self, y: Any, name: str) -> Any:
        """What a sublayer adds, normalized."""

    @abstractmethod
    def attention(self, layer: int, x: Any, past: Pair) -> tuple[Any, ir.Value, ir.Value]:
        """What attention adds to the stream; keys and values for the cache."""

    @abstractmethod
    def mlp(self, layer: int, x: Any) -> Any:
        """What the MLP adds to the stream."""

    @abstractmethod
    def add(self, x: Any, y: Any, name: str) -> Any:
        """The stream with what a sublayer adds."""


def parameter(graph: ir.Graph, name: str, shape: Sequence[int], kind: ir.DataType) -> ir.Value:
    """A weight of ``graph``, without data yet; the same value for the same name."""
    if name not in graph.initializers:
        graph.initializers[name] = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
    return graph.initializers[name]


def add_output(
    graph: ir.Graph, value: ir.Value, name: str, kind: ir.DataType, shape: Sequence[int | str] | None
) -> None:
    """Make ``value`` an output called ``name``."""
    value.name, value.type = name, ir.TensorType(kind)
    value.shape = None if shape is None else ir.Shape(shape)
    graph.outputs.append(value)


def tune_gains(graph: ir.Graph) -> None:
    """List the gains of normalizations as inputs too, whose stored values are defaults (ONNX IR)."""
    graph.inputs.extend(value for name, value in graph.initializers.items() if name.endswith(_GAIN))


@contextmanager
def scoped(builder: GraphBuilder, name: str, kind: str) -> Iterator[None]:
    """Let ``builder`` name its nodes after a part, as onnxscript's modules do."""
    builder.push_module(name, kind)
    try:
        yield
    finally:
        builder.pop_module()
