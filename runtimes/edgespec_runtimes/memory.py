"""How much memory this process has taken."""

import sys

import psutil

__all__ = ["peak_memory_bytes"]


def peak_memory_bytes() -> int:
    """The most physical memory this process has held at any time, mapped files included, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
