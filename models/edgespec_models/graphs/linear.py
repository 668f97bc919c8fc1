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
from onnxscript import OpBuilder, nn

from edgespec_models.bundles.config import FloatType
from edgespec_models.graphs.plan import EmbeddingSpec, LinearPart, LinearSpec

__all__ = ["FLOATS", "MICROSOFT", "Embedding", "Linear"]

MICROSOFT: dict[str, Any] = {"_domain": "com.microsoft", "_version": 1}
FLOATS: Mapping[FloatType, ir.DataType] = MappingProxyType(
    {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}
)
# MatMulNBits' accuracy_level: int8 activations, or floats, 2 to 5 times slower on CPUs. CUDA's kernels take
# no notice, and a check of their graphs on the CPU is to see the rounding of float16 only.
_ACCURACY: Mapping[FloatType, int] = MappingProxyType({"float32": 4, "float16": 0})
_ALIGNED = 8  # columns; CUDA's kernels for few rows take no other widths


class _Projection(nn.Module):
    """One :class:`LinearPart`."""

    def __init__(self, in_features: int, part: LinearPart, floats: FloatType) -> None:
        super().__init__()
        self.part, self.in_features, self.floats = part, in_features, floats
        form, rows, kind = part.format, part.out_features, FLOATS[floats]
        sums = in_features // form.block if form.minimums else 0
        self.spare = -(in_features + sums) % _ALIGNED if sums and floats == "float16" else 0
        self.columns = in_features + sums + self.spare
        self.zero_points = self.bias = None
        if form.is_float:
            self.weight = nn.Parameter([rows, in_features], dtype=kind)
        else:
            blocks = -(-self.columns // form.block)
            self.weight = nn.Parameter([rows, blocks, form.block * form.bits // 8], dtype=ir.DataType.UINT8)
            self.scales = nn.Parameter([rows, blocks], dtype=kind)
            if form.minimums:
                self.zero_points = nn.Parameter([rows, -(-blocks * form.bits // 8)], dtype=ir.DataType.UINT8)
        if part.biases:
            self.bias = nn.Parameter([rows], dtype=kind)

    def forward(self, op: OpBuilder, x: ir.Value, sums: ir.Value | None) -> ir.Value:
        form = self.part.format
        if form.is_float:
            # Stored row by row, as sources are read; ONNX Runtime folds the transposition at load.
            y = op.MatMul(x, op.Transpose(self.weight, perm=[1, 0]))
            return y if self.bias is None else op.Add(y, self.bias)
        if form.minimums:
            # The rest of the last block are zeros of the matrix, whatever they are multiplied with.
            rest = (op.Slice(x, [0], [self.spare], [2]),) if self.spare else ()
            x = op.Concat(x, sums, *rest, axis=-1)
        return op.MatMulNBits(
            x,
            self.weight,
            self.scales,
            self.zero_points,
            None,
            self.bias,
            K=self.columns,
            N=self.part.out_features,
            bits=form.bits,
            block_size=form.block,
            accuracy_level=_ACCURACY[self.floats],
            **MICROSOFT,
        )


class Linear(nn.Module):
    """``(1, n, in_features) -> (1, n, sum of out_features)``."""

    def __init__(self, spec: LinearSpec, floats: FloatType = "float32", name: str | None = None) -> None:
        super().__init__(name)
        self.spec = spec
        self.parts = nn.ModuleList([_Projection(spec.in_features, part, floats) for part in spec.parts])

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """Define the projection of ``x``."""
        sums: dict[int, ir.Value] = {}
        for block in {part.format.block for part in self.spec.parts if part.format.minimums}:
            blocks = op.Reshape(x, [1, -1, self.spec.in_features // block, block])
            sums[block] = op.ReduceSum(blocks, [-1], keepdims=0)
        pairs = zip(self.spec.parts, self.parts, strict=True)
        outputs = [project(op, x, sums.get(part.format.block)) for part, project in pairs]
        return outputs[0] if len(outputs) == 1 else op.Concat(*outputs, axis=-1)


class Embedding(nn.Module):
    """Token embedding: int64 ``(1, n)`` -> floats ``(1, n, hidden)``."""

    def __init__(
        self,
        rows: int,
        hidden: int,
        spec: EmbeddingSpec,
        floats: FloatType = "float32",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.spec, self.hidden = spec, hidden
        form, kind = spec.format, FLOATS[floats]
        if form.is_float:
            self.weight = nn.Parameter([rows, hidden], dtype=kind)
            return
        self.weight = nn.Parameter([rows, hidden * form.bits // 8], dtype=ir.DataType.UINT8)
        blocks, self.zero_points = hidden // form.block, None
        self.scales = nn.Parameter([rows, blocks], dtype=kind)
        if spec.offsets:
            self.offsets = nn.Parameter([rows, blocks], dtype=kind)
        if spec.zero_points:
            self.zero_points = nn.Parameter([rows, -(-blocks * form.bits // 8)], dtype=ir.DataType.UINT8)

    def forward(self, op: OpBuilder, ids: ir.Value) -> ir.Value:
        """Define the rows of ``ids``."""
        form = self.spec.format
        if form.is_float:
            return op.Gather(self.weight, ids, axis=0)
        x = op.GatherBlockQuantized(
            self.weight,
            ids,
            self.scales,
            self.zero_points,
            bits=form.bits,
            block_size=form.block,
            gather_axis=0,
            quantize_axis=1,
            **MICROSOFT,
        )
        if not self.spec.offsets:
            return x
        offsets = op.Gather(self.offsets, ids, axis=0)
        blocks = op.Reshape(x, [1, -1, self.hidden // form.block, form.block])
        return op.Reshape(op.Add(blocks, op.Unsqueeze(offsets, [-1])), [1, -1, self.hidden])
