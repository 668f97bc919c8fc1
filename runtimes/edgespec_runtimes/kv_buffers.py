"""Keys and values: where a graph keeps them and its inputs and outputs, and caches that are put aside."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.graph_contract import CacheTensor
from edgespec_runtimes.ort import ort
from edgespec_runtimes.prompt_cache import PromptCache
from edgespec_runtimes.session import SavedCache, Session, shared_length

KEY_TILE: Final = 16
"""Tokens whose keys edgespec's own attention keeps together, channel by channel."""
_Array = npt.NDArray[Any]
_ONNX_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int32": 6, "int64": 7, "float16": 10}


def ort_value(array: _Array) -> Any:
    """An OrtValue over the array's own memory, which must outlive it."""
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_TYPES[array.dtype.name])


@dataclass(slots=True, eq=False)
class Stretch:
    """A sequence's part of a KV cache: its tokens, where it begins, and how many tokens it has room for."""

    tokens: list[int] = field(default_factory=list)
    begin: int = 0
    capacity: int = 0


class Move(NamedTuple):
    """Keys and values of ``held`` tokens from place ``begin`` on go to ``to``, where there is more room."""

    begin: int
    to: int
    held: int


class KVBuffers(ABC):
    """The KV cache of a model, for one sequence or, in numpy's memory, several.

    What is not overridden is of graphs that read and write one buffer of full capacity for each tensor.
    """

    def __init__(self, layout: Sequence[CacheTensor]) -> None:
        self._layout = layout
        self._values: list[Any] = []

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes reserved."""

    @abstractmethod
    def reserve(self, capacity: int, moves: Sequence[Move]) -> None:
        """Make room for ``capacity`` tokens, keeping what moves; earlier bindings are void."""

    def bind(self, binding: Any, start: int, count: int) -> None:
        """Let a pass over ``count`` tokens behind ``start`` others read and write the cache."""
        for tensor, value in zip(self._layout, self._values, strict=True):
            binding.bind_ortvalue_input(tensor.past, value)
            binding.bind_ortvalue_output(tensor.present, value)

    def written(self, length: int) -> None:
        """Tell that the bound pass ran, and left keys and values of ``length`` tokens."""
        return

    def view(self, start: int, end: int) -> list[_Array] | None:
        """Keys and values of the tokens from ``start`` on and before ``end``; None where the host has none.

        They are where passes read them. Whole tiles of tokens, which ``start`` begins.
        """
        return None

    def paste(self, arrays: Sequence[_Array], start: int, count: int) -> None:
        """Put the first ``count`` tokens of such views behind ``start`` others. Room must be reserved."""
        return

    @abstractmethod
    def clear(self) -> None:
        """Free the memory."""


class SharedCache(KVBuffers):
    """In numpy's memory.

    ``arrays`` are ``(1, heads, capacity, head_dim)`` each.
    """

    def __init__(self, layout: Sequence[CacheTensor]) -> None:
        super().__init__(layout)
        self.arrays: list[_Array] = []

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(array.nbytes for array in self.arrays)

    def reserve(self, capacity: int, moves: Sequence[Move]) -> None:
        """Make room for ``capacity`` tokens, keeping what moves; earlier bindings are void."""
        moves = [move for move in moves if move.held]
        if not moves:
            self.clear()
        self._values.clear()
        arrays = []
        for tensor in self._layout:
            array = np.zeros((1, tensor.heads, capacity, tensor.head_dim), tensor.dtype)
            # Each goes when it is copied, so that one alone is there twice.
            old = self.arrays.pop(0) if moves else array
            for begin, to, held in moves:
                kept = old[:, :, begin : begin + _whole_tiles(held)]
                array[:, :, to : to + kept.shape[2]] = kept
            arrays.append(array)
        self.arrays, self._values = arrays, [ort_value(array) for array in arrays]

    def view(self, start: int, end: int) -> list[_Array] | None:
        """Keys and values of the tokens from ``start`` on and before ``end``."""
        return [array[:, :, start : _whole_tiles(end)] for array in self.arrays]

    def paste(self, arrays: Sequence[_Array], start: int, count: int) -> None:
        """Put the first ``count`` tokens of such views behind ``start`` others."""
        held = _whole_tiles(count)
        for array, saved in zip(self.arrays, arrays, strict=True):
            array[:, :, start : start + held] = saved[:, :, :held]

    def clear(self) -> None:
        """Free the memory."""
        self.arrays.clear()
        self._values.clear()


class GrowingCache(KVBuffers):
    """For graphs that concatenate: each pass reads exactly the past and writes past and new rows anew.

    Two buffers for each tensor take turns, so that passes allocate nothing. A truncation is made good when
    the next pass binds: the rows that stay move together.
    """

    def __init__(self, layout: Sequence[CacheTensor]) -> None:
        super().__init__(layout)
        self._past: list[_Array] = []
        self._present: list[_Array] = []
        self._held = 0  # tokens that the arrangement of the past is for
        self._bound: list[tuple[_Array, Any]] = []

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(array.nbytes for array in (*self._past, *self._present))

    def reserve(self, capacity: int, moves: Sequence[Move]) -> None:
        """Make room for ``capacity`` tokens, keeping what moves; earlier bindings are void."""
        keep = sum(move.held for move in moves)
        if not keep:
            self.clear()
        past, present = [], []
        for index, tensor in enumerate(self._layout):
            size = tensor.heads * capacity * tensor.head_dim
            past.append(np.zeros(size, tensor.dtype))
            present.append(np.zeros(size, tensor.dtype))
            if keep:
                old = _rows(self._past[index], tensor, self._held)
                _rows(past[index], tensor, keep)[:] = old[:, :, :keep]
        self._past, self._present, self._held = past, present, keep

    def bind(self, binding: Any, start: int, count: int) -> None:
        """Let a pass over ``count`` tokens behind ``start`` others read and write the cache."""
        self._bound.clear()
        for tensor, past, present in zip(self._layout, self._past, self._present, strict=True):
            read, write = _rows(past, tensor, start), _rows(present, tensor, start + count)
            if start != self._held:
                held = _rows(past, tensor, self._held)
                for head in range(1, tensor.heads):  # the first lies where it will lie
                    read[0, head] = held[0, head, :start]
            values = ort_value(read), ort_value(write)
            self._bound += [(read, values[0]), (write, values[1])]
            binding.bind_ortvalue_input(tensor.past, values[0])
            binding.bind_ortvalue_output(tensor.present, values[1])
        self._held = start

    def written(self, length: int) -> None:
        """Tell that the bound pass ran, and left keys and values of ``length`` tokens."""
        self._past, self._present, self._held = self._present, self._past, length

    def view(self, start: int, end: int) -> list[_Array] | None:
        """Keys and values of the tokens from ``start`` on and before ``end``."""
        pairs = zip(self._past, self._layout, strict=True)
        return [_rows(past, tensor, self._held)[:, :, start:end] for past, tensor in pairs]

    def paste(self, arrays: Sequence[_Array], start: int, count: int) -> None:
        """Put the first ``count`` tokens of such views behind ``start`` others."""
        for past, tensor, saved in zip(self._past, self._layout, arrays, strict=True):
            before = _rows(past, tensor, self._held)[:, :, :start].copy()
            rows = _rows(past, tensor, start + count)
            rows[:, :, :start], rows[:, :, start:] = before, saved[:, :, :count]
        self._held = start + count

    def clear(self) -> None:
        """Free the memory."""
        for kept in (self._past, self._present, self._bound):
            kept.clear()


def _whole_tiles(tokens: int) -> int:
    """Keys may lie in tiles of tokens, which move as a whole."""
    return -(-tokens // KEY_TILE) * KEY_TILE


def _rows(buffer: _Array, tensor: CacheTensor, tokens: int) -> _Array:
    """The beginning of a buffer as keys or values of ``tokens`` tokens."""
    shape = (1, tensor.heads, tokens, tensor.head_dim)
    return buffer[: prod(shape)].reshape(shape)


class Memory:
    """Where tensors of passes lie: in numpy's arrays, which a graph on the CPU reads and writes itself.

    Devices have memory of their own.
    """

    def __init__(self) -> None:
        self._output: _Array = np.empty(0)

    def value(self, array: _Array) -> Any:
        """An OrtValue that holds what ``array`` does; the array must outlive it."""
        return ort_value(array)

    def write(self, value: Any, array: _Array) -> None:
        """Let ``value``, made from ``array``, hold what the array does now."""

    def output(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Callable[[], _Array]]:
        """An OrtValue for graphs to write, and what returns, as an array, what it holds until the next pass.

        Outputs of one type share their memory, since passes over ever so many rows would take 300 MB.
        """
        if self._output.size < prod(shape) or self._output.dtype != dtype:
            self._output = np.empty(max(prod(shape), 2 * self._output.size), dtype)
        array = self._output[: prod(shape)].reshape(shape)
        return ort_value(array), lambda: array

    def cache(self, layout: Sequence[CacheTensor]) -> KVBuffers:
        """A KV cache that graphs write in place."""
        return SharedCache(layout)


_LEAST = 4
"""Tokens that are worth a copy: it takes next to nothing, and reading them longer than a pass over one."""


class KvStore:
    """KV caches of conversations that are not being read, of one or more sessions.

    A session's cache holds one text. Before it reads another, what would be lost is put aside, and what is
    known of the new text is put in its place: a copy of the same bits, so that answers do not change. The
    caches least recently used go first. What memory does not have, the disk may: ``prompts``, where texts
    are written when there is time for it. One thread at a time.

    All of them together take ``nbytes`` now, and may take ``budget`` bytes; 0 keeps none.
    """

    def __init__(self, budget: int, prompts: PromptCache | None = None) -> None:
        self._budget, self._prompts = budget, prompts
        self.nbytes = 0
        self._kept: list[tuple[Session, SavedCache]] = []  # the least recently used first
        self._due: list[tuple[Session, SavedCache | None]] = []  # to be written: None is what it holds

    def fetch(
        self, session: Session, tokens: Sequence[int], beside: Sequence[Session] = (), *, on_disk: bool = True
    ) -> None:
        """Let ``session`` hold as much of ``tokens`` as is known of them, or as those ``beside`` it hold.

        With ``on_disk`` also of what other processes held, and what it will hold of this text is written.

        Raises:
            DeviceError: no memory; the session's cache is empty then.
        """
        if self._budget:
            self._fetch_from_memory(session, tokens)
        if (session, None) in self._due:
            self._due.remove((session, None))
        for other in beside:
            shared = other.shared_prefix(tokens)
            view = other.view(0, shared) if shared >= session.shared_prefix(tokens) + _LEAST else None
            if view is not None:
                session.truncate(0)
                session.append(view, shared)
        if self._prompts is not None and on_disk and session.prompt_key:
            session.truncate(
                session.shared_prefix(tokens)
            )  # the rest may be of a text that is not to be written
            self._prompts.read(session, tokens)
            self._due.append((session, None))

    def write_behind(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Write what is not on disk yet, the latest first; ``stop``, asked between blocks, ends it."""
        while self._prompts is not None and self._due and not stop():
            session, saved = self._due[-1]
            text = session.view(0, session.length) if saved is None else saved
            if text is not None and not self._prompts.write(session.prompt_key, text, stop):
                return
            self._due.pop()

    def _fetch_from_memory(self, session: Session, tokens: Sequence[int]) -> None:
        held = session.shared_prefix(tokens)
        found = self._longest(session, tokens, held + _LEAST)
        is_due = found in self._due
        if found is not None:  # it makes room
            self._drop(*found)
        if session.length - held >= _LEAST:
            self._put_aside(session)
        if found is None:
            return
        saved = found[1]
        shared = shared_length(saved.tokens, tokens)
        session.truncate(0)
        session.append(saved, shared)
        if len(saved.tokens) - shared >= _LEAST:  # another text's too: that goes on without its end here
            self._keep(session, saved)
            if is_due and (session, saved) in self._kept:
                self._due.append((session, saved))

    def forget(self, session: Session, *, on_disk: bool = False) -> None:
        """Forget all caches of the model that ``session`` is of, in memory; those on disk too if asked to."""
        self._due = [(owner, saved) for owner, saved in self._due if owner.model is not session.model]
        for owner, saved in self._of_model(session):
            self._drop(owner, saved)
        if on_disk and self._prompts is not None:
            self._prompts.forget(session.prompt_key)

    def _of_model(self, session: Session) -> list[tuple[Session, SavedCache]]:
        return [each for each in self._kept if each[0].model is session.model]

    def _longest(
        self, session: Session, tokens: Sequence[int], least: int
    ) -> tuple[Session, SavedCache] | None:
        """The cache that shares most with ``tokens``, at least so many; the latest of equals."""
        own = self._of_model(session)
        lengths = [shared_length(saved.tokens, tokens) for _, saved in own]
        best = max(lengths, default=0)
        return own[len(lengths) - 1 - lengths[::-1].index(best)] if best >= least else None

    def _put_aside(self, session: Session) -> None:
        """Keep a copy of what ``session`` holds, or of as many tokens as the budget has room for."""
        per_token = -(-session.kv_bytes // max(1, session.capacity))
        length = min(session.length, self._budget // max(1, per_token) // KEY_TILE * KEY_TILE)
        if length < _LEAST:
            return
        self._make_room(length * per_token)
        view = session.view(0, length)
        if view is not None:
            saved = view.copy()
            for owner, other in list(self._kept):
                only_there = len(other.tokens) - shared_length(other.tokens, saved.tokens)
                if owner.model is session.model and only_there < _LEAST:
                    self._drop(owner, other)
            self._keep(session, saved)
            if (session, None) in self._due and (session, saved) in self._kept:
                self._due.append((session, saved))

    def _keep(self, session: Session, saved: SavedCache) -> None:
        self._make_room(saved.nbytes)
        if saved.nbytes <= self._budget:
            self._kept.append((session, saved))
            self.nbytes += saved.nbytes

    def _make_room(self, nbytes: int) -> None:
        while self._kept and self.nbytes + nbytes > self._budget:
            self._drop(*self._kept[0])

    def _drop(self, session: Session, saved: SavedCache) -> None:
        self._kept.remove((session, saved))
        if (session, saved) in self._due:
            self._due.remove((session, saved))
        self.nbytes -= saved.nbytes
