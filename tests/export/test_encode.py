"""Round trips through the layouts of MatMulNBits and GatherBlockQuantized."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_export.formats.encode import Arrays, decode_linear, encode_embedding, encode_linear
from edgespec_export.formats.plan import PORTABLE
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.files.blocks import F32, Blocks, unpack
from edgespec_models.files.tensors import GGMLType
from edgespec_models.graphs.plan import EmbeddingSpec
from tests.kit.gguf import FORMATS, random_raw
from tests.kit.toy import COLUMNS, FLOAT, INT4, INT8

ROWS, COLUMNS_COUNT = 8, 768
EXACT = ("F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4")
"""The others lose a hundredth at most: root mean square of the differences over that of the weights."""


def source_of(name: str, seed: int = 0) -> Blocks | F32:
    kind = GGMLType[name]
    raw = random_raw(np.random.default_rng(seed), ROWS, COLUMNS_COUNT, name).view(np.uint8)
    return unpack(kind, raw.reshape(ROWS, -1, kind.block_bytes))


def values(source: Blocks | F32) -> F32:
    return source.values() if isinstance(source, Blocks) else source


def round_trip(source: Blocks | F32, form: WeightFormat) -> F32:
    return decode_linear(encode_linear(source, form), form, values(source).shape[1])


def loss(got: F32, wanted: F32) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", FORMATS)
def test_formats_lose_what_their_bits_lose(name: str) -> None:
    source, four_bits = source_of(name), INT4 if name == "Q4_0" else COLUMNS
    actual = round_trip(source, PORTABLE[GGMLType[name]])
    assert loss(actual, values(source)) <= (1e-6 if name in EXACT else 1e-2)
    assert loss(round_trip(source, four_bits), values(source)) < 0.1
    if name in ("Q4_0", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"):  # repacked
        np.testing.assert_array_equal(actual, values(source))
    if name == "Q4_0":  # blocks of another size are rounded anew
        for block in (16, 64):
            assert loss(round_trip(source, WeightFormat(4, block)), values(source)) < 0.1


@pytest.mark.parametrize("form", [COLUMNS, INT8], ids=lambda form: form.name)
@pytest.mark.parametrize("minimum", [0.0, -0.0, 0.75, -0.75])
def test_constant_blocks_are_exact(form: WeightFormat, minimum: float) -> None:
    scales = np.zeros((2, 2), np.float32)
    source = Blocks(np.full((2, 64), 5, np.uint8), 0, scales, np.full_like(scales, minimum), 4, 32)
    np.testing.assert_allclose(round_trip(source, form), values(source), rtol=1e-6)
    for every in (COLUMNS, INT4, INT8, FLOAT):
        np.testing.assert_array_equal(round_trip(np.full((3, 64), 0 * minimum, np.float32), every), 0)


def test_scales_below_zero_and_minimums_beyond_the_codes() -> None:
    rng = np.random.default_rng(0)
    scales = -rng.uniform(0.5, 1.0, (4, 3)).astype(np.float32)
    source = Blocks(rng.integers(0, 16, (4, 96), np.uint8), 0, scales, scales * np.float32(7.3), 4, 32)
    assert loss(round_trip(source, COLUMNS), source.values()) < 0.02
    minimums = np.full((4, 3), 40.0, np.float32)  # left to the remainder
    source = Blocks(source.codes, 0, np.ones((4, 3), np.float32), minimums, 4, 32)
    np.testing.assert_allclose(round_trip(source, COLUMNS), source.values(), rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(1e-4, 1e3), shift=st.floats(-5, 5))
def test_quantizing_errs_by_half_a_step_at_most(seed: int, spread: float, shift: float) -> None:
    """By construction; with four bits scales and offsets are searched: ``test_rounding``."""
    rng = np.random.default_rng(seed)
    matrix = (spread * (rng.normal(size=(2, 64)) + shift)).astype(np.float32)
    grouped = matrix.reshape(2, 2, 32)
    step = np.abs(grouped).max(-1, keepdims=True) / 127
    error = np.abs(round_trip(matrix, INT8).reshape(grouped.shape) - grouped)
    assert (error <= 0.501 * step).all()


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("F32", "F16", "BF16")])
def test_embeddings_are_exact(name: str) -> None:
    source = source_of(name)
    assert isinstance(source, Blocks)
    form = WeightFormat(4 if source.bits == 4 else 8, source.block)
    spec = EmbeddingSpec(form, offsets=source.minimums is not None)
    actual = decode_embedding(encode_embedding(source, spec), spec)
    # A 4-bit offset stands for 8 scales less the minimum, so it is rounded once, in float32.
    np.testing.assert_allclose(actual, source.values(), rtol=1e-6, atol=1e-7)


def test_embeddings_in_floats() -> None:
    matrix = np.random.default_rng(0).normal(size=(2, 96)).astype(np.float32)
    np.testing.assert_array_equal(encode_embedding(matrix, EmbeddingSpec(FLOAT))["weight"], matrix)
    packed: dict[Literal[4, 8], list[int]] = {4: [0x88, 0x88], 8: [0x80] * 3}
    for bits, zero_points in packed.items():
        encoded = encode_embedding(matrix, EmbeddingSpec(WeightFormat(bits, 32), zero_points=True))
        assert encoded["zero_points"].tolist() == [zero_points] * 2


def decode_embedding(encoded: Arrays, spec: EmbeddingSpec) -> F32:
    """What GatherBlockQuantized makes of it, plus the offsets."""
    weight, scales = encoded["weight"], encoded["scales"]
    codes = weight
    if spec.format.bits == 4:
        codes = np.stack([weight & 15, weight >> 4], axis=-1).reshape(len(weight), -1)
    centred = codes.astype(np.float32) - (8 if spec.format.bits == 4 else 128)
    result = centred * np.repeat(scales, spec.format.block, axis=1)
    if spec.offsets:
        result = result + np.repeat(encoded["offsets"].astype(np.float32), spec.format.block, axis=1)
    return np.asarray(result, np.float32)
