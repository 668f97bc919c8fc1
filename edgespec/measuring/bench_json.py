"""The figures of a bench as JSON values that tools can rely on.

Keys stay; new ones may come. A figure that could not be measured is null. Times are milliseconds.

    format                          version of this form: 1
    complete                        false if the run was stopped early
    prompts, identical              prompts answered; with the same tokens both ways
    speedup.overall                 of decoding, over all prompts; edgespec.measuring.bench defines it
    speedup.request                 of whole requests, prefill included
    speedup.by_category.NAME        of decoding, over a category's prompts
    plain.tokens_per_second         of decoding; also request_tokens_per_second, decode_tokens, new_tokens
    speculative.*                   the same
    block_efficiency                committed tokens per target pass (tau), speculative
    acceptance_rate                 accepted over drafted tokens, all sources
    acceptance_by_position          list of {position, drafted, accepted, rate}; position counts from 1
    by_source.NAME                  {drafted, accepted, acceptance_rate}
    drafted_per_pass                tokens drafted per target pass, all sources
    mbsu.bytes, mbsu.parameters     memory-bound speedup, see mbsu()
    mbsu.gamma                      tokens the model drafter proposed per target pass
    ttft_ms.*, tpot_ms.*            plain, speculative: median over prompts
    spread.speedup                  {min, q1, median, q3, max} of the prompts' own ratios
    spread.ttft_ms.*, .tpot_ms.*    plain, speculative: the same
    cost_curve                      T(n): list of {n, ms}, a target pass over n rows
    drafter_step_ms                 one step of the drafter
    bytes_per_pass                  weights a target pass reads
    gigabytes_per_second.*          plain, speculative: bytes_per_pass * passes / time in passes
    peak_memory_bytes               of this process, both models
    speculation_off.REASON          in how many answers few or no drafts were made for this reason
    rolled_back.REASON              in how many answers something learned misled and was put back
    models.target, models.drafter   what ran; models.drafter_name may be "ngram"
    options, machine                how and where
    rows                            a prompt each: id, category, identical, speedup, finish_reason, plain,
                                    speculative
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final

from edgespec.loading.measurements import describe_machine
from edgespec.measuring.bench import BenchOptions, Pair, Speed, speedup
from edgespec.requests.results import Generation, GenerationStats
from edgespec_runtimes.memory import peak_memory_bytes

if TYPE_CHECKING:
    from edgespec.engine import Model
    from edgespec_models.bundles.bundle import Bundle

__all__ = ["FORMAT", "MODEL_SOURCE", "mbsu", "summarize"]

FORMAT: Final = 1
MODEL_SOURCE: Final = "model"
"""Name of the model drafter in ``by_source``."""

_BOTH = ("plain", "speculative")


def summarize(
    model: "Model", pairs: Sequence[Pair], options: BenchOptions, *, complete: bool = True
) -> dict[str, Any]:
    """All figures of a bench; the module's docstring lists the keys."""
    sides = {name: [getattr(pair, name).stats for pair in pairs] for name in _BOTH}
    return {
        "format": FORMAT,
        "complete": complete,
        "prompts": len(pairs),
        "identical": sum(pair.identical for pair in pairs),
        "speedup": _speedups(pairs),
        "plain": _speed(pair.plain for pair in pairs),
        "speculative": _speed(pair.speculative for pair in pairs),
        **_drafting(sides["speculative"]),
        "mbsu": _mbsu(model, sides["speculative"]),
        **_latency(pairs),
        **_costs(model, sides),
        "speculation_off": dict(
            Counter(s.speculation_off_reason for s in sides["speculative"] if s.speculation_off_reason)
        ),
        "rolled_back": dict(Counter(reason for s in sides["speculative"] for reason in s.rolled_back)),
        "models": _models(model),
        "options": asdict(options),
        "machine": describe_machine(),
        "rows": [_row(pair) for pair in pairs],
    }


def mbsu(tau: float, gamma: float, c: float) -> float:
    """Memory-bound speedup, tau / (c * gamma + 1): what reading weights alone would allow.

    Args:
        tau: committed tokens per target pass.
        gamma: tokens the model drafter proposed per target pass; n-grams cost nothing. It counts target
            tokens: where a drafter needs several steps for one, or stops behind a token that is not
            proposed, the drafter costs more than this says.
        c: the drafter's bytes (or parameters) read per step, over the target's.
    """
    return tau / (c * gamma + 1.0)


def _speedups(pairs: Sequence[Pair]) -> dict[str, Any]:
    categories: dict[str, list[Pair]] = {}
    for pair in pairs:
        categories.setdefault(pair.prompt.category, []).append(pair)
    plain = Speed.of(pair.plain for pair in pairs)
    speculative = Speed.of(pair.speculative for pair in pairs)
    return {
        "overall": speedup(pairs),
        "request": _ratio(speculative.request_tokens_per_s, plain.request_tokens_per_s),
        "by_category": {name: speedup(members) for name, members in categories.items()},
    }


def _speed(answers: Iterable[Generation]) -> dict[str, Any]:
    speed = Speed.of(answers)
    return {
        "tokens_per_second": speed.tokens_per_s,
        "request_tokens_per_second": speed.request_tokens_per_s,
        "decode_tokens": speed.decode_tokens,
        "new_tokens": speed.new_tokens,
    }


def _drafting(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    rounds, drafted = sum(s.rounds for s in stats), sum(s.drafted for s in stats)
    by_source: dict[str, list[int]] = {}
    for name, source in ((n, s) for one in stats for n, s in one.by_source.items()):
        counts = by_source.setdefault(name, [0, 0])
        counts[0] += source.drafted
        counts[1] += source.accepted
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
            for name, (d, a) in sorted(by_source.items())
        },
        "drafted_per_pass": _ratio(drafted, rounds),
    }


def _mbsu(model: "Model", stats: Sequence[GenerationStats]) -> dict[str, Any]:
    tau = _ratio(sum(s.new_tokens for s in stats), sum(s.rounds for s in stats))
    drafted = sum(s.by_source[MODEL_SOURCE].drafted for s in stats if MODEL_SOURCE in s.by_source)
    gamma = _ratio(drafted, sum(s.rounds for s in stats))
    if tau is None or gamma is None:
        return {"bytes": None, "parameters": None, "gamma": None}
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


def _latency(pairs: Sequence[Pair]) -> dict[str, Any]:
    ttft: dict[str, list[float]] = {}
    tpot: dict[str, list[float]] = {}
    for name in _BOTH:
        stats = [getattr(pair, name).stats for pair in pairs]
        ttft[name] = [s.ttft_s * 1e3 for s in stats]
        tpot[name] = [s.tpot_s * 1e3 for s in stats if s.decode_tokens]
    ratios = [ratio for pair in pairs if (ratio := speedup([pair])) is not None]
    return {
        "ttft_ms": {name: median(values) if values else None for name, values in ttft.items()},
        "tpot_ms": {name: median(values) if values else None for name, values in tpot.items()},
        "spread": {
            "speedup": _spread(ratios),
            "ttft_ms": {name: _spread(values) for name, values in ttft.items()},
            "tpot_ms": {name: _spread(values) for name, values in tpot.items()},
        },
    }


def _costs(model: "Model", sides: Mapping[str, Sequence[GenerationStats]]) -> dict[str, Any]:
    per_pass, step = model.target.manifest.bytes_per_pass, model.drafter_step_s
    curve = sorted(model.cost_curve.seconds_by_rows.items())
    return {
        "cost_curve": [{"n": rows, "ms": seconds * 1e3} for rows, seconds in curve],
        "drafter_step_ms": None if step is None else step * 1e3,
        "bytes_per_pass": per_pass,
        "gigabytes_per_second": {
            name: _ratio(per_pass * sum(s.rounds for s in stats) / 1e9, sum(s.target_s for s in stats))
            for name, stats in sides.items()
        },
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _models(model: "Model") -> dict[str, Any]:
    return {
        "name": model.name,
        "drafter_name": model.drafter_name,
        "row_exact": model.row_exact,
        "target": _bundle(model.target),
        "drafter": None if model.drafter is None else _bundle(model.drafter),
    }


def _bundle(bundle: "Bundle") -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "name": manifest.name,
        "weights": manifest.weights,
        "bytes_per_pass": manifest.bytes_per_pass,
        "parameters_per_pass": manifest.parameters_per_pass,
        "kv_bytes_per_token": manifest.kv_bytes_per_token,
    }


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
    """Extremes and quartiles (linear between values); None of nothing."""
    if not values:
        return None
    q1, middle, q3 = quantiles([*values, *values] if len(values) == 1 else values, n=4, method="inclusive")
    return {"min": min(values), "q1": q1, "median": middle, "q3": q3, "max": max(values)}
