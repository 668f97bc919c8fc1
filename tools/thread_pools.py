"""Do the thread pools of target and drafter fight? `python tools/thread_pools.py TARGET DRAFTER`.

Times target passes over 1 and 3 tokens and drafter steps, alone and in turn as speculation runs them, in a
process of its own for each way to set up ONNX Runtime's threads, and prints medians in milliseconds:
a pool per session (spinning; spinning that ends with the pass; no spinning) or one for the process.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from edgespec_models.bundle import Bundle
from edgespec_runtimes.cpu import CpuOptions, CpuSession, default_threads
from edgespec_runtimes.ort import ort

MODES = ("spinning", "spinning, stopped after a pass", "no spinning", "one pool")
PAST = 256
ROUNDS = 25


def configure(mode: str) -> None:
    """Make sessions of this process set up their threads as ``mode`` says."""

    class Options(ort.SessionOptions):  # type: ignore[misc]
        """Session options that leave out what ``mode`` does not have."""

        def __init__(self) -> None:
            super().__init__()
            self.use_per_session_threads = mode != "one pool"

        def add_session_config_entry(self, key: str, value: str) -> None:
            if "force_spinning_stop" not in key or mode == MODES[1]:
                super().add_session_config_entry(key, value)

    if mode == "one pool":
        ort.set_global_thread_pool_sizes(default_threads(), 1)
    ort.SessionOptions = Options


def measure(target: str, drafter: str, mode: str) -> str:
    """One line of results."""
    options = CpuOptions(spinning=mode != "no spinning")
    big, small = CpuSession(Bundle(Path(target)), options), CpuSession(Bundle(Path(drafter)), options)
    tokens = list(range(100, 100 + PAST))
    times: dict[str, list[float]] = {}

    def timed(name: str, session: CpuSession, count: int) -> None:
        session.truncate(PAST)
        started = perf_counter()
        session.forward(tokens[:count])
        times.setdefault(name, []).append((perf_counter() - started) * 1e3)

    for session in (big, small):
        session.prefill(tokens)
    for _ in range(ROUNDS):
        for name, session, count in (("T(1)", big, 1), ("T(3)", big, 3), ("step", small, 1)):
            timed(name, session, count)
            sleep(0.02)
    for _ in range(ROUNDS):
        timed("step in turn", small, 1)
        timed("T(3) in turn", big, 3)
    return ", ".join(f"{name} {median(values):.1f}" for name, values in times.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--mode", choices=MODES, help="only this one, in this process")
    arguments = parser.parse_args()
    if arguments.mode:
        configure(arguments.mode)
        print(f"{arguments.mode}: {measure(arguments.target, arguments.drafter, arguments.mode)}")
    else:
        for mode in MODES * 2:
            own = [sys.executable, __file__, arguments.target, arguments.drafter, "--mode", mode]
            subprocess.run(own, check=True)
