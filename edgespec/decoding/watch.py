"""A cumulative sum test: has something lost more than chance explains?"""

from typing import Literal

Finding = Literal["proved", "failed"]
"""What a :class:`Watch` found."""


class Watch:
    """Adds up gains and losses until they say something, then begins anew.

    Luck decides single gains, so the sum of losses that no gains have made good is watched (the cumulative
    sum test of Page 1954, "Continuous inspection schemes"): what pays never gets far below, what does not
    gets there soon.

    More than ``stake`` may not be lost; as much, won in all, is the proof of the opposite. ``lost`` are the
    losses that no gains have made good.
    """

    def __init__(self, stake: float) -> None:
        self._stake = stake
        self._won = self.lost = 0.0

    def observe(self, gain: float) -> Finding | None:
        """Tell of a gain, or of a loss, which is below 0. Returns what that shows, if anything."""
        self._won += gain
        self.lost = max(0.0, self.lost - gain)
        finding: Finding | None = None
        if self.lost > self._stake:
            finding = "failed"
        elif self._won >= self._stake:
            finding = "proved"
        if finding:
            self._won = self.lost = 0.0
        return finding
