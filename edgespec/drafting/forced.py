"""Drafting under a grammar: what it forces is proposed for nothing, what it forbids is not proposed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from edgespec.decoding.constraint import Constraint
from edgespec.decoding.draft import NO_DRAFT, Draft, Remarks, Source, Step
from edgespec.drafting.pricing import Pricing

__all__ = ["Forced"]

_SOURCE: Final = "grammar"


class Forced:
    """Around a request's other sources: they go on behind the tokens that the grammar forces.

    A token is forced where it is the only one allowed. It is certain to be accepted, so its confidence is 1
    and it costs the row whose keys and values the target needs anyway. What others propose is cut where the
    grammar forbids it, and may be gone on with there by what it forces instead. The token that completes the
    text is never proposed: the pass that would verify it gives it without.

    Args:
        policy: the other sources.
        constraint: the request's grammar.
        pricing: what verification costs.
        remarks: the policy's.

    Attributes:
        remarks: as given.
    """

    def __init__(
        self, policy: Source, constraint: Constraint, pricing: Pricing, remarks: Remarks | None = None
    ) -> None:
        self._policy, self._constraint, self._pricing = policy, constraint, pricing
        self.remarks = remarks or Remarks()

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`~edgespec.decoding.draft.Source`."""
        self._constraint.begin(tokens)
        forced = self._fitting(NO_DRAFT, NO_DRAFT, limit)
        more = self._policy.propose([*tokens, *forced.tokens], limit - len(forced.tokens))
        if more.probs is None:
            draft = replace(self._fitting(forced, more, limit), forced=len(forced.tokens))
        elif forced.tokens:
            draft = forced
        else:
            draft = self._sampled(more)
        return draft.head(self._pricing.keep(draft.confidence)[0])

    def observe(self, step: Step) -> None:
        """See :class:`~edgespec.decoding.draft.Observer`."""
        self._policy.observe(step)

    def close(self) -> None:
        """See :class:`~edgespec.decoding.draft.Observer`."""
        self._policy.close()

    def _fitting(self, forced: Draft, more: Draft, limit: int) -> Draft:
        """``forced``, then what of ``more`` the grammar allows and what it forces there."""
        tokens, sources, confidence = list(forced.tokens), list(forced.sources), list(forced.confidence)
        proposals = zip(more.tokens, more.sources, more.confidence, strict=False)
        while len(tokens) < limit:
            allowed = self._constraint.allowed(tokens)
            token, source, sure = next(proposals, (None, "", 0.0))
            if (only := allowed.only) is not None:
                if token != only:
                    proposals = zip((), (), (), strict=False)  # they go on behind another token
                token, source, sure = only, _SOURCE, 1.0
            if token is None or token not in allowed or self._constraint.completes([*tokens, token]):
                break
            tokens.append(token)
            sources.append(source)
            confidence.append(sure)
        return Draft(tuple(tokens), None, tuple(sources), tuple(confidence), more.slowdown)

    def _sampled(self, draft: Draft) -> Draft:
        """A draft that was drawn, up to the first token that cannot be accepted or ends the text.

        That token stays: to drop it for what it is would change the distribution of what comes instead.
        """
        for at, token in enumerate(draft.tokens):
            allowed = self._constraint.allowed(draft.tokens[:at])
            if token not in allowed or self._constraint.completes(draft.tokens[: at + 1]):
                return draft.head(at + 1)
        return draft
