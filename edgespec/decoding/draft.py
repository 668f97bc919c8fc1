"""What decoding and its sources of proposals tell each other: drafts, and what came of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from edgespec_runtimes.predictions import Floats, Predictions
from edgespec_runtimes.session import Rows

Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuation of the committed tokens: a function of these, not drawn.

    Attributes:
        tokens: proposed token ids, in the target's vocabulary.
        sources: which drafter proposed each token; as long as ``tokens``.
        confidence: for each token, an estimate in [0, 1] that it will be accepted given that those
            before it are; a function of the context and of earlier proposals only.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    confidence: tuple[float, ...] = field(default=())

    def head(self, count: int) -> "Draft":
        """The first ``count`` proposals."""
        return Draft(self.tokens[:count], self.sources[:count], self.confidence[:count])

    def then(self, more: "Draft") -> "Draft":
        """This draft and ``more`` behind it."""
        if not more.tokens:
            return self
        tokens, sources = self.tokens + more.tokens, self.sources + more.sources
        return Draft(tokens, sources, self.confidence + more.confidence)


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Passed:
    """A pass: its rows, its seconds, a request's share of these, and how many requests shared them.

    ``reads`` says whether one of these read a part of its prompt.
    """

    rows: int
    seconds: float
    share_s: float
    requests: int = 1
    reads: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One round of decoding.

    Attributes:
        tokens: what it committed, at least one token.
        accepted: how many proposals were kept.
        drafter_s: seconds spent proposing.
        target_s: seconds of the target's pass, or the request's share of them.
        seconds: of the round, for this request.
        logprobs: of each token, in nats; empty unless asked for.
        top_logprobs: the most probable tokens in place of each, and their logarithms; empty unless asked for.
        passed: the target's pass, if it was other requests' too.
        features: of a target that a head reads (:mod:`edgespec_runtimes.predictions`), those of the last
            tokens in its cache: all whose keys and values the round left there, at the end of a prompt some
            of these.
        forced: how many of the first proposals a grammar forced; sources were asked to go on behind them.
    """

    tokens: tuple[int, ...]
    draft: Draft = NO_DRAFT
    accepted: int = 0
    drafter_s: float = 0.0
    target_s: float = 0.0
    seconds: float = 0.0
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    passed: Passed | None = None
    features: Floats | None = None
    forced: int = 0

    @property
    def target_pass(self) -> Passed:
        """The pass; of this request alone unless said otherwise."""
        return self.passed or Passed(1 + len(self.draft.tokens), self.target_s, self.target_s)

    @property
    def judged(self) -> tuple[int, ...]:
        """What the round committed from where its sources were asked to go on."""
        return self.tokens[self.forced :]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the reading of a prompt is.

    Attributes:
        total: tokens of the prompt.
        cached: of these, how many the KV cache held already.
        read: how many have been read, those included.
        seconds: since the reading began.
    """

    total: int
    cached: int
    read: int
    seconds: float


class Observer(Protocol):
    """Learns from the rounds of one request."""

    def observe(self, step: Step) -> None:
        """A round is over."""

    def close(self) -> None:
        """The request has ended, however that came; called once."""
        return


class Source(Observer, Protocol):
    """Proposes tokens in one request, a round at a time. It owns its state and never decides what is kept.

    Attributes:
        rows: what a model has to read next; None where the draft is complete. The caller has them read,
            perhaps in one pass with those of other requests.
        draft: what is proposed; an empty draft is always legal.
        is_reading: whether this round only read a piece of the prompt, and the next one goes on with that.
        slowdown: the factor by which the target's pass takes longer because this source computes beside it.
        earliest: tokens that the answer has before this source is asked.
    """

    rows: Rows | None = None
    draft: Draft = NO_DRAFT
    is_reading: bool = False
    slowdown: float = 1.0
    earliest: int = 0

    def begin_round(self, tokens: Sequence[int], limit: int) -> None:
        """Propose at most ``limit`` tokens to follow ``tokens`` (all committed so far, prompt included)."""

    def take(self, predictions: Predictions, passed: Passed) -> None:
        """Go on with what the model says about ``rows``; ``passed`` is the pass that read them."""
        return


class Extending(Observer, Protocol):
    """Proposes tokens at once, at no cost in time, and goes on where another source stopped."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """At most ``limit`` tokens to follow ``tokens``; an empty draft is always legal."""

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        """``draft``, which another source proposed behind ``tokens``, made longer: up to ``limit`` tokens.

        To be called after :meth:`propose` with the same tokens. ``draft`` itself if there is nothing to add.
        """


@dataclass(slots=True, kw_only=True)
class Remarks:
    """What a request's sources have to say besides their drafts, for :class:`edgespec.GenerationStats`."""

    speculation_off_reason: str | None = None
    history_problem: str | None = None
    prompt_cache_problem: str | None = None
    rolled_back: tuple[str, ...] = ()
    placement: str = ""
    drafted_ahead: int = 0
    used_ahead: int = 0


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens: an object of an app's own, given as ``drafter=`` to ``load`` or to a request.

    A class that inherits from this one needs :meth:`propose` alone. All its methods are called by the thread
    that decodes, for one request at a time.
    """

    def propose(self, tokens: Sequence[int], limit: int) -> Draft | Sequence[int]:
        """Propose tokens to follow ``tokens``.

        Args:
            tokens: all tokens so far, prompt and answer, in the target's vocabulary; not to be changed.
            limit: more proposals than these are not looked at.

        Returns:
            Ids in the target's vocabulary, the likeliest continuation; an empty list for none.
            A :class:`Draft` says besides how ``confidence`` each is accepted, as a number from 0 to 1;
            without, that is learned from what is accepted.
        """

    def observe(self, step: Step) -> None:
        """A round is over: ``step.tokens`` were committed, the first ``step.accepted`` as proposed."""
        return

    def close(self) -> None:
        """The request has ended, however that came. Another may begin."""
        return
