"""Which way of training teaches a drafter most? Recorded answers, read one after the other.

Usage: ``python -m tools.training_trials TARGET --drafter DRAFTER --prompts P.jsonl --answers A.jsonl
[--texts 75] [--way rejected ...]``, with answers as ``tools.record_answers`` writes them.

Each text is read with what the texts before it taught, then learned from. Prints the share of first guesses
that were right, text by text given (not drafted), by stretches of 25 texts.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.encoding import encode_chat
from edgespec.learning.decoder import NumpyDecoder
from edgespec.learning.layer_math import F32
from edgespec.learning.tuning import Example, Tuning
from edgespec.prompts import load_prompts
from edgespec_models.bundle import Bundle

_STRETCH = 25
_PROMPT = 256


class Rejected(NumpyDecoder):
    """Learns where it guessed wrong only, as Online Speculative Decoding does (arXiv 2310.07177)."""

    def _head(
        self, x: F32, first: int, labels: npt.NDArray[np.int64], gains: F32, by_gains: F32
    ) -> tuple[float, npt.NDArray[np.bool_], F32]:
        loss, right, _ = super()._head(x, first, labels, gains, by_gains.copy())
        wrong = labels.copy()
        wrong[np.flatnonzero(labels >= 0)[right]] = -1
        return loss, right, super()._head(x, first, wrong, gains, by_gains)[2]


class Untrained(Tuning):
    """Learns nothing."""

    def _step(self, gradient: F32) -> None:
        pass


class Last(Tuning):
    """Trains the last quarter of the gains."""

    def _step(self, gradient: F32) -> None:
        gradient[: len(gradient) * 3 // 4] = 0.0
        super()._step(gradient)


class Fast(Tuning):
    """Goes three times as far each step."""

    def _step(self, gradient: F32) -> None:
        before = self._state[0].copy()
        super()._step(gradient)
        self._state[0] += 2.0 * (self._state[0] - before)


WAYS: dict[str, Callable[[Bundle], Tuning]] = {
    "untrained": lambda bundle: Untrained(NumpyDecoder(bundle)),
    "all": lambda bundle: Tuning(NumpyDecoder(bundle)),
    "last": lambda bundle: Last(NumpyDecoder(bundle)),
    "fast": lambda bundle: Fast(NumpyDecoder(bundle)),
    "rejected": lambda bundle: Tuning(Rejected(bundle)),
}


def examples(target: Bundle, drafter: Bundle, prompts: Path, answers: Path) -> Iterator[Example]:
    """The texts in the drafter's tokens."""
    written = {r["id"]: r["tokens"] for r in map(json.loads, answers.read_text("utf-8").splitlines())}
    ends = target.manifest.special_tokens.eos
    for prompt in load_prompts(prompts):
        if prompt.id in written:
            before = encode_chat(drafter, [{"role": "user", "content": prompt.turns[0]}])[-_PROMPT:]
            data = target.tokenizer.bytes_of([t for t in written[prompt.id] if t not in ends])
            yield Example((*before, *drafter.tokenizer.encode_bytes(data)), len(before))


def main() -> None:
    """Read, learn and print a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=75)
    parser.add_argument("--way", action="append", default=[], choices=WAYS, help="repeatable; all by default")
    args = parser.parse_args()
    drafter = Bundle(args.drafter)
    texts = [*examples(Bundle(args.target), drafter, args.prompts, args.answers)][: args.texts]
    for way in args.way or WAYS:
        tuning = WAYS[way](drafter)
        print(f"{way:10s}", end="", flush=True)
        for start in range(0, len(texts), _STRETCH):
            right = [tuning.learn(text).right for text in texts[start : start + _STRETCH]]
            print(f" {np.concatenate(right).mean():.3f}", end="", flush=True)
        print(f"  put back {tuning.undone} times")


if __name__ == "__main__":
    main()
