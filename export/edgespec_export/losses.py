"""What weight formats cost: a sample of every matrix compared with its source."""

from collections.abc import Iterable

import numpy as np

from edgespec_export.blocks import Blocks, unpack
from edgespec_export.checkpoint import Checkpoint
from edgespec_export.encode import decode_linear, encode_linear
from edgespec_export.report import FormatLoss
from edgespec_models.graphs.decoder import DecoderPlan
from edgespec_models.graphs.linear import LinearPart, Method

__all__ = ["measure_losses"]

_SAMPLE_ROWS = 8


def measure_losses(plan: DecoderPlan, checkpoint: Checkpoint) -> tuple[FormatLoss, ...]:
    """Compare a sample of every matrix with its source, by pair of formats and method."""
    totals: dict[tuple[str, str, Method], np.ndarray] = {}
    for source, part in _sources(plan):
        kind, raw = checkpoint.read(source, 0, min(_SAMPLE_ROWS, checkpoint.tensor(source).shape[0]))
        unpacked = unpack(kind, raw)
        values = unpacked.values() if isinstance(unpacked, Blocks) else unpacked
        encoded = encode_linear(unpacked, part.format, part.method)
        kept = decode_linear(encoded, part.format, values.shape[1])
        rows, columns = checkpoint.tensor(source).shape
        rows = min(rows, part.out_features)  # a trimmed head has fewer
        entry = totals.setdefault((kind.name, part.format.name, part.method), np.zeros(3))
        entry += rows * columns, np.square(kept - values).sum(), np.square(values).sum()
    return tuple(
        FormatLoss(kind, form, int(count), float(np.sqrt(error / norm)) if norm else 0.0, method)
        for (kind, form, method), (count, error, norm) in sorted(totals.items())
    )


def _sources(plan: DecoderPlan) -> Iterable[tuple[str, LinearPart]]:
    return (
        (source, part) for spec in plan.linears.values() for part in spec.parts for source in part.sources
    )
