"""Write a graph's weights, matrix by matrix, into one external data file.

Memory stays bounded: a few chunks of about a million weights are under way at any time, encoded by a
small pool of threads (numpy releases the interpreter's lock) and written in order.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec_export.blocks import F32, Blocks, largest, unpack
from edgespec_export.checkpoint import Checkpoint, SourceTensor
from edgespec_export.encode import Encoded, encode_embedding, encode_linear
from edgespec_models.errors import ModelFileError
from edgespec_models.graphs.decoder import DecoderPlan, rotary_rows
from edgespec_models.graphs.linear import LinearPart
from edgespec_models.graphs.names import module_path
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.rope import rotary_tables

__all__ = ["DATA_FILE", "Parameters", "allocate", "bytes_by_class", "write_weights"]

DATA_FILE = "model.onnx.data"
_CHUNK_WEIGHTS = 1 << 20
_IN_FLIGHT = 4
_LARGEST = 1e15  # no model has such weights, and their squares are finite still
_PAGE = 4096  # mapped weights should start on a page


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Source tensors that become the rows of parameters called ``prefix.*``."""

    prefix: str
    sources: tuple[str, ...]
    encode: Callable[[Blocks | F32], Encoded]
    keep: npt.NDArray[np.int64] | None = None  # ascending rows; None keeps all


class Parameters:
    """Parameters in the data file, each written row after row in its own type."""

    def __init__(self, file: BinaryIO, parameters: dict[str, ir.Value], offsets: dict[str, int]) -> None:
        self._file, self._at = file, dict(offsets)
        self._types = {name: value.dtype.numpy() for name, value in parameters.items() if value.dtype}

    def append(self, name: str, rows: npt.NDArray[np.generic]) -> None:
        """Write ``rows`` behind those that are there."""
        rows = np.ascontiguousarray(rows, self._types[name])
        _write_at(self._file, self._at[name], rows)
        self._at[name] += rows.nbytes


def write_weights(
    model: ir.Model,
    plan: DecoderPlan,
    checkpoint: Checkpoint,
    folder: Path,
    progress: ProgressCallback,
) -> dict[str, int]:
    """Fill every parameter of ``model`` from ``checkpoint``; the bytes go to ``folder / DATA_FILE``.

    Returns:
        Bytes by tensor class: ``embedding``, ``attention``, ``mlp``, ``lm_head``, ``other``.
    """
    parameters = {
        name: value for name, value in model.graph.initializers.items() if value.const_value is None
    }
    offsets, size = allocate(parameters, folder)
    matrices = list(_matrices(plan))
    sources = [source for matrix in matrices for source in matrix.sources]
    total, done = sum(checkpoint.tensor(source).n_bytes for source in sources), 0
    with (folder / DATA_FILE).open("wb") as file, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        parts_of_file = Parameters(file, parameters, offsets)
        for name, small in _small_tensors(plan, checkpoint):
            parts_of_file.append(name, small)
        for matrix in matrices:
            for written in _write_matrix(parts_of_file, checkpoint, matrix, pool):
                done += written
                progress(Progress("Exporting", done, total))
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    return bytes_by_class(parameters)


def allocate(parameters: dict[str, ir.Value], folder: Path) -> tuple[dict[str, int], int]:
    """Give every parameter its place in the data file; returns the places and the file's size."""
    offsets, at = {}, 0
    for name, value in parameters.items():
        assert value.shape is not None and value.dtype is not None
        shape = [int(dim) for dim in value.shape]  # type: ignore[arg-type]
        n_bytes = int(np.prod(shape)) * value.dtype.itemsize
        at = -(-at // _PAGE) * _PAGE
        value.const_value = ir.ExternalTensor(
            DATA_FILE, at, int(n_bytes), value.dtype, shape=ir.Shape(shape), name=name, base_dir=folder
        )
        offsets[name] = at
        at += int(n_bytes)
    return offsets, at


def _matrices(plan: DecoderPlan) -> Iterator[_Matrix]:
    table = plan.embedding
    yield _Matrix("embedding", ("embed",), lambda source: encode_embedding(source, table))
    for name, spec in plan.linears.items():
        keep = None
        if name == "lm_head" and plan.head_tokens is not None:
            keep = np.array(plan.head_tokens, np.int64)
        for index, part in enumerate(spec.parts):
            yield _Matrix(f"{module_path(name)}.parts.{index}", part.sources, _encoder(part), keep)


def _encoder(part: LinearPart) -> Callable[[Blocks | F32], Encoded]:
    return lambda source: encode_linear(source, part.format, part.method)


def _small_tensors(plan: DecoderPlan, checkpoint: Checkpoint) -> Iterator[tuple[str, F32]]:
    """Norms, biases and rotary tables: name in the graph, values."""
    yield "final_norm.weight", checkpoint.values("final_norm")
    for i in range(checkpoint.config.num_layers):
        for name in ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm"):
            if f"layers.{i}.{name}" in checkpoint.tensors:
                module = f"attention.{name}" if name in ("q_norm", "k_norm") else name
                yield f"layers.{i}.{module}.weight", checkpoint.values(f"layers.{i}.{name}")
    for linear, spec in plan.linears.items():
        for index, part in enumerate(spec.parts):
            if part.biases:
                bias = np.concatenate([checkpoint.values(name) for name in part.biases])
                yield f"{module_path(linear)}.parts.{index}.bias", bias
    config = checkpoint.config
    positions = rotary_rows(config)
    tables = rotary_tables(config, config.rope_theta, config.rope_factors, positions=positions)
    yield from zip(("rope_cos", "rope_sin"), tables, strict=True)
    if config.rope_local_theta is not None:
        tables = rotary_tables(config, config.rope_local_theta, positions=positions)
        yield from zip(("rope_local_cos", "rope_local_sin"), tables, strict=True)


def _write_matrix(
    parameters: Parameters,
    checkpoint: Checkpoint,
    matrix: _Matrix,
    pool: ThreadPoolExecutor,
) -> Iterator[int]:
    """Encode and write one matrix; yields source bytes done."""
    pending: deque[tuple[int, Future[Encoded]]] = deque()
    for tensor, n_bytes, raw in _chunks(checkpoint, matrix):
        pending.append((n_bytes, pool.submit(_encode_chunk, matrix.encode, tensor, raw)))
        if len(pending) >= _IN_FLIGHT:
            yield _drain(parameters, matrix.prefix, pending)
    while pending:
        yield _drain(parameters, matrix.prefix, pending)


def _chunks(
    checkpoint: Checkpoint, matrix: _Matrix
) -> Iterator[tuple[SourceTensor, int, npt.NDArray[np.uint8]]]:
    """The tensor, bytes read, and those of its rows that are kept."""
    for source in matrix.sources:
        rows, columns = checkpoint.tensor(source).shape
        step = max(1, _CHUNK_WEIGHTS // columns)
        for start in range(0, rows, step):
            _, raw = checkpoint.read(source, start, min(start + step, rows))
            n_bytes = raw.nbytes
            if matrix.keep is not None:
                first, last = np.searchsorted(matrix.keep, [start, start + len(raw)])
                raw = raw[matrix.keep[first:last] - start]
            if len(raw):
                yield checkpoint.tensor(source), n_bytes, raw


def _encode_chunk(
    encode: Callable[[Blocks | F32], Encoded], tensor: SourceTensor, raw: npt.NDArray[np.uint8]
) -> Encoded:
    source = unpack(tensor.type, raw)
    if largest(source) > _LARGEST:
        raise ModelFileError(
            f"tensor {tensor.name!r} holds weights that are not finite numbers; download or convert it again"
        )
    return encode(source)


def _drain(parameters: Parameters, prefix: str, pending: deque[tuple[int, Future[Encoded]]]) -> int:
    n_bytes, future = pending.popleft()
    for name, array in future.result().arrays.items():
        parameters.append(f"{prefix}.{name}", array)
    return n_bytes


def _write_at(file: BinaryIO, offset: int, array: npt.NDArray[np.generic]) -> None:
    file.seek(offset)
    file.write(array.data)


def bytes_by_class(parameters: dict[str, ir.Value]) -> dict[str, int]:
    """Bytes of ``embedding``, ``attention``, ``mlp``, ``lm_head``, ``other``."""
    totals = dict.fromkeys(("embedding", "attention", "mlp", "lm_head", "other"), 0)
    for name, value in parameters.items():
        assert value.const_value is not None
        kind = next((part for part in name.split(".") if part in totals), "other")
        totals[kind] += value.const_value.nbytes
    return totals
