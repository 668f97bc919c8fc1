"""A decoder's graph and weights on disk: formats planned, weights encoded and written, losses measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir

from edgespec_export.checkpoint import Checkpoint
from edgespec_export.losses import measure_losses
from edgespec_export.native import measure_native_losses, plan_native, write_native
from edgespec_export.plan import plan_decoder
from edgespec_export.ranges import precision_for
from edgespec_export.report import ActivationRanges, FormatLoss
from edgespec_export.trim import Tokens
from edgespec_export.writer import write_weights
from edgespec_models.bundle import GRAPH, HEAD_TOKENS, Operators
from edgespec_models.config import FloatType
from edgespec_models.graphs.decoder import FULL, build_decoder
from edgespec_models.graphs.native import build_native
from edgespec_models.progress import ProgressCallback

if TYPE_CHECKING:
    from edgespec_export.export import ExportOptions

__all__ = ["WrittenGraph", "write_graph"]


@dataclass(frozen=True, slots=True)
class WrittenGraph:
    """A graph on disk, as the manifest tells of it.

    Attributes:
        weights: name of the formats' policy.
        bytes_by_class: bytes of ``embedding``, ``attention``, ``mlp``, ``lm_head``, ``other``.
        losses: what the formats cost the weights.
        head_weights: weights of the LM head.
        operators: whose the graph consists of.
        activations: what it computes in.
        choices: whether it says which columns are the most likely.
    """

    weights: str
    bytes_by_class: dict[str, int]
    losses: tuple[FormatLoss, ...]
    head_weights: int
    operators: Operators
    activations: FloatType = "float32"
    choices: bool = True


def write_graph(
    checkpoint: Checkpoint,
    folder: Path,
    options: "ExportOptions",
    settled: tuple[Tokens | None, ActivationRanges | None],
    progress: ProgressCallback,
) -> WrittenGraph:
    """Write the graph, its weights, and the tokens of a trimmed LM head.

    Args:
        checkpoint: the source.
        folder: the bundle's.
        options: of the export.
        settled: tokens that a trimmed LM head keeps, None for all; and what float16 would have to hold, None
            for a graph in float32.
        progress: told of stages.

    Raises:
        UnsupportedModelError: float16 does not hold it.
        ModelFileError: weights that cannot be read.
    """
    if settled[0] is not None:
        np.save(folder / HEAD_TOKENS, settled[0])
    if options.native:
        return _write_native(checkpoint, folder, options, settled[0], progress)
    return _write_standard(checkpoint, folder, options, settled, progress)


def _write_native(
    checkpoint: Checkpoint,
    folder: Path,
    options: "ExportOptions",
    kept: Tokens | None,
    progress: ProgressCallback,
) -> WrittenGraph:
    quantization = options.quantization
    method = "fit" if quantization is None else quantization.method
    plan = plan_native(
        checkpoint,
        quantization,
        tunable=options.role == "drafter",
        head_tokens=None if kept is None else tuple(kept.tolist()),
    )
    model = build_native(checkpoint.config, plan)
    by_class = write_native(model, plan, checkpoint, folder, method, progress)
    losses = measure_native_losses(plan, checkpoint, model, method)
    onnx_ir.save(model, folder / GRAPH)
    name = "exact" if quantization is None else quantization.name
    head = sum(part.rows * part.columns for part in plan.linears["lm_head"])
    return WrittenGraph(name, by_class, losses, head, "edgespec")


def _write_standard(
    checkpoint: Checkpoint,
    folder: Path,
    options: "ExportOptions",
    settled: tuple[Tokens | None, ActivationRanges | None],
    progress: ProgressCallback,
) -> WrittenGraph:
    kept, ranges = settled
    plan = plan_decoder(
        checkpoint,
        options.quantization,
        tunable=options.role == "drafter" and options.device is None,
        head_tokens=None if kept is None else tuple(kept.tolist()),
        precision=FULL if ranges is None else precision_for(ranges),
    )
    model = build_decoder(checkpoint.config, plan)
    by_class = write_weights(model, plan, checkpoint, folder, progress)
    losses = measure_losses(plan, checkpoint, model)
    onnx_ir.save(model, folder / GRAPH)
    head, floats = plan.linears["lm_head"], plan.precision.activations
    name = "portable" if options.quantization is None else options.quantization.name
    weights = head.in_features * head.out_features
    return WrittenGraph(name, by_class, losses, weights, "standard", floats, plan.choices)
