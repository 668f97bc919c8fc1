"""What penalties and biases make of a row, by their definitions, a token at a time."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgespec.decoding.sampling import Row, SamplingParams


def changed(row: Row, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Row:
    """``row`` of the token behind ``prompt`` and ``output``, as the verifier is to see it."""
    values: npt.NDArray[np.float32] = row.copy()
    for token in {*prompt, *output}:
        logit = values[token]
        penalty = np.float32(params.repetition_penalty)
        values[token] = logit / penalty if logit > 0 else logit * penalty
    for token in set(output):
        subtracted = params.presence_penalty + params.frequency_penalty * list(output).count(token)
        values[token] -= np.float32(subtracted)
    for token, bias in params.logit_bias.items():
        values[token] += np.float32(bias)
    return values
