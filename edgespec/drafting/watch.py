"""Is something ahead or behind? Sums of what it gains and loses, by which luck is told from harm."""

from enum import Enum, auto

__all__ = ["Finding", "Watch"]


class Finding(Enum):
    """What a :class:`Watch` found."""

    PROVED = auto()
    FAILED = auto()


class Watch:
    """Adds up gains and losses until they say something, then begins anew.

    Luck decides single gains, so what is watched is the sum of losses that no gains have made good (the
    cumulative sum test of Page 1954, "Continuous inspection schemes"): what pays never gets far below, what
    does not gets there soon.

    Args:
        stake: more than this may not be lost; as much, won in all, is the proof of the opposite.

    Attributes:
        lost: the losses that no gains have made good.
    """

    def __init__(self, stake: float) -> None:
        self._stake = stake
        self._won = self.lost = 0.0

    def observe(self, gain: float) -> Finding | None:
        """Tell of a gain, or of a loss, which is below 0. Returns what that shows, if anything."""
        self._won += gain
        self.lost = max(0.0, self.lost - gain)
        if self.lost > self._stake:
            finding = Finding.FAILED
        elif self._won >= self._stake:
            finding = Finding.PROVED
        else:
            return None
        self._won = self.lost = 0.0
        return finding
