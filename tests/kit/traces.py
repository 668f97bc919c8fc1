"""Passes of models in four settings, whose rows, drafts and order no change of the inside may move.

``python -m tests.kit.traces`` writes the passes anew, for a change that is meant to move them.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from edgespec import Choice, LoadOptions, Model, Regex
from edgespec.running.stream import Stream
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows, Session
from tests.kit.drafters import mixed, tokenizer
from tests.kit.models import VOCAB, toy_bundle, toy_model, toy_tokenizer
from tests.kit.several import LAW, LONG, OTHER, Driven
from tests.kit.toy import F32, NextLogits, ToyModel, settle
from tools.replay import Clock

STORED: Final = Path(__file__).parent.parent / "golden" / "traces.json"
Ask = tuple[int, str, dict[str, Any]]
"""Passes to wait for before a request, its prompt, and its options."""


class _Traced(ToyModel):
    """A toy that writes down whose rows each pass reads."""

    def __init__(self, law: NextLogits, trace: "_Trace", name: str, **options: Any) -> None:
        super().__init__(law, options.pop("vocab_size", VOCAB), **options)
        self._trace, self._name, self._numbers = trace, name, dict[Session, int]()

    def predict_together(self, rows: Sequence[Rows]) -> list[Predictions]:
        entries = list[str]()
        for part in rows:
            number = self._numbers.setdefault(part.session, len(self._numbers))
            entries.append(f"{number}:{len(part.tokens)}/{part.wanted}")
            self._trace.digest.update(repr((number, part.session.length, [*part.tokens])).encode())
        self._trace.lines.append(f"{self._name} {' '.join(entries)}")
        predictions = super().predict_together(rows)
        self._trace.clock.spend(self._trace.seconds[self._name] + 0.01 * self.passes[-1])
        return predictions


class _Trace:
    """The passes of a setting, and a clock that they move."""

    def __init__(self) -> None:
        self.lines, self.digest, self.clock = list[str](), hashlib.sha256(), Clock()
        self.seconds = {"target": 1.0, "drafter": 0.1}

    def run(self, model: Model, asks: Sequence[Ask]) -> list[str]:
        """Answer ``asks``; return a line for each pass and each answer, and a digest of all tokens read."""
        driven, streams = Driven(model), list[Stream]()
        for turns, prompt, options in asks:
            for _ in range(turns):
                driven.turn()
            streams.append(driven.queue(model.stream(prompt, **options)))
        driven.run()
        for stream in streams:
            stats = stream.result.stats
            sources = {name: (count.drafted, count.accepted) for name, count in stats.by_source.items()}
            self.lines.append(f"{stream.result.text!r} {stats.decode_s:.3f} {stats.drafter_s:.3f} {sources}")
        driven.close()
        return [*self.lines, self.digest.hexdigest()]


GRAMMAR: Final = {"response_format": Regex("(AB|CD){3,9}E")}
ONE_BY_ONE: Final[list[Ask]] = [
    (0, "the quick brown fox", {"max_new_tokens": 60}),
    (90, LONG, {"max_new_tokens": 24, "temperature": 0.9, "seed": 3}),
    (90, "x", {"max_new_tokens": 40, "response_format": Choice(["AN ANSWER", "AN OTHER ONE", "NO"])}),
    (90, LONG + "and a question", {"max_new_tokens": 60, **GRAMMAR}),
    (90, LONG * 4, {"max_new_tokens": 60}),
    (90, "the quick brown fox", {"max_new_tokens": 80, "repetition_penalty": 1.1}),
]
AT_ONCE: Final[list[Ask]] = [
    (0, "the quick brown fox", {"max_new_tokens": 60}),
    (0, LONG * 3, {"max_new_tokens": 40, "temperature": 0.9, "seed": 3}),
    (4, "the quick brown dog", {"max_new_tokens": 50, **GRAMMAR}),
    (0, LONG, {"max_new_tokens": 9, "logprobs": True}),
    (3, "x", {"max_new_tokens": 60, "speculate": False}),
    (0, LONG * 3 + "and more", {"max_new_tokens": 60}),
    (20, LONG + "y", {"max_new_tokens": 60, "prompt_logprobs": True}),
    (9, "z", {"max_new_tokens": 80}),
]


def _copies(folder: Path, trace: _Trace) -> list[str]:
    """N-grams, a history and a prediction."""
    target = _Traced(LAW, trace, "target", chunk=16)
    model = toy_model(target.session(), clock=trace.clock)
    model.use_history(folder / "copies.history")
    first = model.generate("the quick brown fox", max_new_tokens=60, speculate=False).text
    settle()
    predicted = first[:20] + "ANOTHER END" + first[25:]
    asks = [*ONE_BY_ONE, (90, "the quick brown fox", {"max_new_tokens": 60, "prediction": predicted})]
    return trace.run(model, [*asks, *ONE_BY_ONE[:2]])


def _of_a_model(
    folder: Path,
    trace: _Trace,
    *,
    parallel: int = 1,
    asks: Sequence[Ask] = ONE_BY_ONE,
    has_history: bool = False,
) -> list[str]:
    """A drafter of the same vocabulary, which is right in eight of ten places."""
    several = parallel > 1
    target = _Traced(LAW, trace, "target", chunk=16, several=several)
    drafter = _Traced(mixed(LAW, OTHER, 0.8), trace, "drafter", several=several)
    options = LoadOptions(parallel=parallel)
    model = toy_model(target.session(), drafter.session(), options=options, clock=trace.clock)
    if has_history:
        model.use_history(folder / "model.history")
    return trace.run(model, [*asks, *asks[:2]])


def _of_other_vocabulary(folder: Path, trace: _Trace) -> list[str]:
    """A drafter with tokens of its own."""
    other, own = tokenizer("small byte"), toy_tokenizer()

    def law(tokens: Sequence[int]) -> F32:
        """The target's law, as far as its tokens are known."""
        spelled = own.bytes_of([int(LAW(own.encode_bytes(other.bytes_of(tokens[-8:]))).argmax())])
        logits = OTHER(tokens)[: other.vocab_size].copy()
        logits[other.encode_bytes(spelled)[0]] += 900.0 + logits.max()
        return logits

    def bundle(name: str, context: int) -> Bundle:
        return toy_bundle(name, context, other if name == "small" else None)

    target = _Traced(LAW, trace, "target", chunk=16, several=True)
    drafter = _Traced(law, trace, "drafter", several=True, vocab_size=other.vocab_size)
    model = toy_model(
        target.session(),
        drafter.session(),
        options=LoadOptions(parallel=2),
        clock=trace.clock,
        bundle=bundle,
        same_vocabulary=False,
    )
    return trace.run(model, AT_ONCE)


SETTINGS: Final[dict[str, Callable[[Path, _Trace], list[str]]]] = {
    "copies": _copies,
    "a model": partial(_of_a_model, has_history=True),
    "several": partial(_of_a_model, parallel=4, asks=AT_ONCE),
    "another vocabulary": _of_other_vocabulary,
}


def traced(name: str, folder: Path) -> list[str]:
    """The passes of a setting; ``folder`` is for its history."""
    return SETTINGS[name](folder, _Trace())


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        lines = [f"{json.dumps(name)}: {json.dumps(traced(name, Path(place)))}" for name in SETTINGS]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
