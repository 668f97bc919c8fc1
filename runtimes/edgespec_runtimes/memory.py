"""Memory: how much this process has taken, and how fast this machine reads it."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil

from edgespec_models.errors import DeviceError

__all__ = ["memory_bandwidth", "peak_memory_bytes"]

_READ_BYTES = 1 << 28  # more than caches hold
_READS = 5


def peak_memory_bytes() -> int:
    """The most physical memory this process has held at any time, mapped files included, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    status = Path("/proc/self/status")
    _, known, rest = (status.read_text("ascii", "replace") if status.exists() else "").partition("VmHWM:")
    if known:  # Linux; its getrusage begins with what the process had that started this one
        return int(rest.split()[0]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_bandwidth(threads: int, *, size: int = _READ_BYTES) -> float:
    """Bytes a second that ``threads`` read together: the best of five times, within a second or two.

    Each thread looks for the largest number of its part of ``size`` bytes, which numpy does faster than
    memory delivers.

    Raises:
        DeviceError: not enough memory for ``size`` bytes.
    """
    try:
        parts = np.array_split(np.ones(size // 4, np.float32), threads)
    except MemoryError as error:
        raise DeviceError(f"not enough memory to measure its speed with {size:,} bytes") from error
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_READS):
            started = perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, size / (perf_counter() - started))
    return best
