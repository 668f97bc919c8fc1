"""How likely the target found a token, and which others it found likely.

By its own distribution: before temperature, penalties and masks, in nats. They depend on the
target's row alone; where passes give the same bits for any number of rows, plain and speculative answers
have the same.
"""

import numpy as np
import numpy.typing as npt

from edgespec.decoding.sampling import Row

__all__ = ["log_probabilities", "most_likely"]

LogProbabilities = npt.NDArray[np.float64]


def log_probabilities(row: Row) -> LogProbabilities:
    """Of every token, float64 ``(vocab,)``, from a row of logits, float32 ``(vocab,)``."""
    values = row.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return values


def most_likely(logprobs: LogProbabilities, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` most likely tokens and theirs, the most likely first, of equals the lowest id."""
    if not count:
        return ()
    count = min(count, len(logprobs))
    least = np.partition(logprobs, -count)[-count]
    likely = np.flatnonzero(logprobs >= least)
    likely = likely[np.argsort(-logprobs[likely], kind="stable")][:count]
    return tuple(zip(likely.tolist(), logprobs[likely].tolist(), strict=True))
