"""A model on an NVIDIA GPU: float16, its KV cache in the GPU's memory, logits of the wanted rows on the host.

ONNX Runtime copies an input from other memory when it is bound, not when the graph runs
(``IOBinding::BindInput``). So inputs that change from pass to pass have a value on the device, and are
written there before the pass.

A pass of few rows is hundreds of small kernels, and the host takes longer to start them than the GPU to run
them. So the first pass of a shape is captured as a CUDA graph, and later ones start it as a whole. A graph
reads and writes the memory that it was captured with, on the device alone.

The session runs on the CPU too, where the same kernels' float16 versions are slow: for checks and tests.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from math import prod
from threading import RLock
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.graph_contract import Part, Pass
from edgespec_models.decoders.kept import KeptTensor
from edgespec_models.errors import BundleError, DeviceError
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.devices import Device
from edgespec_runtimes.discovery import open_on
from edgespec_runtimes.graph_io import NativeModel
from edgespec_runtimes.kv_cache import KVBuffers, Memory, Stretch
from edgespec_runtimes.ort import RUN_ERRORS, ort
from edgespec_runtimes.own_thread import OwnThread
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Session

_PREFILL_CHUNK = 512  # passes of many rows unpack all weights first, so there should be few
_GROWTH = 4096  # tokens; a cache grows beyond what is wanted by this many at most
_CAPTURED = 16  # tokens; longer passes are of prompts, and keep the GPU busy for longer
_TOTAL = "total_sequence_length"
_Array = npt.NDArray[Any]
_GPU = RLock()
"""Held while a model uses a GPU: while a graph is captured, no other thread may allocate or copy there."""


def open_cuda(
    bundle: Bundle, device: Device, options: CpuOptions | None = None, *, row_exact: bool | None = None
) -> Session:
    """Load a bundle's graph on a GPU and prove that it can roll back.

    ``bundle`` has a float16 graph of any shape, and every operator of it must run on ``device``.
    ``row_exact`` is the result of an earlier self-test; None tests now. A row's bits may depend on the number
    of rows, by which the device chooses its kernels; no token is run twice.

    Raises:
        BundleError: the bundle has another graph, or its graph cannot roll back.
        DeviceError: the device cannot run all of the graph, or has too little memory.
    """
    if bundle.manifest.graph_kind != "dynamic-float16":
        raise BundleError(f"{bundle.path} has no float16 graph of any shape; open it with edgespec.load")
    options = options or CpuOptions()
    with _GPU:
        session = OwnThread(partial(open_on, device, bundle.graph, options), "edgespec-gpu")
    chunk = max(options.prefill_chunk, _PREFILL_CHUNK)
    memory = DeviceMemory(device.kind.memory, device.number)
    return CudaModel(session, bundle, chunk=chunk, memory=memory).opened(row_exact)


class CudaModel(NativeModel):
    """A graph whose passes of few tokens are captured.

    ONNX Runtime keeps captured graphs, and the handles of CUDA's libraries, for each thread that runs passes,
    so ``session`` runs all of them in one. A graph that does not find the most likely columns itself has its
    logits on the host, and bindings of a trimmed LM head whose columns are offered anew for each request do
    not last: both are never captured.
    """

    cache: "DeviceCache"

    def __init__(self, session: OwnThread, bundle: Bundle, *, chunk: int, memory: "DeviceMemory") -> None:
        """Capture nothing yet."""
        self._numbers, self._is_new = count(1), False
        self._captured: list[int] = []
        self._stale: list[int] = []
        self._room = np.zeros((), np.int32)
        super().__init__(session, bundle, chunk=chunk, memory=memory)
        self._most = _CAPTURED if bundle.manifest.choices and not len(self._context) else 0

    def make_room(self, stretch: Stretch, capacity: int) -> None:
        """Make room for ``capacity`` tokens and some more, because all graphs are captured anew for it."""
        present = self.cache.capacity
        if stretch.capacity < capacity <= present:
            return
        if capacity > present:
            capacity = min(max(capacity, present + min(present, _GROWTH)), self.longest)
        super().make_room(stretch, capacity)

    def feed(self, binding: Any, pass_: Pass) -> list[tuple[str, _Array, Any, Memory]]:
        """Bind the inputs of a pass, without weights, and its cache.

        GroupQueryAttention reads the total length on the host, when a graph is captured, and cuts its work by
        it. So that is as long as it can become. On the device it reads the true length.
        """
        inputs = super().feed(binding, pass_)
        if len(pass_.tokens) > self._most:
            return inputs
        self._room[...] = self.cache.capacity
        binding.bind_ortvalue_input(_TOTAL, self._host.value(self._room))
        return [entry for entry in inputs if entry[0] != _TOTAL]

    def run_options(self, tokens: int) -> Any:
        """ONNX Runtime's options: the number of the graph to capture or start, -1 for none."""
        number = -1
        if tokens <= self._most:
            self._is_new = True
            self._captured.append(number := next(self._numbers))
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        return options

    def run_pass(self, parts: Sequence[Part]) -> list[Predictions]:
        """A row for each of the last ``rows`` of each part. The first run of a shape captures a graph."""
        with _GPU:
            began, self.prepared_s, self._is_new = perf_counter(), 0.0, False
            try:
                while self._stale:
                    self._session.release_captured_graph(self._stale.pop())
                predictions = super().run_pass(parts)
            except BaseException:  # a shape may be bound and not captured
                self.unbind()
                raise
            if not self._is_new:
                return predictions
            self.prepared_s = perf_counter() - began
            return super().run_pass(parts)

    def unbind(self) -> None:
        """Forget all bindings; the graphs that were captured with them are freed before the next pass."""
        super().unbind()
        self._stale += self._captured
        self._captured.clear()

    def make_way(self) -> None:
        """Forget bindings that were not captured, or all."""
        prompts = [key for key in self.passes if key[0] > self._most]
        for key in prompts:
            del self.passes[key]
        if not prompts:
            self.unbind()


class DeviceMemory(Memory):
    """Memory of a device, to which arrays are copied.

    ``kind`` is ONNX Runtime's name, such as ``cuda``, and ``number`` that of the device. With ``cpu`` arrays
    are copied, too.
    """

    def __init__(self, kind: str, number: int = 0) -> None:
        self._kind, self._number = kind, number

    def value(self, array: _Array) -> Any:
        """An OrtValue on the device with the content of ``array``; DeviceError if there is no room."""
        with _GPU:
            value = self._allocate(array.shape, array.dtype)
            value.update_inplace(array)
        return value

    def write(self, value: Any, array: _Array) -> None:
        with _GPU:
            value.update_inplace(array)

    def read(self, value: Any) -> _Array:
        """A copy of ``value`` on the host."""
        with _GPU:
            array: _Array = value.numpy()
        return array

    def output(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Callable[[], _Array]]:
        """An OrtValue on the device, and its copy to the host; DeviceError if there is no room."""
        value = self._allocate(shape, dtype)
        return value, partial(self.read, value)

    def shared_output(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Callable[[], _Array]]:
        """The same: captured graphs write to their own memory."""
        return self.output(shape, dtype)

    def cache(self, layout: Sequence[KeptTensor]) -> KVBuffers:
        return DeviceCache(layout, self)

    def _allocate(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        try:
            with _GPU:
                return ort.OrtValue.ortvalue_from_shape_and_type(
                    list(shape), dtype.type, self._kind, self._number
                )
        except RUN_ERRORS as error:
            wanted = prod(shape) * dtype.itemsize
            raise DeviceError(f"{self._kind} has no room for {wanted:,} more bytes: {error}") from error


class DeviceCache(KVBuffers):
    """A KV cache on a device.

    When it grows, its content travels over the host, a tensor at a time. That is rare, because sessions
    reserve a request's room at its start.
    """

    def __init__(self, layout: Sequence[KeptTensor], memory: DeviceMemory) -> None:
        super().__init__(layout)
        self._memory, self._nbytes, self.capacity = memory, 0, 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

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
        self._values.clear()
        self._nbytes = self.capacity = 0

    def _reserve(self, capacity: int, keep: int) -> None:
        self._nbytes, self.capacity = 0, capacity
        for index, tensor in enumerate(self._layout):
            array = np.zeros(tensor.of_tokens(capacity), tensor.dtype)
            self._nbytes += array.nbytes
            if index == len(self._values):
                self._values.append(None)
            elif keep:
                array[:, :, :keep] = self._memory.read(self._values[index])[:, :, :keep]
            self._values[index] = None  # the device need not hold both
            self._values[index] = self._memory.value(array)
