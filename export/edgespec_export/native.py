"""Bundles for edgespec's own kernels: every quantized matrix keeps the blocks that its file has.

Matrices in floating point are rounded into the same block formats.
"""

from collections.abc import Iterator
from types import MappingProxyType

import numpy as np

from edgespec_export.blocks import F32, U8, Blocks
from edgespec_export.checkpoint import Checkpoint
from edgespec_export.encode import Arrays
from edgespec_export.gguf import GGMLType
from edgespec_export.quantization import Quantization
from edgespec_export.rounding import Rounding, round_matrix
from edgespec_export.tiles import pack, pack_blocks, unpack_tiles
from edgespec_export.writer import Stored
from edgespec_models.graphs.definition import module_path
from edgespec_models.graphs.native import Matrix, NativePlan
from edgespec_models.tiles import FORMATS, LANES, tile_bytes
from edgespec_models.weight_format import Method, WeightFormat

__all__ = ["native_biases", "plan_native", "stored_native"]

_LARGE = 1_000_000_000  # weights; smaller models lose too much by 4 bits that nobody chose for them
_LAYER = (("qkv", ("q", "k", "v")), ("o", ("o",)), ("gate_up", ("gate", "up")), ("down", ("down",)))
_ROUNDED = MappingProxyType(
    {
        "Q8_0": WeightFormat(8, 32),
        "Q4_0": WeightFormat(4, 32),
        "Q4_1": WeightFormat(4, 32, minimums=True),
    }
)


def plan_native(
    checkpoint: Checkpoint,
    quantization: Quantization | None,
    *,
    tunable: bool,
    head_tokens: tuple[int, ...] | None = None,
) -> NativePlan:
    """Choose a format for every matrix.

    Args:
        checkpoint: the source.
        quantization: how to round every matrix anew; None keeps quantized ones as they are.
        tunable: whether gains may be replaced at run time.
        head_tokens: the tokens a trimmed LM head keeps.

    Raises:
        UnsupportedModelError: a width without whole blocks.
    """
    config = checkpoint.config

    def matrix(source: str) -> Matrix:
        rows, columns = checkpoint.tensor(source).shape
        if source == "lm_head" and head_tokens is not None:
            rows = len(head_tokens)
        form = _format_of(checkpoint, source, quantization)
        tile_bytes(form, rows, columns)  # refuses widths
        return Matrix(checkpoint.stored_name(source), form, rows, columns)

    linears: dict[str, tuple[Matrix, ...]] = {"lm_head": (matrix("lm_head"),)}
    for layer in range(config.num_layers):
        for name, sources in _LAYER:
            linears[f"layers.{layer}.{name}"] = tuple(matrix(f"layers.{layer}.{each}") for each in sources)
    return NativePlan(
        matrix("embed"),
        linears,
        biases=checkpoint.has_biases,
        tunable=tunable,
        head_tokens=head_tokens,
        context=head_tokens is not None and checkpoint.tied_head,
    )


def _format_of(checkpoint: Checkpoint, source: str, quantization: Quantization | None) -> str:
    tensor, config = checkpoint.tensor(source), checkpoint.config
    if tensor.type.name in FORMATS and (quantization is None or source == "embed"):
        return tensor.type.name
    if quantization is not None:
        name = "lm_head" if source == "embed" else source
        return quantization.block_format(name, tensor.type, config.num_layers)
    weights = sum(each.shape[0] * each.shape[-1] for each in checkpoint.tensors.values())
    layers = source not in ("embed", "lm_head")
    return "Q4_1" if layers and weights >= _LARGE else "Q8_0"


def native_biases(plan: NativePlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Parameters that hold biases, and the tensors in each."""
    for name in plan.linears:
        if plan.biases and name.endswith(".qkv"):
            layer = name.removesuffix("qkv")
            yield f"{module_path(name)}.bias", tuple(f"{layer}{each}_bias" for each in "qkv")


def stored_native(plan: NativePlan, checkpoint: Checkpoint, method: Method) -> list[Stored]:
    """Where every matrix comes from; floats are rounded by ``method``."""
    rounding: Rounding = "fit" if method == "keep" else method

    def stored(parameter: str, matrix: Matrix) -> Stored:
        form, keep = matrix.format, None
        if parameter.startswith("lm_head.") and plan.head_tokens is not None:
            keep = np.array(plan.head_tokens, np.int64)

        def encode(kind: GGMLType, raw: U8, source: Blocks | F32) -> Arrays:
            if kind.name == form:
                return {"weight": pack(form, raw)}
            values = source.values() if isinstance(source, Blocks) else source
            return {"weight": pack_blocks(form, round_matrix(values, _ROUNDED[form], rounding), values)}

        return Stored(
            prefix=parameter.removesuffix(".weight"),
            sources=(matrix.source,),
            format=form,
            method="keep" if checkpoint.tensor(matrix.source).type.name == form else rounding,
            encode=encode,
            decode=lambda arrays, rows, columns: unpack_tiles(form, arrays["weight"], rows, columns),
            keep=keep,
            lanes=LANES,
        )

    return [stored(parameter, matrix) for parameter, matrix in plan.matrices().items()]
