"""Inputs as trees and back: JSON, the header of a GGUF file, and messages of Protocol Buffers.

Reading raises ValueError where an input has another form. Writing takes any tree: a change may have made
anything of it, and what does not fit is left out.
"""

import json
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from tools.fuzz.trees import Tree

__all__ = ["GGUF", "JSON", "PROTOBUF", "Form", "as_bytes"]

_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _LIST = 8, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS: Final[Mapping[int, int]] = {_FIXED64: 8, _FIXED32: 4}


@dataclass(frozen=True, slots=True)
class Form:
    """How an input is read as a tree, and written again."""

    read: Callable[[bytes], Tree]
    write: Callable[[Tree], bytes]


def _read_json(data: bytes) -> Tree:
    try:
        return json.loads(data.decode("utf-8", "surrogateescape"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _write_json(tree: Tree) -> bytes:
    try:
        return json.dumps(tree).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class _Reader:
    """Numbers and texts of a GGUF file, one behind the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from(code, self._data, self._at)
        except struct.error as error:
            raise ValueError("it ends too early") from error
        self._at += struct.calcsize(code)
        return value

    def text(self) -> str:
        length = self.number("<Q")
        text = self._data[self._at : self._at + length].decode("latin-1")
        self._at += length
        if self._at > len(self._data):
            raise ValueError("it ends too early")
        return text

    def value(self, kind: int) -> Tree:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            inner, count = self.number("<I"), self.number("<Q")
            if count > len(self._data):
                raise ValueError("it ends too early")
            return [inner, [self.value(inner) for _ in range(count)]]
        if kind not in _SCALARS:
            raise ValueError(f"there is no type {kind}")
        return self.number(_SCALARS[kind])


def _read_gguf(data: bytes) -> Tree:
    if data[:4] != b"GGUF":
        raise ValueError("it is no GGUF file")
    reader = _Reader(data[4:])
    version, tensors, keys = (reader.number(code) for code in ("<I", "<Q", "<Q"))
    if max(tensors, keys) > len(data):
        raise ValueError("it ends too early")
    facts, infos = [], []
    for _ in range(keys):
        name, kind = reader.text(), reader.number("<I")
        facts.append([name, kind, reader.value(kind)])
    for _ in range(tensors):
        name, dims = reader.text(), reader.number("<I")
        if dims > 8:
            raise ValueError("there are no such tensors")
        shape = [reader.number("<Q") for _ in range(dims)]
        infos.append([name, shape, reader.number("<I"), reader.number("<Q")])
    return {"version": version, "more": [0, 0], "facts": facts, "tensors": infos}


def _write_gguf(tree: Tree) -> bytes:
    """``more`` is how many tensors and keys it says to have besides those that it has."""
    tree = tree if isinstance(tree, dict) else {}
    facts = [each for each in _items(tree.get("facts")) if isinstance(each, list) and len(each) == 3]
    infos = [each for each in _items(tree.get("tensors")) if isinstance(each, list) and len(each) == 4]
    more = [_whole(each) for each in _items(tree.get("more"))] + [0, 0]
    parts = [b"GGUF", _packed("<I", tree.get("version", 3))]
    parts += [_packed("<Q", len(infos) + more[0]), _packed("<Q", len(facts) + more[1])]
    for name, kind, value in facts:
        parts += [_gguf_text(name), _packed("<I", kind), _gguf_value(_whole(kind), value, 0)]
    for name, shape, kind, offset in infos:
        dims = _items(shape)
        parts += [_gguf_text(name), _packed("<I", len(dims)), *(_packed("<Q", each) for each in dims)]
        parts += [_packed("<I", kind), _packed("<Q", offset)]
    return b"".join(parts)


def _gguf_value(kind: int, value: Tree, depth: int) -> bytes:
    if kind == _TEXT:
        return _gguf_text(value)
    if kind == _LIST and depth < 8:
        pair = _items(value)
        inner, items = (_whole(pair[0]), _items(pair[1])) if len(pair) == 2 else (4, pair)
        head = _packed("<I", inner) + _packed("<Q", len(items))
        return head + b"".join(_gguf_value(inner, each, depth + 1) for each in items)
    return _packed(_SCALARS.get(kind, "<I"), value)


def _gguf_text(value: Tree) -> bytes:
    data = as_bytes(value)
    return struct.pack("<Q", len(data)) + data


def _packed(code: str, value: Tree) -> bytes:
    if code[1] in "fd":
        try:
            return struct.pack(code, float(value))
        except (TypeError, ValueError, OverflowError):
            return bytes(struct.calcsize(code))
    size = struct.calcsize(code)
    return (_whole(value) % (1 << 8 * size)).to_bytes(size, "little")


def _items(value: Tree) -> list[Tree]:
    return value if isinstance(value, list) else []


def _whole(value: Tree) -> int:
    try:
        return int(value) if isinstance(value, int | float) else 0
    except (ValueError, OverflowError):  # what is no number, and what is infinite
        return 0


def as_bytes(value: Tree) -> bytes:
    """Of a text, a byte for each character, if that can be; nothing of anything else."""
    if not isinstance(value, str):
        return b""
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")


def _read_protobuf(data: bytes, depth: int = 0) -> Tree:
    """A list of fields: number, kind, and a number, a text of bytes, or the fields of a message within."""
    fields, at = list[Tree](), 0
    while at < len(data):
        key, at = _varint(data, at)
        kind, value = key & 7, 0
        if kind == _VARINT:
            value, at = _varint(data, at)
            fields.append([key >> 3, kind, value])
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in _WIDTHS:
            size = _WIDTHS[kind]
        else:
            raise ValueError(f"there is no field of kind {kind}")
        content, at = data[at : at + size], at + size
        if at > len(data):
            raise ValueError("it ends too early")
        fields.append(
            [key >> 3, kind, _inner(content, depth) if kind == _BYTES else content.decode("latin-1")]
        )
    return fields


def _inner(content: bytes, depth: int) -> Tree:
    """A message, if it can be read as one and does not look like a text."""
    if depth < 6 and any(byte > 127 or (byte < 32 and byte not in b"\t\n\r") for byte in content[:1000]):
        with suppress(ValueError):
            return _read_protobuf(content, depth + 1)
    return content.decode("latin-1")


def _write_protobuf(tree: Tree) -> bytes:
    parts = []
    for each in _items(tree):
        if not isinstance(each, list) or len(each) != 3:
            continue
        number, kind, value = _whole(each[0]), _whole(each[1]) & 7, each[2]
        parts.append(_as_varint(number << 3 | kind))
        if kind == _VARINT:
            parts.append(_as_varint(_whole(value)))
        elif kind in _WIDTHS:
            parts.append(as_bytes(value)[: _WIDTHS[kind]].ljust(_WIDTHS[kind], b"\0"))
        else:
            content = _write_protobuf(value) if isinstance(value, list) else as_bytes(value)
            parts += [_as_varint(len(content)), content]
    return b"".join(parts)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a number has no end")


def _as_varint(value: int) -> bytes:
    value %= 1 << 64
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


JSON: Final = Form(_read_json, _write_json)
GGUF: Final = Form(_read_gguf, _write_gguf)
PROTOBUF: Final = Form(_read_protobuf, _write_protobuf)
