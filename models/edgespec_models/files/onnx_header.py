"""What an ONNX file says of itself: inputs, outputs, operators and weights, without reading the weights.

Foreign models are judged before ONNX Runtime loads them, and decoding does not need the onnx package, so
this reads the few fields of ``onnx.proto3`` (the ONNX project's schema) that matter. The file is mapped;
weights inside it are stepped over. Graphs within operators (``If``, ``Loop``) are not entered.
"""

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from edgespec_models.errors import BundleError

__all__ = ["FLOAT_TYPES", "Graph", "Node", "Tensor", "read_header"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# TensorProto.DataType -> name and bits of an element.
_TYPES = {
    1: ("float32", 32),
    2: ("uint8", 8),
    3: ("int8", 8),
    4: ("uint16", 16),
    5: ("int16", 16),
    6: ("int32", 32),
    7: ("int64", 64),
    9: ("bool", 8),
    10: ("float16", 16),
    11: ("float64", 64),
    12: ("uint32", 32),
    13: ("uint64", 64),
    16: ("bfloat16", 16),
    21: ("uint4", 4),
    22: ("int4", 4),
}
FLOAT_TYPES = ("float32", "float16")
"""Element types that logits may have."""

_Field = tuple[int, int, memoryview]  # number, value of a varint, content


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input, an output or a stored weight.

    Attributes:
        name: its name.
        type: of an element, as numpy calls it; the ONNX number where numpy has no such type.
        dims: sizes; a name, perhaps empty, where the size is not fixed.
        location: the file, relative to the graph's, that holds the data; empty where the graph does.
        offset: where in that file the data begins.
    """

    name: str
    type: str
    dims: tuple[int | str, ...]
    location: str = ""
    offset: int = 0

    @property
    def elements(self) -> int:
        """Elements of a tensor whose sizes are all fixed."""
        return prod(dim for dim in self.dims if isinstance(dim, int))

    @property
    def size_bytes(self) -> int:
        """Bytes of a tensor whose sizes are all fixed; types not known to this module count a byte each."""
        bits = next((bits for name, bits in _TYPES.values() if name == self.type), 8)
        return self.elements * bits // 8


@dataclass(frozen=True, slots=True)
class Node:
    """An operator: its type, what it reads and writes, its whole-number attributes and those of text."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int]
    texts: Mapping[str, str]


@dataclass(slots=True)
class Graph:
    """A graph, weights left where they are; each mapping is by name."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)


def read_header(path: Path) -> Graph:
    """Read the graph in the ONNX file ``path``.

    Raises:
        BundleError: it cannot be read, or is no ONNX file.
    """
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return _model(data)
    except (OSError, ValueError, IndexError) as error:
        raise BundleError(f"cannot read {path} as an ONNX graph: {error}. Copy or make it again.") from error


def _model(data: memoryview) -> Graph:
    for number, _, content in _fields(data):
        if number == 7:
            return _graph(content)
    raise ValueError("it holds no graph")


def _graph(data: memoryview) -> Graph:
    graph = Graph()
    for number, _, content in _fields(data):
        if number == 1:
            graph.nodes.append(_node(content))
        elif number == 5:
            weight = _weight(content)
            graph.weights[weight.name] = weight
        elif number in (11, 12):
            value = _value(content)
            (graph.inputs if number == 11 else graph.outputs)[value.name] = value
    for name in graph.weights:  # files of early versions list the weights as inputs too
        graph.inputs.pop(name, None)
    return graph


def _node(data: memoryview) -> Node:
    op_type, inputs, outputs, attributes, texts = "", [], [], {}, {}
    for number, _, content in _fields(data):
        if number == 1:
            inputs.append(_text(content))
        elif number == 2:
            outputs.append(_text(content))
        elif number == 4:
            op_type = _text(content)
        elif number == 5:
            found = {key: (value, inner) for key, value, inner in _fields(content)}
            if 1 in found and 3 in found:
                attributes[_text(found[1][1])] = found[3][0]
            elif 1 in found and 4 in found:
                texts[_text(found[1][1])] = _text(found[4][1])
    return Node(op_type, tuple(inputs), tuple(outputs), attributes, texts)


def _weight(data: memoryview) -> Tensor:
    name, kind, dims = "", 0, list[int | str]()
    external = dict[str, str]()
    for number, value, content in _fields(data):
        if number == 1:
            dims += list(_varints(content)) if content else [value]
        elif number == 2:
            kind = value
        elif number == 8:
            name = _text(content)
        elif number == 13:
            entry = {key: _text(inner) for key, _, inner in _fields(content)}
            external[entry.get(1, "")] = entry.get(2, "")
    location, offset = external.get("location", ""), int(external.get("offset", "0"))
    return Tensor(name, _type_name(kind), tuple(dims), location, offset)


def _value(data: memoryview) -> Tensor:
    name, kind, dims = "", 0, tuple[int | str, ...]()
    for number, _, content in _fields(data):
        if number == 1:
            name = _text(content)
        elif number == 2:
            kind, dims = _tensor_type(content)
    return Tensor(name, _type_name(kind), dims)


def _tensor_type(data: memoryview) -> tuple[int, tuple[int | str, ...]]:
    kind, dims = 0, list[int | str]()
    for number, _, content in _fields(data):
        if number != 1:
            continue
        for key, value, inner in _fields(content):
            if key == 1:
                kind = value
            elif key == 2:
                dims = [_dim(dim) for dim_key, _, dim in _fields(inner) if dim_key == 1]
    return kind, tuple(dims)


def _dim(data: memoryview) -> int | str:
    for number, value, content in _fields(data):
        if number == 1:
            return value
        if number == 2:
            return _text(content)
    return ""


def _type_name(kind: int) -> str:
    return _TYPES[kind][0] if kind in _TYPES else str(kind)


def _text(data: memoryview) -> str:
    return bytes(data).decode("utf-8")


def _fields(data: memoryview) -> Iterator[_Field]:
    """The fields of a message, in order (Protocol Buffers' encoding)."""
    nothing, at = data[:0], 0
    while at < len(data):
        key, at = _varint(data, at)
        kind, value, size = key & 7, 0, 0
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at + size > len(data):
            raise ValueError("it ends in the middle of a field")
        yield key >> 3, value, data[at : at + size] if size else nothing
        at += size


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
