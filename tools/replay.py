"""What would speculation gain where passes take these times? Recorded answers, real drafter, made-up clock.

Usage: ``python -m tools.replay TARGET --answers ANSWERS.jsonl --prompts PROMPTS.jsonl --drafter DIR
--target-ms 1:38,2:48,4:72,8:120 --drafter-ms 1:6.5,2:7,32:38``

Benchmarks on a shared machine differ more from run to run than policies do from each other. Here the
engine runs as it is, with sessions and a clock of its own: the target's passes return the recorded answer
instead of computing it; the clock shows the sum of the given pass times; and what the drafter says after a
text is kept in a file, so that another policy is replayed in seconds. ANSWERS comes from
``python -m tools.record_answers``. ``--drafter`` may be repeated; without one, n-grams draft. ``--behind
TOKENS``: prompts stand behind so many tokens of context, or behind several numbers in turn (``0,8000``).
Along it passes get longer by ``--attention-us A,B``: A for a token of context, B for a token and row.
``edgespec cost --json`` has both. With ``--blind`` prices know nothing of that. ``--experts
US,USED,MEASURED,TEXT`` makes the target a mixture of experts: a row uses USED, each different one takes US
microseconds. The pass times are of rows that overlap by MEASURED; those of the text overlap by TEXT, at
random.
"""

import argparse
import hashlib
import json
import shelve
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgespec.answering.results import Generation, GenerationStats
from edgespec.asking.request import RequestOptions, encode_chat
from edgespec.engine import LoadOptions, Model
from edgespec.loading.opening import Loaded, TimedModel
from edgespec.measuring.prompts import Prompt, ask, load_prompts
from edgespec.running.runner import Runner
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_runtimes.cost import CostCurve, ExpertCosts
from edgespec_runtimes.cpu import CpuOptions, open_graph
from edgespec_runtimes.discovery import place
from edgespec_runtimes.graph_io import NativeModel
from edgespec_runtimes.kv_cache import Stretch
from edgespec_runtimes.predictions import Logits, Predictions
from edgespec_runtimes.session import Rows, Session
from edgespec_runtimes.states import ANYWHERE
from tools.arguments import arguments

Answer = tuple[list[int], RequestOptions]
Memo = MutableMapping[str, tuple[Any, Any]]
"""What drafters said: a digest of bundle and text -> the most probable rows and their logarithms."""
_TOP = 8
_SURE = 30.0  # logit of a recorded token


class Clock:
    """Seconds that passes were said to take."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class Recorded:
    """A target that writes what it wrote before: one sequence, no weights."""

    row_exact, compiled, takes_several, prompt_key, places = True, "", False, "", ANYWHERE
    experts_read, prepared_s = 0, 0.0

    def __init__(
        self, vocab_size: int, curve: CostCurve, clock: Clock, behind: Sequence[int], overlap: float
    ) -> None:
        self._overlap, self._router = overlap, np.random.default_rng(0)
        self.vocab_size, self._curve, self._clock, self._contexts = vocab_size, curve, clock, cycle(behind)
        self._behind = self._fresh = 0
        self._tokens: list[int] = []
        self._text: Sequence[int] = ()
        self.capacity = self.longest = self.piece = 1 << 30
        self.model: object = self
        self.stretch = Stretch()

    @property
    def plain_s(self) -> float:
        """Seconds of a pass of plain decoding, behind the request's context."""
        return self._curve.seconds(1, self._behind)

    @property
    def length(self) -> int:
        """Tokens the KV cache would hold."""
        return len(self._tokens)

    def expect(self, text: Sequence[int]) -> None:
        """The prompt and the answer of the request to come, which stands behind the next context."""
        self._text, self._behind = text, next(self._contexts)

    @property
    def attended(self) -> float:
        """Tokens that its layers attend to."""
        return self._behind + len(self._tokens)

    def reserve(self, capacity: int) -> None:
        """There is room."""

    def prepare(self, end: int) -> None:
        """There is room."""

    def close(self) -> None:
        """There is nothing to free."""

    def shared_prefix(self, tokens: Sequence[int]) -> int:
        """Every request begins anew: prefill is not what a replay is about."""
        return 0

    def prefill(self, tokens: Sequence[int]) -> None:
        """Takes no time here."""
        self._tokens = list(tokens)

    def keep(self, rows: int) -> None:
        """Forget the last rows of a pass."""
        del self._tokens[len(self._tokens) - self._fresh + rows :]
        self._fresh = rows

    def rewind(self, length: int) -> int:
        """Forget tokens."""
        del self._tokens[length:]
        return length

    def predict_together(self, rows: Sequence[Rows]) -> list[Predictions]:
        """A round's pass; what belongs to the reading of a prompt takes no time."""
        ((_, tokens, wanted),) = ((row_set.session, row_set.tokens, row_set.wanted) for row_set in rows)
        self._fresh = len(tokens)
        if wanted == 1 and len(tokens) > 1:
            self.prefill([*self._tokens, *tokens[:-1]])
            tokens = tokens[-1:]
        return [self.predict(tokens)]

    def predict(self, tokens: Sequence[int]) -> Predictions:
        """The recorded token behind every token that is as recorded; anything behind others."""
        logits = np.zeros((len(tokens), self.vocab_size), np.float32)
        for row, token in enumerate(tokens):
            self._tokens.append(token)
            at = len(self._tokens)
            if at < len(self._text):
                logits[row, self._text[at]] = _SURE
        self._clock.spend(self._curve.seconds(len(tokens), self.attended) + self._routed_s(len(tokens)))
        return Predictions(logits)

    def _routed_s(self, rows: int) -> float:
        """Draw the experts of a pass; by how much longer they take than those that the curve has."""
        costs = self._curve.experts
        if costs is None:
            return 0.0
        new = (self._router.binomial(costs.used, (1.0 - self._overlap) ** row) for row in range(rows))
        self.experts_read = int(sum(new))
        return costs.read_s * (self.experts_read - costs.expected(rows))


class Priced(NativeModel):
    """A drafter whose passes take the given time, and compute only what the memo lacks.

    A session of its own computes; those of the engine hold tokens alone.
    """

    def __init__(self, bundle: Bundle, options: CpuOptions, pricing: "tuple[CostCurve, Clock, Memo]") -> None:
        native = bundle.manifest.operators == "edgespec"
        super().__init__(
            open_graph(bundle.graph, options, native=native), bundle, chunk=options.prefill_chunk
        )
        self._priced: tuple[CostCurve, Clock, Memo] | None = pricing
        self._key = bundle.manifest.files["model.onnx.data"].sha256.encode()
        self._computing: Session | None = None
        self._offered: tuple[int, ...] = ()

    def offer(self, tokens: Sequence[int]) -> None:
        """Remember what is offered: the distribution depends on it."""
        self._offered = tuple(tokens)
        super().offer(tokens)

    def predict_together(self, rows: Sequence[Rows]) -> list[Predictions]:
        """See :class:`edgespec_runtimes.session.LoadedModel`."""
        if self._priced is None:
            return super().predict_together(rows)
        session, tokens, wanted = rows[0].session, rows[0].tokens, rows[0].wanted
        curve, clock, _ = self._priced
        clock.spend(curve.seconds(len(tokens)))
        sequence = [*session.stretch.tokens, *tokens]
        ends = range(len(sequence) - max(wanted, 1) + 1, len(sequence) + 1)
        predictions = [self._distribution(*self._known(sequence[:end])) for end in ends]
        session.stretch.tokens, session.stretch.fresh = sequence, len(tokens)
        return [Predictions(np.concatenate(predictions))]

    def _known(self, sequence: list[int]) -> tuple[Any, Any]:
        assert self._priced is not None
        memo = self._priced[2]
        text = np.array([*self._offered, -1, *sequence], np.int64).tobytes()
        key = hashlib.blake2b(self._key + text, digest_size=16).hexdigest()
        if key not in memo:
            memo[key] = self._compute(sequence)
        return memo[key]

    def _compute(self, sequence: list[int]) -> tuple[Any, Any]:
        if self._computing is None:
            self._computing = Session(self)
        priced, self._priced = self._priced, None
        logits = self._computing.predict_next(sequence).logits[0].astype(np.float64)
        self._priced = priced
        logits -= logits.max() + np.log(np.exp(logits - logits.max()).sum())
        top = np.argpartition(logits, -_TOP)[-_TOP:]
        return top.astype(np.int32), logits[top].astype(np.float32)

    def _distribution(self, rows: Any, logs: Any) -> Logits:
        """A distribution with these most probable rows; the others share the rest."""
        head = self.head_tokens
        width = self.vocab_size if head is None else len(head)
        rest = max(1.0 - float(np.exp(logs.astype(np.float64)).sum()), 1e-12)
        logits = np.full((1, width), np.log(rest / max(width - len(rows), 1)), np.float32)
        logits[0, rows] = logs
        return logits


def curve_of(text: str, attention_us: str = "0,0", experts: str = "") -> CostCurve:
    """``1:38,2:48`` -> T(n); attention's microseconds for a token of context, and for one and a row.

    ``experts`` is as of the command line.
    """
    points = {int(n): float(ms) / 1e3 for n, ms in (item.split(":") for item in text.split(","))}
    context_s, row_context_s = (float(us) / 1e6 for us in attention_us.split(","))
    costs = None
    if experts:
        read_us, used, overlap, _ = map(float, experts.split(","))
        costs = ExpertCosts(read_us / 1e6, int(used), overlap)
    return CostCurve(points, True, context_s, row_context_s, costs)


@contextmanager
def replayed(
    target: Bundle, drafter: Bundle | None, args: argparse.Namespace
) -> Iterator[tuple[Model, Recorded]]:
    """A model whose clocks and target are made up."""
    clock, curve = Clock(), curve_of(args.target_ms, args.attention_us, args.experts)
    behind, overlap = [int(n) for n in args.behind.split(",")], float(args.experts.rpartition(",")[2] or 1.0)
    session = Recorded(target.config.vocab_size, curve, clock, behind, overlap)
    known = curve_of(args.target_ms) if args.blind else curve
    loaded = Loaded(TimedModel(target, cast(Any, session), known, place(target)))
    # What these sessions say does not lie in KV caches: there is nothing to put aside.
    options = LoadOptions(max_draft=args.max_draft, cache_bytes=0, prompt_cache_bytes=0)
    with shelve.open(str(args.memo)) as memo:
        if drafter is not None:
            curve = curve_of(args.drafter_ms)
            small = Priced(drafter, CpuOptions(exact_rows=False), (curve, clock, memo)).opened(True)
            same = drafter.tokenizer.matches(target.tokenizer)
            loaded = Loaded(loaded.target, TimedModel(drafter, small, curve, place(drafter)), same)
        with Model(Runner(loaded, options, clock=clock)) as model:
            yield model, session


def answers(path: Path) -> dict[str, Answer]:
    """Recorded tokens by prompt id, and what was asked for besides."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {record.pop("id"): (record.pop("tokens"), record) for record in records}


def replay(
    model: Model, recorded: Recorded, prompts: Sequence[Prompt], written: Mapping[str, Answer]
) -> Iterator[tuple[Prompt, Generation, float]]:
    """Answer every recorded prompt; prompt, answer, and its speedup over plain decoding."""
    longest = max(len(tokens) for tokens, _ in written.values())
    for prompt in prompts:
        tokens, options = written.get(prompt.id, ([], {}))
        if len(tokens) < 2:
            continue
        text = [{"role": "user", "content": prompt.turns[0]}]
        recorded.expect([*encode_chat(model.target, text), *tokens])
        answer = ask(model, prompt, {"max_new_tokens": longest, **options}).run()
        if list(answer.tokens) != tokens:
            raise AssertionError(f"{prompt.id}: another answer than recorded")
        plain_s = answer.stats.decode_tokens * recorded.plain_s
        yield prompt, answer, plain_s / answer.stats.decode_s


def main() -> None:
    """Replay and print a table."""
    args = arguments(
        __doc__,
        "target",
        answers=Path,
        prompts=Path,
        drafter=[Path],
        target_ms="1:38,2:48,3:60,4:72,5:82,6:93,8:120",
        drafter_ms="1:6.5,2:7,32:38",
        max_draft=8,
        behind="0",
        attention_us="0,0",
        experts="",
        blind=False,
        memo=Path("replay.memo"),
    )
    prompts, written = load_prompts(args.prompts), answers(args.answers)
    for path in args.drafter or [None]:
        target = open_bundle(Path(args.target))  # its templates end with the model
        drafter = None if path is None else open_bundle(path)
        with replayed(target, drafter, args) as (model, recorded):
            print(path.name if path else "ngram")
            show(list(replay(model, recorded, prompts, written)))


def show(results: Sequence[tuple[Prompt, Generation, float]]) -> None:
    """A line a category, then all."""
    print("category          speedup  tokens a pass   model: drafted, accepted   n-grams: drafted, accepted")
    for name in [*{prompt.category: None for prompt, _, _ in results}, "all"]:
        picked = [
            (answer.stats, ratio) for prompt, answer, ratio in results if name in (prompt.category, "all")
        ]
        chosen = [stats for stats, _ in picked]
        tokens, seconds = sum(s.decode_tokens for s in chosen), sum(s.decode_s for s in chosen)
        ratio = sum(stats.decode_s * gain for stats, gain in picked) / seconds
        tau = tokens / sum(s.rounds - 1 for s in chosen)
        counts = [counted(chosen, source) for source in ("model", "ngram")]
        (drafted, accepted), (copied, right) = counts
        print(f"{name:16s} {ratio:8.3f} {tau:14.2f} {drafted:16d} {accepted:9d} {copied:18d} {right:9d}")
    ratios = sorted(ratio for _, _, ratio in results)
    quarter, slower = ratios[len(ratios) // 4], sum(ratio < 1 for ratio in ratios)
    print(f"worst {ratios[0]:.2f}, lower quarter {quarter:.2f}, slower than plain: {slower} of {len(ratios)}")


def counted(stats: Sequence[GenerationStats], source: str) -> tuple[int, int]:
    """Tokens that ``source`` drafted, and accepted ones."""
    counts = [s.by_source[source] for s in stats if source in s.by_source]
    return sum(count.drafted for count in counts), sum(count.accepted for count in counts)


if __name__ == "__main__":
    main()
