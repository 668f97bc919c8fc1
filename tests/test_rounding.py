"""Every method of rounding, by itself and against another implementation."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_export.formats.encode import decode_linear, encode_linear
from edgespec_export.formats.rounding import Rounding, round_matrix
from edgespec_export.sources.blocks import F32
from edgespec_models.bundles.weight_format import WeightFormat

METHODS: tuple[Rounding, ...] = get_args(Rounding)
SEARCHES: tuple[Rounding, ...] = ("fit", "k-quant")
MARGIN = {"fit": 1.001, "k-quant": 1.05}
"""Over the squared errors of round to nearest: k-quant lowers weighted ones."""
FORMS = (WeightFormat(4, 32, minimums=True), WeightFormat(4, 32), WeightFormat(8, 32))


def matrix(seed: int, *, heavy: bool = False, shift: float = 0.0) -> F32:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, (6, 384)) if heavy else rng.normal(size=(6, 384))
    return (values * 0.02 + shift).astype(np.float32)


def kept(values: F32, form: WeightFormat, method: Rounding) -> F32:
    return decode_linear(encode_linear(values, form, method), form, values.shape[1])


def norm(error: F32) -> float:
    return float(np.linalg.norm(error))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), spread=st.floats(1e-6, 1e4), shift=st.floats(-0.05, 0.05), data=st.data()
)
def test_round_to_nearest_errs_by_half_a_step(
    seed: int, spread: float, shift: float, data: st.DataObject
) -> None:
    form = data.draw(st.sampled_from(FORMS))
    values = (matrix(seed, shift=shift) * spread).astype(np.float32)
    blocks = round_matrix(values, form, "rtn")
    error = np.abs(blocks.values() - values).reshape(*blocks.scales.shape, form.block)
    # Where zero must be a code, the end of the range may miss one: a step rather than half.
    steps = 0.5 if form.minimums else 1.0
    assert (error <= (steps + 1e-3) * np.abs(blocks.scales)[..., None] + 1e-6 * np.abs(values).max()).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), heavy=st.booleans(), shift=st.floats(-0.03, 0.03), data=st.data())
def test_a_search_is_never_worse_than_round_to_nearest(
    seed: int, heavy: bool, shift: float, data: st.DataObject
) -> None:
    form = data.draw(st.sampled_from(FORMS))
    values = matrix(seed, heavy=heavy, shift=shift)
    plain = round_matrix(values, form, "rtn").values() - values
    for method in SEARCHES:
        error = round_matrix(values, form, method).values() - values
        assert norm(error) <= MARGIN[method] * norm(plain), method


def test_a_search_pays() -> None:
    """It would not if its grids were dropped, or refitted to other codes than they give."""
    values = matrix(0, heavy=True)
    for form in FORMS:
        plain, *searched = (norm(kept(values, form, method) - values) for method in ("rtn", *SEARCHES))
        assert max(searched) < plain, form.name


def test_large_weights_count_for_more_in_k_quant() -> None:
    values = matrix(0, heavy=True)
    blocks = np.abs(values.reshape(6, -1, 32))
    weights = blocks + np.sqrt(np.square(blocks).mean(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    for form in FORMS[:2]:
        fit, k_quant = (np.square(kept(values, form, method) - values) for method in SEARCHES)
        assert (weights.reshape(6, -1) * (k_quant - 0.97 * fit)).sum() < 0.0


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("method", METHODS)
def test_formats_hold_what_was_rounded(method: Rounding, form: WeightFormat) -> None:
    values = matrix(1, shift=0.01)
    rounded = round_matrix(values, form, method)
    # Minimums are rounded once more: the remainders, to 4 bits.
    loss = norm(kept(values, form, method) - rounded.values()) / norm(values)
    assert loss < (2e-2 if form.minimums else 1e-5)
    multiple = round_matrix(values * np.float32(2**10), form, method)
    np.testing.assert_array_equal(rounded.codes, multiple.codes)
    for value in (0.0, -0.0, 0.7, -0.7, 1e-30):
        constant = np.full((2, 64), value, np.float32)
        np.testing.assert_allclose(round_matrix(constant, form, method).values(), constant, rtol=0.01)


@pytest.mark.parametrize("heavy", [False, True])
def test_k_quant_is_as_good_as_onnxruntimes(heavy: bool) -> None:
    """ONNX Runtime's port keeps integer zero points, found after the search."""
    reference = pytest.importorskip("onnxruntime.quantization.neural_compressor.weight_only")
    values = matrix(5, heavy=heavy)
    codes, scales, zeros = reference.quant_tensor_k_quant_cpu(values, 4, 32)
    theirs = ((codes - zeros) * scales).reshape(values.shape) - values
    assert norm(round_matrix(values, FORMS[0], "k-quant").values() - values) <= 1.01 * norm(theirs)
