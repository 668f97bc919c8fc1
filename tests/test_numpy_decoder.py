"""A drafter in NumPy against ONNX Runtime over the same bundle, and its gradient against differences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.learning.decoder import NumpyDecoder, Reading
from edgespec.learning.layer_math import F32
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_runtimes.cpu import open_cpu
from tests.kit.gguf import tiny_gguf
from tests.kit.native import tiny_native
from tests.kit.toy import GEMMA, LLAMA, TinyModel
from tests.test_graphs import CONFIGS, reference_logits

TOKENS = [5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63, 11, 387, 18, 5, 17, 301, 4, 77, 6]
START = 8

KEPT = tuple(range(0, 404, 3))
"""Of a trimmed LM head: some of the answer's tokens are among them, some are not."""


def _drafter(folder: Path, config: ModelConfig = LLAMA, kind: str = "Q8_0", **options: Any) -> TinyModel:
    return tiny_native(folder / "m", config, kind, role="drafter", **options)


def _read(decoder: NumpyDecoder, gains: F32 | None = None, *, differentiate: bool = False) -> Reading:
    return decoder.read(
        TOKENS, START, decoder.gains.stored if gains is None else gains, differentiate=differentiate
    )


def _judged(bundle: Bundle, logits: F32) -> tuple[float, list[bool]]:
    """Loss and right guesses by logits in float64."""
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


CASES = [(name, None) for name in CONFIGS] + [("llama", KEPT)]


@pytest.mark.parametrize(("name", "kept"), CASES)
def test_a_text_is_read_as_the_papers_say(tmp_path: Path, name: str, kept: tuple[int, ...] | None) -> None:
    model = _drafter(tmp_path, CONFIGS[name], head_tokens=kept)
    loss, right = _judged(model.bundle, reference_logits(model, TOKENS[:-1]))
    reading = _read(NumpyDecoder(model.bundle))
    assert reading.loss == pytest.approx(loss, rel=1e-5) and reading.gradient is None
    assert reading.right.tolist() == right
    assert len(right) == len(TOKENS) - START if kept is None else 1 < len(right) < len(TOKENS) - START


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_what_the_exporter_makes_is_read_as_onnx_runtime_reads_it(tmp_path: Path, architecture: str) -> None:
    source = tiny_gguf(architecture).write(tmp_path / "m.gguf")
    options = ExportOptions(role="drafter", trim=320)
    export_model(source, tmp_path / "out", options=options)
    bundle = Bundle(tmp_path / "out")
    reading, session = _read(NumpyDecoder(bundle), differentiate=True), open_cpu(bundle)
    loss, right = _judged(bundle, session.predict(TOKENS[:-1]).logits.copy())
    session.close()
    assert reading.loss == pytest.approx(loss, rel=0.02)  # but for the rounding of activations
    assert len(reading.right) == len(right) < len(TOKENS) - START
    assert reading.gradient is not None and np.isfinite(reading.gradient).all() and reading.gradient.any()


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
    for gain in decoder.gains:  # each gain on its own, so that small ones are checked as well
        along = np.zeros_like(gains)
        part = decoder.gains.part(along, gain)
        part[:] = rng.normal(size=part.shape)
        part += np.sign(decoder.gains.part(gradient, gain))  # not at right angles to the gradient
        along /= np.linalg.norm(along)
        expected = _slope(decoder, gains, along, 0.05)
        assert float(gradient @ along) == pytest.approx(expected, rel=5e-3, abs=2e-4), gain


def test_a_long_head_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = NumpyDecoder(_drafter(tmp_path).bundle)
    whole = _read(decoder, differentiate=True)
    monkeypatch.setattr("edgespec.learning.decoder._CHUNK", 96)
    parts = _read(decoder, differentiate=True)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.gradient is not None and whole.gradient is not None
    np.testing.assert_allclose(parts.gradient, whole.gradient, atol=1e-5)


@pytest.mark.parametrize("factor", [1e3, 1e8, 1e19, 1e30])
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=lambda config: config.architecture)
def test_gains_out_of_all_proportion_warn_nobody(tmp_path: Path, config: ModelConfig, factor: float) -> None:
    decoder = NumpyDecoder(_drafter(tmp_path, config).bundle)
    signs = np.where(np.arange(len(decoder.gains)) % 3, 1.0, -1.0).astype(np.float32)
    gains = decoder.gains.stored * signs * np.float32(factor)
    reading = _read(decoder, gains, differentiate=True)  # warnings are errors here
    assert reading.gradient is not None and reading.gradient.shape == gains.shape
