"""What a corrected guess costs beside a plain one: `python tools/learning_cost.py [--rows 49152]`.

Made-up logits with some twenty likely tokens; microseconds of processor time, the best of five rounds.
"""

import argparse
from collections.abc import Callable
from time import process_time

import numpy as np

from edgespec.learning.correction import Correction

_TIMES = 400


def microseconds(act: Callable[[int], object]) -> float:
    """Of one call."""
    best = float("inf")
    for _ in range(5):
        started = process_time()
        for number in range(_TIMES):
            act(number)
        best = min(best, process_time() - started)
    return best / _TIMES * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=49_152, help="of the drafter's LM head")
    rows = parser.parse_args().rows
    random = np.random.default_rng(0)
    logits = random.normal(-12.0, 1.0, (16, rows)).astype(np.float32)
    logits[:, :20] = random.normal(0.0, 2.0, (16, 20))
    text = random.integers(0, rows, 300).tolist()
    correction = Correction(fixed=(2,), share=1e9)

    def plain(number: int) -> float:
        scores = logits[number % 16]
        return float(1.0 / np.exp(scores - scores[int(scores.argmax())]).sum())

    def learned(number: int) -> None:
        correction.guess(text, logits[number % 16], None)
        correction.settle([*text, number % 20])

    def corrected(number: int) -> None:
        correction.guess(text, logits[number % 16], None)
        correction.settle([])

    usual, guess = microseconds(plain), microseconds(corrected)
    print(f"a plain guess {usual:.0f}, a corrected one {guess - usual:.0f} more, ", end="")
    print(f"learning from it {microseconds(learned) - guess:.0f}")


if __name__ == "__main__":
    main()
