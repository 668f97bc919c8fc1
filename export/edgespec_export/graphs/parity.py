"""Comparison of an export with its source.

Weights are always compared with the source's, and logits with stored ones if there are some for the source
file (``tools/make_golden.py`` makes them with another implementation).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec_export.formats.encode import Arrays
from edgespec_export.formats.plan import Stored, stored
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.errors import ParityError
from edgespec_models.files.blocks import F32
from edgespec_models.graphs.plan import DecoderPlan
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_runtimes.predictions import Logits
from edgespec_runtimes.session import Session

_ROWS = 16
_SAMPLE_ROWS = 8
_MIN_TOP1 = 0.85
_MAX_KL = 0.15


@dataclass(frozen=True, slots=True)
class Golden:
    """Reference next-token log-probabilities for some texts.

    Attributes:
        labels: the kind of each text, such as ``en`` or ``code``.
        texts: token ids of each text.
        top_ids: for each text, int32 ``(tokens, k)``: the most probable next tokens by the reference.
        top_logprobs: float32, the same shape.
    """

    name: str
    labels: tuple[str, ...]
    texts: tuple[tuple[int, ...], ...]
    top_ids: tuple[npt.NDArray[np.int32], ...]
    top_logprobs: tuple[F32, ...]


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


def session_logits(
    session: Session, golden: Golden, progress: ProgressCallback = ignore_progress
) -> Iterator[Iterator[Logits]]:
    """The logits of each of the reference's texts, a few rows at a time, for :func:`check_parity`."""
    for number, tokens in enumerate(golden.texts):
        progress(Progress("Checking", number, len(golden.texts), "step"))
        session.prefill([])
        yield (session.predict(tokens[at : at + _ROWS]).logits for at in range(0, len(tokens), _ROWS))


def check_parity(
    logits: Iterable[Iterable[Logits]], golden: Golden, head_tokens: npt.NDArray[np.int32] | None = None
) -> dict[str, Any]:
    """Compare with the reference at every position.

    Returns the number of ``positions``; ``top1_agreement``, the share of them with the same most probable
    token; ``kl``, the mean Kullback-Leibler divergence of the export from the reference, in nats a token; and
    the same ``by_text``, by label. The reference keeps its k most probable tokens; all others count as one,
    so ``kl`` is a lower bound.

    Args:
        logits: logits of each text in turn, float32 ``(rows, head rows)``, in parts of any number of rows.
        golden: the reference.
        head_tokens: tokens of a trimmed LM head. Distributions are then compared under the condition that the
            next token is kept and among the reference's most probable.

    Raises:
        ParityError: they are so far apart that the export must be wrong, not only quantized.
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
    means = {label: np.concatenate(many).mean(axis=0) for label, many in by_text.items()}
    top1, kl = float(all_rows[:, 0].mean()), float(all_rows[:, 1].mean())
    if top1 < _MIN_TOP1 or not kl <= _MAX_KL:
        raise ParityError(
            f"the export agrees with the reference for {golden.name} in only {top1:.1%} of {len(all_rows)} "
            f"positions (at least {_MIN_TOP1:.0%} is required), KL {kl:.3f} nats (at most {_MAX_KL}). Its "
            "formats lose too much of this model (leave out options that quantize), or the export has a bug; "
            "nothing was kept."
        )
    return {
        "positions": len(all_rows),
        "top1_agreement": top1,
        "kl": kl,
        "by_text": {label: {"top1_agreement": float(m[0]), "kl": float(m[1])} for label, m in means.items()},
    }


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
    """Log-probabilities, along the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float64)


def _coarse_kl(row: F32, ids: npt.NDArray[np.int32], logprobs: F32) -> float:
    log_q = _normalized(row)[ids]
    log_p = logprobs.astype(np.float64)
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = max(1 - p.sum(), 1e-12), max(1 - q.sum(), 1e-12)
    return float((p * (log_p - log_q)).sum() + rest_p * np.log(rest_p / rest_q))


def measure_losses(plan: DecoderPlan, checkpoint: Checkpoint, model: ir.Model) -> list[dict[str, Any]]:
    """Compare a sample of each matrix, as written in ``model``, with its source, by formats.

    Each pair has the ``source`` format and the bundle's ``format``, the number of ``weights``, and their
    ``relative_error``: root mean square of the differences, divided by the root mean square of the weights.
    """
    matrices = stored(plan)[0 if plan.native else 1 :]  # ONNX Runtime's embedding is exact
    totals: dict[tuple[str, str], np.ndarray] = {}
    for matrix in matrices:
        start, rows = 0, sum(len(_kept(matrix, checkpoint, source)) for source in matrix.sources)
        for source in matrix.sources:
            tensor = checkpoint.tensor(source)
            kept = _kept(matrix, checkpoint, source)
            wanted = kept[: max(_SAMPLE_ROWS, matrix.lanes)]
            values = np.concatenate([checkpoint.values(source, row, row + 1) for row in wanted])
            written = _written(model, matrix, range(start, start + len(wanted)), rows)
            start += len(kept)
            errors = matrix.decode(written, len(wanted), tensor.shape[-1]) - values
            entry = totals.setdefault((tensor.type.name, matrix.format.name), np.zeros(3))
            entry += len(kept) * tensor.shape[-1], np.square(errors).sum(), np.square(values).sum()
    return [
        {
            "source": kind,
            "format": form,
            "weights": int(count),
            "relative_error": float(np.sqrt(error / norm)) if norm else 0.0,
        }
        for (kind, form), (count, error, norm) in sorted(totals.items())
    ]


def _kept(matrix: Stored, checkpoint: Checkpoint, source: str) -> Sequence[int]:
    """The rows of one of its sources that a matrix has."""
    return range(checkpoint.tensor(source).n_rows) if matrix.keep is None else matrix.keep.tolist()


def _written(model: ir.Model, matrix: Stored, wanted: range, rows: int) -> Arrays:
    """The ``wanted`` rows of all ``rows`` of a matrix's parameters, by the last word of their names."""
    arrays, lanes = {}, matrix.lanes
    for name, value in model.graph.initializers.items():
        if not name.startswith(f"{matrix.prefix}.") or name.endswith(".bias"):
            continue
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor) and tensor.offset is not None
        row_bytes = tensor.nbytes // (-(-rows // lanes) * lanes)
        with Path(tensor.path).open("rb") as file:
            file.seek(tensor.offset + wanted.start * row_bytes)
            data = file.read(-(-len(wanted) // lanes) * lanes * row_bytes)
        array = np.frombuffer(data, tensor.dtype.numpy()).reshape(-1, *tensor.shape.numpy()[1:])
        arrays[name.removeprefix(f"{matrix.prefix}.")] = array
    return arrays


def compare(references: Iterable[Logits], logits: Iterable[Logits]) -> dict[str, Any]:
    """Compare each text's logits with the reference's; memory holds the logits of one text.

    Returns the figures of :func:`check_parity`, without those by text.
    """
    same, kl = list[npt.NDArray[np.bool_]](), list[npt.NDArray[np.float64]]()
    for text_logits, expected in zip(logits, references, strict=True):
        same.append(expected.argmax(1) == text_logits.argmax(1))
        for start in range(0, len(text_logits), _ROWS):  # in float64 a text's would take gigabytes
            rows = slice(start, start + _ROWS)
            log_p, log_q = _normalized(expected[rows]), _normalized(text_logits[rows])
            kl.append((np.exp(log_p) * (log_p - log_q)).sum(1))
    return {
        "positions": sum(map(len, same)),
        "top1_agreement": float(np.concatenate(same).mean()),
        "kl": float(np.concatenate(kl).mean()),
    }
