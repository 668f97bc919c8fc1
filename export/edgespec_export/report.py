"""What an export measured: stored in the bundle, shown by ``edgespec inspect``."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgespec_export.blocks import Blocks, unpack
from edgespec_export.checkpoint import Checkpoint
from edgespec_export.encode import decode_linear, encode_linear
from edgespec_export.parity import ParityReport
from edgespec_models.graphs.decoder import DecoderPlan
from edgespec_models.graphs.linear import LinearPart

__all__ = ["ExportReport", "FormatLoss", "measure_losses"]

_SAMPLE_ROWS = 8


@dataclass(frozen=True, slots=True)
class FormatLoss:
    """What a format costs the weights it holds.

    Attributes:
        source: weight format in the checkpoint.
        format: format in the bundle.
        weights: how many weights.
        relative_error: root mean square of the differences over that of the weights, on a sample of rows.
    """

    source: str
    format: str
    weights: int
    relative_error: float


@dataclass(frozen=True, slots=True)
class ExportReport:
    """One export; times in seconds, sizes in bytes.

    ``parity`` is None where no reference is stored for the source file.
    """

    parity: ParityReport | None
    row_exact: bool
    weights: tuple[FormatLoss, ...]
    source_bytes: int
    bundle_bytes: int
    bytes_by_class: dict[str, int]
    seconds: float
    peak_memory_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "parity": None if self.parity is None else self.parity.to_json(),
            "row_exact": self.row_exact,
            "weights": [asdict(loss) for loss in self.weights],
            "bytes": {
                "source": self.source_bytes,
                "bundle": self.bundle_bytes,
                "by_class": self.bytes_by_class,
            },
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def measure_losses(plan: DecoderPlan, checkpoint: Checkpoint) -> tuple[FormatLoss, ...]:
    """Compare a sample of every matrix with its source, by pair of formats."""
    totals: dict[tuple[str, str], np.ndarray] = {}
    for source, part in _sources(plan):
        kind, raw = checkpoint.read(source, 0, min(_SAMPLE_ROWS, checkpoint.tensor(source).shape[0]))
        unpacked = unpack(kind, raw)
        values = unpacked.values() if isinstance(unpacked, Blocks) else unpacked
        kept = decode_linear(encode_linear(unpacked, part.format), part.format, values.shape[1])
        rows, columns = checkpoint.tensor(source).shape
        entry = totals.setdefault((kind.name, part.format.name), np.zeros(3))
        entry += rows * columns, np.square(kept - values).sum(), np.square(values).sum()
    return tuple(
        FormatLoss(kind, form, int(count), float(np.sqrt(error / norm)) if norm else 0.0)
        for (kind, form), (count, error, norm) in sorted(totals.items())
    )


def _sources(plan: DecoderPlan) -> Iterable[tuple[str, LinearPart]]:
    return (
        (source, part) for spec in plan.linears.values() for part in spec.parts for source in part.sources
    )
