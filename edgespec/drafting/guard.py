"""Drafting, or a part of it, pauses where it loses time against plain decoding."""

from typing import Final

from edgespec.pricing import Pricing
from edgespec.watch import Finding, Watch

__all__ = ["STAKE", "Guard"]

STAKE: Final = 5.0
"""Tokens that plain decoding may be ahead by."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # rounds


class Guard:
    """Pauses what is to save time when it loses time against plain decoding.

    Estimates can be wrong; what was realised cannot. A gain is what was committed less what plain decoding
    would have committed in that time; :class:`~edgespec.watch.Watch` tells bad luck from a loss. After a
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

    def observe_rows(self, committed: int, count: int, *, rows: int) -> Finding | None:
        """Tell of ``count`` proposals in a pass of ``rows``, of which ``committed`` were accepted.

        They took the time by which such a pass is longer than one without them.
        """
        seconds = self._pricing.pass_seconds(rows) - self._pricing.pass_seconds(rows - count)
        return self.observe(committed, max(0.0, seconds))
