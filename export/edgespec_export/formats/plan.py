"""The format of each weight of a graph, and its source.

For edgespec's own kernels every quantized matrix keeps its file's blocks, and floats are rounded into block
formats. For ONNX Runtime's operators a format that they lack becomes the nearest one that they have. A
quantization of the user's choice replaces both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec_export.formats.encode import Arrays, decode_linear, encode_embedding, encode_linear
from edgespec_export.formats.quantization import Quantization
from edgespec_export.formats.rounding import round_matrix
from edgespec_export.sources.adapters import Adapted
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.tiles import pack, pack_blocks, unpack_tiles
from edgespec_models.bundles.weight_format import FORMATS, LANES, WeightFormat, tile_bytes
from edgespec_models.decoders.record import record
from edgespec_models.files.blocks import F32, WITHIN, Blocks, unpack, values_of
from edgespec_models.files.tensors import FLOATS, U8, GGMLType
from edgespec_models.graphs.plan import (
    FULL,
    DecoderPlan,
    EmbeddingSpec,
    LinearPart,
    LinearSpec,
    Precision,
)

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
"""The stored form of multiplied matrices, by their format in the source."""

_EXACT = ("delta_decay", "delta_strength")  # small, and every later token depends on them
_COLUMNS = frozenset(("lm_head", "chain_out"))  # which have a row for each column of the logits
_TABLES = ("embed", "inputs", "chain_in")  # a pass reads some of their rows
_LARGE = 1_000_000_000  # weights; smaller models lose too much by 4 bits that no user chose, and so
# do matrices that a quantized file keeps in floating point
_ROUNDED = MappingProxyType(
    {
        "Q8_0": WeightFormat(8, 32),
        "Q4_0": WeightFormat(4, 32),
        "Q4_1": WeightFormat(4, 32, minimums=True),
    }
)
"""The rounding of floats in tiles."""


def plan_decoder(
    checkpoint: Checkpoint,
    quantization: Quantization | None = None,
    *,
    native: bool = False,
    head_tokens: tuple[int, ...] | None = None,
    precision: Precision = FULL,
) -> DecoderPlan:
    """Assign formats; for ONNX Runtime, neighbours with one format become one matrix.

    Without a ``quantization`` each matrix keeps its format, or gets the nearest one in :data:`PORTABLE`.
    ``native`` is for edgespec's own kernels. ``head_tokens`` are the tokens of a trimmed LM head.

    Raises:
        UnsupportedModelError: a width without whole blocks, for edgespec's kernels.
    """
    largest = 64 if precision == FULL else _GPU_BLOCK

    def form(source: str) -> WeightFormat:
        if native:
            return _tiles(checkpoint, source, quantization)
        return _portable(checkpoint, source, quantization, largest)

    def linear(sources: tuple[str, ...], path: str) -> LinearSpec:
        alone = ((form(source), [source]) for source in sources)
        groups = alone if native else groupby(sources, form)
        parts = tuple(_part(checkpoint, tuple(group), chosen) for chosen, group in groups)
        return LinearSpec(checkpoint.tensor(sources[0]).shape[-1], parts, path)

    products = record(checkpoint.config).products
    linears = {name: linear(product.matrices, product.path) for name, product in products.items()}
    for name in _COLUMNS & linears.keys() if head_tokens is not None else ():
        kept = replace(linears[name].parts[0], out_features=len(head_tokens or ()))
        linears[name] = replace(linears[name], parts=(kept,))
    if native:
        (table,) = linear(("embed",), "embedding").parts
        embedding = EmbeddingSpec(table.format)
    else:
        embedding = _embedding(checkpoint, quantized=quantization is not None)
    context = head_tokens is not None and checkpoint.tied_head and "chain_out" not in linears
    of_head = checkpoint.head_tokens
    columns = None if of_head is None else tuple(of_head.tolist())
    plan = DecoderPlan(embedding, linears, head_tokens, context, columns)
    return plan if precision == FULL else _with_precision(plan, precision)


def _part(checkpoint: Checkpoint, sources: tuple[str, ...], form: WeightFormat) -> LinearPart:
    biases = tuple(name for source in sources if (name := f"{source}_bias") in checkpoint.tensors)
    rows = sum(checkpoint.tensor(name).n_rows for name in sources)
    return LinearPart(tuple(map(checkpoint.stored_name, sources)), rows, form, biases)


def _tiles(checkpoint: Checkpoint, source: str, quantization: Quantization | None) -> WeightFormat:
    """A format of edgespec's kernels."""
    tensor, config = checkpoint.tensor(source), checkpoint.config
    layers = source.rpartition(".")[2] not in (*_TABLES, "lm_head", *_EXACT)
    kept = WITHIN.get(tensor.type.name, tensor.type.name)
    if kept in FORMATS and (quantization is None or source in _TABLES):
        name = kept
    elif quantization is not None:
        name = quantization.block_format(
            "lm_head" if source in _TABLES else source, tensor.type, config.num_layers
        )
    elif (tiles := checkpoint.tiles_of(source)) is not None:
        name = tiles
    else:
        weights = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
        unquantized = all(tensor.type in FLOATS for tensor in checkpoint.tensors.values())
        name = "Q4_1" if layers and unquantized and weights >= _LARGE else "Q8_0"
    tile_bytes(name, tensor.n_rows, tensor.shape[-1])  # refuses widths
    return replace(_ROUNDED.get(name, _INT8), tiles=name)


def _portable(
    checkpoint: Checkpoint, source: str, quantization: Quantization | None, largest: int
) -> WeightFormat:
    """A format of ONNX Runtime's operators, in blocks up to ``largest``."""
    kind, columns = checkpoint.tensor(source).type, checkpoint.tensor(source).shape[-1]
    if quantization is not None:
        return quantization.format_of(source, kind, columns, checkpoint.config.num_layers)
    tensor = checkpoint.tensor(source)
    rounds = isinstance(tensor, Adapted) and tensor.base.type not in FLOATS
    chosen = _INT8 if rounds else PORTABLE[kind]  # a file that is small stays small
    whole = chosen.block <= largest and columns % chosen.block == 0
    return chosen if whole or chosen.is_float else replace(chosen, block=_INT8.block)


def _with_precision(plan: DecoderPlan, precision: Precision) -> DecoderPlan:
    """Store matrices in floating point in the type of their products."""
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


def _embedding(checkpoint: Checkpoint, *, quantized: bool) -> EmbeddingSpec:
    """The format of an embedding. Its rows are gathered, not multiplied, so a quantized table stays exact at
    no cost.

    A table in floating point gets 8 bits if matrices are ``quantized``.
    """
    row = unpack(*checkpoint.read("embed", 0, 1))
    if not isinstance(row, Blocks):
        fits = quantized and row.shape[1] % _INT8.block == 0
        return EmbeddingSpec(_INT8 if fits else WeightFormat(32))
    form = WeightFormat(4 if row.bits == 4 else 8, row.block)
    return EmbeddingSpec(form, offsets=row.minimums is not None)


def biases_of(plan: DecoderPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Parameters that hold biases, and the tensors in each."""
    for spec in plan.linears.values():
        if plan.native and spec.parts[0].biases:  # one for all parts
            yield f"{spec.path}.bias", tuple(name for part in spec.parts for name in part.biases)
        elif not plan.native:
            for index, part in enumerate(spec.parts):
                if part.biases:
                    yield f"{spec.path}.parts.{index}.bias", part.biases


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix of the graph: parameters ``prefix.*``, made of rows of the checkpoint's tensors.

    ``keep`` are ascending rows; None keeps all. ``table`` is the form of an embedding for ONNX Runtime.
    """

    prefix: str
    sources: tuple[str, ...]
    format: WeightFormat
    keep: npt.NDArray[np.int64] | None = None
    table: EmbeddingSpec | None = None

    @property
    def lanes(self) -> int:
        """Rows that are stored together; zeros fill up the last."""
        return LANES if self.format.tiles else 1

    def encode(self, kind: GGMLType, raw: U8, source: Blocks | F32) -> Arrays:
        """The parameters' rows, from raw rows of the format ``kind`` and their values."""
        tiles = self.format.tiles
        if self.table is not None:
            return encode_embedding(source, self.table)
        if not tiles:
            return encode_linear(source, self.format)
        if tiles == WITHIN.get(kind.name, kind.name):
            return {"weight": pack(tiles, raw, kind)}
        values = values_of(source)
        return {"weight": pack_blocks(tiles, round_matrix(values, _ROUNDED[tiles]), values)}

    def decode(self, arrays: Arrays, rows: int, columns: int) -> F32:
        """The inverse: the values of parameters with this many rows and columns."""
        if self.format.tiles:
            return unpack_tiles(self.format.tiles, arrays["weight"], rows, columns)
        return decode_linear(arrays, self.format, columns)


def stored(plan: DecoderPlan) -> list[Stored]:
    """The source of every matrix, the embedding first."""
    table = plan.embedding
    gathered = None if plan.native else table
    matrices = [Stored("embedding", ("embed",), table.format, table=gathered)]
    for prefix, part in plan.parts():
        trimmed = prefix.startswith(("lm_head.", "chain_out.")) and plan.head_tokens is not None
        keep = np.array(plan.head_tokens, np.int64) if trimmed else None
        matrices.append(Stored(prefix, part.sources, part.format, keep))
    return matrices
