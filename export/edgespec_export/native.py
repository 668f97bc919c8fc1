"""Bundles for edgespec's own kernels: every quantized matrix keeps the blocks that its file has.

Matrices in floating point are rounded into the same block formats.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from os import cpu_count, fsync
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec_export.blocks import F32, U8, Blocks, largest, unpack
from edgespec_export.checkpoint import Checkpoint
from edgespec_export.gguf import GGMLType
from edgespec_export.quantization import Quantization
from edgespec_export.report import FormatLoss
from edgespec_export.rounding import Rounding, round_matrix
from edgespec_export.tiles import pack, pack_blocks, unpack_tiles
from edgespec_export.writer import DATA_FILE, Parameters, allocate, bytes_by_class
from edgespec_models.errors import ModelFileError
from edgespec_models.graphs.names import module_path
from edgespec_models.graphs.native import Matrix, NativePlan
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.rope import rotary_tables
from edgespec_models.tiles import FORMATS, LANES, tile_bytes
from edgespec_models.weight_format import Method, WeightFormat

__all__ = ["measure_native_losses", "plan_native", "write_native"]

_LARGE = 1_000_000_000  # weights; smaller models lose too much by 4 bits that nobody chose for them
_CHUNK_WEIGHTS, _IN_FLIGHT, _LARGEST = 1 << 20, 4, 1e15
_SAMPLE_ROWS = 16
_LAYER = (("qkv", ("q", "k", "v")), ("o", ("o",)), ("gate_up", ("gate", "up")), ("down", ("down",)))
_ROUNDED = MappingProxyType(
    {
        "Q8_0": WeightFormat(8, 32),
        "Q4_0": WeightFormat(4, 32),
        "Q4_1": WeightFormat(4, 32, minimums=True),
    }
)
_SMALL_NORMS = ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm")


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
        biases="layers.0.q_bias" in checkpoint.tensors,
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


def write_native(
    model: ir.Model,
    plan: NativePlan,
    checkpoint: Checkpoint,
    folder: Path,
    method: Method,
    progress: ProgressCallback,
) -> dict[str, int]:
    """Fill every parameter of ``model`` from ``checkpoint``; returns bytes by tensor class."""
    named = {k: v for k, v in model.graph.initializers.items() if v.const_value is None}
    offsets, size = allocate(named, folder)
    matrices = plan.matrices()
    total, done = sum(checkpoint.tensor(each.source).n_bytes for each in matrices.values()), 0
    with (folder / DATA_FILE).open("wb") as file, ThreadPoolExecutor(cpu_count() or 1) as pool:
        parameters = Parameters(file, named, offsets)
        for name, small in _small_tensors(plan, checkpoint):
            parameters.append(name, small)
        for name, matrix in matrices.items():
            keep = plan.head_tokens if name.startswith("lm_head.") else None
            for tiles, n_bytes in _tiles(checkpoint, matrix, keep, method, pool):
                parameters.append(name, tiles)
                done += n_bytes
                progress(Progress("Exporting", done, total))
        file.truncate(size)
        file.flush()
        fsync(file.fileno())
    by_class = bytes_by_class(named)
    if plan.tied:  # a pass reads all of it
        by_class["lm_head"], by_class["embedding"] = by_class["embedding"], 0
    return by_class


def _small_tensors(plan: NativePlan, checkpoint: Checkpoint) -> Iterator[tuple[str, F32]]:
    """Norms, biases and rotary tables: name in the graph, values."""
    config = checkpoint.config
    yield "final_norm.weight", checkpoint.values("final_norm")
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        for name in _SMALL_NORMS:
            if f"{prefix}.{name}" in checkpoint.tensors:
                module = f"attention.{name}" if name in ("q_norm", "k_norm") else name
                yield f"{prefix}.{module}.weight", checkpoint.values(f"{prefix}.{name}")
        if plan.biases:
            biases = [checkpoint.values(f"{prefix}.{each}_bias") for each in "qkv"]
            yield f"{module_path(f'{prefix}.qkv')}.bias", np.concatenate(biases)
    thetas = {"rope": (config.rope_theta, config.rope_factors)}
    if config.rope_local_theta is not None:
        thetas["rope_local"] = (config.rope_local_theta, ())
    for kind, (theta, factors) in thetas.items():
        tables = rotary_tables(config, theta, factors, positions=config.context_length)
        yield from zip((f"{kind}_cos", f"{kind}_sin"), tables, strict=True)


def _tiles(
    checkpoint: Checkpoint,
    matrix: Matrix,
    keep: Sequence[int] | None,
    method: Method,
    pool: ThreadPoolExecutor,
) -> Iterator[tuple[U8, int]]:
    """A matrix's tiles in order, and the source's bytes that went into them."""
    tensor = checkpoint.tensor(matrix.source)
    encode = partial(encode_tiles, tensor.name, matrix.format, method)
    pending: deque[tuple[int, Future[U8]]] = deque()
    for kind, raw, n_bytes in _rows(checkpoint, matrix, keep):
        pending.append((n_bytes, pool.submit(encode, kind, raw)))
        if len(pending) >= _IN_FLIGHT:
            read, future = pending.popleft()
            yield future.result(), read
    for read, future in pending:
        yield future.result(), read


def _rows(
    checkpoint: Checkpoint, matrix: Matrix, keep: Sequence[int] | None
) -> Iterator[tuple[GGMLType, U8, int]]:
    """The rows that are kept, whole tiles of them at a time, the last filled up with zeros."""
    rows = checkpoint.tensor(matrix.source).shape[0]
    wanted = None if keep is None else np.array(keep, np.int64)
    step = max(LANES, _CHUNK_WEIGHTS // matrix.columns // LANES * LANES)
    rest: U8 | None = None
    for start in range(0, rows, step):
        kind, raw = checkpoint.read(matrix.source, start, min(start + step, rows))
        n_bytes = raw.nbytes
        if wanted is not None:
            first, last = np.searchsorted(wanted, [start, start + len(raw)])
            raw = raw[wanted[first:last] - start]
        if rest is not None:
            raw = np.concatenate([rest, raw])
        whole = len(raw) // LANES * LANES
        rest = raw[whole:]
        if start + step >= rows and len(rest):
            raw = np.concatenate([raw, np.zeros((LANES - len(rest), *raw.shape[1:]), np.uint8)])
            whole += LANES
        if whole:
            yield kind, raw[:whole], n_bytes


def encode_tiles(name: str, form: str, method: Method, kind: GGMLType, raw: U8) -> U8:
    """Raw rows of tensor ``name``, whole tiles of them, in ``form``.

    Raises:
        ModelFileError: weights that are not finite numbers.
    """
    source = unpack(kind, raw)
    if largest(source) > _LARGEST:
        raise ModelFileError(
            f"tensor {name!r} holds weights that are not finite numbers; download or convert it again"
        )
    if kind.name == form:
        return pack(form, raw)
    values = source.values() if isinstance(source, Blocks) else source
    return pack_blocks(form, round_matrix(values, _ROUNDED[form], _rounding(method)), values)


def measure_native_losses(
    plan: NativePlan, checkpoint: Checkpoint, model: ir.Model, method: Method
) -> tuple[FormatLoss, ...]:
    """Compare a sample of every matrix of ``model`` with its source, by pair of formats."""
    totals: dict[tuple[str, str], npt.NDArray[np.float64]] = {}
    for name, matrix in plan.matrices().items():
        tensor = checkpoint.tensor(matrix.source)
        kept = plan.head_tokens if name.startswith("lm_head.") else None
        rows = (kept or range(matrix.rows))[:_SAMPLE_ROWS]
        values = np.concatenate([checkpoint.values(matrix.source, row, row + 1) for row in rows])
        stored = unpack_tiles(matrix.format, _first_tiles(model, name, matrix), len(rows), matrix.columns)
        entry = totals.setdefault((tensor.type.name, matrix.format), np.zeros(3))
        entry += matrix.rows * matrix.columns, np.square(stored - values).sum(), np.square(values).sum()
    return tuple(
        FormatLoss(
            kind,
            form,
            int(count),
            float(np.sqrt(error / norm)) if norm else 0.0,
            "keep" if kind == form else _rounding(method),
        )
        for (kind, form), (count, error, norm) in sorted(totals.items())
    )


def _rounding(method: Method) -> Rounding:
    return "fit" if method == "keep" else method


def _first_tiles(model: ir.Model, name: str, matrix: Matrix) -> U8:
    tensor = model.graph.initializers[name].const_value
    assert isinstance(tensor, ir.ExternalTensor) and tensor.offset is not None
    with Path(tensor.path).open("rb") as file:
        file.seek(tensor.offset)
        count = tile_bytes(matrix.format, LANES, matrix.columns)
        return np.frombuffer(file.read(count), np.uint8)
