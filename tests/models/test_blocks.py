"""Every weight format against the ``gguf`` package's own dequantization."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgespec_models.files.blocks import Blocks, largest, unpack
from edgespec_models.files.tensors import U8, GGMLType
from tests.kit.gguf import F32, FORMATS, random_raw

QUANTIZED = [kind for kind in GGMLType if kind.block > 1]
HALVES = {kind: range(kind.factors_at, kind.factors_at + 2 * kind.factors, 2) for kind in QUANTIZED}
"""Where a block holds float16 numbers."""


def values(kind: GGMLType, raw: U8) -> F32:
    unpacked = unpack(kind, raw)
    return unpacked.values() if isinstance(unpacked, Blocks) else unpacked


def expected(kind: GGMLType, raw: U8) -> F32:
    result: F32 = dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[kind.name])
    return result


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_the_gguf_package_reads(name: str) -> None:
    kind, written = GGMLType[name], random_raw(np.random.default_rng(1), 6, 768, name)
    actual = values(kind, written.view(np.uint8).reshape(6, -1, kind.block_bytes))
    np.testing.assert_array_equal(actual, dequantize(written, GGMLQuantizationType[name]))
    assert actual.dtype == np.float32 and actual.shape == (6, 768)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@settings(max_examples=50, deadline=None)
@given(data=st.data(), scale=st.sampled_from([None, 0.0, -0.0, -0.25]))
def test_any_bytes_with_finite_scales(kind: GGMLType, data: st.DataObject, scale: float | None) -> None:
    raw = data.draw(arrays(np.uint8, (2, 3, kind.block_bytes)))
    for at in HALVES[kind]:
        raw[..., at + 1] &= 0b10111111  # the exponent's top bit off: neither infinite nor NaN
        if scale is not None:
            raw[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    if kind is GGMLType.MXFP4:
        raw[..., 0] = np.minimum(raw[..., 0], 250)  # the largest weight is below 2**127 still
    np.testing.assert_array_equal(values(kind, raw), expected(kind, raw))
    blocks = unpack(kind, raw)
    assert isinstance(blocks, Blocks) and blocks.codes.max() < 1 << blocks.bits
    assert blocks.scales.shape == (2, blocks.codes.shape[1] // blocks.block)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_largest_sees_what_is_not_finite(bad: float) -> None:
    floats = np.array([[1.0, -3.0, 2.0]], np.float32)
    assert largest(floats) == 3.0
    assert largest(np.array([[1.0, bad, 2.0]], np.float32)) == np.inf
    codes, scales = np.zeros((1, 64), np.uint8), np.array([[1.0, -5.0]], np.float32)
    assert largest(Blocks(codes, 8, scales, None, 4, 32)) == 5.0
    minimums = np.array([[bad, 0.0]], np.float32)
    assert largest(Blocks(codes, 0, scales, minimums, 4, 32)) == np.inf
