"""The common part of decoders whose operations are nodes of a graph: inputs, parameters, outputs.

Graphs of any shape take ``input_ids`` int64 (1, n), ``logits_rows`` int64 (r), the rows whose logits are
wanted, and the KV cache, ``past_key_values.L.key/value``, written in place; further inputs hold the cache's
length. They return ``logits`` float32 (1, r, columns) and the cache, ``present.L.key/value``. Some return the
choice beside the logits: ``best_columns`` int64 (1, r) is the most likely column of each row, the lowest of
equals, and ``best_probabilities`` float32 (1, r) its probability, NaN where a row has NaN or its largest
logit is not finite. Trimmed drafters with tied embeddings also take ``context_tokens`` int64 (m): m more
columns of the logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import onnx_ir as ir
from onnxscript import GraphBuilder

from edgespec_models.decoders.kept import KeptTensor, KeptType
from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer

FLOAT: Final = ir.DataType.FLOAT
INT64: Final = ir.DataType.INT64
IR_VERSION: Final = 10


class GraphDecoder(Backend):
    """A decoder as a graph, whose weights are parameters without data, for the exporter to fill.

    ``past`` has the kept tensors of each layer before the pass, ``present`` all of them after it.
    """

    reads_blocks = False  # of the cache, by a table; else it is one buffer a tensor

    def __init__(self, config: Transformer, opsets: dict[str, int]) -> None:
        super().__init__()
        self.config, self.record = config, record(config)
        self.record.refuse(type(self), config.architecture)
        self.graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name="decoder")
        self.weights = self.graph  # the graph that has parameters
        self.past: dict[int, list[ir.Value]] = {}
        self.present: list[ir.Value] = []

    def input(self, name: str, kind: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """An input of the graph."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
        self.graph.inputs.append(value)
        return value

    def parameter(self, name: str, shape: Sequence[int], kind: ir.DataType = FLOAT) -> ir.Value:
        """A weight; the same value for the same name."""
        return parameter(self.weights, name, shape, kind)

    def stored(self, name: str, kind: ir.DataType = FLOAT) -> ir.Value:
        """The small parameter that begins with the tensor ``name``, such as a gain."""
        parameter = self.record.parameters[self.name(name)]
        return self.parameter(parameter.path, parameter.shape, kind)

    def output(
        self, value: ir.Value, name: str, kind: ir.DataType, shape: Sequence[int | str] | None
    ) -> None:
        """Make ``value`` an output called ``name``."""
        value.name, value.type = name, ir.TensorType(kind)
        value.shape = None if shape is None else ir.Shape(shape)
        self.graph.outputs.append(value)

    def read_cache(self, kind: KeptType) -> None:
        """Give every layer its kept tensors, in a cache that is written in place."""
        self.kept = self.record.kept_in(kind)
        for tensor in (*self.kept, *self.record.read_in(kind)):
            self.past.setdefault(tensor.layer, []).append(self.input(tensor.input, *self.type_of(tensor)))

    def write_outputs(self, logits: ir.Value, columns: int | str, choices: Sequence[ir.Value]) -> None:
        """Return logits, the most likely column of each row and its probability, and the cache."""
        self.output(logits, "logits", FLOAT, [1, "r", columns])
        for value, name, kind in zip(
            choices, ("best_columns", "best_probabilities"), (INT64, FLOAT), strict=False
        ):
            self.output(value, name, kind, [1, "r"])
        for tensor, value in zip(self.kept, self.present, strict=True):
            self.output(value, tensor.output, *self.type_of(tensor))

    def type_of(self, tensor: KeptTensor) -> tuple[ir.DataType, list[int | str]]:
        """The type of a kept tensor's value."""
        shape: list[int | str] = ["slots", *tensor.shape]
        if tensor.per != "sequence":
            shape = ["extents" if tensor.per == "token" else "blocks", *tensor.of_blocks(0)[1:]]
            if not self.reads_blocks:
                shape = [*tensor.of_tokens(0)[:2], "capacity", tensor.shape[1]]
        return ir.DataType.from_numpy(tensor.dtype), shape

    def model(self) -> ir.Model:
        """The finished graph."""
        return ir.Model(self.graph, ir_version=IR_VERSION, producer_name="edgespec")


def parameter(graph: ir.Graph, name: str, shape: Sequence[int], kind: ir.DataType) -> ir.Value:
    """A weight of ``graph``, without data yet; the same value for the same name."""
    if name not in graph.initializers:
        graph.initializers[name] = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
    return graph.initializers[name]


@contextmanager
def scoped(builder: GraphBuilder, name: str, kind: str) -> Iterator[None]:
    """Have ``builder`` name its nodes after a part, as onnxscript's modules do."""
    builder.push_module(name, kind)
    try:
        yield
    finally:
        builder.pop_module()
