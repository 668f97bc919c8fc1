"""Where a session's inputs and its KV cache lie: in the host's memory, or in a device's.

ONNX Runtime copies an input that lies elsewhere than its graph runs when it is bound, not when the graph is
run (``IOBinding::BindInput``). So what changes from pass to pass has a value on the device, and is written
there before the pass.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgespec_models.errors import DeviceError
from edgespec_models.graph_contract import CacheTensor
from edgespec_runtimes.kv_buffers import InPlaceCache, KVBuffers, SharedCache, ort_value
from edgespec_runtimes.ort import RUN_ERRORS, ort

__all__ = ["DeviceCache", "DeviceMemory", "HostMemory", "TensorMemory"]

_Array = npt.NDArray[Any]


class TensorMemory(Protocol):
    """A kind of memory that ONNX Runtime's values lie in."""

    def value(self, array: _Array) -> Any:
        """An OrtValue that holds what ``array`` does; the array must outlive it."""

    def write(self, value: Any, array: _Array) -> None:
        """Let ``value``, made from ``array``, hold what the array does now."""

    def output(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Callable[[], _Array]]:
        """An OrtValue for graphs to write, and what returns, as an array, what it holds then."""

    def cache(self, layout: Sequence[CacheTensor]) -> KVBuffers:
        """A KV cache that graphs write in place."""


class HostMemory:
    """numpy's: a graph on the CPU reads and writes the arrays themselves."""

    def value(self, array: _Array) -> Any:
        """An OrtValue over the array's own memory."""
        return ort_value(array)

    def write(self, value: Any, array: _Array) -> None:
        """Nothing to do: they are one."""

    def output(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Callable[[], _Array]]:
        """An OrtValue over an array, and what returns that array."""
        array = np.empty(shape, dtype)
        return ort_value(array), lambda: array

    def cache(self, layout: Sequence[CacheTensor]) -> KVBuffers:
        """A KV cache that graphs write in place."""
        return SharedCache(layout)


class DeviceMemory:
    """A device's: arrays are copied there.

    Args:
        kind: as ONNX Runtime calls it, such as ``cuda``. With ``cpu`` everything is copied all the same.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def value(self, array: _Array) -> Any:
        """An OrtValue on the device, with what ``array`` holds now.

        Raises:
            DeviceError: the device has no room for it.
        """
        value = self._allocate(array.shape, array.dtype)
        value.update_inplace(array)
        return value

    def write(self, value: Any, array: _Array) -> None:
        """Copy ``array`` to ``value``."""
        value.update_inplace(array)

    def output(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Callable[[], _Array]]:
        """An OrtValue on the device, and what copies it to the host.

        Raises:
            DeviceError: the device has no room for it.
        """
        value = self._allocate(shape, dtype)
        return value, value.numpy

    def cache(self, layout: Sequence[CacheTensor]) -> KVBuffers:
        """A KV cache that graphs write in place."""
        return DeviceCache(layout, self)

    def _allocate(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        try:
            return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype.type, self._kind, 0)
        except RUN_ERRORS as error:
            wanted = prod(shape) * dtype.itemsize
            raise DeviceError(f"{self._kind} has no room for {wanted:,} more bytes: {error}") from error


class DeviceCache(InPlaceCache):
    """On a device.

    To grow, what is kept travels over the host, a tensor at a time: a device has no other copy here, and
    sessions reserve what a request needs at its start.
    """

    def __init__(self, layout: Sequence[CacheTensor], memory: DeviceMemory) -> None:
        super().__init__(layout)
        self._memory = memory
        self.nbytes = 0
        """Bytes reserved."""

    def reserve(self, capacity: int, keep: int) -> None:
        """Make room for ``capacity`` tokens, keeping the first ``keep``; earlier bindings are void.

        Raises:
            DeviceError: the device has no room for it; nothing is kept then.
        """
        try:
            self._reserve(capacity, keep)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Free the memory."""
        self._values.clear()
        self.nbytes = 0

    def _reserve(self, capacity: int, keep: int) -> None:
        self.nbytes = 0
        for index, tensor in enumerate(self._layout):
            array = np.zeros((1, tensor.heads, capacity, tensor.head_dim), tensor.dtype)
            self.nbytes += array.nbytes
            if index == len(self._values):
                self._values.append(None)
            elif keep:
                array[:, :, :keep] = self._values[index].numpy()[:, :, :keep]
            self._values[index] = None  # the device need not hold both
            self._values[index] = self._memory.value(array)
