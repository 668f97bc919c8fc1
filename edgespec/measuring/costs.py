"""The costs of verification on this machine: T(n) of one model beside the machine's roofline.

A pass over n rows reads every weight once and multiplies each n times, so it takes at least
``max(bytes / bandwidth, 2 * weights * n / peak)`` (Williams et al. 2009, "Roofline"). Bandwidth is what numpy
reads with as many threads. The peak is not the processor's on paper, but the best that these kernels reached
over wide passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from edgespec.loading.footprint import room_for
from edgespec.loading.measurements import describe_machine, discard
from edgespec.loading.opening import conditions_of, open_one, timed_rows
from edgespec.measuring.other_programs import OtherPrograms
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.memory import memory_bandwidth
from edgespec_runtimes.session import Session

ACCEPTANCE = (0.5, 0.7, 0.9)
CONTEXTS = (2000, 8000)
"""The lengths of context, in tokens, for which times of passes are shown."""

_FORMAT = 1
_PROMPT_TOKENS = 256
_CONTEXT_ROWS = 8
_FREE = 1.1  # a pass that takes a tenth longer than a single row's counts as free


def draft_gain(curve: CostCurve, acceptance: float, longest: int) -> dict[str, Any]:
    """The gain of proposals that cost nothing to make, such as n-grams, at a given acceptance rate.

    Equation 1 of Leviathan et al. 2023 over T(n), for every draft length from 0 to ``longest``; between
    measured points T(n) is interpolated. Best is the length with most tokens per second.
    """
    tokens = [sum(acceptance**i for i in range(length + 1)) for length in range(longest + 1)]
    plain = curve.seconds(1)
    speedups = [count * plain / curve.seconds(length + 1) for length, count in enumerate(tokens)]
    best = speedups.index(max(speedups))
    return {
        "acceptance": acceptance,
        "best_length": best,
        "tokens_per_pass": tokens[best],
        "speedup": speedups[best],
        "lengths_that_pay": [length for length, speedup in enumerate(speedups) if speedup > 1.0],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """T(n) of a model and its bounds.

    ``remembered`` says whether the curve was measured earlier and checked now, or measured now. ``bandwidth``
    is the bytes a second that memory delivers to as many threads. It is numpy's figure, or the passes' figure
    if that is higher because the weights fit into a cache. ``prompt_rate`` is the tokens of a prompt that are
    read in a second. ``other_programs`` is the share of the processor that others took meanwhile.
    """

    bundle: Bundle
    options: CpuOptions
    threads: int
    curve: CostCurve
    remembered: bool
    bandwidth: float
    prompt_rate: float
    other_programs: float

    @property
    def operations_per_row(self) -> int:
        """Multiplications and additions of one row: two for each weight."""
        return 2 * self.bundle.manifest.parameters_per_pass

    @property
    def peak(self) -> float:
        """Operations a second at best, over all measured passes."""
        return max(self.operations_per_row * n / t for n, t in self.curve.seconds_by_rows.items())

    def bytes_read(self, rows: int) -> float:
        """Bytes of weights that a pass reads; only the experts that its tokens use are read."""
        manifest, experts = self.bundle.manifest, self.curve.experts
        more = 0.0 if experts is None else experts.expected(rows) - experts.used
        return manifest.bytes_per_pass + more * manifest.expert_bytes

    def reading_s(self, rows: int) -> float:
        """Seconds that reading the weights of a pass once takes at the memory's full speed."""
        return self.bytes_read(rows) / self.bandwidth

    @property
    def ridge(self) -> float:
        """Rows at which computing takes as long as reading the weights; below, memory is the bound."""
        return self.reading_s(1) * self.peak / self.operations_per_row

    @property
    def free_rows(self) -> int:
        """Rows of the widest pass that, like all narrower ones, takes at most a tenth longer than one row."""
        dear = [n for n, t in self.curve.seconds_by_rows.items() if t > _FREE * self.curve.seconds(1)]
        return max(n for n in self.curve.seconds_by_rows if n < min(dear, default=n + 1))

    def bound_s(self, rows: int) -> float:
        """The roofline: the least seconds that a pass over ``rows`` can take."""
        return max(self.reading_s(rows), self.operations_per_row * rows / self.peak)

    def to_json(self) -> dict[str, Any]:
        """The costs as plain JSON values; ``docs/json.md`` explains them."""
        manifest, longest = self.bundle.manifest, max(self.curve.seconds_by_rows) - 1
        return {
            "format": _FORMAT,
            "name": manifest.name,
            "role": "target" if self.options.exact_rows else "drafter",
            "weights": manifest.weights,
            "threads": self.threads,
            "remembered": self.remembered,
            "confirmed": self.curve.confirmed,
            "bytes_per_pass": manifest.bytes_per_pass,
            "parameters_per_pass": manifest.parameters_per_pass,
            "memory_gigabytes_per_second": self.bandwidth / 1e9,
            "peak_gops": self.peak / 1e9,
            "ridge_rows": self.ridge,
            "free_rows": self.free_rows,
            "prompt_tokens_per_second": self.prompt_rate,
            "other_programs": self.other_programs,
            "rows": [self._row(n, t) for n, t in sorted(self.curve.seconds_by_rows.items())],
            "attention_us": {
                "token": self.curve.context_s * 1e6,
                "token_and_row": self.curve.row_context_s * 1e6,
            },
            "experts": self._experts(),
            "contexts": [
                self._context(tokens) for tokens in CONTEXTS if tokens <= self.bundle.config.context_length
            ],
            "free_drafts": [draft_gain(self.curve, acceptance, longest) for acceptance in ACCEPTANCE],
            "machine": describe_machine(),
        }

    def _experts(self) -> dict[str, Any] | None:
        costs = self.curve.experts
        if costs is None:
            return None
        return {"used": costs.used, "overlap": costs.overlap, "us": costs.read_s * 1e6}

    def _context(self, tokens: int) -> dict[str, Any]:
        attended = self.bundle.config.attended(tokens)
        rows = (n for n in sorted(self.curve.seconds_by_rows) if n <= _CONTEXT_ROWS)
        return {"tokens": tokens, "ms": {str(n): self.curve.seconds(n, attended) * 1e3 for n in rows}}

    def _row(self, rows: int, seconds: float) -> dict[str, Any]:
        return {
            "n": rows,
            "ms": seconds * 1e3,
            "relative": seconds / self.curve.seconds(1),
            "ms_per_row": seconds * 1e3 / rows,
            "gigabytes_per_second": self.bytes_read(rows) / seconds / 1e9,
            "gops": self.operations_per_row * rows / seconds / 1e9,
            "roofline_ms": self.bound_s(rows) * 1e3,
            "bound": "memory" if self.bound_s(rows) == self.reading_s(rows) else "arithmetic",
        }


def as_ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as a reader wants them: ``1 to 4, 7``; ``none`` if there are none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs) or "none"


def _prompt_rate(session: Session, bundle: Bundle) -> float:
    """Tokens a second of a prompt, the better of two readings."""
    count = min(_PROMPT_TOKENS, bundle.config.context_length // 2)
    seconds = []
    for start in range(2):
        session.prefill([])
        began = perf_counter()
        session.predict_next([(start + token) % bundle.config.vocab_size for token in range(count)])
        seconds.append(perf_counter() - began)
    return count / min(seconds)


def measure_costs(
    bundle: Bundle,
    options: CpuOptions,
    *,
    fresh: bool = False,
    progress: ProgressCallback = ignore_progress,
) -> Costs:
    """Load a model and measure the costs of its passes. Confirmed costs are kept for later loads.

    A drafter's passes need no exact rows (``options``). Passes over more rows than the model's context
    has are left out. ``fresh`` forgets what earlier loads found out.

    Raises:
        EdgespecError: the model cannot be loaded, or there is too little memory.
    """
    options = room_for(bundle, None, options)
    conditions = conditions_of(bundle, options)
    if fresh:
        discard(conditions)
    progress(Progress("Loading the model", 0, 1, "models"))
    others = OtherPrograms()
    running = open_one(bundle, options, timed_rows(options), progress=progress)
    prompt_rate = _prompt_rate(running.session, bundle)
    busy = others.share()
    running.session.close()
    progress(Progress("Loading the model", 1, 1, "models"))
    fastest = min(running.curve.seconds_by_rows.values())
    return Costs(
        bundle=bundle,
        options=options,
        threads=conditions.options.threads,
        curve=running.curve,
        remembered=running.remembered,
        prompt_rate=prompt_rate,
        other_programs=busy,
        bandwidth=max(memory_bandwidth(conditions.options.threads), bundle.manifest.bytes_per_pass / fastest),
    )
