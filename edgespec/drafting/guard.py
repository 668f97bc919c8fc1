"""Drafting, or a part of it, pauses where it loses time against plain decoding."""

from typing import Final

from edgespec.decoding.draft import Step
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.watch import Finding, Watch

__all__ = ["STAKE", "Guard"]

STAKE: Final = 5.0
"""Tokens that plain decoding may be ahead by."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # rounds


class Guard:
    """Pauses what is to save time when it loses time against plain decoding.

    Estimates can be wrong; what was realised cannot. A gain is what was committed less what plain decoding
    would have committed in that time; :class:`Watch` tells bad luck from a loss. After a
    pause it is tried again, and each failure doubles the pause.

    Args:
        pricing: what plain decoding commits in a time.
        what: what is watched and what it does, in words: the beginning of the reason.

    Attributes:
        reason: why it was paused last; None while it pays.
    """

    def __init__(self, pricing: Pricing, what: str = "rounds with drafts ran") -> None:
        self._pricing, self._what = pricing, what
        self._watch = Watch(STAKE)
        self._tokens = self._seconds = 0.0  # of the losing streak
        self._pause, self._left = _FIRST_PAUSE, 0
        self.reason: str | None = None

    @property
    def allows(self) -> bool:
        """Whether to go on."""
        return self._left == 0

    def rest(self) -> None:
        """Tell of a round of a pause."""
        self._left = max(0, self._left - 1)

    def observe(self, committed: int, seconds: float) -> Finding | None:
        """Tell of tokens that were committed and the time they took; returns what that shows, if anything."""
        self._tokens, self._seconds = self._tokens + committed, self._seconds + seconds
        finding = self._watch.observe(committed - seconds * self._pricing.plain_rate)
        if finding is Finding.PROVED:
            self._pause, self.reason = _FIRST_PAUSE, None
        elif finding is Finding.FAILED:
            ratio = self._tokens / self._seconds / self._pricing.plain_rate
            self.reason = f"{self._what} at {ratio:.2f} times the speed of plain decoding"
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        if self._watch.lost == 0.0:
            self._tokens = self._seconds = 0.0
        return finding

    def observe_source(self, source: str, step: Step) -> Finding | None:
        """Tell of a round, of which the proposals of one source are watched; pauses go by in rounds too.

        What they brought is how many were accepted, what they cost is the time by which a pass is longer for
        their rows.
        """
        if not self.allows:
            self.rest()
        places = [place for place, name in enumerate(step.draft.sources) if name == source]
        if not places:
            return None
        rows = 1 + len(step.draft.tokens)
        seconds = self._pricing.pass_seconds(rows) - self._pricing.pass_seconds(rows - len(places))
        return self.observe(sum(place < step.accepted for place in places), max(0.0, seconds))
