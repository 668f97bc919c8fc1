"""A cumulative sum test: has something lost more than chance explains?"""

from typing import Literal

Finding = Literal["proved", "failed"]
"""The finding of a :class:`Watch`."""


class Watch:
    """Adds up gains and losses until they prove something, then begins anew.

    Single gains are luck, so the test watches the sum of losses that no gains have made good (the cumulative
    sum test of Page 1954, "Continuous inspection schemes"). What pays never loses much; what does not pay
    soon does.

    A loss above ``stake`` is a failure; a total gain of ``stake`` is a proof. ``lost`` is the sum of losses
    that no gains have made good.
    """

    def __init__(self, stake: float) -> None:
        self._stake = stake
        self._won = self.lost = 0.0

    def observe(self, gain: float) -> Finding | None:
        """Add a gain, or a loss below 0. Returns what the sum proves, if anything."""
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
