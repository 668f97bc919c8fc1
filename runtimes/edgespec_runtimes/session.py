"""The contract of a running model, whatever device it runs on: sessions, and what a pass predicts.

Whoever reads predictions says by asking what it needs: a device that finds the most likely columns itself
copies rows of logits to the host only where somebody reads them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgespec_models.errors import EdgespecError, RequestError

Logits = npt.NDArray[np.float32]


class Predictions:
    """What a model says behind each token of a pass; valid until the session's next one.

    ``logits`` are float32 ``(rows, head_rows)``.

    Attributes:
        hidden: float32, of its own memory. Of a target that a head reads, its features of all tokens of the
            pass; of a head, its states of the rows; else None.
    """

    hidden: npt.NDArray[np.float32] | None = None

    def __init__(self, logits: Logits) -> None:
        self._logits = logits

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits: ``(rows, head_rows)``."""
        return self._logits.shape

    @property
    def logits(self) -> Logits:
        """Every row, float32 ``(rows, head_rows)``; the session's own buffer."""
        return self._logits

    def best(self, row: int) -> int:
        """The most likely column of a row; the lowest of equals.

        Raises:
            EdgespecError: the row is not a distribution (it holds NaN, or nothing finite).
        """
        logits = self.logits[row]
        column = int(logits.argmax())
        check_best(float(logits[column]))
        return column

    def probability(self, row: int) -> float:
        """The probability of a row's most likely column, among all of them."""
        logits = self.logits[row]
        return float(1.0 / np.exp(logits - logits.max()).sum())


class DevicePredictions(Predictions):
    """Those of a device that finds the most likely columns itself.

    Args:
        shape: of the logits.
        read: copies them to the host.
        columns: the most likely one of each row, the lowest of equals; int64 ``(rows,)``.
        probabilities: of these; float32 ``(rows,)``, NaN where a row is not a distribution.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        read: Callable[[], Logits],
        columns: npt.NDArray[np.int64],
        probabilities: npt.NDArray[np.float32],
    ) -> None:
        self._shape, self._read = shape, read
        self._columns, self._probabilities = columns, probabilities

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits: ``(rows, head_rows)``."""
        return self._shape

    @cached_property
    def logits(self) -> Logits:
        """Every row, float32 ``(rows, head_rows)``, copied from the device when they are first asked for."""
        return self._read()

    def best(self, row: int) -> int:
        """See :meth:`Predictions.best`."""
        if not math.isfinite(self._probabilities[row]):
            return super().best(row)  # which says what is wrong
        return int(self._columns[row])

    def probability(self, row: int) -> float:
        """See :meth:`Predictions.probability`."""
        return float(self._probabilities[row])


def check_best(logit: float) -> None:
    """See that the largest logit of a row is one of a distribution.

    Raises:
        EdgespecError: it is not a finite number.
    """
    if not math.isfinite(logit):
        raise EdgespecError(
            f"the model's best logit is {logit}, not a finite number: the model file is damaged, or its "
            "device computes it wrongly; check the bundle and try another device"
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """What a pass is to read of one sequence: ``tokens``, behind those in its session's cache.

    ``wanted`` rows of logits are asked for, of the last tokens. ``hidden`` is what a head reads beside them
    (:class:`edgespec_models.bundles.graph_contract.Part`).
    """

    session: "Session"
    tokens: Sequence[int]
    wanted: int
    hidden: npt.NDArray[np.float32] | None = None


_COMPARED = 256


@dataclass(frozen=True, slots=True, eq=False)
class SavedCache:
    """A part of a session's KV cache.

    ``arrays`` are keys and values of ``tokens`` as the session keeps them, tokens on the third axis; the rest
    is its own business.
    """

    tokens: tuple[int, ...]
    arrays: tuple[npt.NDArray[Any], ...] = ()

    def part(self, start: int, end: int) -> "SavedCache":
        """The tokens from ``start`` on and before ``end``, multiples of 16, in the same memory."""
        return SavedCache(self.tokens[start:end], tuple(array[:, :, start:end] for array in self.arrays))

    def copy(self) -> "SavedCache":
        """The same in memory of its own."""
        return SavedCache(self.tokens, tuple(array.copy() for array in self.arrays))

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return sum(array.nbytes for array in self.arrays)


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts share, from the first on. Both are lists or tuples."""
    end = min(len(left), len(right))
    # Comparing slices is a hundred times faster than a loop; only the one that differs is searched.
    for start in range(0, end, _COMPARED):
        ours, theirs = list(left[start : start + _COMPARED]), list(right[start : start + _COMPARED])
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False), start)
            return next((index for index, (a, b) in pairs if a != b), end)
    return end


class Session(Protocol):
    """A sequence that a model reads; the only owner of its KV cache.

    The cache holds the keys and values of ``length`` tokens, at most ``capacity``.
    Rollback is a number: :meth:`truncate`. Predictions have a column for every row of the LM head: every
    token, or the tokens a trimmed drafter's bundle lists
    (:attr:`edgespec_models.bundles.bundle.Bundle.head_tokens`).
    """

    @property
    def vocab_size(self) -> int:
        """Tokens the model reads: ids from 0 to ``vocab_size - 1``."""

    @property
    def length(self) -> int:
        """Tokens the KV cache holds."""

    @property
    def capacity(self) -> int:
        """Tokens the KV cache can hold now."""

    @property
    def row_exact(self) -> bool:
        """Whether passes give the same bits for any number of rows."""

    @property
    def longest(self) -> int:
        """Tokens the KV cache can hold at most."""

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV cache."""

    @property
    def compiled(self) -> str:
        """Whether context binaries are used and, if not, why; empty where there are none for the device."""

    @property
    def tunable(self) -> frozenset[str]:
        """Weights that :meth:`tune` replaces, by their names in the graph."""

    @property
    def head_tokens(self) -> npt.NDArray[np.int32] | None:
        """The token of every column of the logits, int32; None where column i is token i."""

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens, keeping what the cache holds.

        Raises:
            RequestError: more than the model's context length.
            DeviceError: no memory for them; the cache is empty then.
        """

    def shared_prefix(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, from the first on, the cache holds already."""

    @property
    def piece(self) -> int:
        """Tokens of a prompt that one pass reads at most."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Make the cache hold exactly ``tokens``, keeping a shared prefix.

        Raises:
            RequestError: more tokens than ``capacity``.
        """

    def predict(self, tokens: Sequence[int]) -> Predictions:
        """Append ``tokens`` to the cache; what the model says behind each, a row for each of them.

        They lie in the session's own buffers: the next call overwrites them.
        """

    @property
    def model(self) -> object:
        """The same for sessions of one model, which understand each other's saved caches."""
        return self

    @property
    def takes_several(self) -> bool:
        """Whether passes may be over rows of several sequences, each with a session :meth:`beside` this."""
        return False

    def beside(self) -> "Session":
        """Another session of the same model, with an empty cache.

        Raises:
            RequestError: passes are of one sequence.
        """
        raise RequestError("this model's passes are of one sequence")

    def predict_together(self, asked: Sequence[Rows]) -> list[Predictions]:
        """One pass over rows of this session and of those that it made :meth:`beside` it.

        They are appended to their caches; a row has the bits it has alone. Like :meth:`predict` otherwise.
        """
        (rows,) = asked
        return [rows.session.predict(rows.tokens)]

    def predict_next(self, tokens: Sequence[int]) -> Predictions:
        """Make the cache hold exactly ``tokens``; what the model says of what follows, one row.

        At least the last token is computed.
        """

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on."""

    @property
    def prompt_key(self) -> str:
        """What the bits of the KV cache depend on besides its tokens, as a name that a folder may have.

        Empty where a session does not promise them to other processes. Weights given to :meth:`tune` are not
        in it: who gives some keeps nothing on disk.
        """

    def view(self, start: int, end: int) -> SavedCache | None:
        """The cache's tokens from ``start`` on and before ``end``; None where a session has none to give.

        They lie in the session's own memory: the next call overwrites them. ``start`` is a multiple of 16.
        """
        return None

    def append(self, saved: SavedCache, count: int) -> None:
        """Put the first ``count`` tokens of a view behind what the cache holds: the same bits again.

        They have been behind the same tokens, as many as a multiple of 16.

        Raises:
            DeviceError: no memory for them; the cache is empty then.
        """

    def tune(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Run with these weights from the next pass on; the cache, which others computed, is empty then.

        Raises:
            RequestError: one that is not among :attr:`tunable`, or of another shape.
        """

    def offer(self, tokens: Sequence[int]) -> None:
        """Let a head that is tied to the embedding write ``tokens`` too: a column each, behind its rows'.

        They replace what was offered before; the tokens in the cache stay. Other heads take no notice.
        """

    def close(self) -> None:
        """Free the model. The session cannot be used afterwards."""
