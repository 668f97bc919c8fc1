"""What a drafter is: proposals in the target's vocabulary, and never a decision."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Draft", "Drafter", "Extending", "NO_DRAFT"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuation of the committed tokens.

    Attributes:
        tokens: proposed token ids, in the target's vocabulary.
        probs: the law the tokens were sampled from, float64 ``(len(tokens), vocab)`` over the target's
            vocabulary; None where the tokens are a function of the context (greedy drafter, n-grams).
        sources: which drafter proposed each token; as long as ``tokens``.
        confidence: for each token, an estimate in [0, 1] that it will be accepted given that those
            before it are; a function of the context and of earlier proposals only.
    """

    tokens: tuple[int, ...] = ()
    probs: npt.NDArray[np.float64] | None = None
    sources: tuple[str, ...] = ()
    confidence: tuple[float, ...] = field(default=())

    def head(self, count: int) -> "Draft":
        """The first ``count`` proposals."""
        probs = None if self.probs is None else self.probs[:count]
        return Draft(self.tokens[:count], probs, self.sources[:count], self.confidence[:count])

    def then(self, more: "Draft") -> "Draft":
        """This draft and ``more`` behind it; both deterministic."""
        if not more.tokens:
            return self
        return Draft(
            self.tokens + more.tokens, None, self.sources + more.sources, self.confidence + more.confidence
        )


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Proposes tokens. It owns its state and re-aligns itself with ``tokens`` at every call."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """Propose at most ``limit`` tokens to follow ``tokens`` (all committed so far, prompt included).

        An empty draft is always legal.
        """


class Extending(Drafter, Protocol):
    """A drafter that also goes on where another one stopped."""

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        """``draft``, which another drafter proposed behind ``tokens``, made longer: up to ``limit`` tokens.

        To be called after :meth:`propose` with the same tokens. ``draft`` itself if there is nothing to add.
        """
