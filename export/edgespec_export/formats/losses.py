"""What weight formats cost: a sample of every matrix, as it was written, compared with its source."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgespec_export.formats.encode import Arrays
from edgespec_export.graphs.writer import Stored
from edgespec_export.report import FormatLoss
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.weight_format import Method

__all__ = ["measure_losses"]

_SAMPLE_ROWS = 8


def measure_losses(
    matrices: Iterable[Stored], checkpoint: Checkpoint, model: ir.Model
) -> tuple[FormatLoss, ...]:
    """Compare a sample of ``matrices``, as written in ``model``, with its source, by formats and method."""
    totals: dict[tuple[str, str, Method], np.ndarray] = {}
    for matrix in matrices:
        start, rows = 0, sum(len(_kept(matrix, checkpoint, source)) for source in matrix.sources)
        for source in matrix.sources:
            tensor = checkpoint.tensor(source)
            kept = _kept(matrix, checkpoint, source)
            wanted = kept[: max(_SAMPLE_ROWS, matrix.lanes)]
            values = np.concatenate([checkpoint.values(source, row, row + 1) for row in wanted])
            written = _written(model, matrix, range(start, start + len(wanted)), rows)
            start += len(kept)
            errors = matrix.decode(written, len(wanted), values.shape[1]) - values
            entry = totals.setdefault((tensor.type.name, matrix.format, matrix.method), np.zeros(3))
            entry += len(kept) * tensor.shape[1], np.square(errors).sum(), np.square(values).sum()
    return tuple(
        FormatLoss(kind, form, int(count), float(np.sqrt(error / norm)) if norm else 0.0, method)
        for (kind, form, method), (count, error, norm) in sorted(totals.items())
    )


def _kept(matrix: Stored, checkpoint: Checkpoint, source: str) -> Sequence[int]:
    """The rows of one of its sources that a matrix has."""
    return range(checkpoint.tensor(source).shape[0]) if matrix.keep is None else matrix.keep.tolist()


def _written(model: ir.Model, matrix: Stored, wanted: range, rows: int) -> Arrays:
    """The ``wanted`` of all ``rows`` of a matrix's parameters, by their last names."""
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
