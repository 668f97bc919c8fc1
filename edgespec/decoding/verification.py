"""Which proposals are kept, and the token that follows them: without changing the target's distribution.

Every rule here looks at one row of logits after another and stops at the first rejection. A proposal is
never dropped because of what it is: that would change the distribution of the output.
"""

import os
from collections.abc import Callable, Sequence

import numpy as np

from edgespec.decoding.draft import Draft
from edgespec.decoding.sampling import (
    ACCEPT_LANE,
    TOKEN_LANE,
    Distribution,
    Penalties,
    Row,
    RowStep,
    SamplingParams,
    changed_row,
    distribution,
    draw,
    uniform,
)
from edgespec_models.errors import RequestError
from edgespec_runtimes.session import Predictions


class Verifier:
    """Judges drafts by what the target says, in one request, whose tokens it follows.

    Deterministic drafts (``probs`` None) are verified by sample-and-match: the token is chosen from the
    target's row, and the proposal is accepted while it equals that choice. The output is then, token for
    token, that of plain decoding, or of plain sampling with the same seed. Sampled drafts are verified by
    speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2), which keeps the
    target's distribution.

    Args:
        params: how tokens are chosen; without a seed a fresh one is drawn.
        masks: what else changes the rows, after the penalties and biases of ``params``: a grammar, for one.
    """

    def __init__(self, params: SamplingParams, masks: Sequence[RowStep] = ()) -> None:
        self._params = params
        self._steps = [Penalties(params), *masks] if params.changes_rows else list(masks)
        self._seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed

    def __call__(self, predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> tuple[int, int]:
        """Judge ``draft`` as the continuation of ``tokens``. Rows behind a rejection are not read.

        Args:
            predictions: the target's, of ``len(draft.tokens) + 1`` rows; row i is for the token after
                ``tokens`` and the first i proposals.
            draft: the proposals; none is plain decoding.
            tokens: all committed tokens, prompt included.

        Returns:
            How many proposals are kept, from the first on, and the token that follows them.

        Raises:
            RequestError: predictions or the draft's probabilities of another shape; the request leaves no
                token that may come next.
            EdgespecError: a row of logits is not a distribution.
        """
        _check_shapes(predictions, draft)
        for step in self._steps:
            step.begin(tokens)
        position = len(tokens)

        def row(i: int) -> Row:
            return changed_row(predictions, draft.tokens[:i], self._steps)

        def target_probs(i: int) -> Distribution:
            return distribution(row(i), self._params)

        def sample(i: int) -> int:
            return draw(target_probs(i), uniform(self._seed, position + i, TOKEN_LANE))

        if self._params.greedy:
            # A device that found the most likely tokens itself need not copy the rows.
            return _match(draft, (lambda i: int(row(i).argmax())) if self._steps else predictions.best)
        if draft.probs is None:
            return _match(draft, sample)
        for i, x in enumerate(draft.tokens):
            p, q = target_probs(i), draft.probs[i]
            # r < p(x) / q(x), without the division
            if uniform(self._seed, position + i, ACCEPT_LANE) * q[x] < p[x]:
                continue
            residual = np.maximum(0.0, p - q)
            # Only rounding can leave no residual: then p and q are the same distribution.
            probs = residual if residual.any() else p
            return i, draw(probs, uniform(self._seed, position + i, TOKEN_LANE))
        return len(draft.tokens), sample(len(draft.tokens))


def _match(draft: Draft, choose: Callable[[int], int]) -> tuple[int, int]:
    """Accept proposals while the target's own choice for row i, ``choose(i)``, is the same token."""
    for i, proposal in enumerate(draft.tokens):
        token = choose(i)
        if token != proposal:
            return i, token
    return len(draft.tokens), choose(len(draft.tokens))


def _check_shapes(predictions: Predictions, draft: Draft) -> None:
    rows, shape = len(draft.tokens) + 1, predictions.shape
    if len(shape) != 2 or shape[0] != rows:
        raise RequestError(f"logits of shape {shape} for {rows - 1} proposals; needed: ({rows}, vocab)")
    if draft.probs is not None and draft.probs.shape != (rows - 1, shape[1]):
        raise RequestError(
            f"draft probabilities of shape {draft.probs.shape}; needed: {(rows - 1, shape[1])}, "
            "over the target's vocabulary"
        )
