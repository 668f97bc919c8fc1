"""How far to trim: as asked, or as measured."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from edgespec_export.graphs.calibration import read_texts, shipped_texts, written_by
from edgespec_export.graphs.trim import (
    CANDIDATES,
    Ranking,
    Tokens,
    Trim,
    trim_vocabulary,
    weigh,
)
from edgespec_export.options import TrimOptions
from edgespec_export.report import TrimChoice
from edgespec_models.bundles.bundle import Bundle, Manifest
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.cost import CostCurve, measure_cost
from edgespec_runtimes.cpu import CpuOptions, CpuSession

__all__ = ["plan_trim"]

WriteBundle = Callable[[Path, Tokens], None]

_STAGE = "Sizing the vocabulary"
_LEAST_GAIN = 1.05  # held-out texts are about what the counted ones are about, so that they flatter
_TYPICAL_TARGET = 9.0  # a target's pass costs as much as so many steps of the untrimmed drafter,
_TYPICAL_ROW = 0.08  # and every further row so much of it
_NOT_BYTES = 0.25  # share of a step that does not shrink with the bytes it reads
_HELD_TEXTS = 40
_HELD_TOKENS = 80
_UNJUDGED = 8  # tokens at a text's beginning, which without its prompt nobody could guess


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
        write: writes the drafter's bundle with these tokens into a folder, for measurements.
        scratch: a folder that does not exist, for these; gone afterwards.
        progress: told of text being written and of measurements.

    Raises:
        RequestError: calibration text that cannot be read, or a size this vocabulary cannot have.
    """
    tokenizer, special = vocabulary
    if options.size == "auto" and tokenizer.vocab_size <= CANDIDATES[0]:
        return None
    sources, target = _sources(options, progress)
    ranking = Ranking(sources, tokenizer, special.eos)
    sizes = (options.size,) if isinstance(options.size, int) else ranking.candidates
    for size in sizes:
        ranking.check(size)
    progress(Progress(_STAGE, 0, 1, "step"))
    try:
        scratch.mkdir(parents=True)
        write(scratch, ranking.tokens(ranking.whole))
        bundle = Bundle(scratch)
        with closing(CpuSession(bundle, CpuOptions(exact_rows=False))) as session:
            step_s = _steps(bundle.manifest, measure_cost(session, (1,)).seconds(1))
            acceptance = _acceptance(session, ranking, (*sizes, ranking.whole), special)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(Progress(_STAGE, 1, 1, "step"))
    choices = weigh(ranking, acceptance, step_s, target or _typical_target(step_s(ranking.whole)))
    chosen = choices[0] if isinstance(options.size, int) else _best(choices)
    return None if chosen.rows == ranking.whole else trim_vocabulary(ranking, chosen, choices)


def _best(choices: Sequence[TrimChoice]) -> TrimChoice:
    """What promises most; the whole vocabulary, the last choice, where nothing promises clearly more."""
    best = max(choices, key=lambda choice: choice.relative_tokens_per_second)
    return best if best.relative_tokens_per_second >= _LEAST_GAIN else choices[-1]


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


def _steps(manifest: Manifest, whole_s: float) -> Callable[[int], float]:
    """Seconds of a step by rows of the LM head, from those of all rows and the bytes a step reads.

    Two sizes timed against each other would be nearer to this machine, but not twice the same: beside other
    work SmolLM2 was once cut to a twelfth of its rows.
    """
    head = manifest.bytes_by_class["lm_head"]
    share = (1.0 - _NOT_BYTES) * head / manifest.bytes_per_pass
    rows = manifest.config.vocab_size
    return lambda size: whole_s * (1.0 - share * (1.0 - size / rows))


def _acceptance(
    session: CpuSession, ranking: Ranking, sizes: Sequence[int], special: SpecialTokens
) -> dict[int, float]:
    """Share of held-out tokens that are the drafter's first guess, given the text before, by size."""
    bos = [special.bos] if special.add_bos and special.bos is not None else []
    right, total = dict.fromkeys(sizes, 0), 0
    for tokens in ranking.held_tokens[:_HELD_TEXTS]:
        ids = [*bos, *tokens[:_HELD_TOKENS]]
        if len(ids) <= _UNJUDGED + 1:
            continue
        session.prefill(ids[:_UNJUDGED])
        logits = session.predict(ids[_UNJUDGED:-1]).logits
        truth = np.array(ids[_UNJUDGED + 1 :])
        for size in sizes:
            kept = ranking.tokens(size, held_out=True)
            right[size] += int((kept[logits[:, kept].argmax(axis=1)] == truth).sum())
        total += len(truth)
    session.truncate(0)
    return {size: count / max(1, total) for size, count in right.items()}


def _typical_target(step_s: float) -> CostCurve:
    first = _TYPICAL_TARGET * step_s
    return CostCurve({1: first, 2: first * (1 + _TYPICAL_ROW), 9: first * (1 + 8 * _TYPICAL_ROW)})
