"""Memory: its size, its use, and the speed of reading."""

import ctypes
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil

from edgespec_models.errors import DeviceError

_READ_BYTES = 1 << 28  # more than caches hold
_MMAP_THRESHOLD = -3  # of mallopt
_LEAST_MAPPED = 1 << 18  # bytes of a block that the system gives and takes by itself
_READS = 5


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Physical memory that a process here may use, in bytes.

    Attributes:
        total: Bytes of the machine, or the limit of a container or service if that is lower.
        available: Bytes that no other program uses.
        limited: Whether the memory in all is the limit of a container or service.
    """

    total: int
    available: int
    limited: bool = False


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """The memory of this machine, within the limits of Linux control groups."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    limits = list(_group_limits(root))
    return MachineMemory(
        total=min([total, *(limit for limit, _ in limits)]),
        available=max(0, min([available, *(limit - used for limit, used in limits)])),
        limited=any(limit < total for limit, _ in limits),
    )


def give_back() -> None:
    """Give freed memory back to the system. glibc keeps blocks of up to 32 MiB, of every thread its own."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def give_back_at_once() -> None:
    """From now on give memory back to the system as soon as it is freed, which takes a little more time.

    Else glibc keeps it in pieces that later blocks do not fit.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LEAST_MAPPED)


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of every control group of this process, and its use that cannot be reclaimed."""
    try:
        groups = (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, place = line.split(":", 2)
        second = not controllers  # version 2 has one hierarchy for all
        if not second and "memory" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("" if second else "memory")
        folder = mounted / place.strip("/")
        for group in (folder, *folder.parents):
            yield from _limit_of(group, second)
            if group == mounted:
                break


def _limit_of(group: Path, second: bool) -> Iterator[tuple[int, int]]:
    names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, used = (int((group / name).read_text("ascii")) for name in names)
        stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        prefix = "" if second else "total_"
        cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):
        return  # "max" is no limit; the first group has no such files, and others may not be seen from here
    yield limit, max(0, used - cached)


def peak_memory_bytes() -> int:
    """The most physical memory this process has held at any time, mapped files included, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    status = Path("/proc/self/status")
    _, known, rest = (status.read_text("ascii", "replace") if status.exists() else "").partition("VmHWM:")
    if known:  # Linux; its getrusage begins with the peak of the parent process
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
