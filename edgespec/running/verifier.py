"""Verification of drafts by the target's predictions.

It looks at one row of logits after another and stops at the first rejection. No proposal is dropped
for its value, because that would change the distribution of the output.
"""

import os
from collections.abc import Callable, Sequence

from edgespec.decoding.draft import Draft
from edgespec.decoding.sampling import (
    Penalties,
    Row,
    RowStep,
    SamplingParams,
    Suppressed,
    changed_row,
    distribution,
    draw,
    uniform,
)
from edgespec_models.errors import RequestError
from edgespec_runtimes.predictions import Predictions


class Verifier:
    """Judges the drafts of one request by the target's predictions.

    Drafts are verified by sample-and-match: the token is chosen from the target's row, and the proposal is
    accepted while it equals that choice. So the output equals plain decoding, or plain sampling with the same
    seed, token for token.

    Without a seed in ``params`` a new one is drawn. ``masks``, such as a grammar, change the rows after the
    penalties and biases of ``params``; ``suppressed`` changes them last.
    """

    def __init__(
        self, params: SamplingParams, masks: Sequence[RowStep] = (), suppressed: Suppressed | None = None
    ) -> None:
        self._params, self._suppressed = params, suppressed
        self._steps = [Penalties(params), *masks] if params.changes_rows else list(masks)
        self._seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed % 2**64

    def __call__(self, predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> tuple[int, int]:
        """Judge ``draft`` as a continuation of ``tokens``. Rows behind a rejection are not read.

        Args:
            predictions: the target's, with ``len(draft.tokens) + 1`` rows. Row i predicts the token after
                ``tokens`` and the first i proposals.
            draft: the proposals. An empty draft is plain decoding.
            tokens: all committed tokens, prompt included.

        Returns:
            The number of accepted proposals, and the token behind them.

        Raises:
            RequestError: the predictions have another shape, or the request allows no token.
            EdgespecError: a row of logits is not a distribution.
        """
        _check_shapes(predictions, draft)
        suppressed = self._suppressed
        steps = self._steps if suppressed is None else [*self._steps, suppressed]
        for step in steps:
            step.begin(tokens)
        position = len(tokens)

        def row(i: int) -> Row:
            return changed_row(predictions, draft.tokens[:i], steps)

        def best(i: int) -> int:
            # A device that found the most likely tokens itself need not copy the rows.
            token = None if self._steps else predictions.best(i)
            if token is None or (suppressed and token in suppressed.behind(draft.tokens[:i])):
                token = int(row(i).argmax())
            return token

        def sample(i: int) -> int:
            return draw(distribution(row(i), self._params), uniform(self._seed, position + i))

        return _match(draft, best if self._params.greedy else sample)

    def head(self, draft: Draft) -> Draft:
        """The beginning of a draft without tokens that are never written."""
        never = frozenset[int]() if self._suppressed is None else self._suppressed.always
        return draft.head(
            next((at for at, token in enumerate(draft.tokens) if token in never), len(draft.tokens))
        )


def _match(draft: Draft, choose: Callable[[int], int]) -> tuple[int, int]:
    """Accept proposals while ``choose(i)``, the target's choice for row i, is the same token."""
    for i, proposal in enumerate(draft.tokens):
        token = choose(i)
        if token != proposal:
            return i, token
    return len(draft.tokens), choose(len(draft.tokens))


def _check_shapes(predictions: Predictions, draft: Draft) -> None:
    rows, shape = len(draft.tokens) + 1, predictions.shape
    if len(shape) != 2 or shape[0] != rows:
        raise RequestError(f"logits of shape {shape} for {rows - 1} proposals; needed: ({rows}, vocab)")
