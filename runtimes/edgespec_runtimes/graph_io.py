"""Passes over any number of tokens: filling a graph's inputs and reading its outputs.

Sessions know tokens. The inputs of graphs are in :mod:`graph_contract`; this module binds them to memory,
runs the graph, and reads the outputs.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.graph_contract import (
    BLOCKS,
    CHANGING,
    EXPERTS_READ,
    INPUTS,
    ROWS,
    Part,
    Pass,
    stream_name,
)
from edgespec_models.decoders.kept import KeptTensor
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import BundleError, DeviceError
from edgespec_runtimes.block_pool import BlockPool
from edgespec_runtimes.kv_cache import GrowingCache, KVBuffers, Memory, Stretch, ort_value
from edgespec_runtimes.ort import RUN_ERRORS, TYPES, lacks_memory, ort
from edgespec_runtimes.predictions import DevicePredictions, Floats, Hidden, Predictions
from edgespec_runtimes.session import LoadedModel
from edgespec_runtimes.states import ResumePoints, States

_MAX_KEPT_BINDINGS = 32
_LOGITS_BYTES = 32 << 20
_PROBED = 4
_FATAL = 4  # ONNX Runtime's severity

_Input = tuple[str, npt.NDArray[Any], Any, Memory]
_OfRows = Callable[[slice], Predictions]


@dataclass(slots=True)
class _Bound:
    """A binding for passes of one shape.

    ``changing`` are the ``inputs`` (name, array, value, and its memory) that change in the next pass.
    ``predictions`` belong to rows of the last run, ``hidden`` are other outputs of it. ``options`` are ONNX
    Runtime's options of its runs, or None. ``blocks`` are the numbers of the cache's blocks in the bound
    ``table``.
    """

    binding: Any
    options: Any
    inputs: Sequence[_Input]
    changing: Sequence[_Input]
    predictions: _OfRows
    hidden: Sequence[Floats]
    blocks: list[int] | None = None
    table: npt.NDArray[np.int64] | None = None


class _GraphModel(LoadedModel):
    """A graph that takes any number of tokens, and keeps keys and values in ``cache``.

    In ONNX Runtime attention over a single row has other code, which sums in another order; on processors
    without AVX-512 products have, too. So a single token may be run twice. The second token's keys and values
    lie behind the sequence, and the next pass overwrites or ignores them.
    """

    cache: KVBuffers
    lent: tuple[str, ...] = ()
    """Tensors of the target's cache that a head reads. Its own, of zeros, serves to see what passes take."""

    def __init__(self, session: Any, bundle: Bundle, *, chunk: int, memory: Memory | None = None) -> None:
        """Bind nothing yet, to ONNX Runtime's ``session``."""
        super().__init__(bundle.config, chunk=chunk)
        self._session, self._tensors, self._host = session, bundle.tensors, Memory()
        self._memory = memory or self._host
        every = {value.name: TYPES[value.type] for value in session.get_inputs()}
        names = self._tensors.inputs
        self._inputs = {called: (names[called], every[called]) for called in every.keys() & names.keys()}
        kinds = {value.name: TYPES[value.type] for value in session.get_outputs()}
        self._logits = kinds[self._tensors.logits]
        self._columns = bundle.manifest.head_rows or bundle.config.vocab_size

    @property
    def kv_bytes(self) -> int:
        return self.cache.nbytes

    def run(self, parts: Sequence[Part]) -> list[Predictions]:
        try:
            return self.run_pass(parts)
        except (MemoryError, *RUN_ERRORS) as error:
            count = sum(len(part.tokens) for part in parts)
            if lacks_memory(error):
                raise DeviceError(f"not enough memory for a pass over {count} tokens") from error
            raise self.failure(count, error) from error

    @abstractmethod
    def run_pass(self, parts: Sequence[Part]) -> list[Predictions]:
        """The work of :meth:`run`. Raises ONNX Runtime's exceptions."""

    @abstractmethod
    def failure(self, count: int, error: Exception) -> Exception:
        """The error for a failed pass over this many tokens."""

    def close(self) -> None:
        self.cache.clear()
        self._session = None

    def feed(self, binding: Any, pass_: Pass) -> list[_Input]:
        """Bind the inputs of a pass, without weights, and its cache."""
        inputs: list[_Input] = []
        for called, (name, kind) in self._inputs.items():
            # GroupQueryAttention reads the total length on the host, wherever it runs.
            memory = self._host if name == "total_sequence_length" else self._memory
            array = np.array(INPUTS[name](pass_), kind)
            inputs.append((name, array, memory.value(array), memory))
            binding.bind_ortvalue_input(called, inputs[-1][2])
        if not self.lent:
            self.cache.bind(binding, pass_.parts[0].start, len(pass_.parts[0].tokens))
        return inputs

    def read_rows(self, binding: Any, count: int, columns: int, rows: slice) -> _OfRows:
        """Bind logits of ``count`` rows; return a function that gives some of them after each run."""
        value, logits = self._host.shared_output((1, count, columns), self._logits)
        binding.bind_ortvalue_output(self._tensors.logits, value)
        bound = logits()[0, rows]
        return lambda some: Predictions(bound[some].astype(np.float32, copy=False))


class NativeModel(_GraphModel):
    """A graph that edgespec built.

    It has logits of the wanted rows, and writes a cache with spare room in place, so a binding serves every
    pass with the same number of tokens. A graph of edgespec's operators takes several sequences, each with a
    table of blocks. A graph of ONNX Runtime's takes one, and computes at least two rows of logits if rows
    have to be exact.

    ``passes`` are bindings by number of tokens, of wanted rows, of parts, of features and of vectors.
    """

    states: States

    def __init__(
        self,
        session: Any,
        bundle: Bundle,
        *,
        chunk: int,
        exact_rows: bool = False,
        memory: Memory | None = None,
        read_layers: Sequence[int] = (),
    ) -> None:
        """Bind nothing yet.

        ``exact_rows`` runs a single token twice if that makes a row's bits independent of the number of rows.
        Predictions have the streams that enter ``read_layers``, side by side.
        """
        super().__init__(session, bundle, chunk=chunk, memory=memory)
        self.takes_several = self._inputs.pop(BLOCKS, None) is not None
        self._spare = int(exact_rows and not self.takes_several)  # rows that are run twice
        self._choices, self._head_tokens = bundle.manifest.choices, bundle.head_tokens
        self._context = np.zeros(int("context_tokens" in self._inputs), np.int64)
        self._set_head()
        config, streams = bundle.config, [stream_name(layer) for layer in read_layers]
        width = config.hidden_size if isinstance(config, Transformer) else 0
        late = record(config).late if isinstance(config, Transformer) else None
        rows_alone = late is not None and max(read_layers, default=0) >= late
        self._hidden = Hidden(session, streams, width, of_tokens=not rows_alone)
        counts = [value.shape for value in session.get_outputs() if value.name == EXPERTS_READ]
        self._experts_read = np.zeros(counts[0], np.int64) if counts else None
        self.most_rows = bundle.config.context_length
        self.passes: dict[tuple[int, ...], _Bound] = {}
        kept, has_slots = bundle.manifest.kept, "places" in self._inputs
        config = bundle.config
        target_tensors = record(config).read_in("float16") if isinstance(config, Transformer) else ()
        self.lent = tuple(tensor.input for tensor in target_tensors)
        layout = target_tensors or [tensor for tensor in kept if tensor.per != "sequence" or not has_slots]
        self.cache = BlockPool(layout, self.unbind) if self.takes_several else self._memory.cache(layout)
        self.states, self.places = States(kept), ResumePoints.of(kept)
        self.reads_vectors = "picture_vectors" in self._inputs
        self._no_vectors = np.empty((0, width), np.float32)

    @property
    def kv_bytes(self) -> int:
        return self.cache.nbytes + self.states.nbytes

    def offer(self, tokens: Sequence[int]) -> None:
        """Add a column for each of ``tokens`` to a trimmed LM head that is tied to the embedding."""
        offered = np.array(tokens or [0], np.int64)
        if len(self._context) and not np.array_equal(offered, self._context):
            self._context = offered
            self._set_head()
            self.unbind()

    def _set_head(self) -> None:
        if self._head_tokens is not None:
            self.head_tokens = np.concatenate([self._head_tokens, self._context.astype(np.int32)])

    def make_room(self, stretch: Stretch, capacity: int) -> None:
        self.unbind()
        self.states.reserve(1 + max((other.slot for other in self.stretches), default=0))
        self.cache.reserve(capacity + self._spare, len(stretch.tokens))

    def run_pass(self, parts: Sequence[Part]) -> list[Predictions]:
        order = self._hidden.order(parts)
        parts = [parts[at] for at in order]
        wanted = sum(part.rows for part in parts)
        features, states = self._hidden.inputs(parts)
        doubled = [_twice(part, least=2) for part in parts] if self._spare else parts
        rows = [part.vectors for part in parts if part.vectors is not None]
        vectors = np.concatenate([self._no_vectors, *rows])
        pass_ = Pass(doubled, self._context, self._columns + len(self._context), features, states, vectors)
        key = sum(len(part.tokens) for part in parts), wanted, len(parts), len(features), len(vectors)
        bound = self.passes.get(key)
        if bound is None:
            if len(self.passes) >= _MAX_KEPT_BINDINGS:
                self.make_way()
            self.passes[key] = bound = self._bind(pass_, wanted)
        else:
            for name, array, value, memory in bound.changing:
                array[...] = INPUTS[name](pass_)
                memory.write(value, array)
        if self.takes_several:  # their number changes, too
            blocks = [*chain.from_iterable(part.blocks for part in parts)]
            if blocks != bound.blocks:
                bound.blocks, bound.table = blocks, np.array(blocks, np.int64)
                bound.binding.bind_ortvalue_input(BLOCKS, ort_value(bound.table))
        if self.lent:  # at every pass, since the target may have moved them
            (parts[0].cache or self.cache).lend(bound.binding, self.lent)
        self._session.run_with_iobinding(bound.binding, bound.options)
        if self._experts_read is not None:
            self.experts_read = int(self._experts_read.sum())
        ends = list(accumulate(part.rows for part in parts))
        predictions = [
            bound.predictions(slice(end - part.rows, end)) for end, part in zip(ends, parts, strict=True)
        ]
        for of_part, hidden in zip(predictions, self._hidden.of_parts(parts, bound.hidden), strict=True):
            of_part.hidden = hidden
        return [predictions[order.index(at)] for at in range(len(parts))]

    def unbind(self) -> None:
        """Forget all bindings, because what they bind has moved or changed."""
        self.passes.clear()

    def make_way(self) -> None:
        """Forget some bindings, because there are too many."""
        self.unbind()

    def run_options(self, tokens: int) -> Any:
        """ONNX Runtime's options for passes of one binding, over this many tokens."""
        return None

    def failure(self, count: int, error: Exception) -> Exception:
        """The error of a pass, mostly for lack of memory."""
        return DeviceError(f"a pass over {count} tokens failed: {error}")

    def close(self) -> None:
        self.unbind()
        self.states.clear()
        super().close()

    def _bind(self, pass_: Pass, rows: int) -> _Bound:
        """Bind the inputs and outputs of a pass; its predictions belong to the last ``rows``."""
        binding = self._session.io_binding()
        inputs = self.feed(binding, pass_)
        self.states.bind(binding)
        # With a single part equal numbers of rows are the same rows.
        changing = [
            entry for entry in inputs if entry[0] in CHANGING and (entry[0] != ROWS or len(pass_.parts) > 1)
        ]
        hidden = self._hidden.arrays(len(pass_.tokens), rows)
        for name, array in hidden.items():
            binding.bind_ortvalue_output(name, ort_value(array))
        if self._experts_read is not None:
            binding.bind_ortvalue_output(EXPERTS_READ, ort_value(self._experts_read))
        if self._choices:
            predictions = self._choose(binding, pass_)
        else:
            predictions = self.read_rows(
                binding, pass_.rows, pass_.columns, slice(pass_.rows - rows, pass_.rows)
            )
        options = self.run_options(len(pass_.tokens))
        return _Bound(binding, options, inputs, changing, predictions, tuple(hidden.values()))

    def _choose(self, binding: Any, pass_: Pass) -> _OfRows:
        """Bind outputs of a graph that returns the most likely columns; all stay on its device."""
        floats = np.dtype(np.float32)
        logits, read_logits = self._memory.shared_output((1, pass_.rows, pass_.columns), floats)
        best, read_best = self._memory.output((1, pass_.rows), np.dtype(np.int64))
        likely, read_likely = self._memory.output((1, pass_.rows), floats)
        outputs = {self._tensors.logits: logits, "best_columns": best, "best_probabilities": likely}
        for name, output in outputs.items():
            binding.bind_ortvalue_output(name, output)
        return lambda rows: DevicePredictions(
            (rows.stop - rows.start, pass_.columns),
            lambda: read_logits()[0, rows],
            read_best()[0, rows],
            read_likely()[0, rows],
        )


class ForeignModel(_GraphModel):
    """A graph of another exporter, whose passes read one sequence.

    It reads a growing mask and writes logits of all rows, so every pass is bound anew; ``most_rows`` take
    about 32 MiB. GroupQueryAttention with spare room writes its cache in place; a graph that concatenates
    returns a longer cache. A short trial at the start tells which, because configurations do not always tell,
    and Optimum's never.
    """

    def __init__(self, session: Any, bundle: Bundle, *, chunk: int, exact_rows: bool) -> None:
        """Bind nothing yet; ``exact_rows`` is as in :class:`NativeModel`."""
        super().__init__(session, bundle, chunk=chunk)
        self._pairs, kept = exact_rows, bundle.manifest.kept
        self.copies_cache = self._grows(kept)
        self.cache = GrowingCache(kept) if self.copies_cache else self._memory.cache(kept)
        self.most_rows = max(1, _LOGITS_BYTES // (self._columns * self._logits.itemsize))

    def make_room(self, stretch: Stretch, capacity: int) -> None:
        # With the context the model's rotary tables end.
        room = min(capacity + int(self._pairs), self.config.context_length)
        self.cache.reserve(room, len(stretch.tokens))

    def run_pass(self, parts: Sequence[Part]) -> list[Predictions]:
        """A row for each of the last ``rows`` of the only part."""
        (part,) = parts
        pairs = self._pairs and part.start + 2 <= self.config.context_length
        doubled = _twice(part) if pairs else part
        binding, pass_, count = self._session.io_binding(), Pass([doubled]), len(doubled.tokens)
        inputs, end = self.feed(binding, pass_), count - doubled.ending
        predictions = self.read_rows(binding, count, self._columns, slice(end - part.rows, end))
        self._session.run_with_iobinding(binding)
        del inputs  # the pass has read their memory
        self.cache.written(doubled.end)
        return [predictions(slice(0, part.rows))]

    def failure(self, count: int, error: Exception) -> Exception:
        """The error of a pass, perhaps by the graph's fault."""
        return BundleError(f"ONNX Runtime cannot run this graph of another exporter: {error}")

    def _grows(self, kept: Sequence[KeptTensor]) -> bool:
        """Whether the returned cache is longer than the input, although it had room."""
        pass_ = Pass([Part((0, 0), 0)])
        feeds = {called: np.array(INPUTS[name](pass_), kind) for called, (name, kind) in self._inputs.items()}
        feeds |= {tensor.input: np.zeros(tensor.of_tokens(_PROBED), tensor.dtype) for tensor in kept}
        quiet = ort.RunOptions()
        quiet.log_severity_level = _FATAL
        try:
            present = self._session.run([kept[0].output], feeds, quiet)[0]
        except RUN_ERRORS:  # this graph takes no mask that is shorter than the cache
            return True
        return bool(present.shape[2] != _PROBED)


def _twice(part: Part, *, least: int = 0) -> Part:
    """A part with its single token twice, and with at least this many rows of logits."""
    twice = len(part.tokens) == 1
    tokens = (*part.tokens, *part.tokens) if twice else part.tokens
    return part._replace(tokens=tokens, rows=max(part.rows, least), ending=int(twice))
