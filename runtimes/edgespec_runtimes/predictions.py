"""The results of a pass on any device: predictions, and hidden states for a head.

Results are fetched when they are read: a device that finds the most likely columns itself copies rows of
logits to the host only if they are read.

A target returns its *features*: the residual streams that enter some of its layers, side by side, or the one
that leaves the last. A head drafts from features (arXiv 2503.01840, 2412.19437). With each token it reads the
features of the token before. Behind its own drafts it reads the *state* that it returned there instead. In a
pass tokens with features come first, because graphs of heads need that order.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.graph_contract import NEW_STATES, Part
from edgespec_models.errors import EdgespecError

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float32]
KEPT = 128  # tokens whose features are kept, besides the last pass's


class Predictions:
    """A model's predictions behind each token of a pass, valid until the session's next pass.

    ``logits`` are float32 ``(rows, head_rows)``.

    Attributes:
        hidden: float32, in memory of its own. For a target with a head its features of all tokens of the
            pass, or of the rows alone where layers compute no others; for a head its states of the rows; else
            None.
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
    """Predictions of a device that finds the most likely columns itself.

    Args:
        shape: shape of the logits.
        read: a function that copies them to the host.
        columns: the most likely column of each row, the lowest of equals; int64 ``(rows,)``.
        probabilities: their probabilities; float32 ``(rows,)``, NaN if a row is no distribution.
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
        return self._shape

    @cached_property
    def logits(self) -> Logits:
        return self._read()

    def best(self, row: int) -> int:
        if not math.isfinite(self._probabilities[row]):
            return super().best(row)  # it raises the error
        return int(self._columns[row])

    def probability(self, row: int) -> float:
        return float(self._probabilities[row])


def check_best(logit: float) -> None:
    """Check by its largest logit that a row is a distribution; EdgespecError if the logit is not finite."""
    if not math.isfinite(logit):
        raise EdgespecError(
            f"the model's best logit is {logit}, not a finite number: the model file is damaged, or its "
            "device computes it wrongly; check the bundle and try another device"
        )


def joined(before: Floats | None, now: Floats | None) -> Floats | None:
    """Features of the end of a text, joined from this pass and earlier ones."""
    return now if before is None or now is None else np.concatenate([before[-KEPT:], now])


class Hidden:
    """The outputs of a graph besides logits, and its inputs besides tokens.

    ``streams`` are outputs of a target, ``width`` wide each, of all tokens or of rows alone. Most graphs have
    neither these nor states.
    """

    def __init__(self, session: Any, streams: Sequence[str], width: int, *, of_tokens: bool) -> None:
        self._of_tokens = of_tokens and bool(streams)
        states = [value.name for value in session.get_outputs() if value.name == NEW_STATES]
        self.outputs = tuple(streams) or tuple(states)
        shapes = {value.name: value.shape for value in session.get_inputs()}
        self._widths = shapes.get("features", (0,))[-1], shapes.get("states", (0,))[-1]
        self._width = self._widths[1] or width
        self._none = tuple(np.zeros((0, width), np.float32) for width in self._widths)

    def order(self, parts: Sequence[Part]) -> list[int]:
        """The order in which a pass reads parts: parts with features come first."""
        return sorted(range(len(parts)), key=lambda at: parts[at].features is None)

    def inputs(self, parts: Sequence[Part]) -> tuple[Floats, Floats]:
        """Features and states of all tokens, ``(m, width)`` and ``(k, width)``.

        Missing states are zeros, for measurements of passes.
        """
        features, states = self._none
        if not any(self._widths):
            return features, states
        of_parts = [part.features for part in parts if part.features is not None]
        written = [
            np.zeros((len(part.tokens), self._widths[1]), np.float32) if part.states is None else part.states
            for part in parts
            if part.features is None
        ]
        return np.concatenate([features, *of_parts]), np.concatenate([states, *written])

    def arrays(self, tokens: int, rows: int) -> dict[str, Floats]:
        """Arrays for each of the outputs of a pass, ``(1, n, width)``."""
        shape = 1, tokens if self._of_tokens else rows, self._width
        return {name: np.empty(shape, np.float32) for name in self.outputs}

    def of_parts(self, parts: Sequence[Part], arrays: Iterable[Floats]) -> list[Floats | None]:
        """For each part a target's features of all tokens, or a head's states of the wanted rows."""
        if not self.outputs:
            return [None] * len(parts)
        whole = np.concatenate([array[0] for array in arrays], axis=-1)
        counts = [len(part.tokens) if self._of_tokens else part.rows for part in parts]
        return [whole[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
