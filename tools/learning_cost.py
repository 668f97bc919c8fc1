"""What a drafter that learns costs: `python -m tools.learning_cost [--rows 49152]`.

Made-up logits with some twenty likely tokens, made-up text; microseconds of processor time, the best of five
rounds. To be compared with a step of the drafter, which takes thousands.
"""

import argparse
from collections.abc import Callable
from math import inf
from time import process_time
from unittest import mock

import numpy as np

from edgespec.learning.correction import Correction

_TIMES = 400
_LIKELY = 20


def microseconds(act: Callable[[int], object]) -> float:
    """Of one call."""
    best = inf
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
    logits[:, :_LIKELY] = random.normal(0.0, 2.0, (16, _LIKELY))
    text = random.integers(0, rows, 300).tolist()
    with mock.patch("edgespec.learning.correction._STAKE", inf):  # what is made up is never right
        correction = Correction(fixed=(2,), share=1e9)

    def plain(number: int) -> float:
        scores = logits[number % 16]
        return float(1.0 / np.exp(scores - scores[int(scores.argmax())]).sum())

    def peek(number: int) -> None:
        correction.peek([*text, number], logits[number % 16], None)

    def learn(number: int) -> None:
        correction.guess([*text, number], logits[number % 16], None)
        correction.settle([*text, number, number % _LIKELY])

    usual, corrected = microseconds(plain), microseconds(peek)
    print(f"microseconds: a plain guess {usual:.0f}, a corrected one {corrected - usual:.0f} more;", end=" ")
    print(f"settling one that was judged {microseconds(learn) - corrected:.0f};", end=" ")
    print(f"keeping its logits {microseconds(lambda number: logits[number % 16].copy()):.0f}")


if __name__ == "__main__":
    main()
