"""What do huge pages gain? The same model twice, its weights in pages of 4 KiB and in huge ones.

Usage: ``python -m tools.huge_pages BUNDLE [--threads N]``. Passes of both take turns; medians, and the
median of the ratios of neighbours.
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest import mock

from edgespec_models.foreign import open_bundle
from edgespec_runtimes.cpu import CpuOptions, CpuSession

_BEHIND = 256


def opened(path: Path, threads: int) -> CpuSession:
    """A session that has read ``_BEHIND`` tokens."""
    session = CpuSession(open_bundle(path), CpuOptions(threads=threads), row_exact=True)
    session.reserve(2 * _BEHIND)
    session.prefill(list(range(_BEHIND)))
    return session


def pass_seconds(session: CpuSession, rows: int) -> float:
    """Seconds of the second of two passes."""
    for _ in range(2):
        started = perf_counter()
        session.forward(list(range(rows)))
        seconds = perf_counter() - started
        session.truncate(_BEHIND)
    return seconds


def compare(small: CpuSession, huge: CpuSession, rows: Sequence[int], turns: int) -> None:
    """Print a line for each number of rows."""
    print("| rows | 4 KiB, ms | huge pages, ms | times as fast |\n|---|---|---|---|")
    for count in rows:
        pairs = []
        for turn in range(turns):
            order = (small, huge) if turn % 2 else (huge, small)
            seconds = {session: pass_seconds(session, count) for session in order}
            pairs.append((seconds[small], seconds[huge]))
        one, other = (1e3 * median(pair[side] for pair in pairs) for side in (0, 1))
        print(f"| {count} | {one:.1f} | {other:.1f} | {median(a / b for a, b in pairs):.2f} |")


def main() -> None:
    """Load the model both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--turns", type=int, default=24)
    args = parser.parse_args()
    with mock.patch("edgespec_runtimes.cpu.huge_pages", nullcontext):
        small = opened(args.bundle, args.threads)
    compare(small, opened(args.bundle, args.threads), (1, 2, 3, 4, 6, 8), args.turns)


if __name__ == "__main__":
    main()
