"""The graph of standard operators: which format each of its weights gets, and where it comes from.

Formats that ONNX Runtime's kernels lack take the nearest that they have; a quantization that the user chose
takes the place of that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Final

import numpy as np

from edgespec_export.blocks import Blocks, unpack
from edgespec_export.checkpoint import FLOATS, Checkpoint
from edgespec_export.encode import decode_linear, encode_embedding, encode_linear
from edgespec_export.gguf import GGMLType
from edgespec_export.quantization import Quantization
from edgespec_export.writer import Stored
from edgespec_models.graphs.decoder import FULL, DecoderPlan, Precision
from edgespec_models.graphs.definition import module_path
from edgespec_models.graphs.linear import EmbeddingSpec, LinearPart, LinearSpec
from edgespec_models.weight_format import WeightFormat

__all__ = ["PORTABLE", "decoder_biases", "plan_decoder", "stored_decoder"]

_INT8 = WeightFormat(8, 32)
_HALF = WeightFormat(16)
_GPU_BLOCK = 32  # CUDA's kernels are made and measured for blocks of 32, and have no use for larger ones

PORTABLE: Final[Mapping[GGMLType, WeightFormat]] = MappingProxyType(
    {
        **dict.fromkeys(GGMLType, _INT8),
        **dict.fromkeys(FLOATS, WeightFormat(32)),
        GGMLType.Q4_0: WeightFormat(4, 32),
        GGMLType.Q4_1: WeightFormat(4, 32, minimums=True),
        GGMLType.Q4_K: WeightFormat(4, 32, minimums=True),
        GGMLType.Q6_K: WeightFormat(8, 64),
    }
)
"""What multiplied matrices of each source format are stored as."""


def plan_decoder(
    checkpoint: Checkpoint,
    quantization: Quantization | None = None,
    *,
    tunable: bool = False,
    head_tokens: tuple[int, ...] | None = None,
    precision: Precision = FULL,
) -> DecoderPlan:
    """Assign formats; neighbouring projections with one format are fused into one matrix.

    Args:
        checkpoint: the source.
        quantization: how to round every matrix; None keeps each as near as :data:`PORTABLE` says.
        tunable: whether gains may be replaced at run time.
        head_tokens: the tokens a trimmed LM head keeps.
        precision: what the graph computes in.
    """
    config = checkpoint.config
    largest = 64 if precision == FULL else _GPU_BLOCK

    def linear(sources: tuple[str, ...], biases: tuple[str, ...] = ()) -> LinearSpec:
        return _linear(checkpoint, quantization, (sources, biases), largest)

    head = linear(("lm_head",))
    if head_tokens is not None:
        head = replace(head, parts=(replace(head.parts[0], out_features=len(head_tokens)),))
    linears = {"lm_head": head}
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        qkv, both = (tuple(prefix + name for name in names) for names in (("q", "k", "v"), ("gate", "up")))
        biases = tuple(f"{name}_bias" for name in qkv) if checkpoint.has_biases else ()
        linears[f"{prefix}qkv"] = linear(qkv, biases)
        linears[f"{prefix}o"] = linear((f"{prefix}o",))
        linears[f"{prefix}gate_up"] = linear(both)
        linears[f"{prefix}down"] = linear((f"{prefix}down",))
    embedding = _embedding(checkpoint, quantized=quantization is not None)
    context = head_tokens is not None and checkpoint.tied_head
    plan = DecoderPlan(embedding, linears, head_tokens, context, tunable)
    return plan if precision == FULL else _with_precision(plan, precision)


def _with_precision(plan: DecoderPlan, precision: Precision) -> DecoderPlan:
    """Matrices in floating point are kept in the type that they are multiplied in."""
    linears = {
        name: replace(
            spec, parts=tuple(replace(p, format=_HALF) if p.format.is_float else p for p in spec.parts)
        )
        for name, spec in plan.linears.items()
    }
    embedding = replace(plan.embedding, zero_points=not plan.embedding.format.is_float)
    if embedding.format.is_float and precision.residual == "float16":
        embedding = replace(embedding, format=_HALF)
    return replace(plan, linears=linears, embedding=embedding, precision=precision)


def _linear(
    checkpoint: Checkpoint,
    quantization: Quantization | None,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    largest: int,
) -> LinearSpec:
    """A projection of the matrices and biases called ``names``, in blocks up to ``largest``."""
    sources, biases = names
    columns, layers = checkpoint.tensor(sources[0]).shape[1], checkpoint.config.num_layers

    def form(source: str) -> WeightFormat:
        kind = checkpoint.tensor(source).type
        if quantization is not None:
            return quantization.format_of(source, kind, columns, layers)
        chosen = PORTABLE[kind]
        whole = chosen.block <= largest and columns % chosen.block == 0
        return chosen if whole or chosen.is_float else replace(chosen, block=_INT8.block)

    method = "keep" if quantization is None else quantization.method
    parts, at = [], 0
    for chosen, group in groupby(sources, form):
        fused = tuple(group)
        rows = sum(checkpoint.tensor(name).shape[0] for name in fused)
        its_biases = biases[at : at + len(fused)] if biases else ()
        parts.append(LinearPart(fused, rows, chosen, its_biases, method))
        at += len(fused)
    return LinearSpec(columns, tuple(parts))


def _embedding(checkpoint: Checkpoint, *, quantized: bool) -> EmbeddingSpec:
    """Rows are gathered, not multiplied, so exactness costs no time: a quantized table stays as it is.

    One in floating point takes 8 bits where matrices are to be ``quantized``.
    """
    row = unpack(*checkpoint.read("embed", 0, 1))
    if not isinstance(row, Blocks):
        fits = quantized and row.shape[1] % _INT8.block == 0
        return EmbeddingSpec(_INT8 if fits else WeightFormat(32))
    form = WeightFormat(4 if row.bits == 4 else 8, row.block)
    return EmbeddingSpec(form, offsets=row.minimums is not None)


def decoder_biases(plan: DecoderPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Parameters that hold biases, and the tensors in each."""
    for linear, spec in plan.linears.items():
        for index, part in enumerate(spec.parts):
            if part.biases:
                yield f"{module_path(linear)}.parts.{index}.bias", part.biases


def stored_decoder(plan: DecoderPlan) -> list[Stored]:
    """Where every matrix comes from, the embedding first."""
    table = plan.embedding
    embedding = Stored(
        prefix="embedding",
        sources=("embed",),
        format=table.format.name,
        method="keep",
        encode=lambda kind, raw, source: encode_embedding(source, table),
        decode=lambda arrays, rows, columns: decode_linear(arrays, table.format, columns),
    )
    linears = (
        _stored(f"{module_path(name)}.parts.{index}", part, plan.head_tokens if name == "lm_head" else None)
        for name, spec in plan.linears.items()
        for index, part in enumerate(spec.parts)
    )
    return [embedding, *linears]


def _stored(prefix: str, part: LinearPart, keep: tuple[int, ...] | None) -> Stored:
    return Stored(
        prefix=prefix,
        sources=part.sources,
        format=part.format.name,
        method=part.method,
        encode=lambda kind, raw, source: encode_linear(source, part.format, part.method),
        decode=lambda arrays, rows, columns: decode_linear(arrays, part.format, columns),
        keep=None if keep is None else np.array(keep, np.int64),
    )
