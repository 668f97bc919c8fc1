"""The bench: prompts are answered plain and speculatively in turn, and the times compared.

The bench is an ordinary user of :class:`edgespec.engine.Model`. Plain decoding is the same loop of the
same model without drafts. The two take turns prompt by prompt, and which goes first alternates, so a
disturbance of the machine meets both. :func:`summarize` turns pairs of answers into figures.

Terms:

* decode time: of the rounds behind the first, which is never drafted and commits one token both ways. The
  drafter's reading of the prompt lies in it.
* speedup of a set of prompts: plain decode seconds per token over speculative decode seconds per token,
  both summed over the set. With equal token counts, as in greedy decoding, this is the ratio of the
  total times. Below 1, speculation is slower.
* request speedup: the same ratio over whole requests, prefill included.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from edgespec.answering.results import Generation, GenerationStats
from edgespec.loading.measurements import describe_machine
from edgespec.measuring.prompts import Prompt, ask
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.schema import Checked, within
from edgespec_runtimes.memory import peak_memory_bytes

if TYPE_CHECKING:
    from edgespec.asking.request import RequestOptions
    from edgespec.engine import Model
    from edgespec_models.bundles.bundle import Bundle


FORMAT: Final = 1
_WARM_UP = Prompt("warm-up", "warm-up", ("Count from one to ten, then count from one to ten again.",))
_WARM_UP_TOKENS = 24
_AGREE = 1.2
_MODEL_SOURCE: Final = "model"  # name of the model drafter in ``by_source``


@dataclass(frozen=True, slots=True)
class BenchOptions(Checked):
    """How prompts are answered.

    Attributes:
        max_new_tokens: of each answer, 2 or more: one token is no decoding.
        temperature: 0 is greedy.
        seed: of both runs of a prompt; with equal seeds sampled answers can be compared too.
        stop_at_eos: False makes every answer ``max_new_tokens`` long.
    """

    max_new_tokens: Annotated[int, within(2, 2**31 - 1)] = 128
    temperature: Annotated[float, within(0, 100)] = 0.0
    seed: Annotated[int, within(0, 2**64 - 1)] = 0
    stop_at_eos: bool = True


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, answered both ways."""

    prompt: Prompt
    plain: Generation
    speculative: Generation

    @property
    def identical(self) -> bool:
        """Whether both answers have the same tokens."""
        return self.plain.tokens == self.speculative.tokens


def measure(
    model: "Model",
    prompts: Sequence[Prompt],
    options: BenchOptions,
    *,
    turns: int = 1,
    progress: ProgressCallback = ignore_progress,
) -> Iterator[Pair]:
    """Answer every prompt both ways, after a warm-up; a pair is yielded when it is complete.

    With two ``turns`` or more all prompts are asked a second time behind the last, and in further turns those
    of which two answers differ by more than a fifth in their time per token. :func:`typical` chooses.
    """
    _pair(model, _WARM_UP, replace(options, max_new_tokens=_WARM_UP_TOKENS), plain_first=True)
    pairs: list[list[Pair]] = [[] for _ in prompts]
    for turn in range(turns):
        stage = "Measuring again" if turn else "Measuring"
        places = [place for place, measured in enumerate(pairs) if turn < 2 or _differ(measured)]
        progress(Progress(stage, 0, len(places), "prompts"))
        for done, place in enumerate(places, start=1):
            pair = _pair(model, prompts[place], options, plain_first=(place + turn) % 2 == 0)
            pairs[place].append(pair)
            yield pair
            progress(Progress(stage, done, len(places), "prompts"))


def typical(pairs: Iterable[Pair]) -> list[Pair]:
    """A pair for each prompt, of answers with the median time per token; of two the quicker counts.

    Disturbances of the machine only add time.
    """
    by_prompt: dict[Prompt, list[Pair]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair.prompt, []).append(pair)
    return [
        Pair(prompt, *(side[(len(side) - 1) // 2] for side in _by_time(measured)))
        for prompt, measured in by_prompt.items()
    ]


def _by_time(pairs: Sequence[Pair]) -> list[list[Generation]]:
    """The plain answers and the speculative ones, the quickest first."""
    sides = zip(*((pair.plain, pair.speculative) for pair in pairs), strict=True)
    return [sorted(side, key=lambda answer: answer.stats.tpot_s) for side in sides]


def _differ(pairs: Sequence[Pair]) -> bool:
    """Whether no two answers of a side are near each other."""
    return any(
        all(slow.stats.tpot_s > _AGREE * quick.stats.tpot_s for quick, slow in pairwise(side))
        for side in _by_time(pairs)
    )


def _pair(model: "Model", prompt: Prompt, options: BenchOptions, *, plain_first: bool) -> Pair:
    answers: dict[bool, Generation] = {}
    for speculate in (False, True) if plain_first else (True, False):
        model.forget(on_disk=False)  # of two runs of one prompt, the second would have no prompt to read
        request = cast("RequestOptions", {**asdict(options), "speculate": speculate})
        answers[speculate] = ask(model, prompt, request).run()
    return Pair(prompt, answers[False], answers[True])


def summarize(
    model: "Model", pairs: Sequence[Pair], options: BenchOptions, *, complete: bool = True
) -> dict[str, Any]:
    """All figures as JSON values; docs/json.md lists the keys, which stay. Unmeasured figures are null."""
    plain = [pair.plain.stats for pair in pairs]
    speculative = [pair.speculative.stats for pair in pairs]
    sides = {"plain": plain, "speculative": speculative}
    return {
        "format": FORMAT,
        "complete": complete,
        "prompts": len(pairs),
        "identical": sum(pair.identical for pair in pairs),
        "speedup": _speedups(pairs),
        **{name: _speed(stats) for name, stats in sides.items()},
        **_drafting(speculative),
        "mbsu": _mbsu(model, speculative),
        **_latency(pairs, sides),
        **_costs(model, sides),
        "speculation_off": Counter(s.speculation_off_reason for s in speculative if s.speculation_off_reason),
        "rolled_back": Counter(reason for s in speculative for reason in s.rolled_back),
        "models": {
            "name": model.name,
            "drafter_name": model.drafter_name,
            "row_exact": model.row_exact,
            "target": _bundle(model.target),
            "drafter": None if model.drafter is None else _bundle(model.drafter),
        },
        "options": asdict(options),
        "machine": describe_machine(),
        "rows": [_row(pair) for pair in pairs],
    }


def speedup(pairs: Sequence[Pair], figure: str = "tokens_per_second") -> float | None:
    """Speedup of decoding over ``pairs`` (the module's docstring defines it); None without any."""
    plain = _speed([pair.plain.stats for pair in pairs])[figure]
    return _ratio(_speed([pair.speculative.stats for pair in pairs])[figure] or None, plain)


def mbsu(tau: float, gamma: float, c: float) -> float:
    """Memory-bound speedup, tau / (c * gamma + 1): the speedup if passes only took the time to read weights.

    Args:
        tau: committed tokens per target pass.
        gamma: tokens the model drafter proposed per target pass; n-grams cost nothing. It counts target
            tokens: where a drafter needs several steps for one, or stops behind a token that is not
            proposed, the drafter costs more than this says.
        c: the drafter's bytes (or parameters) read per step, over the target's.
    """
    return tau / (c * gamma + 1.0)


def _speed(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    decode_s = sum(s.decode_s for s in stats)
    decoded, written = sum(s.decode_tokens for s in stats), sum(s.new_tokens for s in stats)
    return {
        "tokens_per_second": _ratio(decoded, decode_s),
        "request_tokens_per_second": _ratio(written, decode_s + sum(s.ttft_s for s in stats)),
        "decode_tokens": decoded,
        "new_tokens": written,
    }


def _speedups(pairs: Sequence[Pair]) -> dict[str, Any]:
    categories: dict[str, list[Pair]] = {}
    for pair in pairs:
        categories.setdefault(pair.prompt.category, []).append(pair)
    return {
        "overall": speedup(pairs),
        "request": speedup(pairs, "request_tokens_per_second"),
        "by_category": {name: speedup(members) for name, members in categories.items()},
    }


def _drafting(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    rounds, drafted = sum(s.rounds for s in stats), sum(s.drafted for s in stats)
    counts: dict[str, list[int]] = {}
    for name, source in ((n, s) for answer in stats for n, s in answer.by_source.items()):
        before = counts.get(name, [0, 0])
        counts[name] = [before[0] + source.drafted, before[1] + source.accepted]
    positions = zip(
        _sums(s.drafted_by_position for s in stats),
        _sums(s.accepted_by_position for s in stats),
        strict=False,
    )
    return {
        "block_efficiency": _ratio(sum(s.new_tokens for s in stats), rounds),
        "acceptance_rate": _ratio(sum(s.accepted for s in stats), drafted),
        "acceptance_by_position": [
            {"position": at, "drafted": d, "accepted": a, "rate": _ratio(a, d)}
            for at, (d, a) in enumerate(positions, start=1)
        ],
        "by_source": {
            name: {"drafted": d, "accepted": a, "acceptance_rate": _ratio(a, d)}
            for name, (d, a) in sorted(counts.items())
        },
        "drafted_per_pass": _ratio(drafted, rounds),
    }


def _mbsu(model: "Model", stats: Sequence[GenerationStats]) -> dict[str, Any]:
    rounds = sum(s.rounds for s in stats)
    if not rounds:
        return {"bytes": None, "parameters": None, "gamma": None}
    tau = sum(s.new_tokens for s in stats) / rounds
    gamma = sum(s.by_source[_MODEL_SOURCE].drafted for s in stats if _MODEL_SOURCE in s.by_source) / rounds
    by_bytes = by_parameters = 0.0
    if model.drafter is not None:
        target, drafter = model.target.manifest, model.drafter.manifest
        by_bytes = drafter.bytes_per_pass / target.bytes_per_pass
        by_parameters = drafter.parameters_per_pass / target.parameters_per_pass
    return {
        "bytes": mbsu(tau, gamma, by_bytes),
        "parameters": mbsu(tau, gamma, by_parameters),
        "gamma": gamma,
    }


def _latency(pairs: Sequence[Pair], sides: Mapping[str, Sequence[GenerationStats]]) -> dict[str, Any]:
    times = {
        "ttft_ms": {name: [s.ttft_s * 1e3 for s in stats] for name, stats in sides.items()},
        "tpot_ms": {
            name: [s.tpot_s * 1e3 for s in stats if s.decode_tokens] for name, stats in sides.items()
        },
    }
    ratios = [ratio for pair in pairs if (ratio := speedup([pair])) is not None]
    spread = {key: {name: _spread(values) for name, values in both.items()} for key, both in times.items()}
    return {
        key: {name: median(values) if values else None for name, values in both.items()}
        for key, both in times.items()
    } | {"spread": {"speedup": _spread(ratios), **spread}}


def _costs(model: "Model", sides: Mapping[str, Sequence[GenerationStats]]) -> dict[str, Any]:
    per_pass, step, drafted = model.target.manifest.bytes_per_pass, model.drafter_step_s, sides["speculative"]
    curve = sorted(model.cost_curve.seconds_by_rows.items())
    return {
        "cost_curve": [{"n": rows, "ms": seconds * 1e3} for rows, seconds in curve],
        "drafter_step_ms": None if step is None else step * 1e3,
        "drafter_share": _ratio(sum(s.drafter_s for s in drafted), sum(s.decode_s for s in drafted)),
        "bytes_per_pass": per_pass,
        "gigabytes_per_second": {
            name: _ratio(per_pass * sum(s.rounds - 1 for s in stats) / 1e9, sum(s.target_s for s in stats))
            for name, stats in sides.items()
        },
        "prompt_tokens_per_second": _ratio(
            sum(s.prompt_tokens - s.cached_tokens for s in sides["plain"]),
            sum(s.ttft_s for s in sides["plain"]),
        ),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _bundle(bundle: "Bundle") -> dict[str, Any]:
    names = ("name", "weights", "bytes_per_pass", "parameters_per_pass", "kv_bytes_per_token")
    return {name: getattr(bundle.manifest, name) for name in names}


def _row(pair: Pair) -> dict[str, Any]:
    return {
        "id": pair.prompt.id,
        "category": pair.prompt.category,
        "identical": pair.identical,
        "speedup": speedup([pair]),
        "finish_reason": pair.plain.finish_reason,
        "plain": pair.plain.stats.to_json(),
        "speculative": pair.speculative.stats.to_json(),
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _sums(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Extremes and quartiles (linear between values); None without values."""
    if not values:
        return None
    q1, middle, q3 = quantiles([*values, *values] if len(values) == 1 else values, n=4, method="inclusive")
    return {"min": min(values), "q1": q1, "median": middle, "q3": q3, "max": max(values)}
