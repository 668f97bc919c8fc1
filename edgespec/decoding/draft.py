"""Drafts and their outcomes: the objects that the loop and the sources of proposals exchange."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edgespec_runtimes.predictions import Floats

_LOG = logging.getLogger("edgespec")

Clock = Callable[[], float]
"""Returns seconds since a fixed moment."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed continuation of the committed tokens. It is a function of these tokens, without randomness.

    Attributes:
        tokens: proposed token ids, in the target's vocabulary.
        sources: which drafter proposed each token; as long as ``tokens``.
        confidence: for each token, the estimated probability that it is accepted if all tokens before it are.
            It depends on the context and on earlier proposals only.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    confidence: tuple[float, ...] = ()

    @property
    def first(self) -> str:
        """The drafter of the first token; empty without tokens."""
        return self.sources[0] if self.sources else ""

    def head(self, count: int) -> "Draft":
        """The first ``count`` proposals."""
        return Draft(self.tokens[:count], self.sources[:count], self.confidence[:count])

    def then(self, more: "Draft") -> "Draft":
        """This draft, followed by ``more``."""
        if not more.tokens:
            return self
        tokens, sources = self.tokens + more.tokens, self.sources + more.sources
        return Draft(tokens, sources, self.confidence + more.confidence)


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that share passes.

    Attributes:
        sequences: the number of requests, each of which has a row of a pass in any case.
        context: the mean number of tokens that a layer attends to in these requests.
    """

    sequences: int = 1
    context: float = 0.0


ALONE = Load()


@dataclass(frozen=True, slots=True)
class Passed:
    """A pass: its rows, its seconds, one request's share of the seconds, and the number of requests.

    ``reads`` is true if one of these requests read rows of its prompt. ``experts`` is how many different
    ones of a mixture the pass used. A target's pass was priced for ``load``.
    """

    rows: int
    seconds: float
    share_s: float
    requests: int = 1
    reads: bool = False
    experts: int = 0
    load: Load = ALONE

    @property
    def unshared_s(self) -> float:
        """The seconds of a pass in which each request has as large a share as this one."""
        return self.share_s * self.requests


@dataclass(frozen=True, slots=True)
class Round:
    """One round of decoding.

    Attributes:
        tokens: the committed tokens, at least one.
        accepted: the number of proposals that were kept.
        drafter_s: seconds spent proposing.
        target_s: seconds of the target's pass, or the request's share of them.
        seconds: the time of the round, for this request.
        logprobs: the log probability of each token, in nats. Empty unless the request asks for it.
        top_logprobs: the most likely tokens at each place with their log probabilities. Empty unless the
            request asks for them.
        passed: the target's pass; None where a round was made up.
        features: features of the last tokens in the target's cache, for a head
            (:mod:`edgespec_runtimes.predictions`). They cover the tokens whose keys and values the round left
            there; at the end of a prompt, some of these.
        forced: the number of first proposals that a grammar forced. Sources go on behind them.
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
        """The target's pass. Unless ``passed`` says otherwise, this request had it alone."""
        return self.passed or Passed(1 + len(self.draft.tokens), self.target_s, self.target_s)

    @property
    def judged(self) -> tuple[int, ...]:
        """The committed tokens without the forced ones at their beginning. Sources are judged by them."""
        return self.tokens[self.forced :]


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt has been read.

    Attributes:
        total: the tokens of the prompt.
        cached: the tokens that the KV cache held already.
        read: the tokens read so far, with the cached ones.
        seconds: the time since the reading began.
    """

    total: int
    cached: int
    read: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Remarks:
    """Notes of a request's sources for :class:`edgespec.GenerationStats`."""

    speculation_off_reason: str | None = None
    history_problem: str | None = None
    prompt_cache_problem: str | None = None
    rolled_back: tuple[str, ...] = ()
    placement: str = ""

    def note_failure(self, error: Exception) -> None:
        """Note, and log, that the drafter failed and the request goes on without it."""
        self.speculation_off_reason = f"the drafter failed: {str(error) or type(error).__name__}"
        _LOG.warning("%s; the answer goes on without it", self.speculation_off_reason)


@runtime_checkable
class Drafter(Protocol):
    """An app's own source of proposals, given as ``drafter=`` to ``load`` or to a request.

    A subclass needs :meth:`propose` only. The thread that decodes calls all methods, for one request at a
    time.
    """

    def propose(self, tokens: Sequence[int], limit: int) -> Draft | Sequence[int]:
        """Propose tokens to follow ``tokens``.

        Args:
            tokens: all tokens so far, prompt and answer, in the target's vocabulary. Do not change them.
            limit: the most proposals that are used.

        Returns:
            The likeliest continuation as ids in the target's vocabulary; an empty list for none. A
            :class:`Draft` also has the ``confidence`` of each, from 0 to 1; without it, the confidence is
            learned from what is accepted.
        """

    def observe(self, round_: Round) -> None:
        """A round has ended: it committed ``round_.tokens``, the first ``round_.accepted`` as proposed."""
        return

    def close(self) -> None:
        """The request has ended, however that came. Another may begin."""
        return
