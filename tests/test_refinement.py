"""A coarse LM head whose most probable tokens get the logits that their own rows give."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from edgespec_export import plan
from edgespec_export.export import ExportOptions, ExportReport, export_model
from edgespec_export.pieces import cut, run_pieces
from edgespec_models.bundle import GRAPH, Bundle
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from edgespec_runtimes.ort import ort
from tests.gguf_for_tests import TinyGGUF, tiny_gguf

COLUMNS = 24
TEXTS = ([5, 17, 300, 2, 2, 41, 17], [300, 99], [250])


def export(model: TinyGGUF, folder: Path, options: ExportOptions) -> ExportReport:
    """Export with every vocabulary large enough for a coarse head."""
    source = model.write(folder.with_suffix(".gguf"))
    with mock.patch.multiple(plan, _REFINED_FROM=1, _REFINED_WEIGHTS=COLUMNS * 256, _LEAST_REFINED=1):
        return export_model(source, folder, options=options)


def logits_and_hidden(bundle: Bundle, tokens: list[int]) -> list[npt.NDArray[np.float32]]:
    """Of every token: float32 ``(tokens, vocab)`` and ``(tokens, hidden)``."""
    session = ort.InferenceSession(str(bundle.graph), providers=["CPUExecutionProvider"])
    count, config = len(tokens), bundle.config
    shape = (1, config.num_kv_heads, count, config.head_dim)
    feeds: dict[str, Any] = {
        "input_ids": np.array([tokens], np.int64),
        "seqlens_k": np.array([count - 1], np.int32),
        "total_sequence_length": np.array(count, np.int32),
        "logits_rows": np.arange(count),
        "attention_pad": np.zeros((1, 0, config.query_width + 2 * config.kv_width), np.float32),
        "attention_rows": np.array([count], np.int64),
    }
    feeds |= {v.name: np.zeros(shape, np.float32) for v in session.get_inputs() if v.name.startswith("past")}
    return [values[0] for values in session.run(["logits", "hidden_states"], feeds)]


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", "Q6_K"), ("llama", "F16"), ("llama", "Q4_K"), ("qwen2", "Q4_K"), ("gemma3", "Q8_0")],
)
def test_the_best_columns_are_the_products_with_the_rows_of_the_file(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    model = tiny_gguf(architecture, kind)
    # ``int8`` keeps sources in floating point from having float heads.
    export(model, tmp_path / "m", ExportOptions(weights="int8", hidden_states=True))
    bundle = Bundle(tmp_path / "m")
    logits, hidden = logits_and_hidden(bundle, TEXTS[0])
    head = model.values("output.weight" if "output.weight" in model.tensors else "token_embd.weight")
    exact = hidden @ head.T
    error, scale = np.abs(logits - exact), float(np.abs(exact).max())
    held = 1e-5 if kind != "F16" else 1e-2  # floats are rounded to 8 bits
    right = error <= held * scale
    assert (right.sum(axis=1) >= COLUMNS).all()
    best = np.argsort(-exact, axis=1)
    assert np.take_along_axis(right, best[:, : COLUMNS // 3], axis=1).all()
    if kind != "F16":  # the others come from 4 bits
        assert right.mean() < 0.5 and error.max() > 1e-2 * scale
        np.testing.assert_array_equal(logits.argmax(axis=1), exact.argmax(axis=1))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_rows_are_exact_and_pieces_agree(tmp_path: Path, architecture: str) -> None:
    report = export(tiny_gguf(architecture, "Q6_K"), tmp_path / "m", ExportOptions(weights="close"))
    bundle = Bundle(tmp_path / "m")
    assert report.row_exact and bundle.manifest.even_head and not bundle.manifest.even_rows
    session = CpuSession(bundle)
    assert session.row_exact
    assert not CpuSession(bundle, CpuOptions(exact_rows=False)).row_exact
    pieces = cut(bundle.path / GRAPH, piece_bytes=1)
    result = run_pieces(pieces, bundle.config, TEXTS, even_rows=False, even_head=True)
    assert result.rolls_back and result.row_exact
    for tokens, got in zip(TEXTS, result.logits, strict=True):
        session.prefill([])
        np.testing.assert_array_equal(got, session.forward(tokens))
    session.close()


def test_rows_that_are_only_looked_up_are_not_read_by_every_pass(tmp_path: Path) -> None:
    model = tiny_gguf("llama", "Q6_K")
    export(model, tmp_path / "refined", ExportOptions(weights="close"))
    export_model(model.write(tmp_path / "m.gguf"), tmp_path / "whole", options=ExportOptions(weights="close"))
    refined, whole = Bundle(tmp_path / "refined").manifest, Bundle(tmp_path / "whole").manifest
    assert refined.bytes_per_pass < whole.bytes_per_pass
    assert refined.bytes_by_class["lm_head"] < 0.6 * whole.bytes_by_class["lm_head"]
    assert refined.bytes_by_class["embedding"] > whole.bytes_by_class["embedding"]
    assert not whole.even_head  # its vocabulary is small


@pytest.mark.parametrize("options", [ExportOptions(role="drafter"), ExportOptions(weights="exact")])
def test_drafters_and_exact_targets_have_one_head(tmp_path: Path, options: ExportOptions) -> None:
    export(tiny_gguf("llama", "Q6_K"), tmp_path / "m", options)
    assert "TopK" not in (tmp_path / "m" / GRAPH).read_bytes().decode("latin-1")
