"""The one decoding loop: propose, forward, verify, commit. Plain decoding is the loop without drafts."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from time import perf_counter

from edgespec.drafting.draft import NO_DRAFT, Draft, Drafter
from edgespec.verification import Verifier
from edgespec_runtimes.session import Session

__all__ = ["Step", "decode"]


@dataclass(frozen=True, slots=True)
class Step:
    """One round.

    Attributes:
        tokens: what it committed, at least one token.
        draft: what was proposed.
        accepted: how many proposals were kept.
        drafter_s: seconds spent proposing.
        target_s: seconds of the target's pass.
    """

    tokens: tuple[int, ...]
    draft: Draft
    accepted: int
    drafter_s: float
    target_s: float


def decode(
    target: Session,
    drafter: Drafter | None,
    verify: Verifier,
    tokens: list[int],
    *,
    max_new_tokens: int,
    max_draft: int,
    stop: Collection[int] = (),
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[Step]:
    """Continue ``tokens`` in place, a round at a time, until ``stop`` or ``max_new_tokens``.

    At every yield the target's cache holds every token but the last, so the caller may stop at any
    point and the session stays valid. The first round is never drafted: a drafter that has a prompt to
    read would delay the first token.

    Args:
        target: its cache is made to hold the prompt first.
        drafter: None for plain decoding.
        verify: decides what is kept.
        tokens: the prompt, at least one token; grows.
        max_new_tokens: at most so many tokens are committed.
        max_draft: longest draft.
        stop: tokens that end the generation; the one that did is committed.
        cancelled: asked between prefill chunks, where it raises, and between rounds, where it ends the loop.

    Raises:
        Cancelled: ``cancelled`` said so while the prompt was read; nothing was committed.
    """
    target.prefill(tokens[:-1], cancelled)
    end, ended = len(tokens) + max_new_tokens, False
    first = True
    while len(tokens) < end and not ended and not (cancelled is not None and cancelled()):
        started = perf_counter()
        limit = 0 if first or drafter is None else min(max_draft, end - len(tokens) - 1)
        draft = drafter.propose(tokens, limit) if limit > 0 and drafter is not None else NO_DRAFT
        draft = draft.head(len(_until_stop(draft.tokens, stop)[0]))  # nothing is committed behind the end
        drafted = perf_counter()
        predictions = target.predict([tokens[-1], *draft.tokens])  # k + 1 rows
        passed = perf_counter()
        verdict = verify(predictions, draft, tokens)
        new, ended = _until_stop((*draft.tokens[: verdict.accepted], verdict.token), stop)
        tokens += new
        target.truncate(len(tokens) - 1)
        first = False
        yield Step(new, draft, min(verdict.accepted, len(new)), drafted - started, passed - drafted)


def _until_stop(tokens: tuple[int, ...], stop: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Tokens up to and including the first that ends the generation, and whether one did."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1], True
    return tokens, False
