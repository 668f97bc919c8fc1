"""A decoder's graph on disk, and its weights, matrix by matrix, in one file beside it.

Memory stays bounded: a few chunks of about a million weights are under way at any time, encoded by a
small pool of threads (numpy releases the interpreter's lock) and written in order.
"""

import errno
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec_export.formats.encode import Arrays
from edgespec_export.formats.plan import Stored, biases_of, plan_decoder, stored
from edgespec_export.journal import DATA_FILE, Journal
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.bundle import GRAPH
from edgespec_models.decoders.config import MTP_ROWS
from edgespec_models.decoders.record import record
from edgespec_models.errors import ModelFileError
from edgespec_models.files.blocks import largest, unpack
from edgespec_models.files.tensors import U8, Tensor
from edgespec_models.graphs.decoder import build_decoder, rotary_rows
from edgespec_models.graphs.native import build_native
from edgespec_models.graphs.plan import DecoderPlan
from edgespec_models.progress import Progress, ProgressCallback

JOURNALED_BYTES = 1 << 28
"""Weights of this many bytes have a journal; smaller ones are soon written again."""
_CHUNK_WEIGHTS = 1 << 20
_IN_FLIGHT = 4
_LARGEST = 1e15  # no model has such weights, and their squares are finite
_PAGE = 4096  # mapped weights should start on a page
_CLASSES = ("embedding", "attention", "mlp", "lm_head", "other")
_MIXERS = {**dict.fromkeys(("mixer", "fuse", "embed_fuse", "next_state"), "attention"), "centroids": "mlp"}


def write_graph(
    checkpoint: Checkpoint,
    plan: DecoderPlan,
    folder: Path,
    progress: ProgressCallback,
    made_of: Mapping[str, str] | None = None,
) -> tuple[ir.Model, dict[str, int]]:
    """Write the graph of ``plan`` and its weights to ``folder``; returns it, and bytes by class.

    If ``made_of`` has the facts on which the weights depend besides ``plan``, large ones have a journal, and
    writing goes on behind the matrices in ``folder``.

    Raises:
        ModelFileError: weights are not finite numbers, or cannot be read.
        OSError: the disk has no room for them.
    """
    model, matrices, data = _build(checkpoint, plan), stored(plan), folder / DATA_FILE
    parameters, size = allocate(model, folder)
    n_bytes = [sum(checkpoint.tensor(source).n_bytes for source in matrix.sources) for matrix in matrices]
    total, finished, stage, journal = sum(n_bytes), 0, "Exporting", None
    data.touch()
    with data.open("r+b") as file, ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def whole(matrix: Stored) -> int:
            tensors = (_tensor(value) for n, value in parameters.items() if n.startswith(f"{matrix.prefix}."))
            return _checksum(file, tensors)

        if made_of is not None and size >= JOURNALED_BYTES:
            journal = Journal(folder, {**made_of, "layout": _layout(plan, parameters)})
            known = journal.read()
            while finished < len(known[: len(matrices)]) and known[finished] == whole(matrices[finished]):
                finished += 1
                progress(Progress("Checking what is finished", finished, len(known), "matrix"))
            journal.write(known[:finished])
        if finished:
            stage += f", going on at {100 * sum(n_bytes[:finished]) // total} %"
        else:
            file.truncate(0)
        for tensor in map(_tensor, parameters.values()):
            end = (tensor.offset or 0) + tensor.nbytes
            file.seek(end)
            file.write(bytes(-end % _PAGE))  # no checksum covers what lies between weights
        write, done = row_writer(file, parameters), sum(n_bytes[:finished])
        for name, values in _small_tensors(checkpoint, plan):
            write(name, values)
        progress(Progress(stage, done, total))
        for matrix in matrices[finished:]:
            for arrays, source_bytes in _encoded(checkpoint, matrix, pool):
                for name, array in arrays.items():
                    write(f"{matrix.prefix}.{name}", array)
                done += source_bytes
                progress(Progress(stage, done, total))
            if journal is not None:
                journal.add(whole(matrix))
        file.truncate(size)
    ir.save(model, folder / GRAPH)
    return model, bytes_by_class(parameters, tied=plan.tied)


def _layout(plan: DecoderPlan, parameters: Mapping[str, ir.Value]) -> str:
    """Names the formats and places of all weights: SHA-256, in hex."""
    places = [(name, _tensor(value).offset, _tensor(value).nbytes) for name, value in parameters.items()]
    return sha256(repr((plan, places)).encode()).hexdigest()


def weight_bytes(checkpoint: Checkpoint, weights: str | None) -> tuple[dict[str, int], int]:
    """Bytes by class, and of the file, that an export for the CPU would write.

    Drafters keep their whole LM head here, and heads with their target's LM head their default rows.
    """
    config = checkpoint.config
    is_trimmed = config.is_head and not checkpoint.keeps_rows
    kept = tuple(range(min(MTP_ROWS, config.vocab_size))) if is_trimmed else None
    plan = plan_decoder(checkpoint, native=weights in (None, "exact"), head_tokens=kept)
    parameters, size = allocate(_build(checkpoint, plan), None)
    return bytes_by_class(parameters, tied=plan.tied), size


def _build(checkpoint: Checkpoint, plan: DecoderPlan) -> ir.Model:
    return (build_native if plan.native else build_decoder)(checkpoint.config, plan)


def allocate(model: ir.Model, folder: Path | None, data: str = DATA_FILE) -> tuple[dict[str, ir.Value], int]:
    """Place each parameter in the data file; returns them and its size.

    Without a folder nothing is to be written. Raises OSError if the folder's disk has no room.
    """
    parameters = {n: value for n, value in model.graph.initializers.items() if value.const_value is None}
    at = 0
    for name, value in parameters.items():
        assert value.shape is not None and value.dtype is not None
        shape = [int(dim) for dim in value.shape]  # type: ignore[arg-type]
        n_bytes = int(np.prod(shape)) * value.dtype.itemsize
        at = -(-at // _PAGE) * _PAGE
        value.const_value = ir.ExternalTensor(
            data, at, int(n_bytes), value.dtype, shape=ir.Shape(shape), name=name, base_dir=folder or ""
        )
        at += int(n_bytes)
    if folder is not None:  # before minutes of writing
        free = shutil.disk_usage(folder).free + _taken(folder / data)
        if free < at:
            raise OSError(errno.ENOSPC, f"the weights take {at:,} bytes, {free:,} are free")
    return parameters, at


def row_writer(
    file: BinaryIO, parameters: dict[str, ir.Value]
) -> Callable[[str, npt.NDArray[np.generic]], None]:
    """A function that writes the next rows of a parameter to its place, in its type."""
    at, types = dict[str, int](), dict[str, np.dtype[Any]]()
    for name, value in parameters.items():
        tensor = _tensor(value)
        at[name], types[name] = tensor.offset or 0, tensor.dtype.numpy()

    def write(name: str, rows: npt.NDArray[np.generic]) -> None:
        rows = np.ascontiguousarray(rows, types[name])
        file.seek(at[name])
        file.write(rows.data)
        at[name] += rows.nbytes

    return write


def _tensor(parameter: ir.Value) -> ir.ExternalTensor:
    """The tensor at its place from :func:`allocate`."""
    assert isinstance(parameter.const_value, ir.ExternalTensor)
    return parameter.const_value


def _checksum(file: BinaryIO, tensors: Iterable[ir.ExternalTensor]) -> int:
    """CRC-32 of the bytes of ``tensors`` in the weights file, as far as it reaches."""
    total = 0
    for tensor in tensors:
        file.seek(tensor.offset or 0)
        left = tensor.nbytes
        while left and (chunk := file.read(min(left, _CHUNK_WEIGHTS))):
            total, left = zlib.crc32(chunk, total), left - len(chunk)
    return total


def _taken(path: Path) -> int:
    """Bytes of the disk that a file takes; 0 without a file."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return 0
    return int(getattr(facts, "st_blocks", -(-facts.st_size // 512))) * 512


def class_of(path: str) -> str:
    """The class of a graph's matrix; see :func:`bytes_by_class`."""
    parts = (_MIXERS.get(part, part) for part in path.split("."))
    return "experts" if ".experts_" in path else next((part for part in parts if part in _CLASSES), "other")


def bytes_by_class(parameters: dict[str, ir.Value], *, tied: bool = False) -> dict[str, int]:
    """Bytes of ``embedding``, ``attention`` or another mixer, ``mlp``, ``lm_head``, ``other``.

    Models with experts also have ``experts``. A ``tied`` matrix counts as the LM head, because a pass reads
    all of it.
    """
    totals = dict.fromkeys(_CLASSES, 0)
    for name, value in parameters.items():
        assert value.const_value is not None
        kind = "lm_head" if tied and name == "embedding.weight" else class_of(name)
        totals[kind] = totals.get(kind, 0) + value.const_value.nbytes
    return totals


def _small_tensors(
    checkpoint: Checkpoint, plan: DecoderPlan
) -> Iterator[tuple[str, npt.NDArray[np.float32 | np.int64]]]:
    """All but the products' matrices, by their names in the graph."""
    config = checkpoint.config
    made = record(config)
    if checkpoint.clustered is not None:
        yield "lm_head.tokens", checkpoint.clustered
    for parameter in made.parameters.values():
        values = np.concatenate([checkpoint.values(name) for name in parameter.sources])
        yield parameter.path, values.T if parameter.transposed else values
    for name, names in biases_of(plan):
        yield name, np.concatenate([checkpoint.values(bias) for bias in names])
    rows = config.context_length if plan.native else rotary_rows(config)
    yield from made.tables(rows, whole=not plan.native).items()


def _encoded(
    checkpoint: Checkpoint, matrix: Stored, pool: ThreadPoolExecutor
) -> Iterator[tuple[Arrays, int]]:
    """A matrix's parameters, some rows at a time, and the bytes read from the source."""
    pending: deque[tuple[int, Future[Arrays]]] = deque()
    for source in matrix.sources:
        tensor = checkpoint.tensor(source)
        for raw, n_bytes in _rows(checkpoint, source, matrix):
            pending.append((n_bytes, pool.submit(_encode, matrix, tensor, raw)))
            if len(pending) >= _IN_FLIGHT:
                source_bytes, future = pending.popleft()
                yield future.result(), source_bytes
    for source_bytes, future in pending:
        yield future.result(), source_bytes


def _rows(checkpoint: Checkpoint, source: str, matrix: Stored) -> Iterator[tuple[U8, int]]:
    """The kept rows, in whole lanes, and the bytes read."""
    tensor, lanes = checkpoint.tensor(source), matrix.lanes
    rows, step = tensor.n_rows, max(lanes, _CHUNK_WEIGHTS // tensor.shape[-1] // lanes * lanes)
    rest: U8 | None = None
    for start in range(0, rows, step):
        _, raw = checkpoint.read(source, start, min(start + step, rows))
        n_bytes = raw.nbytes
        if matrix.keep is not None:
            first, last = np.searchsorted(matrix.keep, [start, start + len(raw)])
            raw = raw[matrix.keep[first:last] - start]
        if rest is not None and len(rest):
            raw = np.concatenate([rest, raw])
        whole = len(raw) // lanes * lanes
        rest = raw[whole:]
        if start + step >= rows and len(rest):
            raw = np.concatenate([raw, np.zeros((lanes - len(rest), *raw.shape[1:]), np.uint8)])
            whole += lanes
        if whole:
            yield raw[:whole], n_bytes


def _encode(matrix: Stored, tensor: Tensor, raw: U8) -> Arrays:
    source = unpack(tensor.type, raw)
    if largest(source) > _LARGEST:
        raise ModelFileError(
            f"tensor {tensor.name!r} holds weights that are not finite numbers; download or convert it again"
        )
    return matrix.encode(tensor.type, raw, source)
