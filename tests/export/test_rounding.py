"""Rounding to blocks: how far it may be off, and what another implementation reaches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_export.formats.encode import decode_linear, encode_linear
from edgespec_export.formats.rounding import round_matrix
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.files.blocks import F32

FORMS = (WeightFormat(4, 32, minimums=True), WeightFormat(4, 32), WeightFormat(8, 32))


def matrix(seed: int, *, heavy: bool = False, shift: float = 0.0) -> F32:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, (6, 384)) if heavy else rng.normal(size=(6, 384))
    return (values * 0.02 + shift).astype(np.float32)


def to_nearest(values: F32, form: WeightFormat) -> F32:
    """The whole range of a block over its codes, nothing else."""
    blocks, top = values.reshape(len(values), -1, 32), (1 << form.bits) - 1
    low, high = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
    middle = 0 if form.minimums else (top + 1) // 2
    step = (high - low) / top if form.minimums else np.where(-low >= high, low, high) / -middle
    start = low if form.minimums else np.zeros_like(low)
    codes = np.clip(np.rint((blocks - start) / np.where(step == 0, 1, step)), -middle, top - middle)
    rounded: F32 = (start + codes * step).reshape(values.shape).astype(np.float32)
    return rounded


def norm(error: F32) -> float:
    return float(np.linalg.norm(error))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), heavy=st.booleans(), spread=st.floats(1e-6, 1e4), data=st.data())
def test_it_is_never_worse_than_round_to_nearest(
    seed: int, heavy: bool, spread: float, data: st.DataObject
) -> None:
    form, shift = data.draw(st.sampled_from(FORMS)), data.draw(st.floats(-0.03, 0.03))
    values = (matrix(seed, heavy=heavy, shift=shift) * spread).astype(np.float32)
    error = round_matrix(values, form).values() - values
    assert norm(error) <= 1.001 * norm(to_nearest(values, form) - values)


@pytest.mark.parametrize("form", FORMS[:2], ids=lambda form: form.name)
def test_it_pays(form: WeightFormat) -> None:
    """It would not if its ranges were dropped, or refitted to other codes than they give."""
    values = matrix(0, heavy=True)
    assert norm(round_matrix(values, form).values() - values) < 0.97 * norm(to_nearest(values, form) - values)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_formats_hold_what_was_rounded(form: WeightFormat) -> None:
    values = matrix(1, shift=0.01)
    rounded = round_matrix(values, form)
    kept = decode_linear(encode_linear(rounded, form), form, values.shape[1])
    # Minimums are rounded once more: the remainders, to 4 bits.
    assert norm(kept - rounded.values()) / norm(values) < (2e-2 if form.minimums else 1e-5)
    np.testing.assert_array_equal(rounded.codes, round_matrix(values * np.float32(2**10), form).codes)
    for value in (0.0, -0.0, 0.7, -0.7, 1e-30):
        constant = np.full((2, 64), value, np.float32)
        np.testing.assert_allclose(round_matrix(constant, form).values(), constant, rtol=0.01)


@pytest.mark.parametrize("heavy", [False, True])
def test_it_is_as_good_as_onnxruntimes_search(heavy: bool) -> None:
    """ONNX Runtime's port of llama.cpp's k-quant keeps integer zero points, found after the search."""
    reference = pytest.importorskip(
        "onnxruntime.quantization.neural_compressor.weight_only", reason="ONNX Runtime without this tool"
    )
    values = matrix(5, heavy=heavy)
    codes, scales, zeros = reference.quant_tensor_k_quant_cpu(values, 4, 32)
    theirs = ((codes - zeros) * scales).reshape(values.shape) - values
    assert norm(round_matrix(values, FORMS[0]).values() - values) <= norm(theirs)
