"""Is a prompt worth a model drafter's reading? What it gained in requests that began alike.

An application asks the same things again and again: the same system prompt, the same instruction, another
text behind them. Short answers, and answers the drafter cannot foresee, never earn back what reading the
prompt costs; which those are is told by how the prompt begins.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

_STRIDE, _DEPTH = 4, 96  # tokens
_PRIOR = 0.15
_PRIOR_WEIGHT, _SHORTER_WEIGHT = 1.0, 0.3  # requests
_MEMORY = 0.9
_FORGETTING = 0.97
MOST = 4096
"""Beginnings that are remembered."""


@dataclass(slots=True)
class Gains:
    """Decayed sum and number of the gains of requests with one beginning."""

    gain: float = 0.0
    count: float = 0.0

    def add(self, share: float) -> None:
        """One more request."""
        self.gain = _MEMORY * self.gain + share
        self.count = _MEMORY * self.count + 1.0


class Experience:
    """Gains by beginning of the prompt: every fourth token, up to 96.

    A gain is time saved as a share of the longest answer's plain decoding time. What is known of a
    longer beginning is weighed against what shorter ones let expect, those against the prior: 15 %, the
    typical gain. A single request of the same kind says more than many of others.

    ``records`` are what is known, by beginning, the latest last: 8 bytes each, a hash, from which no prompt
    can be read. ``tell`` is told the beginnings of a request's prompt, and its gain.
    """

    def __init__(
        self,
        records: Mapping[bytes, Gains] | None = None,
        *,
        tell: Callable[[Sequence[bytes], float], None] = lambda beginnings, share: None,
    ) -> None:
        self._records = dict(records or {})
        self._tell = tell

    def expected(self, prompt: Sequence[int]) -> float:
        """What reading ``prompt`` is expected to gain."""
        known = self._known(prompt)
        expected, weight = _PRIOR, _PRIOR_WEIGHT
        for record, longer in zip_longest(known, known[1:]):
            if longer is None or longer.count < record.count:  # else it says the same
                expected = (record.gain + weight * expected) / (record.count + weight)
                weight = _SHORTER_WEIGHT
        return expected

    def skip(self, prompt: Sequence[int]) -> None:
        """``prompt`` is not read; what is known of its kind fades, so that it is tried again."""
        for record in self._known(prompt):
            record.gain *= _FORGETTING
            record.count *= _FORGETTING

    def add(self, prompt: Sequence[int], share: float) -> None:
        """``prompt`` was read, which gained ``share``."""
        keys = _beginnings(prompt)
        for key in keys:
            record = self._records.pop(key, Gains())
            record.add(share)
            self._records[key] = record  # the latest last
        while len(self._records) > MOST:
            del self._records[next(iter(self._records))]
        self._tell(keys, share)

    def _known(self, prompt: Sequence[int]) -> list[Gains]:
        return [self._records[key] for key in _beginnings(prompt) if key in self._records]


def _beginnings(prompt: Sequence[int]) -> list[bytes]:
    data = np.array(prompt[:_DEPTH], "<u4").tobytes()
    lengths = range(0, min(len(prompt), _DEPTH) + 1, _STRIDE)
    return [hashlib.blake2b(data[: 4 * length], digest_size=8).digest() for length in lengths]
