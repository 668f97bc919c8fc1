"""Weights for graphs with fixed shapes: matrices (inputs, outputs), float32 or int8.

Two rewrites do not change the model's results. Rotations of neighbouring elements become rotations of the
halves of a head, by reordering the rows of queries and keys alike, which does not change their products.
Queries carry the attention scale, so no operator has to.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec_export.graphs.writer import allocate, bytes_by_class, row_writer
from edgespec_export.journal import DATA_FILE
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.decoders.operations import Attention
from edgespec_models.decoders.record import record
from edgespec_models.files.blocks import F32
from edgespec_models.graphs.static_decoder import StaticPlan, build_static_decoder, encoding, matrix_path
from edgespec_models.progress import Progress, ProgressCallback

_Tensors = Iterator[tuple[str, npt.NDArray[Any]]]
_LARGEST_CODE = np.float32(127)
_LARGEST_EMBEDDING_CODE = 65535
_SPAN_ROWS = 4096


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A written file of weights.

    ``ranges`` are least and largest values of weights that are quantized with the activations. Classes of
    bytes are ``embedding``, ``attention``, ``mlp``, ``lm_head`` and ``other``.
    """

    tensors: dict[str, ir.TensorProtocol | None]
    ranges: dict[str, tuple[float, float]]
    bytes_by_class: dict[str, int]

    def fill(self, model: ir.Model) -> None:
        """Give every parameter of ``model`` its place in the file."""
        for name, value in model.graph.initializers.items():
            if value.const_value is None:
                value.const_value = self.tensors[name]


def write_static_weights(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    int8: bool,
    progress: ProgressCallback,
    parts: range | None = None,
) -> WeightFile:
    """Write the weights of a graph to ``folder``, a matrix in memory at a time.

    With ``int8``, matrices have a scale for each output and the embedding is uint16; else all is float32.
    ``parts`` are the graph's parts (:class:`StaticPlan`).
    """
    plan = StaticPlan(
        rows=1, capacity=1, all_logits=True, int8=int8, biases=checkpoint.has_biases, parts=parts
    )
    model = build_static_decoder(checkpoint.config, plan)
    parameters, size = allocate(model, folder)
    tensors, by_class = {n: value.const_value for n, value in parameters.items()}, bytes_by_class(parameters)
    ranges: dict[str, tuple[float, float]] = {}
    with (folder / DATA_FILE).open("wb") as file:
        write, done, total = row_writer(file, parameters), 0, sum(by_class.values())
        for name, array in _stored(checkpoint, int8, plan.parts_of(checkpoint.config.num_layers)):
            if array.ndim == 1 and array.dtype == np.float32:
                ranges[_point(name)] = float(array.min()), float(array.max())
            write(name, array)
            done += array.nbytes
            progress(Progress("Exporting", done, total))
        file.truncate(size)
    return WeightFile(tensors, ranges, by_class)


def _point(name: str) -> str:
    """The point of the graph at which a vector is quantized."""
    return name.replace("attention.", "").replace("q_norm", "q.norm").replace("k_norm", "k.norm")


def _stored(checkpoint: Checkpoint, int8: bool, parts: range) -> _Tensors:
    """Every parameter with its values; an embedding comes in several pieces."""
    matrix, layers = _int8 if int8 else _float, checkpoint.config.num_layers
    for part in parts:
        if part == 0:
            yield from _embedding(checkpoint, int8)
        if part < layers:
            yield from _layer(checkpoint, part, matrix)
        else:
            yield "final_norm.weight", checkpoint.values("final_norm")
            yield from _head(checkpoint, matrix)


def _embedding(checkpoint: Checkpoint, int8: bool) -> _Tensors:
    if not int8:
        yield from (("embedding", rows) for rows in _spans(checkpoint, "embed"))
        return
    ends = [(float(rows.min()), float(rows.max())) for rows in _spans(checkpoint, "embed")]
    scale, zero = encoding(min(low for low, _ in ends), max(high for _, high in ends), np.uint16)
    yield "embedding_scale", np.array(scale)
    yield "embedding_zero", np.array(zero, np.uint16)
    for rows in _spans(checkpoint, "embed"):
        codes = np.rint(rows / scale) + zero
        yield "embedding", codes.clip(0, _LARGEST_EMBEDDING_CODE).astype(np.uint16)


def _head(checkpoint: Checkpoint, matrix: Callable[[str, F32], _Tensors]) -> _Tensors:
    """The LM head, encoded a few thousand of its many outputs at a time."""
    tensors: dict[str, list[npt.NDArray[Any]]] = {}
    for rows in _spans(checkpoint, "lm_head"):
        for name, array in matrix("lm_head", rows):
            tensors.setdefault(name, []).append(array)
    for name in list(tensors):
        yield name, np.concatenate(tensors.pop(name), axis=-1)


def _spans(checkpoint: Checkpoint, name: str) -> Iterator[F32]:
    """The rows of a large matrix, some at a time."""
    count = checkpoint.tensor(name).shape[0]
    for start in range(0, count, _SPAN_ROWS):
        yield checkpoint.values(name, start, min(start + _SPAN_ROWS, count))


def _layer(checkpoint: Checkpoint, index: int, matrix: Callable[[str, F32], _Tensors]) -> _Tensors:
    prefix, made = f"layers.{index}.", record(checkpoint.config)
    facts = made.attentions[index]
    order, scale = _head_order(facts), np.float32(facts.scale)
    scaled = "q_norm" if facts.norms else "q"
    for kind in made.layer_tensors(index, biases=checkpoint.has_biases):
        name, values = kind.removesuffix("_bias"), checkpoint.values(prefix + kind)
        if order is not None and name in ("q", "k", "q_norm", "k_norm"):
            heads = values.reshape(-1, facts.width, *values.shape[1:])
            values = heads[:, order].reshape(values.shape)
        if name == scaled:
            values = values * scale
        if prefix + kind in made.parameters:
            yield made.parameters[prefix + kind].path, values
        elif name != kind:
            yield f"{matrix_path(made, prefix + name)}.bias", values
        else:
            yield from matrix(matrix_path(made, prefix + name), values)


def _head_order(facts: Attention) -> npt.NDArray[np.int64] | None:
    """An order of a head's elements in which neighbours that rotate together lie half a rotation apart."""
    if facts.rope is None or not facts.rope.interleaved:
        return None
    turned = np.arange(facts.rope.width).reshape(-1, 2).T.reshape(-1)
    return np.concatenate([turned, np.arange(facts.rope.width, facts.width)])


def _float(name: str, weight: F32) -> _Tensors:
    yield f"{name}.weight", weight.T


def _int8(name: str, weight: F32) -> _Tensors:
    """Symmetric int8: the scale makes each output's largest weight 127."""
    scale = np.maximum(np.abs(weight).max(axis=1) / _LARGEST_CODE, np.float32(1e-9))
    yield f"{name}.weight", np.rint(weight / scale[:, None]).astype(np.int8).T
    yield f"{name}.scale", scale.astype(np.float32)
    yield f"{name}.zero", np.zeros(len(weight), np.int8)
