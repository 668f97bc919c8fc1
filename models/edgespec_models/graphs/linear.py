"""Projections and embeddings over quantized weights.

A quantized block is ``w = scale * (code - zero) - minimum``. ``MatMulNBits`` holds scales and integer
zero points only, so a format with minimums (Q4_1, Q4_K) leaves a remainder per block of
``r = scale * zero_point - minimum``, which multiplies the sum of the block's activations. So the block sums
are appended to the activations and the remainders, quantized to 4 bits like any other weight, to the matrix:
one kernel, 1/32 more columns.

Projections compute in the type that their graph's activations have, ``float32`` or ``float16``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
from onnxscript import OpBuilder

from edgespec_models.decoders.config import FloatType
from edgespec_models.graphs.graph_decoder import parameter, scoped
from edgespec_models.graphs.plan import EmbeddingSpec, LinearPart, LinearSpec

MICROSOFT: dict[str, Any] = {"_domain": "com.microsoft", "_version": 1}
FLOATS: Mapping[FloatType, ir.DataType] = MappingProxyType(
    {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}
)
_UINT8 = ir.DataType.UINT8
# MatMulNBits' accuracy_level: int8 activations, or floats, 2 to 5 times slower on CPUs. CUDA's kernels ignore
# it, and a check of their graphs on the CPU must see the rounding of float16 only.
_ACCURACY: Mapping[FloatType, int] = MappingProxyType({"float32": 4, "float16": 0})
_ALIGNED = 8  # columns; CUDA's kernels for few rows take no other widths


def linear(op: OpBuilder, x: ir.Value, spec: LinearSpec, floats: FloatType = "float32") -> ir.Value:
    """``(1, n, in_features) -> (1, n, sum of out_features)``; weights are called ``PATH.parts.0.weight``."""
    path = spec.path
    with scoped(op.builder, path.rpartition(".")[2], "Linear"):
        sums: dict[int, ir.Value] = {}
        for block in {part.format.block for part in spec.parts if part.format.minimums}:
            blocks = op.Reshape(x, [1, -1, spec.in_features // block, block])
            sums[block] = op.ReduceSum(blocks, [-1], keepdims=0)
        outputs = []
        for index, part in enumerate(spec.parts):
            with scoped(op.builder, f"parts.{index}", "_Projection"):
                count = spec.in_features // part.format.block if part.format.minimums else 0
                spare = -(spec.in_features + count) % _ALIGNED if count and floats == "float16" else 0
                columns = spec.in_features + count + spare
                weights = _weights(op, f"{path}.parts.{index}", part, columns, FLOATS[floats])
                wide = x
                if count:
                    # The rest of the last block meets zeros of the matrix.
                    rest = (op.Slice(x, [0], [spare], [2]),) if spare else ()
                    wide = op.Concat(x, sums[part.format.block], *rest, axis=-1)
                outputs.append(_product(op, wide, part, columns, weights, _ACCURACY[floats]))
        return outputs[0] if len(outputs) == 1 else op.Concat(*outputs, axis=-1)


def _weights(
    op: OpBuilder, path: str, part: LinearPart, columns: int, floats: ir.DataType
) -> dict[str, ir.Value]:
    """The parameters of a part, by the last word of their names."""
    form, rows = part.format, part.out_features
    shapes = {"weight": ([rows, columns], floats)}
    if not form.is_float:
        blocks = -(-columns // form.block)
        shapes = {"weight": ([rows, blocks, form.block * form.bits // 8], _UINT8)}
        shapes["scales"] = [rows, blocks], floats
        if form.minimums:
            shapes["zero_points"] = [rows, -(-blocks * form.bits // 8)], _UINT8
    if part.biases:
        shapes["bias"] = [rows], floats
    return {name: parameter(op.builder.graph, f"{path}.{name}", *kind) for name, kind in shapes.items()}


def _product(
    op: OpBuilder, x: ir.Value, part: LinearPart, columns: int, weights: dict[str, ir.Value], accuracy: int
) -> ir.Value:
    form, bias = part.format, weights.get("bias")
    if form.is_float:
        # Stored row by row, as sources are read; ONNX Runtime folds the transposition at load.
        y = op.MatMul(x, op.Transpose(weights["weight"], perm=[1, 0]))
        return y if bias is None else op.Add(y, bias)
    return op.MatMulNBits(
        x,
        weights["weight"],
        weights["scales"],
        weights.get("zero_points"),
        None,
        bias,
        K=columns,
        N=part.out_features,
        bits=form.bits,
        block_size=form.block,
        accuracy_level=accuracy,
        **MICROSOFT,
    )


def embedding(
    op: OpBuilder, ids: ir.Value, spec: EmbeddingSpec, shape: tuple[int, int], floats: FloatType = "float32"
) -> ir.Value:
    """The rows of ``ids``, int64 ``(1, n)``, in a table of this shape: ``(1, n, hidden)``."""
    form, (rows, hidden) = spec.format, shape
    blocks = 0 if form.is_float else hidden // form.block

    def stored(name: str, width: int, kind: ir.DataType) -> ir.Value:
        return parameter(op.builder.graph, f"embedding.{name}", [rows, width], kind)

    with scoped(op.builder, "embedding", "Embedding"):
        if form.is_float:
            return op.Gather(stored("weight", hidden, FLOATS[floats]), ids, axis=0)
        weight = stored("weight", hidden * form.bits // 8, _UINT8)
        scales = stored("scales", blocks, FLOATS[floats])
        offsets = stored("offsets", blocks, FLOATS[floats]) if spec.offsets else None
        zeros = stored("zero_points", -(-blocks * form.bits // 8), _UINT8) if spec.zero_points else None
        x = op.GatherBlockQuantized(
            weight,
            ids,
            scales,
            zeros,
            bits=form.bits,
            block_size=form.block,
            gather_axis=0,
            quantize_axis=1,
            **MICROSOFT,
        )
        if offsets is None:
            return x
        added = op.Gather(offsets, ids, axis=0)
        apart = op.Reshape(x, [1, -1, blocks, form.block])
        return op.Reshape(op.Add(apart, op.Unsqueeze(added, [-1])), [1, -1, hidden])
