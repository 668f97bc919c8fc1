"""A model on the CPU: ONNX Runtime's CPU provider, its KV cache in place in numpy memory.

Greedy decoding with drafts equals decoding without only if a row's logits do not depend on how many rows
are computed with it. ONNX Runtime's kernels nearly give that. Attention over a single row, and with large
weight blocks every odd last row, takes other code, which sums in another order. Such a pass gets a spare
row (``CpuOptions.exact_rows``).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import psutil

from edgespec_models.bundle import Bundle
from edgespec_models.errors import BundleError, Cancelled, DeviceError, RequestError
from edgespec_runtimes.graph_io import GraphIO, open_io
from edgespec_runtimes.session import Logits

__all__ = ["CpuOptions", "CpuSession", "default_threads", "open_graph"]

_KV_STEP = 256
_COMPARED = 256
_SAME, _NEAR = 1e-3, 0.2  # of the largest logit


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How a session uses the CPU.

    Attributes:
        threads: threads of a pass; 0 takes the physical cores this process may use.
        spinning: within a pass, idle threads wait busily for the next operator. Faster; turn it off where
            other programs need the cores.
        exact_rows: spare rows where they make a row's bits independent of the number of rows; costs some
            percent of a single-row pass. A drafter does not need it.
        prefill_chunk: tokens of one prefill pass; between two a request can be cancelled.
    """

    threads: int = 0
    spinning: bool = True
    exact_rows: bool = True
    prefill_chunk: int = 128

    def __post_init__(self) -> None:
        if self.threads < 0 or self.prefill_chunk < 1:
            raise RequestError(
                f"threads={self.threads}, prefill_chunk={self.prefill_chunk}: threads must be 0 (automatic) "
                "or more, prefill_chunk at least 1"
            )


def default_threads() -> int:
    """Physical cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


class CpuSession:
    """One model reading one sequence on the CPU; see :class:`edgespec_runtimes.session.Session`.

    Attributes:
        row_exact: whether passes over one and over several tokens gave the same bits in the self-test.
    """

    def __init__(
        self, bundle: Bundle, options: CpuOptions | None = None, *, row_exact: bool | None = None
    ) -> None:
        """Load the graph and prove that the session can roll back.

        Args:
            bundle: whose graph is run.
            options: how.
            row_exact: what an earlier self-test found with the same bundle, options, processor and version
                of ONNX Runtime, on which alone it depends; None tests now.

        Raises:
            BundleError: ONNX Runtime cannot load the graph, or the graph cannot roll back.
        """
        self._config = bundle.config
        self._options = options or CpuOptions()
        self._tokens: list[int] = []
        self._capacity = 0
        session = open_graph(bundle.graph, self._options)
        self._io: GraphIO | None = open_io(session, bundle, exact_rows=self._options.exact_rows)
        self.row_exact = self._self_test() if row_exact is None else row_exact

    @property
    def vocab_size(self) -> int:
        """Tokens the model reads: ids from 0 to ``vocab_size - 1``."""
        return self._config.vocab_size

    @property
    def head_tokens(self) -> npt.NDArray[np.int32] | None:
        """The token of every column of the logits, int32; None where column i is token i."""
        return self._open_io.head_tokens

    def offer(self, tokens: Sequence[int]) -> None:
        """Let a trimmed LM head write ``tokens`` too: a column of the logits each, behind those of its rows.

        They replace what was offered before. Graphs without a trimmed head tied to the embedding take no
        notice. The tokens in the cache stay.
        """
        self._open_io.offer(tokens)

    @property
    def length(self) -> int:
        """Tokens the KV cache holds."""
        return len(self._tokens)

    @property
    def capacity(self) -> int:
        """Tokens the KV cache can hold now."""
        return self._capacity

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV cache."""
        return 0 if self._io is None else self._io.kv_bytes

    @property
    def copies_cache(self) -> bool:
        """Whether every pass writes the whole KV cache anew, as graphs do that concatenate."""
        return self._open_io.copies_cache

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens, keeping what the cache holds."""
        io = self._open_io
        if capacity > self._config.context_length:
            raise RequestError(
                f"{capacity:,} tokens do not fit the model's context of {self._config.context_length:,}; "
                "shorten the prompt or ask for fewer new tokens"
            )
        if capacity <= self._capacity:
            return
        rounded = min(-(-capacity // _KV_STEP) * _KV_STEP, self._config.context_length)
        io.reserve(rounded, self.length)
        self._capacity = rounded

    def shared_prefix(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, from the first on, the cache holds already."""
        return _common_prefix(self._tokens, tokens)

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool] | None = None) -> None:
        """Make the cache hold exactly ``tokens``, keeping a shared prefix."""
        self._extend(tokens, len(tokens), cancelled)

    def next_logits(self, tokens: Sequence[int]) -> Logits:
        """Make the cache hold exactly ``tokens``; return the logits of what follows, ``(head_rows,)``."""
        logits = self._extend(tokens, len(tokens) - 1, None)
        if logits is None:
            raise RequestError("next_logits needs at least one token")
        return logits

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append ``tokens`` and return their logits, float32 ``(len(tokens), head_rows)``."""
        self.reserve(self.length + len(tokens))
        return self._run(tokens, len(tokens))

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on."""
        if not 0 <= length <= self.length:
            raise RequestError(f"cannot truncate to {length}: the cache holds {self.length} tokens")
        del self._tokens[length:]

    def close(self) -> None:
        """Free the model and its cache."""
        if self._io is not None:
            self._io.close()
        self._io = None
        self._tokens.clear()
        self._capacity = 0

    @property
    def _open_io(self) -> GraphIO:
        if self._io is None:
            raise RequestError("this session is closed; open the bundle again")
        return self._io

    def _extend(
        self, tokens: Sequence[int], keep: int, cancelled: Callable[[], bool] | None
    ) -> Logits | None:
        """Make the cache hold ``tokens``, reusing at most ``keep`` of them; logits of the last if any ran."""
        self.reserve(len(tokens))
        self.truncate(min(self.shared_prefix(tokens), max(keep, 0)))
        logits, size = None, min(self._options.prefill_chunk, self._open_io.most_rows)
        while self.length < len(tokens):
            if cancelled is not None and cancelled():
                raise Cancelled(f"cancelled after {self.length} of {len(tokens)} prompt tokens")
            chunk = tokens[self.length : self.length + size]
            logits = self._run(chunk, 1)[0]
        return logits

    def _run(self, tokens: Sequence[int], rows: int) -> Logits:
        """Append ``tokens``; logits of the last ``rows``."""
        if not len(tokens) or not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise RequestError(f"a pass needs token ids from 0 to {self.vocab_size - 1}, at least one")
        logits = self._open_io.run(tokens, self.length, rows)
        self._tokens.extend(tokens)
        return logits

    def _self_test(self) -> bool:
        """Roll back and compare; returns whether the number of rows leaves no trace in the bits."""
        tokens = [7 % self.vocab_size, 11 % self.vocab_size, 13 % self.vocab_size, 5 % self.vocab_size]
        together = self.forward(tokens).copy()
        self.truncate(1)
        again = self.forward(tokens[1:]).copy()
        self.truncate(1)
        single = np.concatenate([self.forward([token]).copy() for token in tokens[1:]])
        self.truncate(1)
        self.forward(tokens[:0:-1])
        self.truncate(1)
        after = self.forward(tokens[1:]).copy()
        self.truncate(0)
        scale = float(np.abs(together).max())
        # Passes over as many rows agree to the bit; others may round otherwise in every layer.
        rolled_back = np.allclose(again, after, atol=_SAME * scale)
        if not (
            np.isfinite(together).all()
            and rolled_back
            and np.allclose(together[1:], again, atol=_NEAR * scale)
        ):
            raise BundleError(
                "this graph cannot roll back: the same tokens gave other logits after a truncation. "
                "Export the model again; sliding-window and recurrent caches cannot be used for speculation."
            )
        return bool(np.array_equal(together[1:], again) and np.array_equal(again, single))


def _common_prefix(left: list[int], right: Sequence[int]) -> int:
    end = min(len(left), len(right))
    # Comparing slices is a hundred times faster than a loop; only the one that differs is searched.
    for start in range(0, end, _COMPARED):
        ours, theirs = left[start : start + _COMPARED], list(right[start : start + _COMPARED])
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False), start)
            return next((index for index, (a, b) in pairs if a != b), end)
    return end


def open_graph(graph: Path, options: CpuOptions) -> Any:
    """ONNX Runtime's session over ``graph``, for target and drafter side by side in one process.

    Raises:
        BundleError: ONNX Runtime cannot load the graph.
        DeviceError: not enough memory.
    """
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = options.threads or default_threads()
    settings.inter_op_num_threads = 1
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1" if options.spinning else "0")
    # Target and drafter run in turn on the same cores: the threads of one must not wait busily for its next
    # pass while the other's begins. One pool for both would do too, but ONNX Runtime's shared pool is the
    # whole process's: every other session of the application would fail to load.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return _open(graph, settings)
    except MemoryError as error:
        raise DeviceError(f"not enough memory to load {graph.parent.name}") from error
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise BundleError(f"ONNX Runtime cannot load {graph}: {error}") from error


def _open(graph: Path, settings: Any) -> Any:
    providers = ["CPUExecutionProvider"]
    # The fallback tries the same provider again, and prints.
    return ort.InferenceSession(str(graph), settings, providers=providers, enable_fallback=0)
