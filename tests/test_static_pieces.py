"""Exports piece by piece against the same ones in one piece, and what is left of a failure."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_export.devices import static_export, static_weights
from edgespec_export.devices.static_export import split
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.options import TrimOptions
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.static_graphs import StaticDevice
from edgespec_models.graphs.static_decoder import encoding
from edgespec_models.progress import Progress
from edgespec_runtimes.cpu import open_graph
from tests.gguf_for_tests import ARCHITECTURES, tiny_gguf
from tests.toy import LLAMA


def _options(folder: Path, device: StaticDevice) -> ExportOptions:
    """Calibrated on three short texts instead of the shipped ones."""
    texts = folder / "texts.jsonl"
    lines = (json.dumps({"text": f"{count} quick brown foxes jump over lazy dogs. " * 3}) for count in "123")
    texts.write_text("\n".join(lines), encoding="utf-8")
    return ExportOptions(device=device, buckets=(64,), trim=TrimOptions(texts=(texts,)))


def _whole(config: ModelConfig) -> list[range]:
    return [range(config.num_layers + 1)]


def _one_by_one(config: ModelConfig) -> list[range]:
    return [range(part, part + 1) for part in range(config.num_layers + 1)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("device", ["npu-qnn", "npu-openvino"])
def test_an_export_in_pieces_is_that_of_the_whole(
    architecture: str, device: StaticDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of all points too: ranges, mask and wide keys are in the graphs, figures in the report."""
    source = tiny_gguf(architecture).write(tmp_path / "m.gguf")
    options, reports = _options(tmp_path, device), []
    for name, pieces, rows in (("whole", _whole, 10_000), ("pieces", _one_by_one, 7)):
        monkeypatch.setattr(static_export, "split", pieces)
        monkeypatch.setattr(static_weights, "_SPAN_ROWS", rows)
        reports.append(export_model(source, tmp_path / name, options=options).static)
    whole, cut = (Bundle(tmp_path / name) for name in ("whole", "pieces"))
    assert whole.manifest.static == cut.manifest.static and reports[0] == reports[1]
    for name in whole.manifest.files.keys() - {"report.json"}:
        assert (whole.path / name).read_bytes() == (cut.path / name).read_bytes(), name


def test_one_piece_is_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[Any]] = []
    monkeypatch.setattr(static_export, "split", _one_by_one)

    def spy(*given: Any) -> Any:
        assert not any(session() for session in opened)
        session = open_graph(*given)
        opened.append(weakref.ref(session))
        return session

    monkeypatch.setattr(static_export, "open_graph", spy)
    source = tiny_gguf("llama").write(tmp_path / "m.gguf")
    export_model(source, tmp_path / "out", options=_options(tmp_path, "npu-qnn"))
    assert len(opened) == 6  # two layers and the head, in float32 and quantized


@pytest.mark.parametrize("stage", ["Calibrating", "Exporting", "Checking"])
def test_ctrl_c_leaves_nothing(stage: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = tiny_gguf("qwen2").write(tmp_path / "source" / "m.gguf")

    def interrupt(report: Progress) -> None:
        if report.stage == stage and report.done > report.total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        options = ExportOptions(device="npu-qnn", buckets=(64,))
        export_model(source, tmp_path / "out", options=options, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@given(st.integers(1, 40), st.integers(1, 1 << 22))
def test_every_part_is_in_one_piece(layers: int, piece_bytes: int) -> None:
    pieces = split(replace(LLAMA, num_layers=layers), piece_bytes)
    assert [part for piece in pieces for part in piece] == [*range(layers + 1)]
    assert len(pieces[-1]) == 1 and all(pieces)


@given(st.floats(-1e5, 0), st.floats(0, 1e5))
def test_what_was_rounded_is_not_rounded_again(low: float, high: float) -> None:
    """So a piece may round what it takes, as the one before it did."""
    scale, zero = encoding(low, high, np.uint16)
    codes = np.arange(1 << 16)
    values = ((codes - zero).astype(np.float32) * scale).astype(np.float32)
    again = np.rint(values / scale) + np.float32(zero)
    np.testing.assert_array_equal(again, codes)
