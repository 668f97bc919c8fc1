"""The one decoding loop: propose, predict, verify, commit, observe; plain decoding has no drafts."""

from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter

from edgespec.decoding.draft import NO_DRAFT, Clock, Source, Step
from edgespec.decoding.sampling import log_probabilities, most_likely
from edgespec.decoding.verification import Verifier
from edgespec_runtimes.session import Predictions, Session


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
        target: its cache is made to hold the prompt first.
        policy: proposes, and is told of every round; closed by whoever made it.
        verify: decides what is kept.
        tokens: the prompt, at least one token; grows.
        max_new_tokens: at most so many tokens are committed.
        max_draft: longest draft.
        stop: tokens that end the generation; the one that did is committed.
        top_logprobs: of how many tokens a place steps give the log probabilities, besides those of the tokens
            that are committed; None gives none.
        cancelled: asked between prefill chunks, where it raises, and between rounds, where it ends the loop.
        clock: times the rounds.

    Raises:
        Cancelled: ``cancelled`` said so while the prompt was read; nothing was committed.
    """
    target.prefill(tokens[:-1], cancelled)
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
