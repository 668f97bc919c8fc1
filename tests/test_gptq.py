"""GPTQ: what it wins where activations go together, what it comes to where they do not, and its bundles."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from edgespec_export import activations, graph_files
from edgespec_export.activations import Activations, activation_tokens
from edgespec_export.blocks import F32
from edgespec_export.encode import encode_linear
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.gptq import factor, round_for
from edgespec_export.pieces import cut, watch_pieces
from edgespec_export.quantization import Quantization
from edgespec_export.rounding import round_matrix
from edgespec_export.trim import TrimOptions
from edgespec_models.bundle import GRAPH, Bundle
from edgespec_models.config import ModelConfig
from edgespec_models.errors import RequestError
from edgespec_models.progress import Progress
from edgespec_models.tokenizer import SpecialTokens, Tokenizer
from edgespec_models.weight_format import WeightFormat
from tests.gguf_for_tests import tiny_gguf
from tests.test_export import logits_error
from tests.tokenizers_for_tests import byte_level_json
from tests.toy import FLOAT, GEMMA, LLAMA, tiny_bundle

FORMS = (
    WeightFormat(4, 32, zero_points=True, remainder="columns"),
    WeightFormat(4, 64, zero_points=True),
    WeightFormat(4, 128),
    WeightFormat(8, 32),
)
TEXTS = ([5, 17, 300, 2, 2, 41, 17], [300, 99, 12], [250, 3])
GPTQ = ExportOptions(quantization=Quantization(block=64, method="gptq"))


def correlated(rng: np.random.Generator, tokens: int, columns: int) -> F32:
    """Activations that live mostly in a fifth of their dimensions."""
    mixing = rng.normal(size=(columns // 5, columns))
    noise = 0.3 * rng.normal(size=(tokens, columns))
    return (rng.normal(size=(tokens, columns // 5)) @ mixing / 5 + noise).astype(np.float32)


def moments(given: F32) -> F32:
    return given.T @ given / np.float32(len(given))


@pytest.mark.parametrize("form", FORMS)
def test_outputs_change_less_than_by_rounding_to_nearest(form: WeightFormat) -> None:
    """On activations it has not seen."""
    rng = np.random.default_rng(1)
    both = correlated(rng, 3000, 256)
    seen, unseen = both[:2000], both[2000:]
    weights = rng.normal(size=(48, 256)).astype(np.float32)
    factors = [factor(moments(seen))]
    losses = {
        name: float(np.linalg.norm(unseen @ (rounded.values() - weights).T))
        for name, rounded in (
            ("rtn", round_matrix(weights, form, "rtn")),
            ("fit", round_matrix(weights, form, "fit", np.diag(moments(seen)).copy())),
            ("gptq", round_for(weights, form, factors)),
        )
    }
    assert losses["gptq"] < 0.75 * min(losses["rtn"], losses["fit"])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_made_up_for_where_columns_do_not_go_together(form: WeightFormat) -> None:
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(24, 256)).astype(np.float32)
    own = rng.uniform(0.1, 2, 256).astype(np.float32)
    upper = factor(np.diag(own))
    assert not (upper - np.diag(np.diag(upper))).any()
    rounded = round_for(weights, form, [upper])
    grid = round_matrix(weights, form, "fit", np.diag(upper) ** -2)
    for name in ("scales", "minimums"):
        expected = getattr(grid, name)
        if expected is not None:
            np.testing.assert_allclose(getattr(rounded, name), expected, rtol=1e-3, atol=1e-4)
    steps = np.repeat(rounded.scales, form.block, axis=1)
    inner = (rounded.codes > 0) & (rounded.codes < (1 << form.bits) - 1)
    misses = np.abs(rounded.values() - weights) / np.abs(steps)
    assert misses[inner].max() < 0.501


def test_the_factor_is_that_of_the_inverse() -> None:
    rng = np.random.default_rng(3)
    matrix = moments(rng.normal(size=(500, 64)).astype(np.float32))
    upper = factor(matrix).astype(np.float64)
    own = np.diag(np.diag(matrix)).astype(np.float64)
    steady = 0.8 * (matrix - own) + own + 0.1 * np.trace(own) / 64 * np.eye(64)
    np.testing.assert_allclose(upper.T @ upper @ steady, np.eye(64), atol=1e-4)
    assert not np.tril(upper, -1).any()


def test_columns_that_saw_nothing_are_rounded_all_the_same() -> None:
    weights = np.random.default_rng(4).normal(size=(8, 64)).astype(np.float32)
    given = correlated(np.random.default_rng(5), 400, 64)
    given[:, ::3] = 0
    for seen in (given, np.zeros_like(given)):
        rounded = round_for(weights, WeightFormat(4, 32), [factor(moments(seen))])
        assert np.linalg.norm(rounded.values() - weights) < 0.5 * np.linalg.norm(weights)


def test_spans_are_rounded_each_for_itself() -> None:
    rng = np.random.default_rng(6)
    weights = rng.normal(size=(8, 256)).astype(np.float32)
    factors = [factor(moments(correlated(rng, 500, columns))) for columns in (192, 64)]
    for form in FORMS[:2]:
        whole = round_for(weights, form, factors).values()
        parts = [
            round_for(weights[:, :192], form, factors[:1]),
            round_for(weights[:, 192:], form, factors[1:]),
        ]
        np.testing.assert_array_equal(whole, np.concatenate([part.values() for part in parts], axis=1))


def test_it_needs_factors() -> None:
    with pytest.raises(ValueError, match="needs factors"):
        encode_linear(np.ones((2, 64), np.float32), WeightFormat(4, 32), "gptq")


@pytest.mark.parametrize("rows", [2048, 4])
@pytest.mark.parametrize("config", [LLAMA, GEMMA])
def test_moments_are_those_of_the_whole_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: ModelConfig, rows: int
) -> None:
    monkeypatch.setattr("edgespec_export.activations._ROWS", rows)
    graph = tiny_bundle(tmp_path / "b", config, FLOAT).path / GRAPH
    names = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
    linears = [f"layers.{layer}.{name}" for layer in range(config.num_layers) for name in names] + ["lm_head"]
    activations = Activations(graph, set(linears), config, TEXTS)
    got = {linear: activations.moments(linear) for linear in linears}
    for value, its_linears in activations._linears.items():
        expected = moments(observed(graph, config, value))
        for linear in its_linears:
            np.testing.assert_allclose(
                got[linear][0], expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max()
            )
            linears.remove(linear)
    assert not linears


def observed(graph: Path, config: ModelConfig, value: str) -> F32:
    """What the whole graph computes for ``value``, without the texts' first tokens."""
    seen: list[F32] = []

    def observe(name: str, given: F32) -> None:
        if name == value:
            seen.append(given[1:])

    for _ in watch_pieces(cut(graph, watched={value}), config, TEXTS, observe):
        pass
    return np.concatenate(seen)


def test_a_bundle_is_the_same_every_time_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = tiny_gguf("qwen2", "F16")
    source = model.write(tmp_path / "m.gguf")
    heard: list[Progress] = []
    reports = [export_model(source, tmp_path / name, options=GPTQ, progress=heard.append) for name in "ab"]
    files = [
        {f.name: f.read_bytes() for f in (tmp_path / name).iterdir() if f.suffix == ".data"} for name in "ab"
    ]
    assert files[0] == files[1]
    assert not (tmp_path / "a" / "activations").exists()
    assert any(step.stage == "Calibrating" for step in heard)
    assert reports[0].row_exact and {loss.method for loss in reports[0].weights} == {"gptq"}
    assert Bundle(tmp_path / "a").manifest.weights == "4/64/gptq"
    assert logits_error(model, tmp_path / "a") < 0.4


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    source = tiny_gguf("llama", "F16", layers=1).write(tmp_path / "m.gguf")
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": "x"}) + "\n", encoding="utf-8")
    options = ExportOptions(quantization=Quantization(method="gptq"), trim=TrimOptions(texts=(file,)))
    with pytest.raises(RequestError, match="two tokens or more"):
        export_model(source, tmp_path / "out", options=options)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_vocabulary_is_sized_without_calibrating_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_gguf("llama", "F16", layers=1).write(tmp_path / "m.gguf")
    opened = mock.Mock(side_effect=activations.open_activations)
    monkeypatch.setattr(graph_files, "open_activations", opened)
    options = replace(GPTQ, role="drafter", trim=TrimOptions(320))
    report = export_model(source, tmp_path / "out", options=options)
    assert opened.call_count == 1
    assert "gptq" in {loss.method for loss in report.weights}
    assert Bundle(tmp_path / "out").manifest.head_rows == 320


def test_tokens_are_taken_from_all_over_the_texts() -> None:
    tokenizer = Tokenizer.from_json(byte_level_json())
    special = SpecialTokens(bos=1, eos=(2,), add_bos=True, pad=None)
    texts = [f"{number} " + "ab! " * 200 for number in range(400)]
    taken = activation_tokens(texts, tokenizer, special, 640)
    assert 3_600 < sum(map(len, taken)) < 4_600
    assert all(tokens[0] == 1 and len(tokens) <= 192 for tokens in taken)
    assert tokenizer.decode(taken[-1][1:5]) > "3"
    assert max(map(len, activation_tokens(texts, tokenizer, special, 50))) == 50
