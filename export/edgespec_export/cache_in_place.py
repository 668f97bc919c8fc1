"""Attention of a decoder graph replaced by GroupQueryAttention, which writes the KV cache in place."""

from collections.abc import Iterable, Sequence

import onnx
from onnx import TensorProto, helper

from edgespec_export.cache_graph import Attention, GraphIndex, UnsuitableError
from edgespec_export.cache_probe import AttentionFacts
from edgespec_models.graph_tensors import CacheTensor, GraphTensors

__all__ = ["put_in_place"]

_DOMAIN = "com.microsoft"
_OWN = "edgespec/"


def put_in_place(
    model: onnx.ModelProto,
    tensors: GraphTensors,
    layers: Sequence[Attention],
    facts: Sequence[AttentionFacts],
) -> None:
    """Replace ``layers`` in ``model`` by operators of those ``facts``, and drop what nothing needs any more.

    A cache that is written in place is as long as there is room, so what else asks for its shape is told
    what the shape was.

    Raises:
        UnsuitableError: something else in the graph reads the cache; ``model`` is then of no more use.
    """
    if tensors.mask is None:
        raise UnsuitableError("no attention mask tells the length")
    replaced: dict[str, list[onnx.NodeProto]] = {}
    stale: dict[str, tuple[CacheTensor, str]] = {}
    pairs = zip(tensors.cache[::2], tensors.cache[1::2], strict=True)
    for number, (layer, pair) in enumerate(zip(layers, pairs, strict=True)):
        replaced[layer.output] = _attention(f"{_OWN}{number}/", layer, pair, facts[number])
        for tensor, whole in zip(pair, (layer.keys, layer.values), strict=True):
            stale[tensor.past] = tensor, f"{_OWN}past"
            stale[tensor.present] = stale[whole] = tensor, f"{_OWN}all"
    for node in model.graph.node:
        if node.op_type == "Shape" and node.input[0] in stale:
            replaced[node.output[0]] = _shape(node, *stale[node.input[0]])
    replaced |= {tensor.present: [] for tensor in tensors.cache}
    nodes = _lengths(tensors.ids, tensors.mask)
    for node in model.graph.node:
        nodes += replaced.get(node.output[0], [node])
    _set_nodes(model, nodes)
    _drop_unused(model.graph)
    _check_readers(model.graph, tensors.cache)


def _attention(
    prefix: str, layer: Attention, cache: tuple[CacheTensor, CacheTensor], facts: AttentionFacts
) -> list[onnx.NodeProto]:
    """GroupQueryAttention with what it reads and writes in the shapes that the graph around has."""
    key, value = cache
    nodes: list[onnx.NodeProto] = []
    flat = [f"{prefix}queries", f"{prefix}keys", f"{prefix}values"]
    for result, given in zip(flat, (layer.queries, layer.new_keys, layer.new_values), strict=True):
        nodes.append(helper.make_node("Transpose", [given], [f"{result}/rows"], perm=[0, 2, 1, 3]))
        nodes += _reshape(f"{result}/rows", result, [0, 0, -1])
    nodes.append(
        helper.make_node(
            "GroupQueryAttention",
            [*flat, key.past, value.past, f"{_OWN}seqlens_k", f"{_OWN}total"],
            [f"{prefix}out", key.present, value.present],
            name=f"{prefix}GroupQueryAttention",
            domain=_DOMAIN,
            num_heads=facts.heads,
            kv_num_heads=facts.kv_heads,
            scale=facts.scale,
            local_window_size=facts.window or -1,
        )
    )
    nodes += _reshape(f"{prefix}out", f"{prefix}heads", [0, 0, facts.heads, facts.width])
    nodes.append(helper.make_node("Transpose", [f"{prefix}heads"], [layer.output], perm=[0, 2, 1, 3]))
    return nodes


def _lengths(ids: str, mask: str) -> list[onnx.NodeProto]:
    """What GroupQueryAttention and the rest of the graph ask: tokens in all, less one, past, batch."""
    node = helper.make_node
    return [
        *_constant("one", [1]),
        node("ReduceSum", [mask, f"{_OWN}one"], [f"{_OWN}sums"], keepdims=0),
        node("Cast", [f"{_OWN}sums"], [f"{_OWN}lengths"], to=TensorProto.INT64),
        node("Sub", [f"{_OWN}lengths", f"{_OWN}one"], [f"{_OWN}last"]),
        node("Cast", [f"{_OWN}last"], [f"{_OWN}seqlens_k"], to=TensorProto.INT32),
        node("Shape", [mask], [f"{_OWN}all"], start=1, end=2),
        node("Squeeze", [f"{_OWN}all"], [f"{_OWN}all/number"]),
        node("Cast", [f"{_OWN}all/number"], [f"{_OWN}total"], to=TensorProto.INT32),
        node("Shape", [ids], [f"{_OWN}new"], start=1, end=2),
        node("Shape", [ids], [f"{_OWN}batch"], start=0, end=1),
        node("Sub", [f"{_OWN}all", f"{_OWN}new"], [f"{_OWN}past"]),
    ]


def _shape(node: onnx.NodeProto, tensor: CacheTensor, length: str) -> list[onnx.NodeProto]:
    """The shape of a tensor of the cache that holds ``length`` tokens, as ``node`` gave it."""
    if node.attribute:
        raise UnsuitableError(f"a part of the shape of {node.input[0]} is read")
    name = node.output[0]
    dims = [f"{_OWN}batch", f"{_OWN}{name}/heads", length, f"{_OWN}{name}/width"]
    return [
        *_constant(f"{name}/heads", [tensor.heads]),
        *_constant(f"{name}/width", [tensor.head_dim]),
        helper.make_node("Concat", dims, [name], axis=0),
    ]


def _reshape(value: str, result: str, shape: Sequence[int]) -> list[onnx.NodeProto]:
    name = f"{result}/shape".removeprefix(_OWN)
    return [*_constant(name, shape), helper.make_node("Reshape", [value, _OWN + name], [result])]


def _constant(name: str, values: Sequence[int]) -> list[onnx.NodeProto]:
    tensor = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
    return [helper.make_node("Constant", [], [_OWN + name], value=tensor)]


def _set_nodes(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> None:
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    del model.graph.value_info[:]
    if all(opset.domain != _DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Drop what no output needs any more: nodes, weights and inputs."""
    nodes, leaves = GraphIndex(graph).needed((value.name for value in graph.output), frozenset())
    weights = [tensor for tensor in graph.initializer if tensor.name in leaves]
    inputs = [value for value in graph.input if value.name in leaves]
    for field, kept in ((graph.node, nodes), (graph.initializer, weights), (graph.input, inputs)):
        del field[:]
        field.extend(kept)


def _check_readers(graph: onnx.GraphProto, cache: Iterable[CacheTensor]) -> None:
    index = GraphIndex(graph)
    for tensor in cache:
        readers = index.readers(tensor.past) + index.readers(tensor.present)
        if [node.op_type for node in readers] != ["GroupQueryAttention"]:
            raise UnsuitableError(f"{tensor.past} is read besides its attention")
