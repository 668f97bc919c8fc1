"""What weight formats cost: a sample of every matrix, as it was written, compared with its source."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec_export.blocks import F32, Blocks, unpack
from edgespec_export.checkpoint import Checkpoint
from edgespec_export.encode import Encoded, decode_linear
from edgespec_export.report import FormatLoss
from edgespec_models.graphs.decoder import DecoderPlan
from edgespec_models.graphs.linear import LinearPart
from edgespec_models.graphs.names import module_path
from edgespec_models.weight_format import Method

__all__ = ["measure_losses"]

_SAMPLE_ROWS = 8


def measure_losses(plan: DecoderPlan, checkpoint: Checkpoint, model: ir.Model) -> tuple[FormatLoss, ...]:
    """Compare a sample of every matrix of ``model`` with its source, by pair of formats and method.

    Args:
        plan: what ``model`` was built from.
        checkpoint: its source.
        model: its parameters written.
    """
    totals: dict[tuple[str, str, Method], np.ndarray] = {}
    for name, part, prefix in _parts(plan):
        start = 0
        for source in part.sources:
            tensor = checkpoint.tensor(source)
            rows = min(tensor.shape[0], part.out_features)  # a trimmed head has fewer
            wanted = range(rows) if name != "lm_head" else plan.head_tokens or range(rows)
            values = _values(checkpoint, source, wanted[:_SAMPLE_ROWS])
            written = Encoded(_written(model, prefix, start, len(values)))
            start += rows
            errors = decode_linear(written, part.format, values.shape[1]) - values
            entry = totals.setdefault((tensor.type.name, part.format.name, part.method), np.zeros(3))
            entry += rows * tensor.shape[1], np.square(errors).sum(), np.square(values).sum()
    return tuple(
        FormatLoss(kind, form, int(count), float(np.sqrt(error / norm)) if norm else 0.0, method)
        for (kind, form, method), (count, error, norm) in sorted(totals.items())
    )


def _parts(plan: DecoderPlan) -> Iterator[tuple[str, LinearPart, str]]:
    """Every part, with its projection's name in the plan and its own in the graph."""
    for name, spec in plan.linears.items():
        for index, part in enumerate(spec.parts):
            yield name, part, f"{module_path(name)}.parts.{index}."


def _values(checkpoint: Checkpoint, source: str, rows: Sequence[int]) -> F32:
    unpacked = [unpack(*checkpoint.read(source, row, row + 1)) for row in rows]
    return np.concatenate([each.values() if isinstance(each, Blocks) else each for each in unpacked])


def _written(model: ir.Model, prefix: str, start: int, count: int) -> dict[str, npt.NDArray[Any]]:
    """``count`` rows of the parameters called ``prefix*``, from row ``start`` on."""
    arrays = {}
    for name, value in model.graph.initializers.items():
        if not name.startswith(prefix) or name.endswith(".bias"):
            continue
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor) and tensor.offset is not None
        shape, kind = tuple(tensor.shape.numpy()), tensor.dtype.numpy()
        row = int(np.prod(shape[1:])) * kind.itemsize
        with Path(tensor.path).open("rb") as file:
            file.seek(tensor.offset + start * row)
            arrays[name.removeprefix(prefix)] = np.frombuffer(file.read(count * row), kind).reshape(
                (count, *shape[1:])
            )
    return arrays
