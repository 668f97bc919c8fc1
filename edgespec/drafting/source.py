"""What proposes tokens: sources that want passes of a model, and those that take no time."""

from collections.abc import Sequence
from typing import Protocol

from edgespec.decoding.draft import NO_DRAFT, Draft, Passed, Round
from edgespec.drafting.pricing import Prices
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows

Wanted = Rows | Draft | None
"""The rows that a model has to read next, a complete draft, or None: this round only reads a piece of the
prompt, and the next round continues it."""


class Observer(Protocol):
    """Learns from the rounds of one request."""

    def observe(self, round_: Round) -> None:
        """A round has ended."""

    def close(self) -> None:
        """The request has ended, however that came, or the source failed; called once."""
        return


class Source(Observer, Protocol):
    """Proposes tokens for one request, a round at a time. It owns its state and never decides what is kept.

    The caller runs the pass over the rows that it wants, perhaps with rows of other requests. An empty
    draft is always legal.

    Attributes:
        earliest: the number of answer tokens before this source is asked.
        is_needed: whether its errors end the request. Otherwise decoding goes on without it.
    """

    earliest: int = 0
    is_needed: bool = False

    def begin(self, tokens: Sequence[int], limit: int, prices: Prices) -> Wanted:
        """Begin a draft of at most ``limit`` tokens behind ``tokens``: the prompt and the answer so far."""

    def take(self, predictions: Predictions, passed: Passed) -> Wanted:
        """Go on with the model's predictions for the wanted rows. ``passed`` is the pass that read them."""
        return NO_DRAFT


class Extending(Observer, Protocol):
    """Proposes tokens at no cost in time, and continues the drafts of other sources."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """At most ``limit`` tokens to follow ``tokens``; an empty draft is always legal."""

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        """Extend another source's ``draft`` behind ``tokens``, to at most ``limit`` tokens.

        Call :meth:`propose` with the same tokens first. Returns ``draft`` itself if there is nothing to add.
        """
