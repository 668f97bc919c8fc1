"""How far to trim: as asked, or as measured."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from edgespec_export.calibration import read_texts, shipped_texts, written_by
from edgespec_export.trim import CANDIDATES, Ranking, Trim, TrimOptions, best_size, trim_vocabulary
from edgespec_models.bundle import Bundle
from edgespec_models.progress import ProgressCallback
from edgespec_models.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.cost import CostCurve, measure_cost
from edgespec_runtimes.cpu import CpuOptions, CpuSession

__all__ = ["plan_trim"]

WriteBundle = Callable[[Path, Trim], None]

_ROUNDS = 3
_TYPICAL_TARGET = 8.0  # a target's pass costs as much as so many steps of the untrimmed drafter,
_TYPICAL_ROW = 0.2  # and every further row so much of it


def plan_trim(
    options: TrimOptions,
    vocabulary: tuple[Tokenizer, SpecialTokens],
    write: WriteBundle,
    *,
    scratch: Path,
    progress: ProgressCallback,
) -> Trim | None:
    """Decide which tokens stay; None keeps all.

    Args:
        options: ``size`` is a number or ``auto``.
        vocabulary: the drafter's.
        write: writes the drafter's bundle, trimmed, into a folder: ``auto`` times two of them.
        scratch: a folder that does not exist, for these; gone afterwards.
        progress: told of text being written and of bundles.

    Raises:
        RequestError: calibration text that cannot be read, or a size this vocabulary cannot have.
    """
    tokenizer, special = vocabulary
    if options.size == "auto" and tokenizer.vocab_size <= CANDIDATES[0]:
        return None
    sources, target = _sources(options, progress)
    ranking = Ranking(sources, tokenizer, special.eos)
    if isinstance(options.size, int):
        return trim_vocabulary(ranking, options.size)
    try:
        step_s = _measure_steps(ranking, write, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    size, choices = best_size(ranking, step_s, target or _typical_target(step_s(ranking.whole)))
    return None if size == ranking.whole else trim_vocabulary(ranking, size, choices)


def _sources(
    options: TrimOptions, progress: ProgressCallback
) -> tuple[Sequence[Sequence[str]], CostCurve | None]:
    """Texts by source, and the cost of the first target if one writes."""
    if not (options.texts or options.targets):
        return [shipped_texts()], None
    sources, curves = [read_texts(path) for path in options.texts], []
    for target in options.targets:
        texts, curve = written_by(target, progress)
        sources.append(texts)
        curves.append(curve)
    return sources, curves[0] if curves else None


def _measure_steps(ranking: Ranking, write: WriteBundle, scratch: Path) -> Callable[[int], float]:
    """Seconds of a step by rows of the LM head: a line through the smallest candidate and the whole."""
    sizes = ranking.candidates[0], ranking.whole
    sessions = []
    try:
        for size in sizes:
            folder = scratch / str(size)
            folder.mkdir(parents=True)
            write(folder, trim_vocabulary(ranking, size))
            sessions.append(CpuSession(Bundle(folder), CpuOptions(exact_rows=False)))
        rounds = [[measure_cost(session, (1,)).seconds(1) for session in sessions] for _ in range(_ROUNDS)]
    finally:
        for session in sessions:
            session.close()
    small, whole = (min(times) for times in zip(*rounds, strict=True))
    per_row = max(0.0, (whole - small) / (sizes[1] - sizes[0]))
    return lambda size: small + (size - sizes[0]) * per_row


def _typical_target(step_s: float) -> CostCurve:
    first = _TYPICAL_TARGET * step_s
    return CostCurve({1: first, 2: first * (1 + _TYPICAL_ROW), 9: first * (1 + 8 * _TYPICAL_ROW)})
