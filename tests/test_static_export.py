"""Exports for other devices than the CPU: what may be asked for, and what the weights become."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from edgespec.cli import app
from edgespec_export.devices import static_export
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats.quantization import Quantization
from edgespec_export.options import TrimOptions
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import EdgespecError, RequestError
from edgespec_models.graphs.static_decoder import encoding
from edgespec_runtimes.devices import CPU, Device
from edgespec_runtimes.static import StaticSession
from tests.gguf_for_tests import tiny_gguf

QNN = ExportOptions(device="npu-qnn", buckets=(64,))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf("llama", layers=1).write(tmp_path_factory.mktemp("source") / "m.gguf")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (replace(QNN, weights="exact"), RequestError, "device=npu-qnn settles formats.*leave out weights"),
        (replace(QNN, quantization=Quantization()), RequestError, "leave out quantization"),
        (replace(QNN, kv="int8"), RequestError, "leave out kv"),
        (replace(QNN, role="drafter", trim=TrimOptions(1000)), RequestError, "leave out trim"),
        (replace(QNN, buckets=(64, 641)), RequestError, "641 tokens exceeds the context of 640"),
        (replace(QNN, device=None), RequestError, "give an NPU as device"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    source: Path, tmp_path: Path, options: ExportOptions, error: type[EdgespecError], message: str
) -> None:
    with pytest.raises(error, match=message):
        export_model(source, tmp_path / "out", options=options)
    assert not list(tmp_path.iterdir())


def test_a_bundle_is_whole_and_says_what_it_is(source: Path, tmp_path: Path) -> None:
    report = export_model(source, tmp_path / "out", options=replace(QNN, role="drafter"))
    bundle = Bundle(tmp_path / "out", verify_digests=True)
    manifest, static = bundle.manifest, bundle.manifest.static
    assert static is not None and static.form == "static-quantized"
    assert {*static.files, "model.onnx.data", "report.json"} <= manifest.files.keys()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*manifest.files, "edgespec.json"}
    assert (manifest.role, manifest.kv, manifest.head_rows) == ("drafter", "uint8", None)
    assert report.static is not None and report.static.calibration_texts > 1
    assert bundle.report() == report.to_json()
    options = ExportOptions(device="npu-openvino", buckets=(64,))
    other = export_model(source, tmp_path / "other", options=options)
    assert Bundle(tmp_path / "other").digest != bundle.digest
    assert other.static is not None and other.static.kl != report.static.kl


def test_the_command_takes_device_and_buckets(source: Path, tmp_path: Path) -> None:
    command = ["export", str(source), "-o", str(tmp_path / "out"), "--device", "npu-openvino", "--buckets"]
    refused = CliRunner().invoke(app, [*command, "many"])
    assert refused.exit_code == 1 and not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, [*command, "128, 64"]).exit_code == 0
    static = Bundle(tmp_path / "out").manifest.static
    assert static is not None and static.buckets == (64, 128)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")]).stdout
    assert "made for" in shown and "npu-openvino" in shown


def test_keys_that_8_bits_would_drown_have_16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2's first layer: a few channels of its keys' bias are a hundred times as large as the others."""
    model = tiny_gguf("qwen2")
    kind, bias = model.tensors["blk.0.attn_k.bias"]
    model.tensors["blk.0.attn_k.bias"] = kind, bias + 200 * (np.arange(bias.size) == 3).astype(np.float32)
    source = model.write(tmp_path / "m.gguf")
    found = {}
    for step in (0.25, np.inf):
        monkeypatch.setattr(static_export, "_LARGEST_STEP", step)
        report = export_model(source, tmp_path / f"{step}", options=QNN)
        manifest = Bundle(tmp_path / f"{step}").manifest
        assert manifest.static is not None and report.static is not None
        found[manifest.static.wide_keys] = report.static.kl
        session = StaticSession(Bundle(tmp_path / f"{step}"), Device(CPU, "ready"))
        session.prefill([1, 2, 3])
        assert session.kv_bytes == 64 * manifest.kv_bytes_per_token
    assert found.keys() == {(0,), ()} and found[0,] < 0.5 * found[()]


@given(st.floats(-1e4, 1e4), st.floats(0, 1e4), st.sampled_from([np.uint8, np.uint16]))
def test_an_encoding_spans_its_range_and_holds_zero(
    low: float, span: float, kind: type[np.unsignedinteger]
) -> None:
    scale, zero = encoding(low, low + span, kind)
    least, most = (np.array([0, np.iinfo(kind).max]) - zero) * float(scale)
    assert least <= min(low, 0.0) + scale and most >= max(low + span, 0.0) - scale
    assert 0 <= zero <= np.iinfo(kind).max
