"""The header of an ONNX file: inputs, outputs, operators and weights, without reading the weights.

Foreign models are judged before ONNX Runtime loads them, and decoding does not need the onnx package, so
this reads the few fields of ``onnx.proto3`` (the ONNX project's schema) that matter. The file is mapped;
weights inside it are stepped over. Graphs within operators (``If``, ``Loop``) are not entered.
"""

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from edgespec_models.errors import BundleError

# TensorProto.DataType -> its name in NumPy.
_TYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
    21: "uint4",
    22: "int4",
}
FLOAT_TYPES = ("float32", "float16")
"""Element types that logits may have."""

_FIXED_BYTES = {1: 8, 5: 4}  # by wire type
_Message = dict[int, list[int | memoryview]]  # by field: numbers, and what has a length


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input, an output or a stored weight.

    Attributes:
        type: NumPy's name of an element's type; the ONNX number if NumPy has no such type.
        dims: sizes; a name, perhaps empty, for a size that is not fixed.
        location: the file with the data, relative to the graph's; empty if the graph holds them.
        offset: beginning of the data in that file.
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
        bits = re.search(r"[a-z](\d+)$", self.type)
        return self.elements * (int(bits[1]) if bits else 8) // 8


@dataclass(frozen=True, slots=True)
class Node:
    """An operator: its type, inputs and outputs, and its attributes with whole numbers."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int]


@dataclass(slots=True)
class Graph:
    """A graph, weights left where they are; each mapping is by name."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)


def read_header(path: Path) -> Graph:
    """Read the graph in an ONNX file; BundleError if it cannot be read, or is none."""
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return _model(data)
    except (OSError, ValueError, IndexError) as error:
        raise BundleError(f"cannot read {path} as an ONNX graph: {error}. Copy or make it again.") from error


def _model(data: memoryview) -> Graph:
    parts = _parts(_message(data), 7)
    if not parts:
        raise ValueError("it holds no graph")
    message, graph = parts[0], Graph()
    graph.nodes = [_node(part) for part in _parts(message, 1)]
    for part in _parts(message, 5):
        weight = _weight(part)
        graph.weights[weight.name] = weight
    for number, values in ((11, graph.inputs), (12, graph.outputs)):
        for part in _parts(message, number):
            value = _value(part)
            values[value.name] = value
    for name in graph.weights:  # files of early versions list the weights as inputs too
        graph.inputs.pop(name, None)
    return graph


def _node(node: _Message) -> Node:
    attributes = dict[str, int]()
    for attribute in _parts(node, 5):
        if 3 in attribute:
            attributes[_text(attribute, 1)] = _numbers(attribute, 3)[-1]
    return Node(_text(node, 4), tuple(_texts(node, 1)), tuple(_texts(node, 2)), attributes)


def _weight(tensor: _Message) -> Tensor:
    external = {_text(entry, 1): _text(entry, 2) for entry in _parts(tensor, 13)}
    location, offset = external.get("location", ""), int(external.get("offset", "0"))
    return Tensor(_text(tensor, 8), _type(tensor, 2), tuple(_numbers(tensor, 1)), location, offset)


def _value(value: _Message) -> Tensor:
    kind, dims = str(0), list[int | str]()
    for tensor in (tensor for type_ in _parts(value, 2) for tensor in _parts(type_, 1)):
        kind = _type(tensor, 1)
        for dim in (dim for shape in _parts(tensor, 2) for dim in _parts(shape, 1)):
            dims.append(_numbers(dim, 1)[-1] if 1 in dim else _text(dim, 2))
    return Tensor(_text(value, 1), kind, tuple(dims))


def _type(message: _Message, number: int) -> str:
    kind = (_numbers(message, number) or [0])[-1]
    return _TYPES.get(kind, str(kind))


def _parts(message: _Message, number: int) -> list[_Message]:
    """The messages in a field."""
    return [_message(value) for value in message.get(number, ()) if isinstance(value, memoryview)]


def _texts(message: _Message, number: int) -> list[str]:
    return [str(value, "utf-8") for value in message.get(number, ()) if isinstance(value, memoryview)]


def _text(message: _Message, number: int) -> str:
    return (_texts(message, number) or [""])[-1]


def _numbers(message: _Message, number: int) -> list[int]:
    """The whole numbers in a field, also packed ones."""
    numbers = list[int]()
    for value in message.get(number, ()):
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            packed, at = _varint(value, at)
            numbers.append(packed)
    return numbers


def _message(data: memoryview) -> _Message:
    """Values by field, in order (Protocol Buffers' encoding)."""
    message: _Message = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value: int | memoryview
        if key & 7 == 0:
            value, at = _varint(data, at)
        else:
            size = _FIXED_BYTES.get(key & 7)
            if key & 7 == 2:
                size, at = _varint(data, at)
            if size is None:
                raise ValueError(f"a field of kind {key & 7}")
            if at + size > len(data):
                raise ValueError("it ends in the middle of a field")
            value, at = data[at : at + size], at + size
        message.setdefault(key >> 3, []).append(value)
    return message


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
