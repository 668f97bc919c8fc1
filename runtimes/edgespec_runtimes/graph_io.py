"""How a pass fills a graph's inputs and reads its outputs: edgespec's own graphs, and everyone else's.

:class:`edgespec_runtimes.cpu.CpuSession` knows tokens; what a graph is called with is known here only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgespec_models.bundle import Bundle
from edgespec_models.config import DecoderShape
from edgespec_models.errors import BundleError, DeviceError, RequestError
from edgespec_models.graph_tensors import GraphTensors
from edgespec_runtimes.kv_buffers import (
    KEY_TILE,
    CacheLayout,
    GrowingCache,
    KVBuffers,
    SharedCache,
    ort_value,
)
from edgespec_runtimes.ort import RUN_ERRORS, ort
from edgespec_runtimes.predictions import DevicePredictions, Predictions
from edgespec_runtimes.tensor_memory import HostMemory, TensorMemory

__all__ = ["EdgespecIO", "GraphIO", "MaskedIO", "open_io"]

_MAX_KEPT_BINDINGS = 32
_LOGITS_BYTES = 32 << 20
_PROBED = 4
_FATAL = 4  # ONNX Runtime's severity
_TYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
}


class GraphIO(Protocol):
    """Runs passes of one graph over one sequence.

    Attributes:
        most_rows: rows of a pass whose logits are not all wanted, at most; bounds the memory for logits.
    """

    most_rows: int

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV cache."""

    @property
    def copies_cache(self) -> bool:
        """Whether every pass writes the whole KV cache anew."""

    @property
    def tunable(self) -> frozenset[str]:
        """Weights that :meth:`tune` replaces."""

    def tune(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Run with these weights, by name, from the next pass on."""

    @property
    def head_tokens(self) -> npt.NDArray[np.int32] | None:
        """The token of every column of the logits; None where column i is token i."""

    def offer(self, tokens: Sequence[int]) -> None:
        """Give a trimmed LM head a column for each of ``tokens``; others take no notice."""

    def reserve(self, capacity: int, keep: int) -> None:
        """Make room for ``capacity`` tokens, keeping the first ``keep``."""

    def cache_rows(self, length: int) -> list[npt.NDArray[Any]] | None:
        """Copies of the keys and values of the first ``length`` tokens; None where there are none to copy."""

    def put_cache_rows(self, arrays: Sequence[npt.NDArray[Any]], length: int) -> None:
        """Put the first ``length`` tokens of such copies where they were. Room must be reserved."""

    def run(self, tokens: Sequence[int], start: int, rows: int) -> Predictions:
        """Run ``tokens`` behind the first ``start`` of the cache; a row for each of the last ``rows``.

        They lie in the graph's own buffers. Room must be reserved.

        Raises:
            BundleError: ONNX Runtime fails to run a foreign graph.
            DeviceError: it fails to run one of edgespec's, mostly for want of memory.
        """

    def close(self) -> None:
        """Free what passes use."""


def open_io(session: Any, bundle: Bundle, *, exact_rows: bool) -> GraphIO:
    """How ``session``, ONNX Runtime's over the bundle's graph, is to be called.

    Args:
        session: an ``onnxruntime.InferenceSession``.
        bundle: whose graph it runs.
        exact_rows: run a single token twice where that makes a row's bits independent of the number of rows.
    """
    if bundle.tensors is None:
        return EdgespecIO(session, bundle, exact_rows=exact_rows)
    return MaskedIO(session, bundle.tensors, bundle.config, exact_rows=exact_rows)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A binding for passes over ``n`` tokens: write the inputs, run, read what comes out."""

    binding: Any
    ids: npt.NDArray[np.int64]
    seqlens_k: npt.NDArray[np.int32]
    past_length: npt.NDArray[np.int64]
    total: npt.NDArray[np.int32]
    predictions: Callable[[], Predictions]  # of the last run
    changing: tuple[tuple[Any, npt.NDArray[Any]], ...]  # values and their arrays, of ids and seqlens_k
    keep_alive: tuple[Any, ...]


class EdgespecIO:
    """Graphs of :func:`~edgespec_models.graphs.native.build_native` and of
    :func:`~edgespec_models.graphs.decoder.build_decoder`, where a single token may run twice: see
    :class:`MaskedIO`.

    Attributes:
        cache: keys and values.
        passes: bindings by number of tokens and of wanted rows.
        most_rows: no bound, since only wanted rows have logits.
    """

    def __init__(
        self, session: Any, bundle: Bundle, *, exact_rows: bool, memory: TensorMemory | None = None
    ) -> None:
        config = bundle.config
        self._session, self._memory = session, memory or HostMemory()
        self._pairs = exact_rows and bundle.manifest.operators == "standard"
        types = {value.name: _TYPES[value.type] for value in session.get_inputs()}
        self._inputs = types
        self._head_rows = bundle.manifest.head_rows or config.vocab_size
        self._head_tokens = bundle.head_tokens
        self._choices = bundle.manifest.choices
        self._context = np.zeros(int("context_tokens" in self._inputs), np.int64)
        self.most_rows = config.context_length
        self.passes: dict[tuple[int, int], _Pass] = {}
        self._tuned: dict[str, tuple[npt.NDArray[np.float32], Any]] = {}
        layers = (f"{layer}.{kind}" for layer in range(config.num_layers) for kind in ("key", "value"))
        heads, width = config.num_kv_heads, config.head_dim
        self.cache = self._memory.cache(
            [
                CacheLayout(past := f"past_key_values.{name}", f"present.{name}", heads, width, types[past])
                for name in layers
            ]
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV cache."""
        return self.cache.nbytes

    @property
    def copies_cache(self) -> bool:
        """False: passes write in place."""
        return False

    @property
    def tunable(self) -> frozenset[str]:
        """Weights that the graph lists as inputs too (ONNX IR: their stored values are defaults)."""
        return frozenset(value.name for value in self._session.get_overridable_initializers())

    def tune(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Run with copies of these weights, by name, from the next pass on.

        Raises:
            RequestError: one of another shape than the graph's.
        """
        arrays = {name: np.array(weight, np.float32) for name, weight in weights.items()}
        shapes = {value.name: tuple(value.shape) for value in self._session.get_overridable_initializers()}
        for name, array in arrays.items():
            if array.shape != shapes[name]:
                raise RequestError(f"{name} is of shape {shapes[name]}, not {array.shape}")
        self._tuned = {name: (array, self._memory.value(array)) for name, array in arrays.items()}
        self.passes.clear()

    @property
    def head_tokens(self) -> npt.NDArray[np.int32] | None:
        """The token of every column of the logits; None where column i is token i."""
        if self._head_tokens is None:
            return None
        return np.concatenate([self._head_tokens, self._context.astype(np.int32)])

    def offer(self, tokens: Sequence[int]) -> None:
        """Give a trimmed LM head that is tied to the embedding a column for each of ``tokens``."""
        offered = np.array(tokens or [0], np.int64)
        if len(self._context) and not np.array_equal(offered, self._context):
            self._context = offered
            self.passes.clear()

    def reserve(self, capacity: int, keep: int) -> None:
        """Make room for ``capacity`` tokens, keeping the first ``keep``."""
        self.passes.clear()
        self.cache.reserve(-(-(capacity + int(self._pairs)) // KEY_TILE) * KEY_TILE, keep)

    def cache_rows(self, length: int) -> list[npt.NDArray[Any]] | None:
        """Copies of the keys and values of the first ``length`` tokens."""
        return self.cache.copy(length)

    def put_cache_rows(self, arrays: Sequence[npt.NDArray[Any]], length: int) -> None:
        """Put the first ``length`` tokens of such copies where they were."""
        self.cache.paste(arrays, length)

    def run(self, tokens: Sequence[int], start: int, rows: int) -> Predictions:
        """Run ``tokens`` behind the first ``start`` of the cache; a row for each of the last ``rows``."""
        count = len(tokens)
        one_pass = self.passes.get((count, rows))
        if one_pass is None:
            if len(self.passes) >= _MAX_KEPT_BINDINGS:
                self.passes.clear()
            one_pass = self.passes[count, rows] = self._bind(count, rows)
        one_pass.ids[0] = tokens
        total = start + one_pass.ids.shape[1]
        one_pass.seqlens_k[0] = total - 1
        one_pass.past_length[0] = start
        one_pass.total[()] = total
        for value, array in one_pass.changing:
            self._memory.write(value, array)
        try:
            self._session.run_with_iobinding(one_pass.binding)
        except RUN_ERRORS as error:
            raise DeviceError(f"a pass over {count} tokens failed: {error}") from error
        return one_pass.predictions()

    def close(self) -> None:
        """Free what passes use."""
        self.passes.clear()
        self.cache.clear()
        self._session = None

    def _bind(self, count: int, rows: int) -> _Pass:
        """Bind inputs and outputs for ``count`` tokens, logits of the last ``rows`` of them."""
        ids = np.zeros((1, 2 if self._pairs and count == 1 else count), np.int64)
        seqlens, past_length = np.zeros(1, np.int32), np.zeros(1, np.int64)
        columns, total = self._head_rows + len(self._context), np.zeros((), np.int32)
        inputs: dict[str, npt.NDArray[Any]] = {
            "input_ids": ids,
            "seqlens_k": seqlens,
            "past_length": past_length,
            "total_sequence_length": total,
            "logits_rows": np.arange(count - rows, count, dtype=np.int64),
            "context_tokens": self._context,
            "column_order": -np.arange(columns if self._choices else 0, dtype=np.float32),
        }
        binding = self._session.io_binding()
        values: dict[str, Any] = {}
        for name in inputs.keys() & self._inputs.keys():
            # GroupQueryAttention reads the total length on the host, wherever it runs.
            memory = HostMemory() if name == "total_sequence_length" else self._memory
            values[name] = memory.value(inputs[name])
            binding.bind_ortvalue_input(name, values[name])
        for name, (_, value) in self._tuned.items():
            binding.bind_ortvalue_input(name, value)
        self.cache.bind(binding, 0, 0)
        predictions = self._bind_outputs(binding, (rows, columns))
        written = (("input_ids", ids), ("seqlens_k", seqlens), ("past_length", past_length))
        changing = tuple((values[name], array) for name, array in written if name in values)
        keep_alive = (inputs, values)
        return _Pass(binding, ids, seqlens, past_length, total, predictions, changing, keep_alive)

    def _bind_outputs(self, binding: Any, shape: tuple[int, int]) -> Callable[[], Predictions]:
        """Bind what comes out of a pass; what hands it out after each run.

        Logits stay where the graph runs if it says itself which columns are the most likely.
        """
        memory = self._memory if self._choices else HostMemory()
        value, logits = memory.output((1, *shape), np.dtype(np.float32))
        binding.bind_ortvalue_output("logits", value)
        if not self._choices:
            return lambda: Predictions(logits()[0])
        best, likely = np.empty((1, shape[0]), np.int64), np.empty((1, shape[0]), np.float32)
        binding.bind_ortvalue_output("best_columns", ort_value(best))
        binding.bind_ortvalue_output("best_probabilities", ort_value(likely))
        return lambda: DevicePredictions(shape, lambda: logits()[0], best[0], likely[0])


class MaskedIO:
    """Graphs that read ids and a mask and write logits of all rows; see :class:`GraphTensors`.

    Where GroupQueryAttention is given a cache with room to spare, it writes in place; the mask's length and
    sum are those of past and new tokens all the same. Graphs that concatenate return a longer cache. A short
    trial at the start tells which: configurations do not always, and Optimum's not at all.

    Attention over a single row, and products with it, take other code, which sums in another order. Where
    rows are to be exact, a single token is run twice; the second's keys and values land behind the sequence
    and are overwritten by the next pass, or left out by it.

    Attributes:
        cache: keys and values.
        most_rows: rows whose logits take about 32 MiB.
    """

    def __init__(
        self, session: Any, tensors: GraphTensors, config: DecoderShape, *, exact_rows: bool
    ) -> None:
        self._session, self._tensors, self._config = session, tensors, config
        vocab_size = config.vocab_size
        used = [*session.get_inputs(), *(v for v in session.get_outputs() if v.name == tensors.logits)]
        self._types = {value.name: _TYPES[value.type] for value in used}
        layout = [
            CacheLayout(t.past, t.present, t.heads, t.head_dim, self._types[t.past]) for t in tensors.cache
        ]
        self.cache: KVBuffers = GrowingCache(layout) if self._grows(layout) else SharedCache(layout)
        self._pairs = exact_rows
        dtype = self._types[tensors.logits]
        self.most_rows = max(1, _LOGITS_BYTES // (vocab_size * dtype.itemsize))
        self._logits: npt.NDArray[Any] = np.empty(0, dtype)
        self._binding = session.io_binding()
        self._bound: list[tuple[npt.NDArray[Any], Any]] = []

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV cache."""
        return self.cache.nbytes

    @property
    def copies_cache(self) -> bool:
        """Whether every pass writes the whole KV cache anew: the graph concatenates."""
        return isinstance(self.cache, GrowingCache)

    @property
    def tunable(self) -> frozenset[str]:
        """None: the graph is as others made it."""
        return frozenset()

    def tune(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Never called: nothing is tunable."""

    @property
    def head_tokens(self) -> None:
        """Column i is token i."""

    def offer(self, tokens: Sequence[int]) -> None:
        """Take no notice: a foreign LM head is whole."""

    def reserve(self, capacity: int, keep: int) -> None:
        """Make room for ``capacity`` tokens, keeping the first ``keep``."""
        self.cache.reserve(min(capacity + int(self._pairs), self._config.context_length), keep)

    def cache_rows(self, length: int) -> list[npt.NDArray[Any]] | None:
        """Copies of the keys and values of the first ``length`` tokens."""
        return self.cache.copy(length)

    def put_cache_rows(self, arrays: Sequence[npt.NDArray[Any]], length: int) -> None:
        """Put the first ``length`` tokens of such copies where they were."""
        self.cache.paste(arrays, length)

    def run(self, tokens: Sequence[int], start: int, rows: int) -> Predictions:
        """Run ``tokens`` behind the first ``start`` of the cache; a row for each of the last ``rows``."""
        wanted, width = len(tokens), self._config.vocab_size
        # The graph's rotary tables end with the context.
        if self._pairs and wanted == 1 and start + 2 <= self._config.context_length:
            tokens = [*tokens, *tokens]
        count = len(tokens)
        if self._logits.size < count * width:
            self._logits = np.empty(count * width, self._logits.dtype)
        logits = self._logits[: count * width].reshape(1, count, width)
        self._bound.clear()
        for name, array in self._inputs(tokens, start).items():
            self._binding.bind_ortvalue_input(name, self._value(array))
        self._binding.bind_ortvalue_output(self._tensors.logits, self._value(logits))
        self.cache.bind(self._binding, start, count)
        try:
            self._session.run_with_iobinding(self._binding)
        except RUN_ERRORS as error:
            raise BundleError(
                f"ONNX Runtime cannot run this graph, which edgespec did not make: {error}"
            ) from error
        self.cache.written(start + count)
        return Predictions(logits[0, wanted - rows : wanted].astype(np.float32, copy=False))

    def close(self) -> None:
        """Free what passes use."""
        self._binding = self._session = None
        self._bound.clear()
        self.cache.clear()

    def _inputs(self, tokens: Sequence[int], start: int) -> dict[str, npt.NDArray[Any]]:
        names, total = self._tensors, start + len(tokens)
        values = {names.ids: np.array([tokens]), names.mask: np.ones((1, total))}
        values[names.positions] = np.arange(start, total)[None]
        return {name: array.astype(self._types[name]) for name, array in values.items() if name is not None}

    def _value(self, array: npt.NDArray[Any]) -> Any:
        value = ort_value(array)
        self._bound.append((array, value))
        return value

    def _grows(self, layout: Sequence[CacheLayout]) -> bool:
        """Whether the cache comes back longer than it went in, although it had room."""
        feeds = self._inputs([0, 0], 0)
        feeds |= {t.past: np.zeros((1, t.heads, _PROBED, t.head_dim), t.dtype) for t in layout}
        quiet = ort.RunOptions()
        quiet.log_severity_level = _FATAL
        try:
            present = self._session.run([layout[0].present], feeds, quiet)[0]
        except RUN_ERRORS:  # a mask shorter than the cache: not for this graph
            return True
        return bool(present.shape[2] != _PROBED)
