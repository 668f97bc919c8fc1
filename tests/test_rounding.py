"""Every method of rounding, by itself and against another implementation."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_export.blocks import F32
from edgespec_export.encode import decode_linear, encode_linear
from edgespec_export.quantization import BLOCKS
from edgespec_export.rounding import Rounding, round_matrix
from edgespec_models.weight_format import WeightFormat

METHODS: tuple[Rounding, ...] = get_args(Rounding)
SEARCHES: tuple[Rounding, ...] = ("fit", "k-quant", "hqq")
MARGIN = {"fit": 1.001, "k-quant": 1.05, "hqq": 1.25}
"""Over the squared errors of round to nearest: k-quant lowers weighted ones, hqq's norm forgives outliers."""


def forms(block: int) -> tuple[WeightFormat, ...]:
    return (
        WeightFormat(4, block, zero_points=True, remainder="columns"),
        WeightFormat(4, block, zero_points=True, remainder="matmul"),
        WeightFormat(4, block, zero_points=True),
        WeightFormat(4, block),
        WeightFormat(8, block),
    )


def matrix(seed: int, *, heavy: bool = False, shift: float = 0.0) -> F32:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, (6, 384)) if heavy else rng.normal(size=(6, 384))
    return (values * 0.02 + shift).astype(np.float32)


def kept(values: F32, form: WeightFormat, method: Rounding) -> F32:
    return decode_linear(encode_linear(values, form, method), form, values.shape[1])


def norm(error: F32, power: int = 2) -> float:
    return float(np.linalg.norm(error.ravel(), power))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), spread=st.floats(1e-6, 1e4), shift=st.floats(-0.05, 0.05), data=st.data()
)
def test_round_to_nearest_errs_by_half_a_step(
    seed: int, spread: float, shift: float, data: st.DataObject
) -> None:
    form = data.draw(st.sampled_from([form for block in BLOCKS for form in forms(block)]))
    values = (matrix(seed, shift=shift) * spread).astype(np.float32)
    blocks = round_matrix(values, form, "rtn")
    error = np.abs(blocks.values() - values).reshape(*blocks.scales.shape, form.block)
    # Where zero must be a code, the end of the range may miss one: a step rather than half.
    steps = 0.5 if form.remainder != "drop" else 1.0
    assert (error <= (steps + 1e-3) * np.abs(blocks.scales)[..., None] + 1e-6 * np.abs(values).max()).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), heavy=st.booleans(), shift=st.floats(-0.03, 0.03), data=st.data())
def test_a_search_is_never_worse_than_round_to_nearest(
    seed: int, heavy: bool, shift: float, data: st.DataObject
) -> None:
    form = data.draw(st.sampled_from([form for block in BLOCKS for form in forms(block)]))
    values = matrix(seed, heavy=heavy, shift=shift)
    plain = round_matrix(values, form, "rtn").values() - values
    for method in SEARCHES:
        error = round_matrix(values, form, method).values() - values
        assert norm(error) <= MARGIN[method] * norm(plain), method
        if method == "hqq":  # the norm it lowers is nearer to this one
            assert norm(error, 1) <= 1.0001 * norm(plain, 1)


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_search_pays(method: Rounding, block: int) -> None:
    """It would not if its grids were dropped, or refitted to other codes than they give."""
    values = matrix(0, heavy=True)
    for form in forms(block):
        error = kept(values, form, method) - values
        plain = kept(values, form, "rtn") - values
        power = 1 if method == "hqq" else 2
        assert norm(error, power) < norm(plain, power), form.name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", BLOCKS)
def test_what_a_format_holds_is_what_was_rounded(method: Rounding, block: int) -> None:
    values = matrix(1, shift=0.01)
    for form in forms(block):
        rounded = round_matrix(values, form, method).values()
        # Only `columns` rounds once more: the remainders, to 4 bits.
        loss = norm(kept(values, form, method) - rounded) / norm(values)
        assert loss < (2e-2 if form.remainder == "columns" else 1e-5), form.name


@pytest.mark.parametrize("method", METHODS)
def test_constant_and_empty_blocks(method: Rounding) -> None:
    for form in forms(32):
        for value in (0.0, -0.0, 0.7, -0.7, 1e-30):
            values = np.full((2, 64), value, np.float32)
            np.testing.assert_allclose(round_matrix(values, form, method).values(), values, rtol=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_a_multiple_gets_the_same_codes(method: Rounding) -> None:
    values = matrix(2)
    for form in forms(64):
        codes = round_matrix(values, form, method).codes
        np.testing.assert_array_equal(codes, round_matrix(values * np.float32(2**10), form, method).codes)


@pytest.mark.parametrize("method", ["fit", "k-quant"])
@pytest.mark.parametrize("heavy", [False, True])
def test_importance_moves_the_error_to_where_it_counts_least(method: Rounding, heavy: bool) -> None:
    values = matrix(3, heavy=heavy)
    normal = np.random.default_rng(0).normal(0.0, 2.0, values.shape[1])
    importance = np.exp(normal).astype(np.float32)
    for form in forms(64):
        plain = round_matrix(values, form, method).values() - values
        aimed = round_matrix(values, form, method, importance).values() - values
        assert (importance * aimed**2).sum() < 0.95 * (importance * plain**2).sum(), form.name


def test_importance_that_says_nothing_changes_nothing() -> None:
    values = matrix(4)
    form = forms(32)[0]
    plain = round_matrix(values, form, "fit").values()
    np.testing.assert_array_equal(
        round_matrix(values, form, "fit", np.zeros(384, np.float32)).values(), plain
    )
    same = round_matrix(values, form, "fit", np.full(384, 5.0, np.float32)).values()
    np.testing.assert_allclose(same, plain, atol=1e-6)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("heavy", [False, True])
def test_k_quant_is_as_good_as_onnxruntimes(block: int, heavy: bool) -> None:
    """ONNX Runtime's port keeps integer zero points, found after the search."""
    reference = pytest.importorskip("onnxruntime.quantization.neural_compressor.weight_only")
    values = matrix(5, heavy=heavy)
    codes, scales, zeros = reference.quant_tensor_k_quant_cpu(values, 4, block)
    theirs = ((codes - zeros) * scales).reshape(values.shape) - values
    form = WeightFormat(4, block, zero_points=True)
    assert norm(round_matrix(values, form, "k-quant").values() - values) <= 1.01 * norm(theirs)
