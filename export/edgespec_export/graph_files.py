"""A decoder's graph and weights on disk: formats planned, weights encoded and written, losses measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir

from edgespec_export.checkpoint import Checkpoint
from edgespec_export.losses import measure_losses
from edgespec_export.native import native_biases, plan_native, stored_native
from edgespec_export.plan import decoder_biases, plan_decoder, stored_decoder
from edgespec_export.ranges import precision_for
from edgespec_export.report import ActivationRanges, FormatLoss
from edgespec_export.trim import Tokens
from edgespec_export.writer import small_tensors, write_weights
from edgespec_models.bundle import GRAPH, HEAD_TOKENS
from edgespec_models.config import FloatType
from edgespec_models.graphs.decoder import FULL, build_decoder, rotary_rows
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
    if settled[0] is not None:
        np.save(folder / HEAD_TOKENS, settled[0])
    write = _write_native if options.native else _write_standard
    return write(checkpoint, folder, options, settled, progress)


def _write_native(
    checkpoint: Checkpoint,
    folder: Path,
    options: "ExportOptions",
    settled: tuple[Tokens | None, ActivationRanges | None],
    progress: ProgressCallback,
) -> WrittenGraph:
    config, quantization = checkpoint.config, options.quantization
    plan = plan_native(
        checkpoint, quantization, tunable=options.role == "drafter", head_tokens=_kept(settled[0])
    )
    model = build_native(config, plan)
    matrices = stored_native(plan, checkpoint, "fit" if quantization is None else quantization.method)
    small = small_tensors(checkpoint, native_biases(plan), config.context_length)
    by_class = write_weights(model, matrices, small, checkpoint, folder, progress)
    if plan.tied:  # a pass reads all of it
        by_class["lm_head"], by_class["embedding"] = by_class["embedding"], 0
    losses = measure_losses(matrices, checkpoint, model)
    onnx_ir.save(model, folder / GRAPH)
    name = "exact" if quantization is None else quantization.name
    return WrittenGraph(name, by_class, losses)


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
        head_tokens=_kept(kept),
        precision=FULL if ranges is None else precision_for(ranges),
    )
    model = build_decoder(checkpoint.config, plan)
    matrices = stored_decoder(plan)
    small = small_tensors(checkpoint, decoder_biases(plan), rotary_rows(checkpoint.config))
    by_class = write_weights(model, matrices, small, checkpoint, folder, progress)
    losses = measure_losses(matrices[1:], checkpoint, model)  # rows of the embedding are gathered
    onnx_ir.save(model, folder / GRAPH)
    name = "portable" if options.quantization is None else options.quantization.name
    return WrittenGraph(name, by_class, losses, plan.precision.activations, plan.choices)


def _kept(tokens: Tokens | None) -> tuple[int, ...] | None:
    return None if tokens is None else tuple(tokens.tolist())
