"""Several answers to one prompt: one request after another, the prompt staying in the KV cache."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from edgespec.requests.request import Request, RequestOptions
from edgespec.requests.results import Generation

__all__ = ["answers", "answers_async"]

_ENDED_EARLY: Final = ("cancelled", "timeout", "closed")


def answers(options: RequestOptions, ask: Callable[[RequestOptions], Generation]) -> Generation:
    """The first of the ``n`` answers that ``options`` want, with all of them as its choices.

    Answer i has the seed ``seed + i``, so that each can be had again alone. Greedy answers are all the same,
    so one is decoded. Where one is ended early there are no further ones.

    Args:
        options: of the request.
        ask: decodes one answer; its options say nothing of ``n``.

    Raises:
        RequestError: an option out of range.
    """
    given = list[Generation]()
    for each in _one_by_one(options):
        given.append(ask(each))
        if given[-1].finish_reason in _ENDED_EARLY:
            break
    return _together(given, options)


async def answers_async(
    options: RequestOptions, ask: Callable[[RequestOptions], Awaitable[Generation]]
) -> Generation:
    """:func:`answers` in an event loop."""
    given = list[Generation]()
    for each in _one_by_one(options):
        given.append(await ask(each))
        if given[-1].finish_reason in _ENDED_EARLY:
            break
    return _together(given, options)


def _one_by_one(options: RequestOptions) -> list[RequestOptions]:
    """The options of each answer that has to be decoded."""
    request = Request.of(options)
    one = options.copy()
    one.pop("n", None)
    if request.n == 1 or request.sampling.greedy:
        return [one]
    seed = request.sampling.seed
    if seed is None:
        return [one] * request.n
    return [{**one, "seed": (seed + i) % 2**64} for i in range(request.n)]


def _together(given: Sequence[Generation], options: RequestOptions) -> Generation:
    first, *others = given
    request = Request.of(options)
    if request.sampling.greedy and first.finish_reason not in _ENDED_EARLY:
        others = [first] * (request.n - 1)
    return replace(first, others=tuple(others)) if others else first
