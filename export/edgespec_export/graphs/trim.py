"""Vocabulary trimming: the rows that a drafter's LM head keeps (VocabTrim, arXiv 2506.22694).

A drafter proposes tokens that a target is likely to write. Rows of tokens that targets hardly ever write cost
time in every step and gain nothing. The rows of the most frequent tokens in targets' texts stay. Texts are
read in the drafter's own vocabulary, so any targets will do, also several at once. Special tokens and single
bytes are always kept: with them every text can be written.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_export.graphs.calibration import prompt_start, read_texts, shipped_texts, written_by
from edgespec_export.options import ExportOptions
from edgespec_models.bundles.bundle import Bundle, Manifest
from edgespec_models.errors import RequestError
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.cost import CostCurve, measure_cost
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.session import Session

Tokens = npt.NDArray[np.int32]
WriteBundle = Callable[[Path, Tokens], None]
Counts = npt.NDArray[np.float64]

CANDIDATES = (2048, 4096, 8192, 12288, 16384, 24576, 32768)
"""Sizes among which ``auto`` chooses, besides the whole vocabulary."""

_HELD_OUT = 5  # every fifth text measures coverage and is not counted
_LONGEST_DRAFT = 8
_STAGE = "Sizing the vocabulary"
_NEARLY = 0.99  # of the best promise: held-out texts have the subjects of the counted ones, so they
# favour few rows
_TYPICAL_TARGET = 9.0  # cost of a target's pass in steps of the untrimmed drafter,
_TYPICAL_ROW = 0.08  # and of every further row as a share of it
_NOT_BYTES = 0.25  # share of a step that does not depend on its bytes
_HELD_TEXTS = 40
_HELD_TOKENS = 80
_UNJUDGED = 8  # tokens at a text's beginning, which without its prompt nobody could guess


@dataclass(frozen=True, slots=True)
class TrimChoice:
    """The effects of a size.

    Attributes:
        rows: rows of the LM head.
        coverage: share of the drafter's tokens of held-out target text that it can still write.
        acceptance: share of those tokens that are its first guess, given the text before.
        step_ms: milliseconds of a drafter step.
        relative_tokens_per_second: its expected speed, divided by the speed with the whole vocabulary.
    """

    rows: int
    coverage: float
    acceptance: float
    step_ms: float
    relative_tokens_per_second: float


class TokenOrder:
    """The order in which tokens stay, and the coverage of the first ones.

    ``whole`` are tokens of the vocabulary; ``required`` ones always stay. ``held_tokens`` are the held-out
    texts in the drafter's tokens.

    Each of the ``sources`` has the same weight, at any length. Tokens that end a text, ``ends``, are never
    counted and always kept.
    """

    def __init__(self, sources: Sequence[Sequence[str]], tokenizer: Tokenizer, ends: Iterable[int]) -> None:
        self.texts = sum(len(texts) for texts in sources)
        self.whole = tokenizer.vocab_size
        encoded = [[tokenizer.encode(text) for text in texts] for texts in sources]
        self.held_tokens = [ids for texts in encoded for ids in texts[::_HELD_OUT]]
        chosen, held = np.zeros((2, self.whole))
        for texts in encoded:
            chosen += _frequencies((ids for i, ids in enumerate(texts) if i % _HELD_OUT), self.whole)
            held += _frequencies(texts[::_HELD_OUT], self.whole)
        required = _required(tokenizer, ends)
        self.required = int(required.sum())
        self._held = held
        self._order = _order(chosen, required)
        self._final = _order(chosen + held, required)

    @property
    def candidates(self) -> tuple[int, ...]:
        """Sizes of :data:`CANDIDATES` that this vocabulary can be trimmed to."""
        return tuple(size for size in CANDIDATES if self.required <= size < self.whole)

    def check(self, size: int) -> None:
        """Raise RequestError for impossible sizes."""
        if not self.required <= size <= self.whole:
            raise RequestError(
                f"trim size is {size:,}; this vocabulary can keep {self.required:,} rows (special tokens and "
                f"single bytes) to {self.whole:,}"
            )

    def coverage(self, size: int) -> float:
        """Share of held-out text that the first ``size`` tokens, ranked without that text, can write."""
        total = self._held.sum()
        return float(self._held[self._order[:size]].sum() / total) if total else 0.0

    def tokens(self, size: int, *, held_out: bool = False) -> Tokens:
        """The first ``size`` tokens, ascending, ranked by all texts, or without the held-out ones."""
        order = self._order if held_out else self._final
        return np.sort(order[:size]).astype(np.int32)


def plan_trim(
    options: ExportOptions,
    vocabulary: tuple[Tokenizer, SpecialTokens],
    write: WriteBundle,
    *,
    scratch: Path,
    progress: ProgressCallback,
) -> tuple[Tokens, dict[str, Any]] | None:
    """The tokens that stay, ascending, and the reasons for the report; None keeps all.

    ``write`` writes the drafter's bundle with some tokens into a folder for measurements: ``scratch``, which
    does not exist before and after.

    Raises:
        RequestError: calibration text that cannot be read, or a size this vocabulary cannot have.
    """
    tokenizer, special = vocabulary
    if options.trim == "auto" and tokenizer.vocab_size <= CANDIDATES[0]:
        return None
    sources, target = _sources(options, progress)
    order = TokenOrder(sources, tokenizer, special.eos)
    sizes = (options.trim,) if isinstance(options.trim, int) else order.candidates
    for size in sizes:
        order.check(size)
    progress(Progress(_STAGE, 0, 1, "step"))
    try:
        scratch.mkdir(parents=True)
        write(scratch, order.tokens(order.whole))
        bundle = Bundle(scratch)
        with closing(open_cpu(bundle, CpuOptions(exact_rows=False))) as session:
            step_s = _steps(bundle.manifest, measure_cost(session, (1,)).seconds(1))
            acceptance = _acceptance(session, order, (*sizes, order.whole), special)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(Progress(_STAGE, 1, 1, "step"))
    choices = weigh(order, acceptance, step_s, target or _typical_target(step_s(order.whole)))
    chosen = choices[0] if isinstance(options.trim, int) else _best(choices)
    if chosen.rows == order.whole:
        return None
    weighed = {"of": order.whole, "texts": order.texts, "choices": [asdict(choice) for choice in choices]}
    return order.tokens(chosen.rows), {**asdict(chosen), **weighed}


def keep_frequent(
    rows: int,
    options: ExportOptions,
    vocabulary: tuple[Tokenizer, SpecialTokens],
    progress: ProgressCallback,
) -> tuple[Tokens, dict[str, Any]] | None:
    """The tokens of this many rows. Raises as :func:`plan_trim` does.

    A head's acceptance cannot be measured without the states of its target.
    """
    tokenizer, special = vocabulary
    order = TokenOrder(_sources(options, progress)[0], tokenizer, special.eos)
    order.check(rows)
    if rows == order.whole:
        return None
    facts = {"rows": rows, "of": order.whole, "coverage": order.coverage(rows), "texts": order.texts}
    return order.tokens(rows), facts


def _best(choices: Sequence[TrimChoice]) -> TrimChoice:
    """The choice with most rows that promises nearly as many tokens a second as the best."""
    enough = _NEARLY * max(choice.relative_tokens_per_second for choice in choices)
    near = (choice for choice in choices if choice.relative_tokens_per_second >= enough)
    return max(near, key=lambda choice: choice.rows)


def _sources(
    options: ExportOptions, progress: ProgressCallback
) -> tuple[Sequence[Sequence[str]], CostCurve | None]:
    """Texts by source, and the costs of the first target if a target writes."""
    if not (options.calibration or options.calibrate_with):
        return [shipped_texts()], None
    sources, curves = [read_texts(path) for path in options.calibration], []
    for target in options.calibrate_with:
        texts, curve = written_by(target, progress)
        sources.append(texts)
        curves.append(curve)
    return sources, curves[0] if curves else None


def _steps(manifest: Manifest, whole_s: float) -> Callable[[int], float]:
    """Seconds of a step by rows of the LM head, from the step with all rows and the bytes that steps read.

    Timing two sizes would be nearer to this machine, but would not repeat: beside other work SmolLM2 was once
    cut to a twelfth of its rows.
    """
    share = (1.0 - _NOT_BYTES) * manifest.bytes_by_class["lm_head"] / manifest.bytes_per_pass
    rows = manifest.config.vocab_size
    return lambda size: whole_s * (1.0 - share * (1.0 - size / rows))


def _acceptance(
    session: Session, order: TokenOrder, sizes: Sequence[int], special: SpecialTokens
) -> dict[int, float]:
    """Share of held-out tokens that are the drafter's first guess, given the text before, by size."""
    bos = prompt_start(special)
    right, total = dict.fromkeys(sizes, 0), 0
    for tokens in order.held_tokens[:_HELD_TEXTS]:
        ids = [*bos, *tokens[:_HELD_TOKENS]]
        if len(ids) <= _UNJUDGED + 1:
            continue
        session.prefill(ids[:_UNJUDGED])
        logits = session.predict(ids[_UNJUDGED:-1]).logits
        truth = np.array(ids[_UNJUDGED + 1 :])
        for size in sizes:
            kept = order.tokens(size, held_out=True)
            right[size] += int((kept[logits[:, kept].argmax(axis=1)] == truth).sum())
        total += len(truth)
    session.rewind(0)
    return {size: count / max(1, total) for size, count in right.items()}


def _typical_target(step_s: float) -> CostCurve:
    first = _TYPICAL_TARGET * step_s
    return CostCurve({1: first, 2: first * (1 + _TYPICAL_ROW), 9: first * (1 + 8 * _TYPICAL_ROW)})


def weigh(
    order: TokenOrder, acceptance: Mapping[int, float], step_s: Callable[[int], float], target: CostCurve
) -> tuple[TrimChoice, ...]:
    """The effects of each size on speed.

    With acceptance ``a`` of a drafted token, a round of k drafted tokens yields (1 - a^(k + 1)) / (1 - a)
    tokens (Leviathan et al. 2023, equation 1) in T(k + 1) + k steps; each size counts with its best k.

    ``acceptance``, and ``step_s``, the seconds of a drafter step, are by rows of the LM head.
    """
    rates = {size: _rate(accepted, step_s(size), target) for size, accepted in acceptance.items()}
    return tuple(
        TrimChoice(
            size, order.coverage(size), acceptance[size], step_s(size) * 1000, rate / rates[order.whole]
        )
        for size, rate in rates.items()
    )


def _rate(acceptance: float, step_s: float, target: CostCurve) -> float:
    return max(
        sum(acceptance**i for i in range(k + 1)) / (target.seconds(k + 1) + k * step_s)
        for k in range(_LONGEST_DRAFT + 1)
    )


def _frequencies(texts: Iterable[Sequence[int]], vocab_size: int) -> Counts:
    counts = np.zeros(vocab_size)
    for ids in texts:
        counts += np.bincount(ids, minlength=vocab_size) if ids else 0
    frequencies: Counts = counts / max(counts.sum(), 1.0)
    return frequencies


def _required(tokenizer: Tokenizer, ends: Iterable[int]) -> npt.NDArray[np.bool_]:
    required = np.zeros(tokenizer.vocab_size, np.bool_)
    required[list(ends)] = True
    for token in range(tokenizer.vocab_size):
        required[token] |= tokenizer.is_special(token) or len(tokenizer.token_bytes(token)) == 1
    return required


def _order(frequencies: Counts, required: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Required tokens, then others by frequency, and unseen ones by id, which here is merge order."""
    return np.lexsort((np.arange(len(frequencies)), -frequencies, ~required))
