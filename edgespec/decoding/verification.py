"""Which proposals are kept, and the token that follows them: without changing the target's distribution.

Every rule here looks at one row of logits after another and stops at the first rejection. A proposal is
never dropped because of what it is: that would change the distribution of the output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgespec.decoding.draft import Draft
from edgespec.decoding.logprobs import log_probabilities, most_likely
from edgespec.decoding.rows import Rows, RowStep, steps_of
from edgespec.decoding.sampling import (
    ACCEPT_LANE,
    TOKEN_LANE,
    SamplingParams,
    distribution,
    draw,
    resolve_seed,
    uniform,
)
from edgespec_models.errors import RequestError
from edgespec_runtimes.predictions import Predictions

__all__ = [
    "GreedyVerifier",
    "SamplingVerifier",
    "Verdict",
    "Verifier",
    "make_verifier",
    "verify_greedy",
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many proposals of a draft are kept, from the first on, and the token that follows them.

    ``logprobs`` and ``top_logprobs`` are of all these tokens, where they are asked for, as in
    :class:`~edgespec.decoding.draft.Step`.
    """

    accepted: int
    token: int
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


class Verifier(Protocol):
    """Judges a draft by what the target says."""

    def __call__(self, predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> Verdict:
        """Judge ``draft`` as the continuation of ``tokens``.

        Args:
            predictions: the target's, of ``len(draft.tokens) + 1`` rows; row i is for the token after
                ``tokens`` and the first i proposals.
            draft: the proposals; it may be empty, which is plain decoding.
            tokens: all committed tokens, prompt included.

        Raises:
            RequestError: predictions or the draft's probabilities of another shape.
            EdgespecError: a row of logits is not a distribution.
        """


def make_verifier(
    params: SamplingParams, masks: Sequence[RowStep] = (), top_logprobs: int | None = None
) -> Verifier:
    """The verifier of one request. Without ``params.seed`` it draws its own.

    Args:
        params: how tokens are chosen.
        masks: what else changes the rows, behind all that ``params`` change: a grammar, for one.
        top_logprobs: of how many tokens a place verdicts say the log probabilities, besides those of the
            tokens that are kept; None says none.
    """
    rows = Rows([*steps_of(params), *masks])
    verify: Verifier = GreedyVerifier(rows) if rows.changed else verify_greedy
    if not params.greedy:
        verify = SamplingVerifier(params, resolve_seed(params), rows)
    return verify if top_logprobs is None else _telling(verify, top_logprobs)


def verify_greedy(predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> Verdict:
    """Accept while the proposal is the most likely token; the lowest id of equals counts as that.

    Rows after the first mismatch are not read, and of none the logits. See :class:`Verifier`.
    """
    _check_shapes(predictions, draft)
    return _accept_while_equal(draft, predictions.best)


class GreedyVerifier:
    """:func:`verify_greedy` where a request changes the rows. One request, whose tokens it follows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __call__(self, predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> Verdict:
        """See :class:`Verifier`."""
        _check_shapes(predictions, draft)
        self._rows.begin(tokens)
        return _accept_while_equal(
            draft, lambda i: int(self._rows.row(predictions, draft.tokens[:i]).argmax())
        )


class SamplingVerifier:
    """Keeps the distribution of the target's samples. One request, whose tokens it follows.

    Deterministic drafts (``probs`` None) are verified by sample-and-match: the token is drawn from the
    target's distribution p and the proposal accepted while it equals the draw. The output is then, token for
    token, that of plain sampling with the same seed. Sampled drafts are verified by speculative
    sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2).

    Args:
        params: temperature above 0.
        seed: 0 to 2**64 - 1; with the position, all the randomness there is.
        rows: what the request changes in the rows; None changes what ``params`` say.
    """

    def __init__(self, params: SamplingParams, seed: int, rows: Rows | None = None) -> None:
        self._params = params
        self._seed = seed
        self._rows = Rows(steps_of(params)) if rows is None else rows

    def __call__(self, predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> Verdict:
        """See :class:`Verifier`."""
        _check_shapes(predictions, draft)
        self._rows.begin(tokens)

        def target_probs(i: int) -> npt.NDArray[np.float64]:
            return distribution(self._rows.row(predictions, draft.tokens[:i]), self._params)

        def sample(i: int) -> int:
            return draw(target_probs(i), uniform(self._seed, len(tokens) + i, TOKEN_LANE))

        if draft.probs is None:
            return _accept_while_equal(draft, sample)
        for i, x in enumerate(draft.tokens):
            p, q = target_probs(i), draft.probs[i]
            # r < p(x) / q(x), without the division
            if uniform(self._seed, len(tokens) + i, ACCEPT_LANE) * q[x] < p[x]:
                continue
            residual = np.maximum(0.0, p - q)
            # Only rounding can leave no residual: then p and q are the same distribution.
            probs = residual if residual.any() else p
            return Verdict(i, draw(probs, uniform(self._seed, len(tokens) + i, TOKEN_LANE)))
        return Verdict(len(draft.tokens), sample(len(draft.tokens)))


def _telling(verify: Verifier, top: int) -> Verifier:
    """``verify``, with the log probabilities of all that it keeps, by the target's own rows."""

    def verify_and_tell(predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> Verdict:
        verdict = verify(predictions, draft, tokens)
        kept = (*draft.tokens[: verdict.accepted], verdict.token)
        rows = [log_probabilities(row) for row in predictions.logits[: len(kept)]]
        return replace(
            verdict,
            logprobs=tuple(float(row[token]) for row, token in zip(rows, kept, strict=True)),
            top_logprobs=tuple(most_likely(row, top) for row in rows),
        )

    return verify_and_tell


def _accept_while_equal(draft: Draft, choose: Callable[[int], int]) -> Verdict:
    """Accept proposals while the target's own choice for row i, ``choose(i)``, is the same token."""
    for i, proposal in enumerate(draft.tokens):
        token = choose(i)
        if token != proposal:
            return Verdict(i, token)
    return Verdict(len(draft.tokens), choose(len(draft.tokens)))


def _check_shapes(predictions: Predictions, draft: Draft) -> None:
    rows, shape = len(draft.tokens) + 1, predictions.shape
    if len(shape) != 2 or shape[0] != rows:
        raise RequestError(f"logits of shape {shape} for {rows - 1} proposals; needed: ({rows}, vocab)")
    if draft.probs is not None and draft.probs.shape != (rows - 1, shape[1]):
        raise RequestError(
            f"draft probabilities of shape {draft.probs.shape}; needed: {(rows - 1, shape[1])}, "
            "over the target's vocabulary"
        )
