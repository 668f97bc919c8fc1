"""The processor time that other programs take while something is measured."""

import os
from time import perf_counter

import psutil

_MANY = 0.1  # of the processor's time, from which on measurements suffer


class OtherPrograms:
    """Watches the processor from the moment it is made.

    Time that a virtual machine's host gives to other machines counts too. Other programs that fill the
    memory's bandwidth on few cores are not seen.
    """

    def __init__(self) -> None:
        self._before, self._started = _busy_s(), perf_counter()

    def share(self) -> float:
        """The share of all cores' time, 0 to 1, that other programs took since then."""
        whole = (perf_counter() - self._started) * (os.cpu_count() or 1)
        busy, own = (now - before for now, before in zip(_busy_s(), self._before, strict=True))
        return min(1.0, max(0.0, (busy - own) / whole)) if whole > 0 else 0.0


def warning(share: float) -> str | None:
    """A sentence for the user where other programs took much; None where they did not."""
    if share < _MANY:
        return None
    return (
        f"Other programs took {share:.0%} of the processor meanwhile, so these times are too long. Close "
        "them and measure again."
    )


def _busy_s() -> tuple[float, float]:
    """Seconds that all cores were busy since the machine started, and seconds of this process."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # they are in user and nice
    return sum(times) - idle - guests, own.user + own.system
