"""The memory of keys and values, and the inputs and outputs of graphs for them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.kept import BLOCK, KeptTensor
from edgespec_models.errors import BundleError
from edgespec_runtimes.ort import ort

_Array = npt.NDArray[Any]
_NAMES = {"float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int32": 6, "int64": 7, "float16": 10}
_ONNX_TYPES = {np.dtype(name): number for name, number in _NAMES.items()}  # a dtype makes its name anew


def ort_value(array: _Array) -> Any:
    """An OrtValue over the array's own memory, which must outlive it."""
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_TYPES[array.dtype])


class Block:
    """The kept rows of 32 tokens of a sequence, or of its last tokens.

    It has a ``number`` in a pool and takes ``nbytes``. A ``frozen`` block is not written any more, because
    others may have it. Python counts its users and calls ``free`` at the end.
    """

    __slots__ = ("_free", "_read", "frozen", "nbytes", "number")

    def __init__(
        self, number: int, nbytes: int, read: Callable[[int], bytes], free: Callable[[int], object]
    ) -> None:
        self.number, self.nbytes, self.frozen = number, nbytes, False
        self._read, self._free = read, free

    def __del__(self) -> None:
        self._free(self.number)

    def __bytes__(self) -> bytes:
        return self._read(self.number)


Saved = Block | memoryview
"""A saved block of tokens: a block of the cache's pool, or a copy."""


@dataclass(slots=True, eq=False)
class Stretch:
    """A sequence's part of a KV cache: its tokens, its blocks, and its room in tokens.

    ``fresh`` is the number of last tokens from the last pass, if nothing was changed since. Its states lie in
    ``slot``, ``behind`` this many of the tokens (:class:`edgespec_runtimes.states.ResumePoints`).
    """

    tokens: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    capacity: int = 0
    fresh: int = 0
    slot: int = 0
    behind: int = 0

    def add(self, tokens: Sequence[int], *, fresh: int = 0, behind: int = 0) -> None:
        """Note that the cache holds these tokens too, and behind how many tokens the states lie now."""
        self.tokens += tokens
        self.fresh, self.behind = fresh, behind

    def cut(self, length: int) -> None:
        """Note that the cache holds the first ``length`` tokens only."""
        del self.tokens[length:], self.blocks[-(-length // BLOCK) :]
        self.fresh, self.behind = 0, min(self.behind, length)


def refuse_states(layout: Sequence[KeptTensor]) -> None:
    """Raise BundleError if a sequence keeps other tensors than keys and values, and ends of blocks."""
    if states := [tensor.input for tensor in layout if tensor.per == "sequence"]:
        raise BundleError(
            f"the graph keeps states ({', '.join(states)}), which edgespec runs in graphs of its own "
            "operators only; export the model for the CPU"
        )


class KVBuffers(ABC):
    """The KV cache of a model, for one sequence or, in blocks, several.

    The default methods are for graphs that read and write one buffer of full capacity per tensor.
    """

    def __init__(self, layout: Sequence[KeptTensor]) -> None:
        """Reserve nothing yet; BundleError if a sequence keeps other tensors than keys and values."""
        refuse_states(layout)
        self._layout = layout
        self._values: list[Any] = []
        self.block_bytes = sum(tensor.nbytes * (BLOCK if tensor.per == "token" else 1) for tensor in layout)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes reserved."""

    @abstractmethod
    def reserve(self, capacity: int, keep: int) -> None:
        """Make room for ``capacity`` tokens, keeping the first ``keep``; earlier bindings are void."""

    def extend(self, stretch: Stretch, end: int) -> None:
        """Extend a sequence, for which room is reserved, to ``end`` tokens."""
        return

    def bind(self, binding: Any, start: int, count: int) -> None:
        """Let a pass over ``count`` tokens behind ``start`` others read and write the cache."""
        for tensor, value in zip(self._layout, self._values, strict=True):
            binding.bind_ortvalue_input(tensor.input, value)
            binding.bind_ortvalue_output(tensor.output, value)

    def lend(self, binding: Any, names: Collection[str]) -> None:
        """Bind the present tensors to a pass of another graph, by these names."""
        for tensor, value in zip(self._layout, self._values, strict=True):
            if tensor.input in names:
                binding.bind_ortvalue_input(tensor.input, value)

    def written(self, length: int) -> None:
        """Tell that the bound pass ran, and left keys and values of ``length`` tokens."""
        return

    def save(self, stretch: Stretch, at: int) -> Saved | None:
        """A sequence's present block ``at``; None if the host has none."""
        view = self.view(at * BLOCK, min((at + 1) * BLOCK, len(stretch.tokens)))
        return None if view is None else memoryview(b"".join(array.tobytes() for array in view))

    def load(self, stretch: Stretch, saved: Saved, count: int) -> None:
        """Append the first ``count`` saved tokens to the sequence's, which fill their blocks."""
        tokens = saved.nbytes * BLOCK // self.block_bytes
        arrays = self.split(saved, [tensor.of_tokens(tokens) for tensor in self._layout])
        self.paste(arrays, len(stretch.tokens), count)

    def split(self, saved: Saved, shapes: Sequence[tuple[int, ...]]) -> list[_Array]:
        """A copy as an array of each tensor."""
        form = [("", tensor.dtype, shape) for tensor, shape in zip(self._layout, shapes, strict=True)]
        return [*np.frombuffer(bytes(saved), np.dtype(form))[0]]

    def view(self, start: int, end: int) -> list[_Array] | None:
        """Keys and values of the tokens from ``start`` to ``end``; None if the host has none."""
        return None

    def paste(self, arrays: Sequence[_Array], start: int, count: int) -> None:
        """Copy the first ``count`` tokens of such views behind ``start`` others. Room must be reserved."""
        return

    @abstractmethod
    def clear(self) -> None:
        """Free the memory."""


class SharedCache(KVBuffers):
    """A KV cache in NumPy's memory.

    ``arrays`` are ``(1, heads, capacity, head_dim)`` each.
    """

    def __init__(self, layout: Sequence[KeptTensor]) -> None:
        super().__init__(layout)
        self.arrays: list[_Array] = []

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def reserve(self, capacity: int, keep: int) -> None:
        if not keep:
            self.clear()
        self._values.clear()
        arrays = []
        for tensor in self._layout:
            array = np.zeros(tensor.of_tokens(capacity), tensor.dtype)
            if keep:  # each is freed when it is copied, so only one is in memory twice
                array[:, :, :keep] = self.arrays.pop(0)[:, :, :keep]
            arrays.append(array)
        self.arrays, self._values = arrays, [ort_value(array) for array in arrays]

    def view(self, start: int, end: int) -> list[_Array] | None:
        return [array[:, :, start:end] for array in self.arrays]

    def paste(self, arrays: Sequence[_Array], start: int, count: int) -> None:
        for array, saved in zip(self.arrays, arrays, strict=True):
            array[:, :, start : start + count] = saved[:, :, :count]

    def clear(self) -> None:
        self.arrays.clear()
        self._values.clear()


class GrowingCache(KVBuffers):
    """A KV cache for graphs that concatenate: each pass reads exactly the past and writes past and new rows.

    Two buffers for each tensor alternate, so passes allocate nothing. After a roll-back the kept rows are
    moved together when the next pass binds.
    """

    def __init__(self, layout: Sequence[KeptTensor]) -> None:
        super().__init__(layout)
        self._past: list[_Array] = []
        self._present: list[_Array] = []
        self._held = 0  # the number of past tokens in the present arrangement
        self._bound: list[tuple[_Array, Any]] = []

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self._past, *self._present))

    def reserve(self, capacity: int, keep: int) -> None:
        if not keep:
            self.clear()
        past, present = [], []
        for index, tensor in enumerate(self._layout):
            size = prod(tensor.of_tokens(capacity))
            past.append(np.zeros(size, tensor.dtype))
            present.append(np.zeros(size, tensor.dtype))
            if keep:
                old = _rows(self._past[index], tensor, self._held)
                _rows(past[index], tensor, keep)[:] = old[:, :, :keep]
        self._past, self._present, self._held = past, present, keep

    def bind(self, binding: Any, start: int, count: int) -> None:
        self._bound.clear()
        for tensor, past, present in zip(self._layout, self._past, self._present, strict=True):
            old, new = _rows(past, tensor, start), _rows(present, tensor, start + count)
            if start != self._held:
                held = _rows(past, tensor, self._held)
                for head in range(1, len(held[0])):  # the first is in its place
                    old[0, head] = held[0, head, :start]
            values = ort_value(old), ort_value(new)
            self._bound += [(old, values[0]), (new, values[1])]
            binding.bind_ortvalue_input(tensor.input, values[0])
            binding.bind_ortvalue_output(tensor.output, values[1])
        self._held = start

    def written(self, length: int) -> None:
        self._past, self._present, self._held = self._present, self._past, length

    def view(self, start: int, end: int) -> list[_Array] | None:
        pairs = zip(self._past, self._layout, strict=True)
        return [_rows(past, tensor, self._held)[:, :, start:end] for past, tensor in pairs]

    def paste(self, arrays: Sequence[_Array], start: int, count: int) -> None:
        for past, tensor, saved in zip(self._past, self._layout, arrays, strict=True):
            before = _rows(past, tensor, self._held)[:, :, :start].copy()
            rows = _rows(past, tensor, start + count)
            rows[:, :, :start], rows[:, :, start:] = before, saved[:, :, :count]
        self._held = start + count

    def clear(self) -> None:
        for kept in (self._past, self._present, self._bound):
            kept.clear()


def _rows(buffer: _Array, tensor: KeptTensor, tokens: int) -> _Array:
    """The beginning of a buffer as keys or values of ``tokens`` tokens."""
    shape = tensor.of_tokens(tokens)
    return buffer[: prod(shape)].reshape(shape)


class Memory:
    """The memory of passes' tensors: NumPy's arrays, which a graph on the CPU reads and writes itself.

    Devices have memory of their own.
    """

    def __init__(self) -> None:
        self._output: _Array = np.empty(0)

    def value(self, array: _Array) -> Any:
        """An OrtValue over ``array``, which must outlive it."""
        return ort_value(array)

    def write(self, value: Any, array: _Array) -> None:
        """Update ``value``, made from ``array``, to the array's content."""

    def output(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Callable[[], _Array]]:
        """An OrtValue for graphs to write, and a function that returns its content as an array."""
        array = np.empty(shape, dtype)
        return ort_value(array), lambda: array

    def shared_output(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Callable[[], _Array]]:
        """The same, whose content stays until the next pass.

        All such outputs share their memory, because logits of all numbers of rows would take 300 MB.
        """
        if self._output.size < prod(shape) or self._output.dtype != dtype:
            self._output = np.empty(max(prod(shape), 2 * self._output.size), dtype)
        array = self._output[: prod(shape)].reshape(shape)
        return ort_value(array), lambda: array

    def cache(self, layout: Sequence[KeptTensor]) -> KVBuffers:
        """A KV cache that graphs write in place."""
        return SharedCache(layout)


_COMPARED = 256


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of tokens that two texts begin with alike. Both are lists or tuples."""
    end = min(len(left), len(right))
    # Comparing slices is a hundred times faster than a loop; only a slice that differs is searched.
    for start in range(0, end, _COMPARED):
        stop = min(start + _COMPARED, end)
        ours, theirs = list(left[start:stop]), list(right[start:stop])
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False), start)
            return next((index for index, (a, b) in pairs if a != b), end)
    return end
