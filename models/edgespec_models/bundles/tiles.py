"""Blocks of weights in the tiles that edgespec's kernels read: :mod:`tiles` and ``layout.h``.

A tile is 16 rows of a matrix, the lanes, by 32 or 256 inputs, in blocks of 32. Four inputs that follow each
other are a group. Codes lie in lines of 64 bytes in which byte ``4 * lane + i`` belongs to input ``i`` of a
group of that lane: a line of 4-bit codes holds two groups, one of 2-bit codes four. Codes of 3, 5 and 6 bits
are 2 or 4 bits, whose lines come first, and lines of the bits above them. Scales and minimums of blocks
follow, each lane by lane, then the float16 factors, or exponents in a byte. Codes and scales are the file's,
so every weight keeps its value.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.weight_format import FORMATS, LANES, tile_bytes
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.files.blocks import F16, F32, Blocks, Fields, Steps, fields
from edgespec_models.files.tensors import U8, GGMLType

U32 = npt.NDArray[np.uint32]

_BLOCK, _GROUP, _GROUPS = 32, 4, 8  # inputs of a block and of a group, groups of a block
_LINE = LANES * _GROUP
_EACH_BYTE = 0x01010101


def pack(name: str, raw: U8, source: GGMLType | None = None) -> U8:
    """Raw blocks of a GGUF file as tiles, without rounding.

    Args:
        name: the format, of :data:`~edgespec_models.bundles.weight_format.FORMATS`.
        raw: uint8 ``(rows, blocks, bytes)``; rows of zeros make up whole tiles.
        source: the blocks' own format, if it lies :data:`~edgespec_models.files.blocks.WITHIN` the other.

    Returns:
        Uint8 ``(bytes,)``.
    """
    return _pack(name, fields(GGMLType[name] if source is None else source, _whole(raw)))


def pack_blocks(name: str, blocks: Blocks, values: F32 | None = None) -> U8:
    """Rounded weights as tiles of Q8_0, Q4_0 or Q4_1, whose scales and minimums are float16.

    Args:
        name: the format.
        blocks: of 32 weights, with the format's bits; Q4_1 alone has minimums.
        values: float32 ``(rows, columns)``, the weights before rounding: codes become the nearest by the
            float16 scales and minimums. None keeps the codes of ``blocks``.

    Returns:
        Uint8 ``(bytes,)``.

    Raises:
        UnsupportedModelError: a scale or minimum is beyond float16.
    """
    bits, zero = FORMATS[name].low, FORMATS[name].zero
    form = (blocks.bits, blocks.zero, blocks.block, blocks.minimums is not None)
    if name not in ("Q8_0", "Q4_0", "Q4_1") or form != (bits, zero, _BLOCK, name == "Q4_1"):
        raise ValueError(f"{name} cannot hold bits, zero, block and minimums of {form}")
    scales = _half(blocks.scales)
    minimums = None if blocks.minimums is None else _half(blocks.minimums)
    codes = blocks.codes if values is None else _nearest(values, scales, minimums, bits, zero)
    factors = None if minimums is None else _whole(minimums)
    return _pack(name, Fields(_whole(codes), zero, bits, _whole(scales), minimum_factors=factors))


def unpack_tiles(name: str, tiles: U8, rows: int, columns: int) -> F32:
    """The weights of tiles, for reports and tests.

    Args:
        name: the format.
        tiles: uint8 ``(bytes,)``.
        rows: rows of the matrix; the padding of its last tiles is left out.
        columns: inputs of the matrix.

    Returns:
        Float32 ``(rows, columns)``.
    """
    assert tiles.size == tile_bytes(name, rows, columns)
    inputs, n_bytes, low, high, zero, _ = FORMATS[name]
    flat = tiles.reshape(-1, columns // inputs, n_bytes)
    ends = np.cumsum([inputs * LANES * bits // 8 for bits in (low, high)])
    first, above, rest = np.split(flat, ends, axis=-1)
    codes = _codes(first, low)
    if high:
        codes |= _codes(above, high) << np.uint8(low)
    by_row = codes.transpose(0, 4, 1, 2, 3, 5).reshape(-1, columns)
    unpacked = Fields(by_row, zero, low + high, *_numbers(name, rest), form=name)
    return unpacked.blocks().values()[:rows]


def _whole(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``rows`` with zeros up to whole tiles."""
    missing = -len(rows) % LANES
    return np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)) if missing else rows


def _half(numbers: F32) -> F16:
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float16)
    if not np.isfinite(halves).all():
        raise UnsupportedModelError(
            f"a block of weights has a scale or minimum of {np.abs(numbers).max():.3g}, and float16 ends at "
            "65504; export with --weights portable"
        )
    return halves


def _nearest(values: F32, scales: F16, minimums: F16 | None, bits: int, zero: int) -> U8:
    steps = values.reshape(*scales.shape, _BLOCK).copy()
    if minimums is not None:
        steps += minimums.astype(np.float32)[..., None]
    exact = scales.astype(np.float32)
    exact[exact == 0] = np.inf  # every weight gets the code of zero
    steps /= exact[..., None]
    np.rint(steps, out=steps)
    steps += np.float32(zero)
    return np.clip(steps, 0, (1 << bits) - 1, out=steps).astype(np.uint8).reshape(values.shape)


def _pack(name: str, source: Fields) -> U8:
    low, high = FORMATS[name].low, FORMATS[name].high
    rows, columns = source.codes.shape
    shape = (rows // LANES, LANES, columns // FORMATS[name].inputs)
    groups = _groups(source.codes, shape)
    parts = [_lines(groups, 0, low)]
    if high:
        parts.append(_lines(groups, low, high))
    scales, minimums = source.scales, source.minimums
    if name == "Q2_K":  # a byte holds both, as in the file
        assert scales is not None and minimums is not None
        scales, minimums = scales | minimums << np.uint8(4), None
    numbers = (scales, minimums, source.factors, source.minimum_factors)
    parts += [_by_lane(values, shape) for values in numbers if values is not None]
    return np.concatenate(parts, axis=-1).reshape(-1)


def _groups(codes: U8, shape: tuple[int, ...]) -> U32:
    """The groups of blocks, four codes in 32 bits: ``(groups, tiles down, tiles along, blocks, lanes)``."""
    words = np.ascontiguousarray(codes).view(np.uint32).reshape(*shape, -1, _GROUPS)
    return np.ascontiguousarray(words.transpose(4, 0, 2, 3, 1))


def _lines(groups: U32, first: int, bits: int) -> U8:
    """``bits`` bits of all codes from bit ``first`` on: uint8 ``(tiles down, tiles along, bytes)``."""
    per_line = 8 // bits
    lines = [groups[at : at + per_line] for at in range(0, _GROUPS, per_line)]
    mask = np.uint32(_EACH_BYTE * ((1 << bits) - 1))
    packed = np.empty((*groups.shape[1:-1], len(lines), LANES), np.uint32)
    part = np.empty(groups.shape[1:], np.uint32)
    for index, line in enumerate(lines):
        whole = np.zeros_like(part)
        for place, group in enumerate(line):
            np.right_shift(group, np.uint32(first), out=part)
            part &= mask
            part <<= np.uint32(place * bits)
            whole |= part
        packed[..., index, :] = whole
    return packed.view(np.uint8).reshape(*packed.shape[:2], -1)


def _by_lane(numbers: npt.NDArray[Any], shape: tuple[int, ...]) -> U8:
    """Numbers of each row as bytes with the lanes innermost: ``(tiles down, tiles along, bytes)``."""
    lanes = numbers.reshape(*shape, -1).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(shape[0], shape[2], -1)


def _codes(lines: U8, bits: int) -> U8:
    """The inverse of :func:`_lines`: ``(tiles down, tiles along, blocks, groups, lanes, 4)``."""
    down, along, _ = lines.shape
    per_line = 8 // bits
    packed = lines.reshape(down, along, -1, _GROUPS // per_line, 1, _LINE)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = (packed >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(down, along, -1, _GROUPS, LANES, _GROUP)


def _numbers(name: str, rest: U8) -> tuple[F16 | U8, Steps | None, F16 | None, U8 | None]:
    """The numbers behind the lines, ``(tiles down, tiles along, bytes)``, in the order of :class:`Fields`."""
    down, along, n_bytes = rest.shape
    at = n_bytes - 2 * LANES * (1 + FORMATS[name].minimums)

    def by_row(part: U8, kind: type[np.generic]) -> npt.NDArray[Any]:
        numbers = np.ascontiguousarray(part).view(kind).reshape(down, along, -1, LANES)
        return numbers.transpose(0, 3, 1, 2).reshape(down * LANES, along, -1)

    if n_bytes == LANES:  # exponents
        return by_row(rest, np.uint8)[..., 0], None, None, None
    factors = by_row(rest[..., at:], np.float16)
    steps = by_row(rest[..., :at], np.uint8)
    if not FORMATS[name].minimums:
        return factors[..., 0], steps if name == "NVFP4" else steps.view(np.int8) if at else None, None, None
    if not at:
        return factors[..., 0], None, factors[..., 1], None
    scales, minimums = np.split(steps, 2, axis=-1)
    if name == "Q2_K":
        scales, minimums = steps & np.uint8(15), steps >> np.uint8(4)
    return factors[..., 0], scales, factors[..., 1], minimums
