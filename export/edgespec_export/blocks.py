"""GGUF blocks unpacked to one form: codes, scales and offsets.

Every quantized format is ``w = scale * (code - zero) - minimum`` over blocks of 16 or 32 weights; this
module brings each to that form without rounding. Layouts: ggml ``ggml-common.h``; tests compare with the
``gguf`` package's own dequantization.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec_export.gguf import GGMLType

__all__ = ["Blocks", "largest", "unpack"]

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a quantized matrix.

    Attributes:
        codes: uint8 ``(rows, columns)``.
        zero: the code that stands for 0 (before ``minimums``).
        scales: float32 ``(rows, columns / block)``.
        minimums: float32 like ``scales``, or None where they are all 0.
        bits: how many bits a code takes.
        block: weights that share a scale.
    """

    codes: U8
    zero: int
    scales: F32
    minimums: F32 | None
    bits: int
    block: int

    def values(self) -> F32:
        """The weights these blocks stand for: float32 ``(rows, columns)``."""
        rows, columns = self.codes.shape
        grouped = self.codes.reshape(rows, -1, self.block).astype(np.float32)
        if self.zero:
            grouped -= self.zero
        grouped *= self.scales[..., None]
        if self.minimums is not None:
            grouped -= self.minimums[..., None]
        return grouped.reshape(rows, columns)


def unpack(kind: GGMLType, raw: U8) -> Blocks | F32:
    """Unpack raw blocks, uint8 ``(rows, blocks, bytes)``.

    Returns:
        :class:`Blocks`, or float32 ``(rows, columns)`` for the floating-point formats.
    """
    if kind in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        return _floats(kind, raw.reshape(raw.shape[0], -1))
    return _UNPACKERS[kind](raw)


def largest(source: Blocks | F32) -> float:
    """The largest magnitude among the weights, or scales and minimums; infinite where one is not finite."""
    arrays = [source] if not isinstance(source, Blocks) else [source.scales]
    if isinstance(source, Blocks) and source.minimums is not None:
        arrays.append(source.minimums)
    extremes = [float(end) for array in arrays for end in (-array.min(), array.max())]
    return max(extremes) if np.isfinite(extremes).all() else float("inf")


def _floats(kind: GGMLType, raw: U8) -> F32:
    if kind is GGMLType.BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float32 if kind is GGMLType.F32 else np.float16).astype(np.float32, copy=False)


def _half(raw: U8, start: int) -> F32:
    """The float16 at byte ``start`` of every block, as float32 ``(rows, blocks)``."""
    return np.ascontiguousarray(raw[..., start : start + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """Low nibbles of a block's bytes first, then the high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _flat(codes: U8) -> U8:
    return codes.reshape(codes.shape[0], -1)


def _q4_0(raw: U8) -> Blocks:
    return Blocks(_flat(_nibbles(raw[..., 2:])), 8, _half(raw, 0), None, 4, 32)


def _q4_1(raw: U8) -> Blocks:
    return Blocks(_flat(_nibbles(raw[..., 4:])), 0, _half(raw, 0), -_half(raw, 2), 4, 32)


def _q5_0(raw: U8) -> Blocks:
    high = np.unpackbits(np.ascontiguousarray(raw[..., 2:6]), axis=-1, bitorder="little")
    return Blocks(_flat(_nibbles(raw[..., 6:]) | (high << np.uint8(4))), 16, _half(raw, 0), None, 5, 32)


def _q8_0(raw: U8) -> Blocks:
    # Two's complement plus 128 is the same byte with its sign bit flipped.
    return Blocks(_flat(raw[..., 2:] ^ np.uint8(128)), 128, _half(raw, 0), None, 8, 32)


def _q4_k(raw: U8) -> Blocks:
    rows = raw.shape[0]
    packed = raw[..., 4:16]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (rest & 15) | ((low >> 6) << 4)], axis=-1)
    minimums = np.concatenate([high & 63, (rest >> 4) | ((high >> 6) << 4)], axis=-1)
    # 64 weights to 32 bytes: the low nibbles are one sub-block of 32, the high nibbles the next.
    codes = _nibbles(raw[..., 16:].reshape(*raw.shape[:2], 4, 32))
    return Blocks(
        _flat(codes),
        0,
        (_half(raw, 0)[..., None] * scales).reshape(rows, -1),
        (_half(raw, 2)[..., None] * minimums).reshape(rows, -1),
        4,
        32,
    )


def _q6_k(raw: U8) -> Blocks:
    rows, blocks = raw.shape[:2]
    low = _nibbles(raw[..., :128].reshape(rows, blocks, 2, 64))
    high = raw[..., 128:192].reshape(rows, blocks, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = low | ((high & np.uint8(3)) << np.uint8(4)).reshape(rows, blocks, 2, 128)
    scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).astype(np.float32)
    return Blocks(_flat(codes), 32, (_half(raw, 208)[..., None] * scales).reshape(rows, -1), None, 6, 16)


_UNPACKERS = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q6_K: _q6_k,
}
