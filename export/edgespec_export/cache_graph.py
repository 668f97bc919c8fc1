"""Where a decoder graph that concatenates its KV cache computes attention, layer by layer.

PyTorch's exporter writes attention out: keys and values grow by ``Concat``; a product, scale, mask,
``Softmax`` and another product follow, with whatever each architecture puts between. Only the ends of that
are looked for here. What lies between is taken for what it computes (:mod:`edgespec_export.cache_probe`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import onnx

from edgespec_models.graph_tensors import CacheTensor

__all__ = ["Attention", "GraphIndex", "UnsuitableError", "find_attention"]

_AXIS = (2, -2)  # tokens, of (batch, heads, tokens, width)
_HANDING_ON = ("Cast", "Identity")


class UnsuitableError(Exception):
    """Why a graph's attention is left as it is; never leaves the exporter."""


class GraphIndex:
    """Who writes and who reads each value of a graph.

    Args:
        graph: which is not changed while the index is used.

    Attributes:
        graph: as given.
        writer: the node that writes a value.
        weights: initializers by name.
        inputs: names of the graph's inputs.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.writer = {name: node for node in graph.node for name in node.output}
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = {value.name for value in graph.input} - self.weights.keys()
        self._readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                self._readers[name].append(node)

    def readers(self, value: str) -> list[onnx.NodeProto]:
        """Nodes that read what ``value`` holds; not those that ask for its shape."""
        return [node for node in self._readers.get(value, ()) if node.op_type != "Shape"]

    def next(self, value: str, kind: str) -> tuple[onnx.NodeProto, int]:
        """The one node of ``kind`` that all paths from ``value`` lead to, and the input they enter by.

        Raises:
            UnsuitableError: there is none, or more than one.
        """
        found: dict[tuple[str, int], onnx.NodeProto] = {}
        for name in self._reached(value, kind):
            for node in self.readers(name):
                if node.op_type == kind:
                    found[node.output[0], list(node.input).index(name)] = node
        if len(found) != 1:
            raise UnsuitableError(f"{value} leads to {len(found)} operators {kind}, not to one")
        (((_, position), node),) = found.items()
        return node, position

    def needed(self, outputs: Iterable[str], given: Set[str]) -> tuple[list[onnx.NodeProto], set[str]]:
        """What computes ``outputs`` from the values ``given``: nodes in order; inputs and weights read."""
        wanted, leaves = list(outputs), set[str]()
        nodes: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name in given or not name:
                continue
            node = self.writer.get(name)
            if node is None:
                leaves.add(name)
            elif node.output[0] not in nodes:
                nodes.add(node.output[0])
                wanted += node.input
        return [node for node in self.graph.node if node.output[0] in nodes], leaves

    def _reached(self, value: str, kind: str) -> Iterator[str]:
        """``value`` and all that is computed from it before the next node of ``kind``."""
        waiting, seen = [value], {value}
        while waiting:
            name = waiting.pop()
            yield name
            for node in self.readers(name):
                if node.op_type != kind:
                    new = set(node.output) - seen
                    seen |= new
                    waiting += new


@dataclass(frozen=True, slots=True)
class Attention:
    """Values of one layer's attention.

    Attributes:
        keys: past and new keys, ``(batch, KV heads, past + new, width)``.
        values: past and new values, likewise.
        new_keys: ``(batch, KV heads, new, width)``.
        new_values: likewise.
        queries: what is multiplied with the keys.
        scores: that product.
        weights: the softmax of the scores.
        output: the product of weights and values.
    """

    keys: str
    values: str
    new_keys: str
    new_values: str
    queries: str
    scores: str
    weights: str
    output: str


def find_attention(index: GraphIndex, key: CacheTensor, value: CacheTensor) -> Attention:
    """The attention over the cache tensors ``key`` and ``value`` of one layer.

    Raises:
        UnsuitableError: it is not built of those operators.
    """
    keys, new_keys = _concatenation(index, key)
    values, new_values = _concatenation(index, value)
    scores, side = index.next(keys, "MatMul")
    softmax, _ = index.next(scores.output[0], "Softmax")
    output, left = index.next(softmax.output[0], "MatMul")
    of_values, right = index.next(values, "MatMul")
    if (side, left, right) != (1, 0, 1) or output.output[0] != of_values.output[0]:
        raise UnsuitableError(f"{key.past} and {value.past} do not meet in one attention")
    return Attention(
        keys=keys,
        values=values,
        new_keys=new_keys,
        new_values=new_values,
        queries=scores.input[0],
        scores=scores.output[0],
        weights=softmax.output[0],
        output=output.output[0],
    )


def _concatenation(index: GraphIndex, tensor: CacheTensor) -> tuple[str, str]:
    """What ``tensor`` and the new rows are concatenated to, and the new rows."""
    node = index.writer.get(tensor.present)
    while node is not None and node.op_type in _HANDING_ON:
        node = index.writer.get(node.input[0])
    axes = [] if node is None else [attribute.i for attribute in node.attribute if attribute.name == "axis"]
    if node is None or node.op_type != "Concat" or axes[0] not in _AXIS:
        raise UnsuitableError(f"{tensor.present} is not a concatenation along the tokens")
    if len(node.input) != 2 or node.input[0] != tensor.past:
        raise UnsuitableError(f"{tensor.present} is not {tensor.past} with new rows behind it")
    return node.output[0], node.input[1]
