"""Every weight format against the ``gguf`` package's own dequantization."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgespec_export.sources.blocks import U8, Blocks, GGMLType, largest, unpack
from tests.gguf_for_tests import F32, FORMATS, random_raw

QUANTIZED = [kind for kind in GGMLType if kind.block > 1]
HALVES = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
}
"""Where a block holds float16 numbers."""


def values(kind: GGMLType, raw: U8) -> F32:
    unpacked = unpack(kind, raw)
    return unpacked.values() if isinstance(unpacked, Blocks) else unpacked


def expected(kind: GGMLType, raw: U8) -> F32:
    result: F32 = dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[kind.name])
    return result


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_the_gguf_package_reads(name: str) -> None:
    kind = GGMLType[name]
    raw = random_raw(np.random.default_rng(1), 6, 768, name).view(np.uint8)
    got = values(kind, raw.reshape(6, -1, kind.block_bytes))
    wanted = random_raw(np.random.default_rng(1), 6, 768, name)
    np.testing.assert_array_equal(got, dequantize(wanted, GGMLQuantizationType[name]))
    assert got.dtype == np.float32
    assert got.shape == (6, 768)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_bytes_with_finite_scales(kind: GGMLType, data: st.DataObject) -> None:
    raw = data.draw(arrays(np.uint8, (2, 3, kind.block_bytes)))
    for at in HALVES[kind]:
        raw[..., at + 1] &= 0b10111111  # the exponent's top bit off: neither infinite nor NaN
    np.testing.assert_array_equal(values(kind, raw), expected(kind, raw))


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_zero_and_negative_scales(kind: GGMLType) -> None:
    rng = np.random.default_rng(2)
    for scale in (0.0, -0.0, -0.25):
        raw = rng.integers(0, 256, (2, 2, kind.block_bytes), np.uint8)
        for at in HALVES[kind]:
            raw[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        np.testing.assert_array_equal(values(kind, raw), expected(kind, raw))


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_codes_fit_their_bits(kind: GGMLType) -> None:
    raw = np.random.default_rng(3).integers(0, 256, (8, 8, kind.block_bytes), np.uint8)
    for at in HALVES[kind]:
        raw[..., at + 1] &= 0b10111111
    blocks = unpack(kind, raw)
    assert isinstance(blocks, Blocks)
    assert blocks.codes.max() == (1 << blocks.bits) - 1
    assert blocks.scales.shape == (8, blocks.codes.shape[1] // blocks.block)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_largest_sees_what_is_not_finite(bad: float) -> None:
    floats = np.array([[1.0, -3.0, 2.0]], np.float32)
    assert largest(floats) == 3.0
    assert largest(np.array([[1.0, bad, 2.0]], np.float32)) == np.inf
    codes, scales = np.zeros((1, 64), np.uint8), np.array([[1.0, -5.0]], np.float32)
    assert largest(Blocks(codes, 8, scales, None, 4, 32)) == 5.0
    minimums = np.array([[bad, 0.0]], np.float32)
    assert largest(Blocks(codes, 0, scales, minimums, 4, 32)) == np.inf
