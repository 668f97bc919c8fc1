"""The one decoding loop: propose, predict, verify, commit, observe; plain decoding has no drafts.

Verification looks at one row of logits after another and stops at the first rejection. A proposal is never
dropped because of what it is: that would change the distribution of the output.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter

from edgespec.decoding.draft import NO_DRAFT, Clock, Draft, Progress, Source, Step
from edgespec.decoding.sampling import (
    Penalties,
    Row,
    RowStep,
    SamplingParams,
    changed_row,
    distribution,
    draw,
    log_probabilities,
    most_likely,
    uniform,
)
from edgespec_models.errors import Cancelled, RequestError
from edgespec_runtimes.session import Predictions, Session


class Verifier:
    """Judges drafts by what the target says, in one request, whose tokens it follows.

    Drafts are verified by sample-and-match: the token is chosen from the target's row, and the proposal is
    accepted while it equals that choice. So the output is, token for token, that of plain decoding, or of
    plain sampling with the same seed.

    Without a seed in ``params`` a fresh one is drawn. ``masks`` change the rows after the penalties and
    biases of ``params``: a grammar, for one.
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
            RequestError: predictions of another shape; the request leaves no token that may come next.
            EdgespecError: a row of logits is not a distribution.
        """
        _check_shapes(predictions, draft)
        for step in self._steps:
            step.begin(tokens)
        position = len(tokens)

        def row(i: int) -> Row:
            return changed_row(predictions, draft.tokens[:i], self._steps)

        def sample(i: int) -> int:
            return draw(distribution(row(i), self._params), uniform(self._seed, position + i))

        if self._params.greedy:
            # A device that found the most likely tokens itself need not copy the rows.
            return _match(draft, (lambda i: int(row(i).argmax())) if self._steps else predictions.best)
        return _match(draft, sample)


def read_prompt(
    target: Session,
    prompt: Sequence[int],
    cancelled: Callable[[], bool] | None = None,
    clock: Clock = perf_counter,
) -> Iterator[Progress]:
    """Make the target's cache hold exactly ``prompt``: a pass a step, so that others may run between two.

    Says how far it is where that takes more than one pass: before the first, and behind each. ``cancelled``
    is asked before each.

    Raises:
        Cancelled: ``cancelled`` said so; the session stays valid.
    """
    started, total, cached = clock(), len(prompt), target.shared_prefix(prompt)
    ends = [*range(cached + target.piece, total, target.piece), total]
    if len(ends) > 1:
        yield Progress(total, cached, cached, 0.0)
    for end in ends:
        if cached < total and cancelled is not None and cancelled():
            raise Cancelled(f"cancelled after {target.length} of {total} prompt tokens")
        target.prefill(prompt[:end])
        if len(ends) > 1:
            yield Progress(total, cached, end, clock() - started)


def decode(
    target: Session,
    policy: Source,
    verify: Verifier,
    tokens: list[int],
    *,
    max_new_tokens: int,
    max_draft: int,
    stop: Collection[int] = (),
    top_logprobs: int | None = None,
    cancelled: Callable[[], bool] | None = None,
    clock: Clock = perf_counter,
) -> Iterator[Step]:
    """Continue ``tokens`` in place, a round at a time, until ``stop`` or ``max_new_tokens``.

    At every yield the target's cache holds every token but the last, so the caller may stop at any
    point and the session stays valid. The first round is never drafted: a drafter that has a prompt to
    read would delay the first token.

    Args:
        target: its cache is made to hold the prompt first, unless :func:`read_prompt` did.
        policy: proposes, and is told of every round; closed by whoever made it.
        verify: decides what is kept.
        tokens: the prompt, at least one token; grows.
        max_new_tokens: at most so many tokens are committed.
        max_draft: longest draft.
        stop: tokens that end the generation; the one that did is committed.
        top_logprobs: of how many tokens a place steps give the log probabilities, besides those of the tokens
            that are committed; None gives none.
        cancelled: asked between passes; while the prompt is read it raises, behind that it ends the loop.
        clock: times the rounds.

    Raises:
        Cancelled: ``cancelled`` said so while the prompt was read; nothing was committed.
    """
    for _ in read_prompt(target, tokens[:-1], cancelled):
        pass
    end, ended, limit = len(tokens) + max_new_tokens, False, 0
    while len(tokens) < end and not ended and not (cancelled is not None and cancelled()):
        started = clock()
        draft = policy.propose(tokens, limit) if limit > 0 else NO_DRAFT
        draft = draft.head(len(_until_stop(draft.tokens, stop)[0]))  # nothing is committed behind the end
        drafted = clock()
        predictions = target.predict([tokens[-1], *draft.tokens])  # k + 1 rows
        passed = clock()
        accepted, token = verify(predictions, draft, tokens)
        new, ended = _until_stop((*draft.tokens[:accepted], token), stop)
        told = ((), ()) if top_logprobs is None else _log_probabilities(predictions, new, top_logprobs)
        tokens += new
        target.truncate(len(tokens) - 1)
        limit = min(max_draft, end - len(tokens) - 1)
        times = drafted - started, passed - drafted, clock() - started
        step = Step(new, draft, min(accepted, len(new)), *times, *told)
        policy.observe(step)
        yield step


def _until_stop(tokens: tuple[int, ...], stop: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Tokens up to and including the first that ends the generation, and whether one did."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1], True
    return tokens, False


def _log_probabilities(
    predictions: Predictions, tokens: Sequence[int], top: int
) -> tuple[tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """Of every token that was committed, and of the ``top`` most likely ones in its place."""
    rows = [log_probabilities(row) for row in predictions.logits[: len(tokens)]]
    own = tuple(float(row[token]) for row, token in zip(rows, tokens, strict=True))
    return own, tuple(most_likely(row, top) for row in rows)


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
