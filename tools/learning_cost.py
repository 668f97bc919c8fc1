"""What training a drafter costs on this machine: `python -m tools.learning_cost DRAFTER [--prompt 64]`.

DRAFTER is a drafter's bundle. Made-up text of 64 and 192 tokens is read and learned from; then steps of the
drafter are timed in turn, with its gains as they are stored and as they would be after training.
"""

import argparse
import resource
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.learning.decoder import NumpyDecoder
from edgespec.learning.tuning import Example, Tuning
from edgespec_models.bundle import Bundle
from edgespec_runtimes.cpu import CpuOptions, CpuSession

_TIMES = 5
_STEPS = 40


def seconds(act: Callable[[], object], times: int = _TIMES) -> float:
    """Of one call: the median."""
    taken = []
    for _ in range(times):
        started = perf_counter()
        act()
        taken.append(perf_counter() - started)
    return median(taken)


def step_seconds(session: CpuSession, text: list[int]) -> float:
    """Of a step behind ``text``."""
    session.prefill(text)

    def step() -> None:
        session.forward([7])
        session.truncate(len(text))

    return seconds(step, _STEPS)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=192, help="tokens of the answer")
    args = parser.parse_args()
    bundle = Bundle(args.drafter)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    decoder = NumpyDecoder(bundle)
    tuning = Tuning(decoder)
    tokens = np.random.default_rng(0).integers(0, bundle.config.vocab_size, args.prompt + args.answer)
    text = [int(token) for token in tokens]
    example = Example(tuple(text), args.prompt)
    reading = seconds(lambda: decoder.read(text, args.prompt, decoder.gains.stored, differentiate=False))
    learning = seconds(lambda: tuning.learn(example))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{len(decoder.gains):,} gains; a text of {len(text)} tokens: read in {reading:.2f} s,", end=" ")
    print(f"learned from in {learning:.2f} s, {learning / args.answer * 1e3:.1f} ms a token of the answer,")
    print(f"{(after - before) / 1024:.0f} MiB of memory at most, of which the weights' file is mapped;")
    session = CpuSession(bundle, CpuOptions(exact_rows=False), row_exact=False)
    stored, tuned = [], []
    for _ in range(_TIMES):
        session.tune({})
        stored.append(step_seconds(session, text))
        session.tune(tuning.gains)
        tuned.append(step_seconds(session, text))
    steps = f"{median(stored) * 1e3:.2f} ms as stored, {median(tuned) * 1e3:.2f} ms tuned"
    print(f"a step of the drafter {steps}")


if __name__ == "__main__":
    main()
