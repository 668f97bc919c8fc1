"""Memory bandwidth beside T(n): `python tools/bandwidth.py TARGET`.

In turn, several times: the bytes a second that one thread reads, that one thread a core reads together, and
passes of the target over 1, 2 and 8 rows behind 256 tokens. On a virtual machine the cores may be moved
between chips that share a memory path and chips that each have one; which it is shows in the second figure,
and in T(1).
"""

import argparse
from statistics import median
from time import perf_counter

from edgespec.loading import open_model
from edgespec_runtimes.cpu import CpuSession, default_threads
from edgespec_runtimes.memory import memory_bandwidth

ROWS = (1, 2, 8)
PAST = 256


def passes(session: CpuSession) -> str:
    """Median milliseconds of passes over each of ROWS."""
    tokens = [index * 7919 % session.vocab_size for index in range(PAST + max(ROWS))]
    session.prefill(tokens[:PAST])
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(12):
        for rows, seconds in times.items():
            session.truncate(PAST)
            started = perf_counter()
            session.predict(tokens[PAST : PAST + rows])
            seconds.append(perf_counter() - started)
    return " | ".join(f"{median(seconds) * 1e3:.1f}" for seconds in times.values())


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    threads = default_threads()
    session = CpuSession(open_model(options.target, "target"))
    print(f"| 1 thread, GB/s | {threads} threads | T(1), ms | T(2) | T(8) |\n|---|---|---|---|---|")
    for _ in range(options.rounds):
        one, together = memory_bandwidth(1) / 1e9, memory_bandwidth(threads) / 1e9
        print(f"| {one:.1f} | {together:.1f} | {passes(session)} |", flush=True)
    session.close()


if __name__ == "__main__":
    main()
