"""A drafter in NumPy against ONNX Runtime over the same bundle, and its gradient against differences."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.learning.decoder import NumpyDecoder, Reading
from edgespec.learning.layer_math import F32
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.options import TrimOptions
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.errors import UnsupportedModelError
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from tests.foreign_for_tests import ForeignSpec, write_genai
from tests.gguf_for_tests import tiny_gguf
from tests.native_for_tests import tiny_native
from tests.test_graphs import CONFIGS, reference_logits
from tests.toy import GEMMA, LLAMA, QWEN, TinyModel, tiny_bundle

TOKENS = [5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63, 11, 387, 18, 5, 17, 301, 4, 77, 6]
START = 8
_OPTIONS = CpuOptions(threads=1, exact_rows=False)

KEPT = tuple(range(0, 404, 3))
"""Of a trimmed LM head: some of the answer's tokens are among them, some are not."""


def _drafter(folder: Path, config: ModelConfig = LLAMA, kind: str = "Q8_0", **options: Any) -> TinyModel:
    return tiny_native(folder / "m", config, kind, role="drafter", **options)


def _read(decoder: NumpyDecoder, gains: F32 | None = None, *, differentiate: bool = False) -> Reading:
    return decoder.read(
        TOKENS, START, decoder.gains.stored if gains is None else gains, differentiate=differentiate
    )


def _expected(model: TinyModel, gains: dict[str, F32] | None = None) -> tuple[float, list[bool]]:
    """Loss and right guesses by logits in float64."""
    model = replace(model, weights=model.weights | (gains or {}))
    return _judged(model.bundle, reference_logits(model, TOKENS[:-1]))


def _judged(bundle: Bundle, logits: F32) -> tuple[float, list[bool]]:
    rows, columns = logits[START - 1 :].astype(np.float64), bundle.head_tokens
    if columns is not None:  # the columns of a prompt's words are not trained
        rows = rows[:, : len(columns)]
    losses, right = [], []
    for row, token in zip(rows, TOKENS[START:], strict=True):
        column = token if columns is None else int(np.searchsorted(columns, token))
        if columns is not None and (column == len(columns) or columns[column] != token):
            continue
        peak = row.max()
        losses.append(peak + np.log(np.exp(row - peak).sum()) - row[column])
        right.append(bool(row.argmax() == column))
    return float(np.mean(losses)), right


def _taught(model: TinyModel) -> dict[str, F32]:
    """Other gains, with which many guesses are right."""
    decoder = NumpyDecoder(model.bundle)
    gains = decoder.gains.stored.copy()
    for _ in range(6):
        gradient = _read(decoder, gains, differentiate=True).gradient
        assert gradient is not None
        gains -= np.float32(0.1) * np.sign(gradient)
    return decoder.gains.named(gains)


CASES = [(name, None) for name in CONFIGS] + [("llama", KEPT)]


@pytest.mark.parametrize(("name", "kept"), CASES)
def test_a_text_is_read_as_the_papers_say(tmp_path: Path, name: str, kept: tuple[int, ...] | None) -> None:
    model = _drafter(tmp_path, CONFIGS[name], head_tokens=kept)
    loss, right = _expected(model)
    reading = _read(NumpyDecoder(model.bundle))
    assert reading.loss == pytest.approx(loss, rel=1e-5) and reading.gradient is None
    assert reading.right.tolist() == right
    assert len(right) == len(TOKENS) - START if kept is None else 1 < len(right) < len(TOKENS) - START


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_with_other_gains_too(tmp_path: Path, name: str) -> None:
    model = _drafter(tmp_path, CONFIGS[name])
    gains = _taught(model)
    reading = _read(NumpyDecoder(model.bundle), np.concatenate(list(gains.values())))
    loss, right = _expected(model, gains)
    assert reading.loss == pytest.approx(loss, rel=1e-4)
    assert reading.right.tolist() == right and any(right)  # so that rights and wrongs are told apart


def _by_session(bundle: Bundle) -> tuple[float, list[bool]]:
    session = CpuSession(bundle, _OPTIONS)
    logits = session.predict(TOKENS[:-1]).logits.copy()
    session.close()
    return _judged(bundle, logits)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "IQ4_NL", "MXFP4"])
@pytest.mark.parametrize("config", [LLAMA, QWEN, GEMMA], ids=lambda config: config.architecture)
def test_it_reads_as_a_session_does_but_for_the_rounding_of_activations(
    tmp_path: Path, config: ModelConfig, kind: str
) -> None:
    model = _drafter(tmp_path, config, kind)
    assert _read(NumpyDecoder(model.bundle)).loss == pytest.approx(_by_session(model.bundle)[0], rel=0.02)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_what_the_exporter_makes_is_read_as_onnx_runtime_reads_it(tmp_path: Path, architecture: str) -> None:
    source = tiny_gguf(architecture).write(tmp_path / "m.gguf")
    options = ExportOptions(role="drafter", trim=TrimOptions(320))
    export_model(source, tmp_path / "out", options=options)
    bundle = Bundle(tmp_path / "out")
    reading = _read(NumpyDecoder(bundle), differentiate=True)
    loss, right = _by_session(bundle)
    assert reading.loss == pytest.approx(loss, rel=0.02)
    assert len(reading.right) == len(right) < len(TOKENS) - START
    assert reading.gradient is not None and np.isfinite(reading.gradient).all() and reading.gradient.any()


def test_an_answer_that_it_cannot_write_teaches_nothing(tmp_path: Path) -> None:
    decoder = NumpyDecoder(_drafter(tmp_path, head_tokens=(400, 401)).bundle)
    reading = _read(decoder, differentiate=True)
    assert reading.gradient is not None
    assert (reading.loss, len(reading.right)) == (0.0, 0) and not reading.gradient.any()


def _slope(decoder: NumpyDecoder, gains: F32, along: F32, step: float) -> float:
    """By differences of fourth order; the loss is float32's, so steps are large."""
    at = {times: _read(decoder, gains + np.float32(times * step) * along).loss for times in (-2, -1, 1, 2)}
    return (8.0 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12.0 * step)


@pytest.mark.parametrize(("name", "kept"), CASES)
def test_the_gradient_is_what_differences_say(
    tmp_path: Path, name: str, kept: tuple[int, ...] | None
) -> None:
    decoder = NumpyDecoder(_drafter(tmp_path, CONFIGS[name], head_tokens=kept).bundle)
    rng = np.random.default_rng(3)
    gains = decoder.gains.stored + rng.normal(0.0, 0.05, len(decoder.gains)).astype(np.float32)
    gradient = _read(decoder, gains, differentiate=True).gradient
    assert gradient is not None and gradient.dtype == np.float32
    for each in decoder.gains:  # each gain on its own, so that small ones are checked as well
        along = np.zeros_like(gains)
        part = decoder.gains.part(along, each)
        part[:] = rng.normal(size=part.shape)
        part += np.sign(decoder.gains.part(gradient, each))  # not at right angles to the gradient
        along /= np.linalg.norm(along)
        expected = _slope(decoder, gains, along, 0.05)
        assert float(gradient @ along) == pytest.approx(expected, rel=5e-3, abs=2e-4), each


def test_a_long_head_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = NumpyDecoder(_drafter(tmp_path).bundle)
    whole = _read(decoder, differentiate=True)
    monkeypatch.setattr("edgespec.learning.decoder._CHUNK", 96)
    parts = _read(decoder, differentiate=True)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.gradient is not None and whole.gradient is not None
    np.testing.assert_allclose(parts.gradient, whole.gradient, atol=1e-5)


class _StopError(Exception):
    pass


def test_it_breathes_between_layers_and_can_be_given_up(tmp_path: Path) -> None:
    decoder, breaths = NumpyDecoder(_drafter(tmp_path).bundle), 0
    gains, passes = decoder.gains.stored.copy(), 2 * LLAMA.num_layers + 1

    def breathe() -> None:
        nonlocal breaths
        breaths -= 1
        if breaths < 0:
            raise _StopError

    before = _read(decoder, differentiate=True)
    for most in range(passes):
        breaths = most
        with pytest.raises(_StopError):
            decoder.read(TOKENS, START, gains, differentiate=True, breathe=breathe)
    np.testing.assert_array_equal(gains, decoder.gains.stored)
    breaths = passes  # each layer's way there and back, and the head
    after = decoder.read(TOKENS, START, gains, differentiate=True, breathe=breathe)
    assert breaths == 0 and after.loss == before.loss
    assert after.gradient is not None and before.gradient is not None
    np.testing.assert_array_equal(after.gradient, before.gradient)


@pytest.mark.parametrize("factor", [1e3, 1e8, 1e19, 1e30])
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=lambda config: config.architecture)
def test_gains_out_of_all_proportion_warn_nobody(tmp_path: Path, config: ModelConfig, factor: float) -> None:
    decoder = NumpyDecoder(_drafter(tmp_path, config).bundle)
    signs = np.where(np.arange(len(decoder.gains)) % 3, 1.0, -1.0).astype(np.float32)
    gains = decoder.gains.stored * signs * np.float32(factor)
    reading = _read(decoder, gains, differentiate=True)  # warnings are errors here
    assert reading.gradient is not None and reading.gradient.shape == gains.shape


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=lambda config: config.architecture)
def test_gains_have_the_graphs_names(tmp_path: Path, config: ModelConfig) -> None:
    model = _drafter(tmp_path, config)
    decoder, session = NumpyDecoder(model.bundle), CpuSession(model.bundle, _OPTIONS)
    assert set(decoder.gains) == session.tunable
    for name, gain in decoder.gains.named(decoder.gains.stored).items():
        np.testing.assert_array_equal(gain, model.weights[name])
    session.close()


def test_drafters_of_other_operators_are_refused(tmp_path: Path) -> None:
    foreign = open_bundle(write_genai(tmp_path / "f", ForeignSpec(external=True)))
    for bundle in (foreign, tiny_bundle(tmp_path / "m", LLAMA, role="drafter").bundle):
        with pytest.raises(UnsupportedModelError, match="own"):
            NumpyDecoder(bundle)
