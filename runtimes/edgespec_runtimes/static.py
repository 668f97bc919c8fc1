"""A model on a device that compiles graphs of fixed shapes: an NPU, a GPU, or, for comparison, the CPU.

The host makes masks and positions and keeps the KV cache. A graph attends over ``capacity`` cached tokens and
the pass's own rows, and returns keys and values of its own rows only; the host copies the kept ones into the
cache. Masks hide free places, rows that were not kept, and later rows. So a roll-back moves and clears
nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.graph_contract import Part, StaticInputs
from edgespec_models.bundles.static_graphs import Contexts, StaticGraphs
from edgespec_models.decoders.kept import KeptTensor
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import BundleError, DeviceError
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.devices import Device
from edgespec_runtimes.discovery import open_on
from edgespec_runtimes.kv_cache import Stretch, ort_value, refuse_states
from edgespec_runtimes.ort import RUN_ERRORS, TYPES
from edgespec_runtimes.predictions import Logits, Predictions
from edgespec_runtimes.session import LoadedModel, Session

_Array = npt.NDArray[Any]
_TIMED = 2
_LOGITS = "logits"


def cheapest_passes(
    count: int, rows: int, static: StaticGraphs, seconds: Mapping[int, float]
) -> tuple[int, ...]:
    """Widths of the passes that take ``count`` tokens and return the logits of the last ``rows``.

    A pass takes as many tokens as it has rows, or the rest; ``seconds`` are its costs by width. The pass for
    prefill returns one row's logits, so it may take one wanted token at most.
    """

    @cache
    def best(left: int) -> tuple[float, tuple[int, ...]]:
        if not left:
            return 0.0, ()
        splits = []
        for width in static.widths:
            taken = min(width, left)
            wanted = max(0, min(rows, left) - (left - taken))
            if width == static.prefill and wanted > 1:
                continue
            rest, widths = best(left - taken)
            splits.append((seconds[width] + rest, (width, *widths)))
        return min(splits)

    # Widths divide most counts, so recursion stays shallow; a long count is cut by the session's chunks.
    return best(count)[1]


@dataclass(frozen=True, slots=True)
class _Pass:
    """One compiled graph, its inputs and outputs."""

    session: Any
    binding: Any
    inputs: Mapping[str, _Array]
    logits: Logits
    presents: tuple[_Array, ...]
    keep_alive: tuple[Any, ...]


class StaticModel(LoadedModel):
    """A bundle's graphs of fixed shapes, open for one bucket at a time.

    A number of rows is cut into the passes that take least time together; spare rows are masked. ``seconds``
    are the costs of a pass of each width, measured when its graph was opened.
    """

    def __init__(self, bundle: Bundle, device: Device, options: CpuOptions | None = None) -> None:
        """Open nothing yet: :meth:`reserve` does.

        Context binaries are opened if they fit; else the device's compiler takes the graphs. ``device`` must
        run every operator of the bundle's graphs.
        """
        static, config = bundle.manifest.static, bundle.config
        if static is None:
            raise BundleError(f"{bundle.path} has no graphs of fixed shapes; open it with edgespec.load")
        assert isinstance(config, Transformer)
        refuse_states(bundle.manifest.kept)
        super().__init__(config, chunk=static.prefill)
        self._static, self._bundle, self._device = static, bundle, device
        self._options, self._path, self._kept = options or CpuOptions(), bundle.path, bundle.manifest.kept
        self._contexts = static.contexts if static.device == device.kind.export else None
        self._refusal = None if self._contexts is None else _misfit(self._contexts, device)
        self._host = StaticInputs(config, record(config).tables(config.context_length), static.masked)
        self._passes: dict[int, _Pass] = {}
        self._cache: list[_Array] = []
        self._capacity = 0
        self._logits = np.zeros((0, config.vocab_size), np.float32)
        self.seconds: dict[int, float] = {}
        self.most_rows = static.longest

    @property
    def kv_bytes(self) -> int:
        return sum(array.nbytes for array in self._cache)

    def make_room(self, stretch: Stretch, capacity: int) -> None:
        """Open the graphs of the bucket of ``capacity`` tokens, and keep the tokens of ``stretch``.

        Nothing is open or kept after an error.

        Raises:
            BundleError: the graphs keep other tensors than the manifest lists.
            DeviceError: the device's compiler refuses a graph, part of it would run elsewhere, or it fails
                to run.
        """
        if capacity == self._capacity:
            return
        old = list(self._cache)
        self.close()  # two buckets' graphs at a time would take twice the memory
        try:
            self._open_bucket(capacity, old, len(stretch.tokens))
        except BaseException:
            self.close()
            raise
        self._capacity = capacity

    def run(self, parts: Sequence[Part]) -> list[Predictions]:
        ((tokens, start, rows, *_),) = parts
        if len(self._logits) < rows:
            self._logits = np.zeros((rows, self.vocab_size), np.float32)
        left, filled = len(tokens), 0
        for width in cheapest_passes(left, rows, self._static, self.seconds):
            taken, at = min(width, left), len(tokens) - left
            self._execute(width, tokens[at : at + taken], start + at)
            self._keep(width, start + at, taken)
            left -= taken
            wanted = rows - filled - min(left, rows - filled)
            if wanted:
                every = self._passes[width].logits[0]
                last = 1 if width == self._static.prefill else taken
                self._logits[filled : filled + wanted] = every[last - wanted : last]
                filled += wanted
        return [Predictions(self._logits[:rows])]

    def close(self) -> None:
        self._passes.clear()
        self._cache.clear()
        self._capacity = 0

    @property
    def compiled(self) -> str:
        if self._contexts is None:
            return ""
        chip = self._contexts.chip.name
        if self._refusal is None:
            return f"from context binaries for {chip}"
        return f"compiled at load, not from the context binaries for {chip}: {self._refusal}"

    @property
    def longest(self) -> int:
        return self._static.longest

    def _open_graphs(self, graphs: Sequence[Path]) -> list[Any]:
        """ONNX Runtime's sessions over ``graphs``, or over all of their compiled forms."""
        if self._contexts is not None and self._refusal is None:
            try:
                return self._open_compiled(graphs)
            except DeviceError as error:
                self._refusal = str(error)
        try:
            return [open_on(self._device, graph, self._options) for graph in graphs]
        except DeviceError as error:
            if self._refusal is None:
                raise
            raise DeviceError(f"{error}; {self.compiled}") from error

    def _open_compiled(self, graphs: Sequence[Path]) -> list[Any]:
        files = [StaticGraphs.context_files(graph.name) for graph in graphs]
        for name in chain.from_iterable(files):
            self._bundle.verify(name)  # the provider's library must get complete files only
        return [open_on(self._device, self._bundle.path / name, self._options) for name, _ in files]

    def rounded(self, capacity: int) -> int:
        return self._static.bucket_for(capacity)

    def too_long(self, tokens: int) -> str:
        if tokens > self.config.context_length:
            return super().too_long(tokens)
        return (
            f"{tokens:,} tokens do not fit the largest bucket of this bundle, {self.longest:,}; shorten the "
            f"prompt, ask for fewer new tokens, or export the model with --buckets up to {tokens:,}"
        )

    def _open_bucket(self, capacity: int, old: Sequence[_Array], keep: int) -> None:
        files = {rows: self._static.file(capacity, rows) for rows in self._static.widths}
        opened = self._open_graphs([self._path / file for file in files.values()])
        sessions = dict(zip(files, opened, strict=True))
        for session in opened:
            self._check_kept(session)
        for index, tensor in enumerate(self._kept):
            self._cache.append(np.zeros(_cache_shape(tensor, index, capacity), tensor.dtype))
            if old:
                _tokens(self._cache[-1], index, 0, keep)[:] = _tokens(old[index], index, 0, keep)
        self._passes = {rows: self._bind(session) for rows, session in sessions.items()}
        self.seconds = {width: self._time(width) for width in self._static.widths}

    def _execute(self, width: int, tokens: Sequence[int], start: int) -> None:
        """One pass over ``tokens``, filled up to ``width`` with spare rows."""
        bound = self._passes[width]
        self._host.fill(bound.inputs, tokens, start)
        try:
            bound.session.run_with_iobinding(bound.binding)
        except RUN_ERRORS as error:
            raise DeviceError(f"the device cannot run {self._path}: {error}") from error

    def _keep(self, width: int, start: int, count: int) -> None:
        """Copy the keys and values of the pass's first ``count`` rows to places ``start`` on."""
        for index, present in enumerate(self._passes[width].presents):
            _tokens(self._cache[index], index, start, count)[:] = _tokens(present, index, 0, count)

    def _time(self, width: int) -> float:
        """Seconds of a pass; a graph's first may set it up. The cache stays as it is."""
        least = np.inf
        for _ in range(_TIMED):
            began = perf_counter()
            self._execute(width, [0] * width, 0)
            least = min(least, perf_counter() - began)
        return float(least)

    def _check_kept(self, session: Any) -> None:
        """Raise BundleError if a graph keeps other tensors than the manifest lists."""
        inputs, outputs = [tensor.input for tensor in self._kept], [tensor.output for tensor in self._kept]
        names = {value.name for value in session.get_inputs()}
        written = sorted(value.name for value in session.get_outputs())
        if len({*inputs} & names) != len(inputs) or sorted([*outputs, _LOGITS]) != written:
            raise BundleError(
                f"the graphs of {self._path} keep other tensors than its manifest lists; "
                "export the model again"
            )

    def _bind(self, session: Any) -> _Pass:
        binding, keep = session.io_binding(), list[Any]()
        shared = {tensor.input: array for tensor, array in zip(self._kept, self._cache, strict=True)}
        inputs = {
            value.name: np.zeros(value.shape, TYPES[value.type])
            for value in session.get_inputs()
            if value.name not in shared
        }
        outputs = {value.name: np.zeros(value.shape, TYPES[value.type]) for value in session.get_outputs()}
        for name, array in (inputs | shared).items():
            keep.append(ort_value(array))
            binding.bind_ortvalue_input(name, keep[-1])
        for name, array in outputs.items():
            keep.append(ort_value(array))
            binding.bind_ortvalue_output(name, keep[-1])
        presents = tuple(outputs[tensor.output] for tensor in self._kept)
        return _Pass(session, binding, inputs, outputs[_LOGITS], presents, tuple(keep))


def _cache_shape(tensor: KeptTensor, index: int, capacity: int) -> tuple[int, ...]:
    """The shape of a cache's tensor.

    Keys, which have even indices, are transposed for the product with the queries.
    """
    batch, heads, tokens, width = tensor.of_tokens(capacity)
    return (batch, heads, tokens, width) if index % 2 else (batch, heads, width, tokens)


def _tokens(array: _Array, index: int, start: int, count: int) -> _Array:
    """Tokens of a tensor of the cache: keys have even indices."""
    if index % 2 == 0:
        return array[:, :, :, start : start + count]
    return array[:, :, start : start + count]


def open_static(
    bundle: Bundle, device: Device, options: CpuOptions | None = None, *, row_exact: bool | None = None
) -> Session:
    """Open the graphs of the smallest bucket and prove that they can roll back.

    ``row_exact`` is the result of an earlier self-test; None tests now.

    Raises:
        BundleError: the bundle has other graphs, or they cannot roll back; a context binary is damaged.
        DeviceError: the device cannot run all of a graph.
    """
    return StaticModel(bundle, device, options).opened(row_exact)


def _misfit(contexts: Contexts, device: Device) -> str | None:
    """The reason why context binaries cannot be used, as far as it is known before the provider opens them.

    The chip is not known here: a provider refuses binaries for other chips.
    """
    if contexts.version.partition(".")[0] == device.version.partition(".")[0]:
        return None
    present = device.version or "unknown"
    return f"version {contexts.version} of the provider compiled them, and this version is {present}"
