"""What decoding and its sources of proposals tell each other: drafts, and what came of them."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

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
        slowdown: the factor by which the target's pass takes longer because its source computes beside it.
        forced: how many of the first tokens a grammar forces; sources were asked to go on behind them.
        reading: whether its source has read a piece of the prompt only, and goes on with that next time.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    confidence: tuple[float, ...] = field(default=())
    slowdown: float = 1.0
    forced: int = 0
    reading: bool = False

    def head(self, count: int) -> "Draft":
        """The first ``count`` proposals."""
        kept = self.tokens[:count], self.sources[:count], self.confidence[:count]
        return Draft(*kept, self.slowdown, self.forced)

    def then(self, more: "Draft") -> "Draft":
        """This draft and ``more`` behind it."""
        if not more.tokens:
            return self
        tokens, sources = self.tokens + more.tokens, self.sources + more.sources
        confidence = self.confidence + more.confidence
        return Draft(tokens, sources, confidence, self.slowdown, self.forced)


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


T = TypeVar("T")
Work = Generator[Rows, tuple[Predictions, Passed], T]
"""Work that needs passes of a model: it asks for rows, and is told what these say, and what the pass took. So
the work of several requests can share passes."""


def alone(work: Work[T], clock: Clock) -> T:
    """Do ``work`` with passes of its own."""
    said: Any = None
    while True:
        try:
            rows = work.send(said)
        except StopIteration as end:
            value: T = end.value
            return value
        began = clock()
        (predictions,) = rows.session.model.predict_together([rows])
        seconds = clock() - began
        said = predictions, Passed(len(rows.tokens), seconds, seconds)


def timed(
    work: Work[T], clock: Clock, share: Callable[[Passed], float] = lambda passed: passed.share_s
) -> Work[tuple[T, float]]:
    """The same work, which says besides how many seconds it took, its ``share`` of each pass included."""
    said: Any = None
    spent_s = 0.0
    while True:
        began = clock()
        try:
            rows = work.send(said)
        except StopIteration as end:
            return end.value, spent_s + clock() - began
        spent_s += clock() - began
        said = yield rows
        spent_s += share(said[1])


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

    @property
    def target_pass(self) -> Passed:
        """The pass; of this request alone unless said otherwise."""
        return self.passed or Passed(1 + len(self.draft.tokens), self.target_s, self.target_s)

    @property
    def judged(self) -> tuple[int, ...]:
        """What the round committed from where its sources were asked to go on."""
        return self.tokens[self.draft.forced :]


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


class Source(Protocol):
    """Proposes tokens in one request. It owns its state and never decides what is kept."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """Propose at most ``limit`` tokens to follow ``tokens`` (all committed so far, prompt included).

        An empty draft is always legal.
        """

    def observe(self, step: Step) -> None:
        """A round is over."""

    def close(self) -> None:
        """The request has ended, however that came; called once."""
        return


@runtime_checkable
class Asking(Protocol):
    """A source whose proposals need passes of a model."""

    def proposing(self, tokens: Sequence[int], limit: int) -> Work[Draft]:
        """Like :meth:`Source.propose`, as work that can be done together with that of other requests."""


class Extending(Source, Protocol):
    """A source that also goes on where another one stopped."""

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
