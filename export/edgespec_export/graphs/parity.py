"""Does an export compute what its source computes?

Against stored reference logits where there are some for the source file (``tools/make_golden.py`` makes
them with another implementation), and against the source's own weights always.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_export.formats.blocks import F32
from edgespec_models.errors import ParityError
from edgespec_runtimes.session import Logits, Session

__all__ = ["Golden", "ParityReport", "check_parity", "find_golden", "session_logits"]

_ROWS = 16
_MIN_TOP1 = 0.85
_MAX_KL = 0.15


@dataclass(frozen=True, slots=True)
class Golden:
    """Reference next-token log-probabilities for some texts.

    Attributes:
        name: catalogue name.
        labels: what each text is, such as ``en`` or ``code``.
        texts: token ids of each text.
        top_ids: for each text, int32 ``(tokens, k)``: the most probable next tokens by the reference.
        top_logprobs: float32, the same shape.
    """

    name: str
    labels: tuple[str, ...]
    texts: tuple[tuple[int, ...], ...]
    top_ids: tuple[npt.NDArray[np.int32], ...]
    top_logprobs: tuple[F32, ...]


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How near an export is to its reference.

    Attributes:
        positions: next tokens compared.
        top1_agreement: share of positions where both name the same most probable token.
        kl: mean Kullback-Leibler divergence of the export from the reference, nats a token. The reference
            keeps its k most probable tokens; all others count as one, so this is a lower bound.
        by_text: the same by text label.
    """

    positions: int
    top1_agreement: float
    kl: float
    by_text: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def find_golden(sha256: str) -> Golden | None:
    """The stored reference for the source file with this digest."""
    folder = resources.files("edgespec_models") / "golden"
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if not entry.name.endswith(".npz"):
            continue
        with entry.open("rb") as file, np.load(file) as data:
            if str(data["source_sha256"]) != sha256:
                continue
            spans = list(zip(data["starts"][:-1], data["starts"][1:], strict=True))
            return Golden(
                entry.name.removesuffix(".npz"),
                tuple(str(label) for label in data["labels"]),
                tuple(tuple(int(t) for t in data["tokens"][a:b]) for a, b in spans),
                tuple(data["top_ids"][a:b] for a, b in spans),
                tuple(data["top_logprobs"][a:b].astype(np.float32) for a, b in spans),
            )
    return None


def session_logits(session: Session, golden: Golden) -> Iterator[Iterator[Logits]]:
    """The logits of each of the reference's texts, a few rows at a time, for :func:`check_parity`."""
    for tokens in golden.texts:
        session.prefill([])
        yield (session.predict(tokens[at : at + _ROWS]).logits for at in range(0, len(tokens), _ROWS))


def check_parity(
    logits: Iterable[Iterable[Logits]], golden: Golden, head_tokens: npt.NDArray[np.int32] | None = None
) -> ParityReport:
    """Compare with the reference at every position.

    Args:
        logits: of each text in turn, float32 ``(rows, head rows)``, in parts of any number of rows.
        golden: the reference.
        head_tokens: of a trimmed LM head; the distributions are then compared as they are given that the next
            token is one that both name: kept, and among the reference's most probable.

    Raises:
        ParityError: so far apart that the export must be wrong, not only quantized.
    """
    by_text: dict[str, list[F32]] = {}
    for label, parts, ids, logprobs in zip(
        golden.labels, logits, golden.top_ids, golden.top_logprobs, strict=True
    ):
        every = (row for part in parts for row in part)
        if head_tokens is None:
            rows = [_compare(row, *reference) for row, *reference in zip(every, ids, logprobs, strict=True)]
        else:
            rows = list(_compare_kept(every, ids, logprobs, head_tokens))
        if rows:
            by_text.setdefault(label, []).append(np.array(rows, np.float32))
    all_rows = np.concatenate([rows for many in by_text.values() for rows in many])
    summaries = {label: np.concatenate(many).mean(axis=0) for label, many in by_text.items()}
    report = ParityReport(
        len(all_rows),
        float(all_rows[:, 0].mean()),
        float(all_rows[:, 1].mean()),
        {label: {"top1_agreement": float(m[0]), "kl": float(m[1])} for label, m in summaries.items()},
    )
    if report.top1_agreement < _MIN_TOP1 or not report.kl <= _MAX_KL:
        raise ParityError(
            f"the export agrees with the reference for {golden.name} in only {report.top1_agreement:.1%} of "
            f"{report.positions} positions (at least {_MIN_TOP1:.0%} is required), KL {report.kl:.3f} nats "
            f"(at most {_MAX_KL}). Its formats lose too much of this model (leave out what quantizes), or "
            "the export is at fault; nothing was kept."
        )
    return report


def _compare(row: F32, ids: npt.NDArray[np.int32], logprobs: F32) -> tuple[bool, float]:
    """Whether the most probable token agrees, and the KL divergence."""
    return int(row.argmax()) == ids[0], _coarse_kl(row, ids, logprobs)


def _compare_kept(
    rows: Iterable[F32], ids: npt.NDArray[np.int32], logprobs: F32, head_tokens: npt.NDArray[np.int32]
) -> Iterator[tuple[bool, float]]:
    """The same for every position where the reference's most probable tokens include a kept one."""
    columns = np.searchsorted(head_tokens, ids).clip(max=len(head_tokens) - 1)
    kept = head_tokens[columns] == ids
    for row, column, is_kept, reference in zip(rows, columns, kept, logprobs, strict=True):
        if is_kept.any():
            log_p = _normalized(reference[is_kept])
            log_q = _normalized(row[column[is_kept]])
            yield log_q.argmax() == 0, float((np.exp(log_p) * (log_p - log_q)).sum())


def _normalized(logits: F32) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)


def _coarse_kl(row: F32, ids: npt.NDArray[np.int32], logprobs: F32) -> float:
    log_q = _normalized(row)[ids]
    log_p = logprobs.astype(np.float64)
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = max(1 - p.sum(), 1e-12), max(1 - q.sum(), 1e-12)
    return float((p * (log_p - log_q)).sum() + rest_p * np.log(rest_p / rest_q))
