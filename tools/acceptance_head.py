"""Would a learned head foresee acceptance better than bins of confidence? Recorded answers, in order.

Usage: ``python -m tools.acceptance_head TARGET --drafter DRAFTER --prompts P.jsonl --answers A.jsonl``, with
answers as ``tools.record_answers`` writes them.

The drafter reads each answer; before every token each way says how likely the drafter's first guess is right,
and is then told. *Bins* is what edgespec drafts by (``Calibration``); the heads are logistic regressions
(SpecDec++, arXiv 2405.19715, has a deeper one), learned online by AdaGrad. Prints the log loss in nats, of
which less is better, and that of the drafter's probability itself.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.drafting.model import Calibration, Guess
from edgespec_models.bundle import Bundle
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from tools.training_trials import examples

_RATE = 0.1
_LEAST = 1e-4
_SIGNALS = {
    "probability": [0, 1],
    "and entropy": [0, 1, 2],
    "and margin": [0, 1, 2, 3],
    "and the last verdict": [0, 1, 2, 3, 4],
}


class Head:
    """Logistic regression on some of the signals."""

    def __init__(self, signals: Sequence[int]) -> None:
        self._signals = list(signals)
        self._weights, self._energy = np.zeros(len(signals)), np.full(len(signals), 0.1)
        self._weights[1] = 1.0  # what the probability says

    def probability(self, values: npt.NDArray[np.float64]) -> float:
        """That the guess is right."""
        return float(1.0 / (1.0 + np.exp(-self._weights @ values[self._signals])))

    def learn(self, values: npt.NDArray[np.float64], right: bool) -> None:
        """It was, or was not."""
        gradient = (right - self.probability(values)) * values[self._signals]
        self._energy += gradient**2
        self._weights += _RATE * gradient / np.sqrt(self._energy)


def signals(logits: npt.NDArray[np.float32], last: bool) -> tuple[float, npt.NDArray[np.float64]]:
    """The best guess's probability; and 1, log odds, entropy, distance to the second, the last verdict."""
    law = np.exp(logits - logits.max(), dtype=np.float64)
    law /= law.sum()
    second, first = np.partition(law, -2)[-2:]
    odds = np.log((first + _LEAST) / (1.0 - first + _LEAST))
    entropy = float(-(law * np.log(law + 1e-30)).sum())
    return float(first), np.array([1.0, odds, entropy, np.log((first + _LEAST) / (second + _LEAST)), last])


def main() -> None:
    """Read, foresee, and print a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=100)
    args = parser.parse_args()
    drafter = Bundle(args.drafter)
    session = CpuSession(drafter, CpuOptions(exact_rows=False), row_exact=False)
    bins, heads = Calibration(), {name: Head(used) for name, used in _SIGNALS.items()}
    losses: dict[str, list[float]] = {name: [] for name in ("the probability itself", "bins", *heads)}
    texts = [*examples(Bundle(args.target), drafter, args.prompts, args.answers)][: args.texts]
    for text in texts:
        session.prefill(text.tokens[: text.start - 1])
        rows, last = session.forward(text.tokens[text.start - 1 : -1]), False
        for logits, (_, token) in zip(rows, pairwise(text.tokens[text.start - 1 :]), strict=True):
            column = int(logits.argmax())
            said = column if drafter.head_tokens is None else int(drafter.head_tokens[column])
            (confidence, values), right = signals(logits, last), said == token
            guess, last = Guess(said, confidence, open=False), right
            foreseen = {"the probability itself": confidence, "bins": bins.probability(guess)}
            foreseen |= {name: head.probability(values) for name, head in heads.items()}
            for name, likely in foreseen.items():
                losses[name].append(-np.log(max(likely if right else 1.0 - likely, _LEAST)))
            bins.observe(guess, right)
            for head in heads.values():
                head.learn(values, right)
    print(f"{len(losses['bins']):,} guesses in {len(texts)} answers; log loss")
    for name, each in losses.items():
        print(f"{name:24s} {np.mean(each):.4f}")


if __name__ == "__main__":
    main()
