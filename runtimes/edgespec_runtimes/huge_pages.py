"""Weights in huge pages (Linux).

A pass reads every weight once. In pages of 4 KiB that is a lookup in the page tables for every 4 KiB, in a
virtual machine a twofold one, which costs narrow passes 5 to 11 % (``tools/huge_pages.py``). Most
distributions give huge pages to those who ask (``madvise``); numpy does, ONNX Runtime does not.
"""

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["huge_pages"]

_SYSTEM: Final = Path("/sys/kernel/mm/transparent_hugepage")
_MAPS: Final = Path("/proc/self/maps")
_ADVISE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE; MADV_COLLAPSE, since Linux 6.1

Range = tuple[int, int]


@contextmanager
def huge_pages() -> Iterator[None]:
    """What is allocated within, and kept, lies in huge pages afterwards.

    Does nothing where the system has no such pages, gives them unasked or to nobody. Copying into them takes
    about two seconds a gigabyte; memory that has them already, as with
    ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1`` in the environment, takes none. Other threads' allocations in
    the meantime are moved too. Nothing depends on whether it succeeds.
    """
    size = _page_size()
    if size is None:
        yield
        return
    before = _anonymous()
    yield
    now = _anonymous()
    if before is None or now is None:
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _without(now, before):
        first = -(-start // size) * size
        length = end // size * size - first
        if length > 0:
            libc.madvise(first, length, _ADVISE)
            libc.madvise(first, length, _COLLAPSE)


def _page_size() -> int | None:
    """Bytes of a huge page, where they are given on request."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        on_request = "[madvise]" in (_SYSTEM / "enabled").read_text(encoding="ascii")
        return int((_SYSTEM / "hpage_pmd_size").read_text(encoding="ascii")) if on_request else None
    except (OSError, ValueError):
        return None


def _anonymous() -> list[Range] | None:
    """Address ranges of this process's own writable memory, ascending; None where they cannot be read."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    ranges = []
    for line in lines:
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and (not name or name[0] == "[heap]"):
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def _without(ranges: Iterable[Range], known: Sequence[Range]) -> Iterator[Range]:
    """The parts of ``ranges`` that are in none of ``known``; all ascending and disjoint."""
    for start, end in ranges:
        at = start
        for low, high in known:
            if high <= at or end <= low:
                continue
            if at < low:
                yield at, low
            at = high
        if at < end:
            yield at, end
