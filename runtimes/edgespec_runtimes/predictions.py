"""What a pass says behind each of its tokens: the most likely column, its probability, whole rows of logits.

Whoever asks says by asking what it needs: a device that finds the most likely columns itself copies rows to
the host only where somebody reads them.
"""

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from edgespec_models.errors import EdgespecError

__all__ = ["DevicePredictions", "Logits", "Predictions", "check_best"]

Logits = npt.NDArray[np.float32]


class Predictions:
    """What a model says behind each token of a pass; valid until the session's next one.

    Args:
        logits: float32 ``(rows, head_rows)``.
    """

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
