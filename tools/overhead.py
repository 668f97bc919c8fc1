"""How much of a decoding step is spent outside ONNX Runtime: `python tools/overhead.py TARGET`.

Wraps the session's one call into ONNX Runtime with a clock, decodes plainly, and compares the time inside
with the time of whole steps, text and statistics included.
"""

import argparse
from time import perf_counter
from typing import Any

import edgespec
from edgespec_runtimes.cpu import CpuSession
from edgespec_runtimes.graph_io import DynamicIO


class Clocked:
    """An inference session that adds up the seconds of its runs."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seconds = inner, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run_with_iobinding(self, binding: Any) -> None:
        """Run and count."""
        started = perf_counter()
        self.inner.run_with_iobinding(binding)
        self.seconds += perf_counter() - started


def main() -> None:
    """Decode and print the share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    with edgespec.load(options.target, drafter=None) as model:
        assert isinstance(model._session, CpuSession)
        io = model._session._io
        assert isinstance(io, DynamicIO | DynamicIO)
        clocked = io._session = Clocked(io._session)
        count = options.max_new_tokens
        stream = iter(model.stream("Once upon a time", max_new_tokens=count, stop_at_eos=False))
        next(stream)
        inside, started = clocked.seconds, perf_counter()
        for _ in stream:
            pass
        total, inside = perf_counter() - started, clocked.seconds - inside
    steps = count - 1
    print(f"{total / steps * 1e3:.2f} ms a step, {inside / steps * 1e3:.2f} ms inside ONNX Runtime")
    print(f"outside: {1 - inside / total:.2%}")


if __name__ == "__main__":
    main()
