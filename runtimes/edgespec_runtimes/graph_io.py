"""How a pass of any number of tokens fills a graph's inputs and reads its outputs.

Sessions know tokens. What a graph is called with is in :mod:`graph_contract`; here that is
bound to memory, run, and read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.graph_contract import CHANGING, INPUTS, ROWS, Part, Pass
from edgespec_models.bundles.kept import KeptTensor
from edgespec_models.errors import BundleError, DeviceError, RequestError
from edgespec_runtimes.kv_cache import KEY_TILE, GrowingCache, KVBuffers, Memory, Move, Stretch, ort_value
from edgespec_runtimes.ort import RUN_ERRORS, TYPES, lacks_memory, ort
from edgespec_runtimes.predictions import DevicePredictions, Floats, Hidden, Predictions

_MAX_KEPT_BINDINGS = 32
_LOGITS_BYTES = 32 << 20
_PROBED = 4
_FATAL = 4  # ONNX Runtime's severity


class GraphIO(ABC):
    """Runs passes of one graph over one sequence or, where it takes them, over several.

    ``most_rows`` is how many rows of a pass have logits at most where not all are wanted; it bounds the
    memory for them. ``takes_several`` says whether a pass may be over parts of several sequences.
    ``stretches`` are those of the sessions whose passes it runs. What is not overridden is of graphs whose
    cache no session is given rows of, whose weights stay and whose LM head has every token.
    """

    most_rows: int
    takes_several = False
    cache: KVBuffers | None = None
    tunable: frozenset[str] = frozenset()
    head_tokens: npt.NDArray[np.int32] | None = None

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV cache."""

    @abstractmethod
    def reserve(self, stretch: Stretch, capacity: int) -> None:
        """Make room for ``capacity`` tokens in ``stretch``, keeping those of all."""

    def tune(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """See :meth:`~edgespec_runtimes.session.Session.tune`."""
        raise RequestError("graphs of fixed shapes have no weights to tune")

    def offer(self, tokens: Sequence[int]) -> None:
        """See :meth:`~edgespec_runtimes.session.Session.offer`."""
        return

    @abstractmethod
    def run(self, parts: Sequence[Part]) -> list[Predictions]:
        """Run a pass; for each part a row for each of its last ``rows``.

        They lie in the graph's own buffers. Room must be reserved.

        Raises:
            BundleError: ONNX Runtime fails to run a foreign graph.
            DeviceError: it fails to run one of edgespec's, mostly for want of memory.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what passes use."""


_Input = tuple[str, npt.NDArray[Any], Any, Memory]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A binding for passes of one shape.

    ``changing`` are those of the ``inputs`` (name, array, value, and its memory) that hold something else in
    the next pass. ``predictions`` are of rows of the last run, ``hidden`` other outputs of it.
    """

    binding: Any
    inputs: tuple[_Input, ...]
    changing: tuple[_Input, ...]
    predictions: Callable[[slice], Predictions]
    hidden: Sequence[Floats]


class DynamicIO(GraphIO):
    """Graphs that take any number of tokens: edgespec's own, and those that others exported.

    Attention over a single row takes other code in ONNX Runtime, which sums in another order; on processors
    without AVX-512 products do too. Where rows are to be exact, a single token is run twice, and at least two
    rows of logits are asked for. The second token's keys and values land behind the sequence and are
    overwritten by the next pass, or left out by it.

    Graphs of edgespec's have logits of the rows that are asked for, and write a cache with room to spare in
    place, so that a binding serves every pass of as many tokens. Other graphs read a mask, which grows, and
    write logits of all rows. Where GroupQueryAttention is given room to spare, they write in place too; where
    they concatenate, a longer cache comes back. A short trial at the start tells which: configurations do not
    always, and Optimum's not at all.

    ``passes`` are bindings by number of tokens, of wanted rows and of parts. Where logits are of all rows,
    ``most_rows`` take about 32 MiB. The ``stretches`` of sequences lie in the cache one behind the other.
    ``grows`` says that a longer cache comes back.
    """

    def __init__(
        self,
        session: Any,
        bundle: Bundle,
        *,
        exact_rows: bool,
        memory: Memory | None = None,
        streams: Sequence[str] = (),
    ) -> None:
        """Bind nothing yet.

        ``exact_rows`` runs a single token twice where that makes a row's bits independent of the number of
        rows. ``streams`` are outputs that predictions have of every token of a pass, side by side.
        """
        super().__init__()
        self._session, self._tensors, self._host = session, bundle.tensors, Memory()
        self._memory = memory or self._host
        manifest, self._context_length = bundle.manifest, bundle.config.context_length
        every = {value.name: TYPES[value.type] for value in session.get_inputs()}
        names = self._tensors.inputs
        self._inputs = {called: (names[called], every[called]) for called in every.keys() & names.keys()}
        self.takes_several = "sequences" in self._inputs
        tunable = session.get_overridable_initializers()  # inputs too, whose stored values are defaults
        self._shapes = {value.name: tuple(value.shape) for value in tunable}
        self.tunable = frozenset(self._shapes)
        self._pairs = exact_rows and manifest.operators == "standard"
        self._choices, self._selects = manifest.choices, ROWS in every
        self._head_tokens, self._columns = bundle.head_tokens, manifest.head_rows or bundle.config.vocab_size
        self._context = np.zeros(int("context_tokens" in every), np.int64)
        self._set_head()
        kinds = {value.name: TYPES[value.type] for value in session.get_outputs()}
        self._logits = kinds[self._tensors.logits]
        width = bundle.config.hidden_size if isinstance(bundle.config, ModelConfig) else 0
        self._hidden = Hidden(session, streams, width)
        row_bytes = self._columns * self._logits.itemsize
        self.most_rows = self._context_length if self._selects else max(1, _LOGITS_BYTES // row_bytes)
        self.passes: dict[tuple[int, ...], _Bound] = {}
        self._tuned: dict[str, tuple[npt.NDArray[np.float32], Any]] = {}
        self.grows = not self._tensors.ours and self._grows(manifest.kept)
        kept = manifest.kept
        self.cache: KVBuffers = GrowingCache(kept) if self.grows else self._memory.cache(kept)

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV cache."""
        return self.cache.nbytes

    def tune(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Run with copies of these weights, by name, from the next pass on.

        Raises:
            RequestError: one that is not among :attr:`tunable`, or of another shape.
        """
        unknown = weights.keys() - self.tunable
        if unknown:
            raise RequestError(f"this graph does not let {', '.join(sorted(unknown))} be replaced")
        arrays = {name: np.array(weight, np.float32) for name, weight in weights.items()}
        for name, array in arrays.items():
            if array.shape != self._shapes[name]:
                raise RequestError(f"{name} is of shape {self._shapes[name]}, not {array.shape}")
        self._tuned = {name: (array, self._memory.value(array)) for name, array in arrays.items()}
        self.passes.clear()
        for stretch in self.stretches:
            stretch.cut(0)

    def offer(self, tokens: Sequence[int]) -> None:
        """Give a trimmed LM head that is tied to the embedding a column for each of ``tokens``."""
        offered = np.array(tokens or [0], np.int64)
        if len(self._context) and not np.array_equal(offered, self._context):
            self._context = offered
            self._set_head()
            self.passes.clear()

    def _set_head(self) -> None:
        if self._head_tokens is not None:
            self.head_tokens = np.concatenate([self._head_tokens, self._context.astype(np.int32)])

    def reserve(self, stretch: Stretch, capacity: int) -> None:
        """Make room for ``capacity`` tokens in ``stretch``, keeping those of all."""
        self.passes.clear()
        moves, end = list[Move](), 0
        for each in self.stretches:
            moves.append(Move(each.begin, end, len(each.tokens)))
            end += self._room(capacity if each is stretch else each.capacity)
        self.cache.reserve(end, moves)
        for each, move in zip(self.stretches, moves, strict=True):
            each.begin = move.to

    def run(self, parts: Sequence[Part]) -> list[Predictions]:
        """Run a pass; for each part a row for each of its last ``rows``."""
        try:
            order = self._hidden.order(parts)
            found = self._pass([parts[at] for at in order])
            return [found[order.index(at)] for at in range(len(parts))]
        except (MemoryError, *RUN_ERRORS) as error:
            count = sum(len(part.tokens) for part in parts)
            if lacks_memory(error):
                raise DeviceError(f"not enough memory for a pass over {count} tokens") from error
            if self._tensors.ours:
                raise DeviceError(f"a pass over {count} tokens failed: {error}") from error
            raise BundleError(
                f"ONNX Runtime cannot run this graph, which edgespec did not make: {error}"
            ) from error

    def _pass(self, parts: Sequence[Part]) -> list[Predictions]:
        wanted = sum(part.rows for part in parts)
        offered, columns = self._context, self._columns + len(self._context)
        features, states = self._hidden.inputs(parts)
        one = Pass(self._in_pairs(parts), offered, columns, features, states)
        key = sum(len(part.tokens) for part in parts), wanted, len(parts), len(features)
        bound = self.passes.get(key)
        if bound is None:
            bound = self._bind(one, wanted)
            if self._tensors.ours:
                if len(self.passes) >= _MAX_KEPT_BINDINGS:
                    self.passes.clear()
                self.passes[key] = bound
        else:
            for name, array, value, memory in bound.changing:
                array[...] = INPUTS[name](one)
                memory.write(value, array)
        self._session.run_with_iobinding(bound.binding)
        self.cache.written(one.parts[0].end)
        ends = list(accumulate(part.rows for part in parts))
        found = [
            bound.predictions(slice(end - part.rows, end)) for end, part in zip(ends, parts, strict=True)
        ]
        for each, hidden in zip(found, self._hidden.found(parts, bound.hidden), strict=True):
            each.hidden = hidden
        return found

    def _in_pairs(self, parts: Sequence[Part]) -> Sequence[Part]:
        """The part with its single token twice, where that makes a row's bits those of other passes."""
        if not self._pairs:
            return parts
        (part,) = parts
        rows = max(part.rows, 2) if self._selects else part.rows
        twice = len(part.tokens) == 1 and (self._tensors.ours or part.start + 2 <= self._context_length)
        return [
            part._replace(
                tokens=(*part.tokens, *part.tokens) if twice else part.tokens, rows=rows, ending=int(twice)
            )
        ]

    def _room(self, capacity: int) -> int:
        """Tokens that the cache has room for where ``capacity`` are asked for."""
        capacity += int(self._pairs)
        if self._tensors.ours:
            return -(-capacity // KEY_TILE) * KEY_TILE
        return min(capacity, self._context_length)  # with which their rotary tables end

    def close(self) -> None:
        """Free what passes use."""
        self.passes.clear()
        self.cache.clear()
        self._session = None

    def _bind(self, one: Pass, rows: int) -> _Bound:
        """Bind what a pass reads and writes; its predictions are of the last ``rows``."""
        binding = self._session.io_binding()
        inputs: list[_Input] = []
        for called, (name, kind) in self._inputs.items():
            # GroupQueryAttention reads the total length on the host, wherever it runs.
            memory = self._host if name == "total_sequence_length" else self._memory
            array = np.array(INPUTS[name](one), kind)
            inputs.append((name, array, memory.value(array), memory))
            binding.bind_ortvalue_input(called, inputs[-1][2])
        for name, (_, value) in self._tuned.items():
            binding.bind_ortvalue_input(name, value)
        self.cache.bind(binding, one.parts[0].start, len(one.parts[0].tokens))
        # Of one part as many rows are always the same ones.
        changing = tuple(
            each for each in inputs if each[0] in CHANGING and (each[0] != ROWS or len(one.parts) > 1)
        )
        hidden = self._hidden.arrays(len(one.tokens), rows)
        for name, array in hidden.items():
            binding.bind_ortvalue_output(name, ort_value(array))
        said = self._bind_outputs(binding, one, rows)
        return _Bound(binding, tuple(inputs), changing, said, tuple(hidden.values()))

    def _bind_outputs(self, binding: Any, one: Pass, wanted: int) -> Callable[[slice], Predictions]:
        """Bind what comes out of a pass; what hands out the wanted rows, or some of them, after each run.

        Logits stay where the graph runs if it says itself which columns are the most likely.
        """
        shape = one.rows if self._selects else len(one.tokens), one.columns
        if self._choices:
            value, logits = self._memory.output((1, *shape), np.dtype(np.float32))
            best, likely = np.empty((1, one.rows), np.int64), np.empty((1, one.rows), np.float32)
            outputs = {"best_columns": ort_value(best), "best_probabilities": ort_value(likely)}
            for name, output in {self._tensors.logits: value, **outputs}.items():
                binding.bind_ortvalue_output(name, output)
            return lambda rows: DevicePredictions(
                (rows.stop - rows.start, shape[1]), lambda: logits()[0, rows], best[0, rows], likely[0, rows]
            )
        value, logits = self._host.output((1, *shape), self._logits)
        binding.bind_ortvalue_output(self._tensors.logits, value)
        end = shape[0] if self._selects else shape[0] - one.parts[0].ending
        said = logits()[0, end - wanted : end]
        return lambda rows: Predictions(said[rows].astype(np.float32, copy=False))

    def _grows(self, kept: Sequence[KeptTensor]) -> bool:
        """Whether the cache comes back longer than it went in, although it had room."""
        one = Pass([Part((0, 0), 0)])
        feeds = {called: np.array(INPUTS[name](one), kind) for called, (name, kind) in self._inputs.items()}
        feeds |= {tensor.input: np.zeros(tensor.of_tokens(_PROBED), tensor.dtype) for tensor in kept}
        quiet = ort.RunOptions()
        quiet.log_severity_level = _FATAL
        try:
            present = self._session.run([kept[0].output], feeds, quiet)[0]
        except RUN_ERRORS:  # a mask shorter than the cache: not for this graph
            return True
        return bool(present.shape[2] != _PROBED)
