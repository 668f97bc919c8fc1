"""A decoder's graph and weights on disk: formats planned, weights encoded and written, losses measured."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir

from edgespec_export.activations import open_activations
from edgespec_export.checkpoint import Checkpoint
from edgespec_export.gptq import factor
from edgespec_export.losses import measure_losses
from edgespec_export.native import measure_native_losses, plan_native, write_native
from edgespec_export.plan import POLICIES, default_weights, plan_decoder
from edgespec_export.quantization import Quantization
from edgespec_export.ranges import precision_for
from edgespec_export.report import ActivationRanges, FormatLoss
from edgespec_export.trim import Tokens
from edgespec_export.writer import FactorsOf, linears_to_calibrate, write_weights
from edgespec_models.bundle import GRAPH, HEAD_TOKENS, Operators
from edgespec_models.config import FloatType
from edgespec_models.graphs.decoder import FULL, DecoderPlan, build_decoder
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
        even_rows: whether formats of the layers want passes of an even number of rows.
        even_head: the same of the LM head.
    """

    weights: str
    bytes_by_class: dict[str, int]
    losses: tuple[FormatLoss, ...]
    head_weights: int
    operators: Operators
    activations: FloatType = "float32"
    choices: bool = True
    even_rows: bool = False
    even_head: bool = False


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
    quantization = options.quantization if isinstance(options.quantization, Quantization) else None
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
    policy = options.weights or default_weights(checkpoint, options.role)
    plan = plan_decoder(
        checkpoint,
        options.quantization or POLICIES[policy],
        hidden_states=options.hidden_states,
        spare_rows=options.role == "target" and options.device is None,
        head_tokens=None if kept is None else tuple(kept.tolist()),
        precision=FULL if ranges is None else precision_for(ranges),
    )
    model = build_decoder(checkpoint.config, plan)
    with _factors(plan, checkpoint, options.trim.texts, folder, progress) as factors:
        by_class = write_weights(model, plan, checkpoint, folder, progress, factors)
    losses = measure_losses(plan, checkpoint, model)
    onnx_ir.save(model, folder / GRAPH)
    head, floats = plan.linears["lm_head"], plan.precision.activations
    return WrittenGraph(
        policy if options.quantization is None else options.quantization.name,
        by_class,
        losses,
        head.in_features * head.out_features,
        "standard",
        floats,
        plan.choices,
        _even_rows(plan, head=False),
        _even_rows(plan, head=True),
    )


def _even_rows(plan: DecoderPlan, *, head: bool) -> bool:
    """Whether formats of the LM head, or of the layers, want passes of an even number of rows."""
    if plan.precision.activations != "float32":  # kernels of its own, for which nothing is known
        return False
    specs = (spec for name, spec in plan.linears.items() if (name == "lm_head") == head)
    return any(part.format.even_rows for spec in specs for part in spec.parts)


@contextmanager
def _factors(
    plan: DecoderPlan,
    checkpoint: Checkpoint,
    texts: Sequence[Path],
    folder: Path,
    progress: ProgressCallback,
) -> Iterator[FactorsOf | None]:
    """The factors of the activations, computed where they are asked for; None where no part needs any."""
    wanted = linears_to_calibrate(plan)
    if not wanted:
        yield None
        return
    with open_activations(checkpoint, wanted, texts, folder / "activations", progress) as activations:
        yield lambda linear: [factor(moments) for moments in activations.moments(linear)]
