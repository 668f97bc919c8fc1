"""Blocks of weights in the layouts of MatMulNBits and GatherBlockQuantized."""

from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_export.formats.rounding import round_matrix
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.files.blocks import F32, Blocks, values_of
from edgespec_models.files.tensors import U8
from edgespec_models.graphs.plan import EmbeddingSpec

Arrays = dict[str, npt.NDArray[Any]]
"""Rows of one matrix: the graph's parameters by name (``weight``, ``scales``, ...), first axis rows."""
_MIDDLES = MappingProxyType({4: 0x88, 8: 0x80})  # two codes to a byte


def encode_linear(source: Blocks | F32, form: WeightFormat) -> Arrays:
    """Rows of a projection in ``form``. Blocks that fit stay unchanged, others are rounded."""
    if form.bits == 8:
        return _encode_8(source, form)
    if isinstance(source, Blocks) and _holds(form, source):
        return _encode_4(source, form)
    values = values_of(source)
    if form.is_float:
        return {"weight": values}
    return _encode_4(round_matrix(values, form), form)


def _holds(form: WeightFormat, source: Blocks) -> bool:
    """Whether 4-bit blocks fit ``form`` unchanged, with their minimums."""
    if source.bits != 4 or source.block != form.block:
        return False
    return form.minimums or (source.minimums is None and source.zero == 8)


def encode_embedding(source: Blocks | F32, spec: EmbeddingSpec) -> Arrays:
    """Rows of a token embedding: exactly as a quantized source has them, floats rounded to ``spec``."""
    arrays = _embedding_arrays(source, spec)
    if spec.zero_points and not spec.format.is_float:
        rows, blocks = arrays["scales"].shape
        packed = -(-blocks * spec.format.bits // 8)
        arrays["zero_points"] = np.full((rows, packed), _MIDDLES[spec.format.bits], np.uint8)
    return arrays


def _embedding_arrays(source: Blocks | F32, spec: EmbeddingSpec) -> Arrays:
    arrays: Arrays
    if not isinstance(source, Blocks):
        arrays = encode_linear(source, spec.format)
        return arrays | {"weight": arrays["weight"].reshape(len(source), -1)}
    arrays = {"weight": _centred_8(source)} if spec.format.bits == 8 else {"weight": _pack_4(source.codes)}
    arrays["scales"] = source.scales
    if spec.offsets:
        shift = 8.0 - source.zero if spec.format.bits == 4 else 0.0
        minimums = np.float32(0) if source.minimums is None else source.minimums
        arrays["offsets"] = np.float32(shift) * source.scales - minimums
    return arrays


def decode_linear(arrays: Arrays, form: WeightFormat, columns: int) -> F32:
    """The values of ``arrays``, float32 ``(rows, columns)``; the inverse of :func:`encode_linear`."""
    weight = arrays["weight"]
    if form.is_float:
        floats: F32 = weight
        return floats
    rows, blocks = arrays["scales"].shape
    flat = weight.reshape(rows, -1)
    codes = flat if form.bits == 8 else np.stack([flat & 15, flat >> 4], axis=-1).reshape(rows, -1)
    zero = np.full((rows, blocks), 1 << (form.bits - 1), np.float32)
    if "zero_points" in arrays:
        packed = arrays["zero_points"]
        zero = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)[:, :blocks].astype(np.float32)
    grouped = codes.reshape(rows, blocks, form.block).astype(np.float32)
    values = ((grouped - zero[..., None]) * arrays["scales"][..., None]).reshape(rows, -1)
    matrix: F32 = values[:, :columns]
    if not form.minimums:
        return matrix
    remainders: F32 = values[:, columns : columns + columns // form.block]
    matrix += np.repeat(remainders, form.block, axis=1)
    return matrix


def _centred_8(source: Blocks) -> U8:
    return source.codes + np.uint8(128 - source.zero)


def _encode_8(source: Blocks | F32, form: WeightFormat) -> Arrays:
    if isinstance(source, Blocks) and source.block == form.block and source.minimums is None:
        codes, scales = _centred_8(source), source.scales
    else:
        values = values_of(source)
        grouped = values.reshape(values.shape[0], -1, form.block)
        scales = np.abs(grouped).max(axis=-1) / np.float32(127)
        codes = _codes(grouped, scales, np.float32(128), 255).reshape(values.shape)
    return {"weight": codes.reshape(codes.shape[0], -1, form.block), "scales": scales}


def _pack_4(codes: U8) -> U8:
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))


def _encode_4(source: Blocks, form: WeightFormat) -> Arrays:
    rows = len(source.codes)
    arrays: Arrays = {}
    codes, scales, zero_points, remainders = _integer_zero_points(source)
    if form.minimums:
        more_codes, more_scales = _remainder_columns(remainders, form.block)
        codes = np.concatenate([codes, more_codes], axis=1)
        scales = np.concatenate([scales, more_scales], axis=1)
        eights = np.full(more_scales.shape, 8, np.uint8)
        zero_points = np.concatenate([zero_points, eights], axis=1)
        even = np.pad(zero_points, ((0, 0), (0, zero_points.shape[1] % 2)))
        arrays["zero_points"] = _pack_4(even)
    arrays["weight"] = _pack_4(codes).reshape(rows, -1, form.block // 2)
    arrays["scales"] = scales
    return arrays


def _integer_zero_points(source: Blocks) -> tuple[U8, F32, U8, F32]:
    """Codes, scales, zero points, and the remainders of rounding the zero points."""
    scales = source.scales.copy()
    if source.minimums is None:
        return source.codes, scales, np.full(scales.shape, source.zero, np.uint8), np.zeros_like(scales)
    minimums = source.minimums
    flat = scales == 0  # a constant block: code 0 at zero point 8 with scale minimum / 8 is the same
    scales[flat] = minimums[flat] / 8
    safe = np.where(scales == 0, np.float32(1), scales)
    zero_points = np.clip(np.rint(minimums / safe), 0, 15)
    zero_points[flat] = 8
    codes = source.codes
    if flat.any():
        codes = np.where(np.repeat(flat, source.block, axis=1), np.uint8(0), codes)
    remainders = scales * zero_points - minimums
    return codes, scales, zero_points.astype(np.uint8), np.where(flat, np.float32(0), remainders)


def _remainder_columns(remainders: F32, block: int) -> tuple[U8, F32]:
    """Remainders quantized to 4 bits in blocks: codes and scales, padded to whole blocks."""
    rows, count = remainders.shape
    padded = np.pad(remainders, ((0, 0), (0, -count % block)))
    grouped = padded.reshape(rows, -1, block)
    scales = np.abs(grouped).max(axis=-1) / np.float32(7)
    return _codes(grouped, scales, np.float32(8), 15).reshape(rows, -1), scales


def _codes(grouped: F32, scales: F32, zero: np.float32, top: int) -> U8:
    safe = np.where(scales == 0, np.float32(1), scales)
    codes = grouped / safe[..., None]
    codes += zero
    return np.clip(np.rint(codes, out=codes), 0, top, out=codes).astype(np.uint8)
