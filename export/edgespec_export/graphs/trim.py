"""Which rows a drafter's LM head keeps: vocabulary trimming (VocabTrim, arXiv 2506.22694).

A drafter proposes what a target is likely to write; rows of tokens that targets hardly ever write cost
time in every step and win nothing. The rows kept are those of the tokens most frequent in text that
targets have written, in the drafter's own vocabulary, so that any target will do, and several at once.
Special tokens and single bytes are always kept: with them every text can be written.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec_export.report import TrimChoice, TrimReport
from edgespec_models.errors import RequestError
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve

__all__ = [
    "CANDIDATES",
    "Ranking",
    "Tokens",
    "Trim",
    "trim_vocabulary",
    "weigh",
]

Tokens = npt.NDArray[np.int32]
Counts = npt.NDArray[np.float64]

CANDIDATES = (2048, 4096, 8192, 12288, 16384, 24576, 32768)
"""Sizes among which ``auto`` chooses, besides the whole vocabulary."""

_HELD_OUT = 5  # every fifth text measures coverage and is not counted
_LONGEST_DRAFT = 8


@dataclass(frozen=True, slots=True)
class Trim:
    """The tokens that stay, ascending, int32, and what that means."""

    tokens: Tokens
    report: TrimReport


class Ranking:
    """The order in which tokens stay, and what the first of them cover.

    Attributes:
        texts: how many texts were counted.
        whole: tokens of the vocabulary.
        required: how many tokens always stay.
        held_tokens: the held-out texts in the drafter's tokens.

    Args:
        sources: texts of each source; every source weighs the same, however long.
        tokenizer: the drafter's.
        ends: tokens that end a text: never counted, always kept.
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
        """Refuse sizes that cannot be: RequestError."""
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


def trim_vocabulary(ranking: Ranking, chosen: TrimChoice, choices: tuple[TrimChoice, ...]) -> Trim:
    """Keep the rows of ``chosen``."""
    return Trim(ranking.tokens(chosen.rows), TrimReport(chosen, ranking.whole, ranking.texts, choices))


def weigh(
    ranking: Ranking, acceptance: Mapping[int, float], step_s: Callable[[int], float], target: CostCurve
) -> tuple[TrimChoice, ...]:
    """What each size means for speed.

    With acceptance ``a`` of a drafted token, a round of k drafted tokens yields (1 - a^(k + 1)) / (1 - a)
    tokens (Leviathan et al. 2023, equation 1) in T(k + 1) + k steps; each size is judged with the k that
    is best for it.

    Args:
        ranking: of the tokens.
        acceptance: by rows of the LM head, that of the whole among them.
        step_s: seconds of a drafter step by rows of the LM head.
        target: the target's cost.
    """
    rates = {size: _rate(accepted, step_s(size), target) for size, accepted in acceptance.items()}
    return tuple(
        TrimChoice(
            size, ranking.coverage(size), acceptance[size], step_s(size) * 1000, rate / rates[ranking.whole]
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
    """Required tokens, then by frequency; unseen ones by id, which in these vocabularies is merge order."""
    return np.lexsort((np.arange(len(frequencies)), -frequencies, ~required))
