"""How likely the target found each token of an answer, and which others it found likely."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgespec.drafting.draft import Draft, TokenLogprob
from edgespec.sampling import Row
from edgespec.verification import Verdict, Verifier
from edgespec_runtimes.predictions import Predictions

__all__ = ["token_logprob", "with_logprobs"]


def with_logprobs(verify: Verifier, top: int) -> Verifier:
    """``verify``, with the logarithms of the probabilities of what it keeps.

    They are functions of the rows that the target gives, whatever was proposed; so where passes give the same
    bits for any number of rows, plain and speculative answers have the same.

    Args:
        verify: decides what is kept.
        top: so many of the most likely tokens are told besides, at each place.
    """

    def verify_and_tell(predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> Verdict:
        verdict = verify(predictions, draft, tokens)
        kept = (*draft.tokens[: verdict.accepted], verdict.token)
        told = (token_logprob(predictions.logits[row], token, top) for row, token in enumerate(kept))
        return replace(verdict, logprobs=tuple(told))

    return verify_and_tell


def token_logprob(row: Row, token: int, top: int) -> TokenLogprob:
    """Of ``token`` in a row of logits, float32 ``(vocab,)``, and of the ``top`` most likely ones; in nats."""
    values = row.astype(np.float64)
    values -= values.max()
    total = float(np.log(np.exp(values).sum()))
    if not top:
        return TokenLogprob(float(values[token]) - total)
    top = min(top, len(values))
    least = np.partition(values, -top)[-top]
    likely = np.flatnonzero(values >= least)  # ascending, so that of equals the lowest ids come first
    likely = likely[np.argsort(-values[likely], kind="stable")][:top]
    return TokenLogprob(
        float(values[token]) - total, tuple((int(each), float(values[each]) - total) for each in likely)
    )
