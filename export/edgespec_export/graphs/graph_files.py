"""A decoder's graph and weights on disk: formats planned, weights encoded and written, losses measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir

from edgespec_export.formats.losses import measure_losses
from edgespec_export.formats.plan import biases_of, plan_decoder, stored
from edgespec_export.graphs.ranges import precision_for
from edgespec_export.graphs.trim import Tokens
from edgespec_export.graphs.writer import small_tensors, write_weights
from edgespec_export.report import ActivationRanges, FormatLoss
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.bundle import GRAPH, HEAD_TOKENS
from edgespec_models.bundles.config import FloatType
from edgespec_models.graphs.decoder import build_decoder, rotary_rows
from edgespec_models.graphs.native import build_native
from edgespec_models.graphs.plan import FULL
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
        activations: what it computes in.
        choices: whether it says which columns are the most likely.
    """

    weights: str
    bytes_by_class: dict[str, int]
    losses: tuple[FormatLoss, ...]
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
    kept, ranges = settled
    if kept is not None:
        np.save(folder / HEAD_TOKENS, kept)
    config, quantization, native = checkpoint.config, options.quantization, options.native
    plan = plan_decoder(
        checkpoint,
        quantization,
        native=native,
        tunable=options.role == "drafter" and options.device is None,
        head_tokens=None if kept is None else tuple(kept.tolist()),
        precision=FULL if ranges is None else precision_for(ranges),
    )
    model = build_native(config, plan) if native else build_decoder(config, plan)
    matrices = stored(plan)
    small = small_tensors(
        checkpoint, biases_of(plan), config.context_length if native else rotary_rows(config)
    )
    by_class = write_weights(model, matrices, small, checkpoint, folder, progress)
    if plan.tied:  # a pass reads all of it
        by_class["lm_head"], by_class["embedding"] = by_class["embedding"], 0
    # Of ONNX Runtime's operators, the embedding is exact.
    losses = measure_losses(matrices if native else matrices[1:], checkpoint, model)
    onnx_ir.save(model, folder / GRAPH)
    policy = "exact" if native else "portable"
    name = policy if quantization is None else quantization.name
    return WrittenGraph(name, by_class, losses, plan.precision.activations, plan.choices)
