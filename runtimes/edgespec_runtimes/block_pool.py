"""The KV cache of edgespec's own graphs: a pool of blocks, and a table for each sequence."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.kept import BLOCK, EXTENT, KeptTensor
from edgespec_runtimes.kv_cache import Block, KVBuffers, Saved, Stretch, ort_value

_GROWTH = 4 if sys.platform == "win32" else 1  # a pool grows by this part of its size


class BlockPool(KVBuffers):
    """Blocks in NumPy's memory, in an array for each tensor.

    A sequence begins in a free extent and goes on behind its last block, because passes read successive
    blocks of an extent as fast as a single buffer.

    Without room the pool is copied to twice its size. So a token is copied once or twice, which takes a
    thousandth of the time to read it. Unused room takes no memory, because its pages are untouched; Windows
    counts it against what programs may have in all, so there the pool grows by a quarter. One tensor at a
    time is in memory twice, and a lack of memory loses nothing. Before it moves it calls ``moving``, because
    bindings refer to its memory.
    """

    def __init__(self, layout: Sequence[KeptTensor], moving: Callable[[], object]) -> None:
        super().__init__(layout)
        self._moving = moving
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the used blocks."""
        return (self._count - len(self._free)) * self.block_bytes

    def reserve(self, capacity: int, keep: int) -> None:
        """Blocks come when passes need them; for a capacity of 0 free the unused ones."""
        if not capacity:
            last = max({*range(self._count)} - self._free, default=-1)
            self._resize((last + EXTENT) // EXTENT * EXTENT)

    def extend(self, stretch: Stretch, end: int) -> None:
        """Give a sequence blocks for ``end`` tokens; it writes to blocks of its own alone."""
        blocks, (at, begun) = stretch.blocks, divmod(len(stretch.tokens), BLOCK)
        if begun and blocks[at].frozen:
            copy = self._block(blocks[:at])
            both = self._arrays_of(copy.number), self._arrays_of(blocks[at].number)
            for mine, other in zip(*both, strict=True):
                mine[...] = other
            blocks[at] = copy
        while len(blocks) * BLOCK < end:
            blocks.append(self._block(blocks))

    def save(self, stretch: Stretch, at: int) -> Saved | None:
        """A sequence's block itself, which is frozen."""
        stretch.blocks[at].frozen = True
        return stretch.blocks[at]

    def load(self, stretch: Stretch, saved: Saved, count: int) -> None:
        """Give a sequence a block of the pool, or a copy of another pool's block."""
        if isinstance(saved, memoryview):
            copy = self._block(stretch.blocks)
            arrays = self._arrays_of(copy.number)
            parts = self.split(saved, [array.shape for array in arrays])
            for array, part in zip(arrays, parts, strict=True):
                array[...] = part
            saved = copy
        stretch.blocks.append(saved)

    def clear(self) -> None:
        """Free the memory."""
        self._count, self._free = 0, set[int]()
        self.arrays = [np.zeros(tensor.of_blocks(0), tensor.dtype) for tensor in self._layout]
        self._values = [ort_value(array) for array in self.arrays]

    def _arrays_of(self, number: int) -> list[npt.NDArray[Any]]:
        """The arrays of a block, tensor by tensor."""
        extent, at = divmod(number, EXTENT)
        tokens = slice(at * BLOCK, (at + 1) * BLOCK)
        return [
            array[extent, :, tokens] if tensor.per == "token" else array[number]
            for tensor, array in zip(self._layout, self.arrays, strict=True)
        ]

    def _block(self, before: Sequence[Block]) -> Block:
        """A block for a sequence with the blocks ``before``."""
        number = before[-1].number + 1 if before else -1
        if number not in self._free:
            number = self._beginning()
        self._free.remove(number)
        return Block(number, self.block_bytes, self._read, self._put_back)

    def _beginning(self) -> int:
        """The first block of a free extent, or of a smaller free part if a quarter is free in such parts."""
        count = self._count
        for first in range(0, count, EXTENT):
            if self._free.issuperset(range(first, first + EXTENT)):
                return first
        if 4 * len(self._free) > count:
            return min(self._free)
        self._resize(count + max(EXTENT, count // _GROWTH // EXTENT * EXTENT))
        return count

    def _read(self, number: int) -> bytes:
        return b"".join(array.tobytes() for array in self._arrays_of(number))

    def _put_back(self, number: int) -> None:
        if number < self._count:  # else the pool is cleared
            self._free.add(number)

    def _resize(self, count: int) -> None:
        if count == self._count:
            return
        self._moving()
        self._free.difference_update(range(count, self._count))
        before = self._count = min(count, self._count)
        try:
            for at, tensor in enumerate(self._layout):
                array: npt.NDArray[Any] = np.zeros(tensor.of_blocks(count), tensor.dtype)
                kept = tensor.of_blocks(before)[0]
                array[:kept] = self.arrays[at][:kept]
                self.arrays[at] = array
            self._free.update(range(before, count))
            self._count = count
        finally:  # after a lack of memory some arrays have more room than others
            rooms = (tensor.of_blocks(self._count)[0] for tensor in self._layout)
            self._values = [ort_value(array[:room]) for array, room in zip(self.arrays, rooms, strict=True)]
