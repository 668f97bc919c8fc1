"""Packing weights into tiles: every value survives, and lies where the kernels' layout says."""

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_export.formats.rounding import round_matrix
from edgespec_models.bundles.tiles import pack, pack_blocks, unpack_tiles
from edgespec_models.bundles.weight_format import FORMATS, LANES, WeightFormat, tile_bytes
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.files.blocks import F32, WITHIN, Blocks, fields
from edgespec_models.files.tensors import U8, GGMLType
from tests.kit.kernels import random_blocks

SEEDS = st.integers(0, 2**32 - 1)
ROUNDED = {
    "Q8_0": WeightFormat(8, 32),
    "Q4_0": WeightFormat(4, 32),
    "Q4_1": WeightFormat(4, 32, minimums=True),
}
LINES = {"Q4_0": (4, 0), "Q4_1": (4, 0), "Q5_0": (4, 1), "Q5_1": (4, 1), "Q8_0": (8, 0)}
LINES |= {"Q2_K": (2, 0), "Q3_K": (2, 1), "Q4_K": (4, 0), "Q5_K": (4, 1), "Q6_K": (4, 2)}
LINES |= dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "MXFP4", "NVFP4"), (4, 0)) | {
    "IQ2_XS": (2, 1)
}
"""Lines of a block in the lower and the upper part; as many as bits."""

by_format = pytest.mark.parametrize("name", FORMATS)
by_rounding = pytest.mark.parametrize("name", ROUNDED)


def columns_of(name: str, raw: U8) -> int:
    blocks: int = raw.shape[1]
    return blocks * FORMATS[name].inputs


@st.composite
def raws(draw: st.DrawFn, name: str) -> U8:
    rng = np.random.default_rng(draw(SEEDS))
    return random_blocks(rng, name, draw(st.integers(1, 50)), FORMATS[name].inputs * draw(st.integers(1, 5)))


@by_format
@settings(max_examples=25)
@given(data=st.data())
def test_tiles_hold_what_the_gguf_package_reads(name: str, data: st.DataObject) -> None:
    raw = data.draw(raws(name))
    rows, columns = len(raw), columns_of(name, raw)
    before = raw.copy()
    tiles = pack(name, raw)
    assert tiles.dtype == np.uint8
    assert tiles.shape == (tile_bytes(name, rows, columns),)
    actual = unpack_tiles(name, tiles, rows, columns)
    assert actual.dtype == np.float32
    wanted = dequantize(raw.reshape(rows, -1), GGMLQuantizationType[name])
    np.testing.assert_array_equal(actual, wanted)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(wanted))
    np.testing.assert_array_equal(raw, before)


@by_format
def test_tiles_follow_each_other_along_the_inputs(name: str) -> None:
    """A matrix is packed as well piece by piece; rows that fill up the last tile are zeros."""
    raw = random_blocks(np.random.default_rng(0), name, 37, 3 * FORMATS[name].inputs)
    padded = np.concatenate([raw, np.zeros((11, *raw.shape[1:]), np.uint8)])
    pieces = [pack(name, padded[at : at + 16, tile : tile + 1]) for at in (0, 16, 32) for tile in range(3)]
    np.testing.assert_array_equal(pack(name, raw), np.concatenate(pieces))
    assert not unpack_tiles(name, pack(name, raw), 48, columns_of(name, raw))[37:].any()


@by_format
@settings(max_examples=15)
@given(data=st.data())
def test_the_layout_of_a_tile(name: str, data: st.DataObject) -> None:
    """Code by code, as ``layout.h`` says it."""
    raw = random_blocks(np.random.default_rng(data.draw(SEEDS)), name, LANES, FORMATS[name].inputs)
    parts = fields(GGMLType[name], raw)
    tile = pack(name, raw)
    low, high = LINES[name]
    blocks = FORMATS[name].inputs // 32
    for _ in range(20):
        lane, block, at = (data.draw(st.integers(0, end - 1)) for end in (LANES, blocks, 32))
        code, group = 0, at // 4
        for lines, start, shift in ((low, 0, 0), (high, blocks * low * 64, low)):
            if lines:
                per_line = 8 // lines
                line = start + (block * lines + group // per_line) * 64
                byte = int(tile[line + 4 * lane + at % 4])
                code |= (byte >> group % per_line * lines & (1 << lines) - 1) << shift
        assert code == parts.codes[lane, 32 * block + at]
    check_numbers(name, tile[blocks * (low + high) * 64 :], raw)


def check_numbers(name: str, rest: U8, raw: U8) -> None:
    """What follows the lines of a tile."""
    parts = fields(GGMLType[name], raw)
    wanted: list[npt.NDArray[np.generic]] = []
    if name == "Q2_K":
        wanted.append(raw[:, 0, :16].T)
    else:
        wanted += [each[:, 0].T for each in (parts.scales, parts.minimums) if each is not None]
    wanted += [each[:, 0] for each in (parts.factors, parts.minimum_factors) if each is not None]
    assert rest.tobytes() == b"".join(each.tobytes() for each in wanted)


def matrix(seed: int, rows: int, blocks: int) -> F32:
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (rows, blocks, 32)) * 10.0 ** rng.uniform(-4, 2, (rows, blocks, 1))
    values += rng.normal(0, 0.02, (rows, blocks, 1))
    values[rng.random((rows, blocks)) < 0.1] = 0
    values[rng.random((rows, blocks)) < 0.1] = 0.125
    return values.reshape(rows, -1).astype(np.float32)


@by_rounding
@settings(max_examples=25)
@given(seed=SEEDS, rows=st.integers(1, 40), blocks=st.integers(1, 6))
def test_codes_are_the_nearest_by_float16_scales(name: str, seed: int, rows: int, blocks: int) -> None:
    values = matrix(seed, rows, blocks)
    rounded = round_matrix(values, ROUNDED[name])
    kept, nearest = (
        unpack_tiles(name, pack_blocks(name, rounded, source), rows, values.shape[1])
        for source in (None, values)
    )
    errors = np.abs(nearest - values)
    assert (errors <= np.abs(kept - values) + 1e-7 * np.abs(values)).all()
    scales = np.abs(rounded.scales.astype(np.float16).astype(np.float32)).repeat(32, axis=1)
    codes = pack_codes(name, rounded, values)
    inner = (codes > 0) & (codes < codes.dtype.type((1 << rounded.bits) - 1))
    assert (errors <= scales * 0.5001 + 1e-6 * np.abs(values))[inner & (scales > 0)].all()


def pack_codes(name: str, blocks: Blocks, values: F32) -> U8:
    """The codes that :func:`pack_blocks` has chosen, ``(rows, columns)``."""
    tiles = pack_blocks(name, blocks, values).reshape(-1, FORMATS[name].n_bytes)
    low = LINES[name][0]
    lines = tiles[:, : low * 64].reshape(-1, low, 1, 64) >> np.arange(0, 8, low, dtype=np.uint8)[:, None]
    codes = (lines & np.uint8((1 << low) - 1)).reshape(-1, values.shape[1] // 32, 8, LANES, 4)
    return codes.transpose(0, 3, 1, 2, 4).reshape(-1, values.shape[1])[: len(values)]


@by_rounding
def test_rounding_loses_what_its_bits_lose(name: str) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, (64, 512)).astype(np.float32)
    rounded = round_matrix(values, ROUNDED[name])
    actual = unpack_tiles(name, pack_blocks(name, rounded, values), 64, 512)
    loss = np.linalg.norm(actual - values) / np.linalg.norm(values)
    assert loss < {"Q8_0": 0.0055, "Q4_0": 0.085, "Q4_1": 0.076}[name]
    # Without the values the codes are kept.
    minimums = None if rounded.minimums is None else rounded.minimums.astype(np.float16).astype(np.float32)
    scales = rounded.scales.astype(np.float16).astype(np.float32)
    wanted = Blocks(rounded.codes, rounded.zero, scales, minimums, rounded.bits, 32).values()
    np.testing.assert_array_equal(unpack_tiles(name, pack_blocks(name, rounded), 64, 512), wanted)


@by_rounding
def test_weights_beyond_float16(name: str) -> None:
    values = np.full((16, 32), 1e9, np.float32)
    values[:, 0] = -1e9
    with pytest.raises(UnsupportedModelError, match=r"float16 ends at 65504; .*--weights portable"):
        pack_blocks(name, round_matrix(values, ROUNDED[name]), values)


def test_what_a_format_cannot_hold() -> None:
    other = {"Q8_0": "Q4_0", "Q4_0": "Q8_0", "Q4_1": "Q4_0", "Q5_0": "Q4_0", "Q4_K": "Q4_1"}
    forms = [(name, ROUNDED[form]) for name, form in other.items()]
    values = np.ones((16, 256), np.float32)
    for name, form in (*forms, ("Q4_0", ROUNDED["Q4_1"]), ("Q8_0", WeightFormat(8, 64))):
        with pytest.raises(ValueError, match=f"{name} cannot hold"):
            pack_blocks(name, round_matrix(values, form), values)
    with pytest.raises(UnsupportedModelError, match="288 columns has no whole blocks of Q4_K"):
        tile_bytes("Q4_K", 16, 288)


@pytest.mark.parametrize("name", WITHIN)
def test_formats_that_others_hold_keep_their_values(name: str) -> None:
    """In tiles of the other format, those of rows that make up no whole tile too."""
    raw = random_blocks(np.random.default_rng(1), name, LANES + 3, 512)
    tiles = pack(WITHIN[name], raw, GGMLType[name])
    actual = unpack_tiles(WITHIN[name], tiles, len(raw), 512)
    np.testing.assert_array_equal(actual, dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[name]))
