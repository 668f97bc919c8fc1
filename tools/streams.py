"""Does it get faster the longer one works with it? A stream of requests, replayed with and without learning.

Usage: ``python -m tools.streams TARGET --answers ANSWERS.jsonl --prompts STREAM.jsonl --drafter DIR
--target-ms 1:38,2:48,4:72,8:120 --drafter-ms 1:6.5,2:7,32:38 --picture streams.svg``

Replays as ``tools/replay.py`` does, in the order of STREAM, once for each way of learning, with a history
that is empty at first. Prints tokens per pass, acceptance and speedup by stretch of the stream, and draws
them. The ways: a drafted token for the target's token of the same bytes and nothing more ("direct mapping");
runs of drafted tokens merged as well, as ever ("nothing learned"); besides, the history's n-grams, or
distillation, or "all". A text is learned from when its answer ends, as if the user then paused.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from pathlib import Path
from unittest import mock

from edgespec.drafting.bridge import ByteBridge
from edgespec.drafting.guard import Guard
from edgespec.engine import Model
from edgespec.history.corrections import DrafterKey
from edgespec.history.manage import History
from edgespec.learning import Example, Trainer
from edgespec.prompts import load_prompts
from edgespec_models.foreign import open_bundle
from tools.replay import answers, replay, replayed

_WAYS = ("direct mapping", "nothing learned", "n-grams", "distillation", "all")
_WINDOW = 25
_COLOURS = ("#c9a227", "#777777", "#1b7f4d", "#2f6fb5", "#b03060")
_WIDTH, _HEIGHT, _EDGE = 720, 190, 44


@dataclass(frozen=True, slots=True)
class Request:
    """How one request fared."""

    category: str
    tokens: int
    passes: int
    drafted: int
    accepted: int
    seconds: float
    plain_s: float


Measure = Callable[[Sequence[Request]], float]
MEASURES: dict[str, Measure] = {
    "tokens per pass": lambda some: sum(r.tokens for r in some) / max(sum(r.passes for r in some), 1),
    "acceptance rate": lambda some: sum(r.accepted for r in some) / max(sum(r.drafted for r in some), 1),
    "speedup": lambda some: sum(r.plain_s for r in some) / sum(r.seconds for r in some),
}


class AtOnce(Trainer):
    """Learns from a text when it is offered, as if the user then took all the time that this takes."""

    def offer(self, example: Example) -> None:
        """Learn."""
        tuning = self._started()
        if tuning is None:
            raise AssertionError(self.problem)
        self._learn(tuning, example)


class Silent(Guard):
    """Lets nothing be proposed."""

    allows = property(lambda self: False)


@contextmanager
def learning(model: Model, *, ngrams: bool, training: bool) -> Iterator[None]:
    """With a new history."""
    side = model._side
    if not ngrams:
        model._runner.history_guard = Silent(model._runner.pricing)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.history"
        model.use_history(path)
        history = model._runner.history
        if training and side is not None and side.trainable and history is not None:
            trainer = AtOnce(partial(side.tuning, None), share=1.0)
            history._trainers[DrafterKey(side.bundle.digest, side.bundle.manifest.name)] = trainer
            side.teach(trainer)
        try:
            yield
        finally:
            model.close()
        tokens = sum(History(path).namespaces().values())
        print(f"The history keeps {tokens:,} tokens in {path.stat().st_size / 1024:,.0f} KiB on disk.")


def directly(bridge: ByteBridge, drafted: Sequence[int]) -> list[tuple[int, int]]:
    """Every drafted token as the target's token of the same bytes, up to the first that has none."""
    pairs = []
    for count, token in enumerate(drafted, start=1):
        data = bridge._drafter.tokenizer.token_bytes(token)
        same = bridge._target.tokenizer.id_of_bytes(data)
        if same is None:
            break
        pairs.append((same, count))
    return pairs


def ways(model: Model) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """Ways to learn, by name."""
    return {
        _WAYS[0]: lambda: mock.patch.object(ByteBridge, "translate", directly),
        _WAYS[1]: nullcontext,
        _WAYS[2]: lambda: learning(model, ngrams=True, training=False),
        _WAYS[3]: lambda: learning(model, ngrams=False, training=True),
        _WAYS[4]: lambda: learning(model, ngrams=True, training=True),
    }


def run(args: argparse.Namespace, name: str) -> list[Request]:
    """The whole stream, one way."""
    prompts, written = load_prompts(args.prompts), answers(args.answers)
    target, drafter = open_bundle(args.target), None if args.drafter is None else open_bundle(args.drafter)
    requests = []
    with replayed(target, drafter, args) as (model, recorded), ways(model)[name]():
        for prompt, answer, ratio in replay(model, recorded, prompts, written):
            stats = answer.stats
            passes, plain_s = stats.rounds - 1, ratio * stats.decode_s
            counts = (stats.decode_tokens, passes, stats.drafted, stats.accepted)
            requests.append(Request(prompt.category, *counts, stats.decode_s, plain_s))
    return requests


def known(path: Path | None) -> dict[str, list[Request]]:
    """What earlier runs found."""
    if path is None or not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return {name: [Request(**each) for each in stream] for name, stream in value.items()}


def keep(path: Path | None, streams: dict[str, list[Request]]) -> None:
    """For later runs."""
    if path is not None:
        value = {name: [asdict(each) for each in stream] for name, stream in streams.items()}
        path.write_text(json.dumps(value), encoding="utf-8")


def stretches(stream: Sequence[Request], length: int) -> list[tuple[int, int]]:
    """Where the stream is cut for the table: at changes of category, and every ``length`` requests."""
    cuts = [0]
    for index in range(1, len(stream)):
        changed = stream[index].category != stream[index - 1].category
        if changed or index - cuts[-1] == length:
            cuts.append(index)
    return list(zip(cuts, [*cuts[1:], len(stream)], strict=True))


def show(streams: dict[str, list[Request]], length: int) -> None:
    """A table for each measure: a line for each stretch, a column for each way."""
    first = next(iter(streams.values()))
    for title, measure in MEASURES.items():
        print(f"{title:30s}" + "".join(f"{name:>17s}" for name in streams))
        for start, end in [*stretches(first, length), (0, len(first))]:
            category = first[start].category if end - start < len(first) else "all"
            values = "".join(f"{measure(stream[start:end]):17.3f}" for stream in streams.values())
            print(f"{f'{category} {start + 1} to {end}':30s}{values}")


def picture(streams: dict[str, list[Request]]) -> str:
    """Means over 25 requests, as SVG: a plot for each measure; a change of category is a dotted line."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT * len(MEASURES) + 30}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for index, name in enumerate(streams):
        at = _EDGE + 130 * index
        parts.append(f'<text x="{at}" y="16" fill="{_COLOURS[index]}">\u25a0 {escape(name)}</text>')
    for index, (title, measure) in enumerate(MEASURES.items()):
        parts += _plot(streams, title, measure, 30 + _HEIGHT * index)
    return "\n".join([*parts, "</svg>", ""])


def _plot(streams: dict[str, list[Request]], title: str, measure: Measure, top: int) -> list[str]:
    curves = {
        name: [measure(stream[max(0, i + 1 - _WINDOW) : i + 1]) for i in range(_WINDOW - 1, len(stream))]
        for name, stream in streams.items()
    }
    values = [value for curve in curves.values() for value in curve] or [0.0, 1.0]
    low, high = min(values), max(values)
    first = next(iter(streams.values()))
    bottom, inner = top + _HEIGHT - 30, _HEIGHT - 50

    def x(request: int) -> float:
        return _EDGE + (_WIDTH - 2 * _EDGE) * request / max(len(first) - 1, 1)

    def y(value: float) -> float:
        return bottom - inner * (value - low) / max(high - low, 1e-9)

    parts = [f'<text x="{_EDGE}" y="{top + 12}">{title}, mean of {_WINDOW} requests</text>']
    for value in (low, (low + high) / 2, high):
        parts.append(f'<text x="{_EDGE - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        parts.append(f'<path d="M{_EDGE} {y(value):.1f}H{_WIDTH - _EDGE}" stroke="#dddddd"/>')
    for number in range(0, len(first) + 1, 50):
        parts.append(f'<text x="{x(number):.1f}" y="{bottom + 15}" text-anchor="middle">{number}</text>')
    for index in range(1, len(first)):
        if first[index].category != first[index - 1].category:
            parts.append(
                f'<path d="M{x(index):.1f} {top + 20}V{bottom}" stroke="#888" stroke-dasharray="2 3"/>'
            )
    for colour, curve in zip(_COLOURS, curves.values(), strict=False):
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(curve, _WINDOW - 1))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts


def main() -> None:
    """Replay, print tables, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="in the order of the stream")
    parser.add_argument("--drafter", type=Path, help="without one: n-grams")
    parser.add_argument("--target-ms", default="1:38,2:48,3:60,4:72,5:82,6:93,8:120")
    parser.add_argument("--drafter-ms", default="1:6.5,2:7,32:38")
    parser.add_argument("--max-draft", type=int, default=8)
    parser.add_argument("--stretch", type=int, default=50, help="requests of a line of the tables")
    parser.add_argument(
        "--way", action="append", default=[], choices=_WAYS, help="repeatable; all by default"
    )
    parser.add_argument(
        "--results", type=Path, help="a JSON file; ways that it has are not replayed, others are added"
    )
    parser.add_argument("--picture", type=Path, help="an SVG file")
    parser.add_argument("--memo", type=Path, default=Path("replay.memo"))
    parser.set_defaults(useless=False, noise=0.0, ahead=False)
    args = parser.parse_args()
    streams = known(args.results)
    for name in args.way or _WAYS:
        if name not in streams:
            streams[name] = run(args, name)
            keep(args.results, streams)
    streams = {name: streams[name] for name in _WAYS if name in streams}
    show(streams, args.stretch)
    if args.picture is not None:
        args.picture.write_text(picture(streams), encoding="utf-8")


if __name__ == "__main__":
    main()
