"""Several sequences side by side in one model on the CPU: a pass over a token of each reads the weights once.

A pass over eight rows costs little more than one over a single row, whether the rows follow each other or
belong to eight texts. So texts that are known beforehand, such as prompts to be answered for training, are
written faster than one after the other with speculation. Each sequence's rows have the bits that they have in
a :class:`~edgespec_runtimes.cpu.CpuSession`, whatever the others are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import BundleError, DeviceError
from edgespec_runtimes.cpu import CpuOptions, open_graph
from edgespec_runtimes.kv_buffers import KEY_TILE, ort_value
from edgespec_runtimes.ort import RUN_ERRORS, lacks_memory
from edgespec_runtimes.session import DevicePredictions, Logits, Predictions, shared_length

_Array = npt.NDArray[Any]


def can_run_side_by_side(bundle: Bundle) -> bool:
    """Whether the bundle's graph consists of edgespec's own operators, which take several sequences."""
    return bundle.manifest.form == "dynamic" and bundle.manifest.operators == "edgespec"


class SideBySide:
    """A model that reads several sequences, numbered from 0, each with its own KV cache.

    ``exact_rows`` of ``options`` says nothing: rows are exact.

    Raises:
        BundleError: the graph cannot be loaded, or was made before graphs took several sequences.
        DeviceError: not enough memory.
    """

    def __init__(self, bundle: Bundle, options: CpuOptions) -> None:
        self._session: Any = open_graph(bundle.graph, options, native=True)
        shapes = {value.name: value.shape for value in self._session.get_inputs()}
        if isinstance(shapes["past_length"][0], int):
            raise BundleError(f"{bundle.path} was made by an earlier version; export the model again")
        self._bundle, self._chunk = bundle, options.prefill_chunk
        self._columns = bundle.config.vocab_size
        self._lengths = np.zeros(0, np.int64)
        self._begun: list[list[int]] = []  # tokens that each sequence began with
        self._caches: list[_Array] = []

    @property
    def sequences(self) -> int:
        """How many there is room for."""
        return len(self._lengths)

    def reserve(self, sequences: int, capacity: int) -> None:
        """Make room for so many sequences of so many tokens; all are empty then.

        Raises:
            DeviceError: no memory for it.
        """
        self._caches.clear()  # first, so that old and new ones are never there together
        self._lengths, self._begun = np.zeros(0, np.int64), []
        capacity = -(-capacity // KEY_TILE) * KEY_TILE
        shapes = ((sequences, each.heads, capacity, each.head_dim) for each in self._bundle.tensors.cache)
        try:
            self._caches = [np.zeros(shape, np.float16) for shape in shapes]
        except MemoryError as error:
            raise DeviceError(f"not enough memory for {sequences} caches of {capacity:,} tokens") from error
        self._lengths, self._begun = np.zeros(sequences, np.int64), [[] for _ in range(sequences)]

    def begin(self, at: int, tokens: Sequence[int]) -> Predictions:
        """Make the cache of sequence ``at`` hold exactly ``tokens``, one or more; what follows, one row.

        What they share with the tokens that it began with before is kept: a chat template's beginning, say.
        """
        kept = min(shared_length(self._begun[at], tokens), len(tokens) - 1)
        self._begun[at], self._lengths[at] = [], kept
        for start in range(kept, len(tokens), self._chunk):
            (last,) = self._pass(slice(at, at + 1), tokens[start : start + self._chunk])
        self._begun[at] = list(tokens)  # only now: a pass may fail
        return last

    def extend(self, tokens: Sequence[int | None]) -> list[Predictions]:
        """Append a token to every sequence; what the model says behind each, one row.

        None empties a sequence, of which nothing is said then.
        """
        for at, token in enumerate(tokens):
            if token is None:
                self._begun[at], self._lengths[at] = [], 0
        return self._pass(slice(None), [token or 0 for token in tokens])

    def close(self) -> None:
        """Free the model and the caches."""
        self._session = None
        self._caches.clear()

    def _pass(self, which: slice, tokens: Sequence[int]) -> list[Predictions]:
        """Append ``tokens``, of each sequence as many; a row for the last of each."""
        lengths, count = self._lengths[which], len(tokens)
        each, rows = count // len(lengths), len(lengths)
        logits = np.empty((1, rows, self._columns), np.float32)
        best, likely = np.empty((1, rows), np.int64), np.empty((1, rows), np.float32)
        inputs: dict[str, _Array] = {
            "input_ids": np.array([tokens], np.int64),
            "past_length": lengths.copy(),
            "logits_rows": np.arange(each - 1, count, each, dtype=np.int64),
        }
        binding = self._session.io_binding()
        outputs: dict[str, _Array] = {"logits": logits, "best_columns": best, "best_probabilities": likely}
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, ort_value(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, ort_value(array))
        for tensor, cache in zip(self._bundle.tensors.cache, self._caches, strict=True):
            value = ort_value(cache[which])
            binding.bind_ortvalue_input(tensor.past, value)
            binding.bind_ortvalue_output(tensor.present, value)
        try:
            self._session.run_with_iobinding(binding)
        except (MemoryError, *RUN_ERRORS) as error:
            lacking = " for want of memory" if lacks_memory(error) else ""
            raise DeviceError(f"a pass over {count} tokens failed{lacking}: {error}") from error
        lengths += each
        return [
            self._said(logits[0, i : i + 1], best[0, i : i + 1], likely[0, i : i + 1]) for i in range(rows)
        ]

    def _said(
        self, logits: Logits, best: npt.NDArray[np.int64], likely: npt.NDArray[np.float32]
    ) -> Predictions:
        return DevicePredictions(logits.shape, lambda: logits, best, likely)
