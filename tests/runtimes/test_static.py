"""Graphs of fixed shapes: what may be asked for, what exports make, and what sessions compute."""

import json
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from edgespec.cli import app
from edgespec_export.devices import static_export, static_weights
from edgespec_export.devices.static_export import split
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats.quantization import Quantization
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.static_graphs import StaticDevice, StaticGraphs
from edgespec_models.decoders.kept import types_of
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import BundleError, DeviceError, RequestError
from edgespec_models.graphs.static_decoder import encoding
from edgespec_models.progress import Progress
from edgespec_runtimes.cpu import open_cpu, open_graph
from edgespec_runtimes.session import Session
from edgespec_runtimes.static import cheapest_passes, open_static
from tests.kit.gguf import ARCHITECTURES, tiny_gguf
from tests.kit.machines import PLAIN, on_machine
from tests.kit.native import edit_manifest
from tests.kit.sessions import ON_CPU, ONE_THREAD, alike, steps
from tests.kit.toy import LLAMA

QNN = ExportOptions(device="npu-qnn", buckets=(64,))
CHIP = "snapdragon-x-elite"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf("llama", layers=1).write(tmp_path_factory.mktemp("source") / "m.gguf")


CUDA = ExportOptions(device="cuda")
REFUSED = (
    (replace(QNN, weights="exact"), "device=npu-qnn chooses formats.*leave out weights"),
    (replace(QNN, quantization=Quantization()), "leave out quantization"),
    (replace(QNN, role="drafter", trim=1000), "leave out trim"),
    (replace(QNN, buckets=(64, 641)), "641 tokens exceeds the context of 640"),
    (replace(QNN, device=None), "give an NPU as device"),
    (replace(CUDA, buckets=(64,)), "give an NPU as device"),
    (replace(CUDA, weights="exact"), "kernels, which run on CPUs"),
    (replace(CUDA, role="drafter", trim="auto"), "measures on this CPU"),
    (replace(CUDA, role="drafter", trim=300), "multiple of 8, such as 304"),
    (replace(QNN, chip="tpu"), "chip 'tpu' is not known; allowed: snapdragon-x-elite, "),
    (replace(QNN, chip=CHIP, device="cuda"), "needs the device npu-qnn, and the device is cuda"),
    (ExportOptions(chip=CHIP), "needs the device npu-qnn, and the device is the CPU"),
    (replace(QNN, chip=CHIP), r"x-elite takes Qualcomm's compiler.*pip install .edgespec\[npu-qnn\]"),
)


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: ExportOptions, message: str
) -> None:
    on_machine(monkeypatch, PLAIN)
    begun: list[Progress] = []
    with pytest.raises((RequestError, DeviceError), match=message):
        export_model(source, tmp_path / "out", options=options, progress=begun.append)
    assert not begun and not list(tmp_path.iterdir())


def test_a_bundle_is_whole_and_says_what_it_is(source: Path, tmp_path: Path) -> None:
    report = export_model(source, tmp_path / "out", options=replace(QNN, role="drafter"))
    bundle = Bundle(tmp_path / "out", verify_digests=True)
    manifest, static = bundle.manifest, bundle.manifest.static
    assert static is not None and static.graph_kind == "static-quantized"
    assert {*static.files, "model.onnx.data", "report.json"} <= manifest.files.keys()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*manifest.files, "edgespec.json"}
    assert (manifest.role, types_of(manifest.kept), manifest.head_rows) == ("drafter", "uint8", None)
    assert report["static"]["calibration_texts"] > 1
    assert bundle.report() == report
    options = ExportOptions(device="npu-openvino", buckets=(64,))
    other = export_model(source, tmp_path / "other", options=options)
    assert Bundle(tmp_path / "other").digest != bundle.digest
    assert other["static"]["kl"] != report["static"]["kl"]


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
    losses = {}
    for step in (0.25, np.inf):
        monkeypatch.setattr(static_export, "_LARGEST_STEP", step)
        report = export_model(source, tmp_path / f"{step}", options=QNN)
        manifest = Bundle(tmp_path / f"{step}").manifest
        wide = tuple(tensor.input for tensor in manifest.kept if tensor.type == "uint16")
        losses[wide] = report["static"]["kl"]
        session = open_static(Bundle(tmp_path / f"{step}"), ON_CPU)
        session.prefill([1, 2, 3])
        assert session.kv_bytes == 64 * manifest.kv_bytes_per_token
    key = ("past_key_values.0.key",)
    assert losses.keys() == {key, ()} and losses[key] < 0.5 * losses[()]


@given(st.floats(-1e4, 1e4), st.floats(0, 1e4), st.sampled_from([np.uint8, np.uint16]))
def test_an_encoding_spans_its_range_and_holds_zero(
    low: float, span: float, kind: type[np.unsignedinteger]
) -> None:
    scale, zero = encoding(low, low + span, kind)
    least, most = (np.array([0, np.iinfo(kind).max]) - zero) * float(scale)
    assert least <= min(low, 0.0) + scale and most >= max(low + span, 0.0) - scale
    assert 0 <= zero <= np.iinfo(kind).max


# ---- Piece by piece ----------------------------------------------------------------------------------------


def _options(folder: Path, device: StaticDevice) -> ExportOptions:
    """Calibrated on three short texts instead of the shipped ones."""
    texts = folder / "texts.jsonl"
    lines = (json.dumps({"text": f"{count} quick brown foxes jump over lazy dogs. " * 3}) for count in "123")
    texts.write_text("\n".join(lines), encoding="utf-8")
    return ExportOptions(device=device, buckets=(64,), calibration=(texts,))


def _whole(config: Transformer) -> list[range]:
    return [range(config.num_layers + 1)]


def _one_by_one(config: Transformer) -> list[range]:
    return [range(part, part + 1) for part in range(config.num_layers + 1)]


@pytest.mark.parametrize(
    ("device", "architecture"), [("npu-openvino", "llama"), *(("npu-qnn", name) for name in ARCHITECTURES)]
)
def test_an_export_in_pieces_is_that_of_the_whole(
    architecture: str, device: StaticDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of all points too: ranges, mask and wide keys are in the graphs, figures in the report."""
    source = tiny_gguf(architecture).write(tmp_path / "m.gguf")
    options, reports = _options(tmp_path, device), []
    for name, pieces, rows in (("whole", _whole, 10_000), ("pieces", _one_by_one, 7)):
        monkeypatch.setattr(static_export, "split", pieces)
        monkeypatch.setattr(static_weights, "_SPAN_ROWS", rows)
        reports.append(export_model(source, tmp_path / name, options=options)["static"])
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


# ---- Sessions ----------------------------------------------------------------------------------------------

Kind = StaticDevice | Literal["float", "cpu"]
"""A device; ``float`` is like ``npu-openvino`` with float32 weights."""
Make = Callable[[str, Kind], Bundle]
OpenStatic = Callable[[str, Kind], Session]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Bundles of random models: for the CPU, or for a device; each is made once."""
    folder = tmp_path_factory.mktemp("static")

    @cache
    def bundle(architecture: str, kind: Kind) -> Bundle:
        source = folder / f"{architecture}.gguf"
        if not source.exists():
            tiny_gguf(architecture).write(source)
        options = ExportOptions(weights="portable")
        if kind != "cpu":
            device: StaticDevice = "npu-openvino" if kind == "float" else kind
            options = ExportOptions(device=device, buckets=(64, 128) if kind == "float" else (64,))
        out = folder / f"{architecture}-{kind}"
        with pytest.MonkeyPatch.context() as patch:
            if kind == "float":
                patch.setattr(static_export, "format_for", lambda device: (False, False))
            export_model(source, out, options=options)
        return Bundle(out)

    return bundle


@pytest.fixture(scope="module")
def opened_static(make: Make) -> OpenStatic:
    @cache
    def opened(architecture: str, device: Kind) -> Session:
        return open_static(make(architecture, device), ON_CPU, ONE_THREAD)

    return opened


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, seed=st.integers(0, 99))
@example(steps=[("prefill", 60), ("forward", 8), ("rewind", 66), ("next", 4)], seed=0)  # a longer bucket
def test_whatever_is_asked_equals_the_cpu_session(
    architecture: str, opened_static: OpenStatic, make: Make, steps: list[tuple[str, int]], seed: int
) -> None:
    with closing(open_cpu(make(architecture, "cpu"), ONE_THREAD)) as dynamic:
        alike(opened_static(architecture, "float"), dynamic, steps, seed, near=2e-4)


@pytest.mark.parametrize(
    ("architecture", "device"), [(name, "npu-qnn") for name in ARCHITECTURES] + [("llama", "npu-openvino")]
)
def test_quantized_graphs_stay_near_and_roll_back(
    architecture: str, device: Kind, opened_static: OpenStatic, make: Make
) -> None:
    report = make(architecture, device).report()["static"]
    assert report["top1_agreement"] > 0.7 and report["kl"] < 0.01
    session = opened_static(architecture, device)
    session.prefill([])
    tokens = list(range(40))
    whole = session.predict(tokens).logits.copy()
    session.rewind(33)
    session.predict([9, 9, 9])
    session.rewind(33)
    again = session.predict(tokens[33:]).logits
    np.testing.assert_allclose(again, whole[33:], atol=0.02 * float(np.abs(whole).max()))


def test_what_does_not_fit_is_an_error(opened_static: OpenStatic, make: Make) -> None:
    session = opened_static("llama", "float")
    session.prefill([])
    with pytest.raises(RequestError, match=r"129 tokens do not fit the largest bucket .*, 128.*--buckets"):
        session.reserve(129)
    with pytest.raises(RequestError, match="641 tokens do not fit the model's context of 640"):
        session.reserve(641)
    session.prefill(list(range(124)))
    with pytest.raises(RequestError, match="largest bucket"):
        session.predict(list(range(8)))
    assert session.length == 124
    with pytest.raises(BundleError, match="no graphs of fixed shapes"):
        open_static(make("llama", "cpu"), ON_CPU)
    with pytest.raises(BundleError, match="graphs of fixed shapes"):
        open_cpu(make("llama", "float"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda kept: kept.pop(), "keep other tensors than its manifest lists; export the model again"),
        (lambda kept: kept.append(kept[0]), "keep other tensors"),
        (lambda kept: kept[0].update(input="x"), "keep other tensors"),
        (lambda kept: kept[0].update(output="x"), "keep other tensors"),
        (lambda kept: kept[0].update(input=kept[1]["input"]), "keep other tensors"),
        (lambda kept: kept[1].update(per="sequence"), r"keeps states \(past_key_values\.0\.value\)"),
        (lambda kept: kept[0].update(shape=[2**31 - 1] * 2), r"bytes a token; allowed: 1,073,741,824"),
    ],
)
def test_a_manifest_that_lists_other_tensors_is_refused(
    make: Make, tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    folder = copytree(make("llama", "float").path, tmp_path / "m")
    edit_manifest(folder, lambda manifest: change(manifest["kept"]))
    with pytest.raises(BundleError, match=words):
        open_static(Bundle(folder), ON_CPU, ONE_THREAD)


GRAPHS = StaticGraphs(
    device="npu-openvino", verify=(1, 4, 8), prefill=64, buckets=(128,), activations="float32", masked=-1.0
)


@pytest.mark.parametrize(
    ("count", "rows", "seconds", "expected"),
    [
        (1, 1, (1, 1.1, 1.2, 3), (1,)),
        (3, 3, (1, 1.1, 1.2, 3), (4,)),
        (9, 9, (1, 1.1, 1.2, 3), (1, 8)),
        (5, 5, (1, 9, 9, 9), (1, 1, 1, 1, 1)),
        (64, 1, (1, 1.1, 1.2, 3), (64,)),
        (64, 64, (1, 1.1, 1.2, 3), (8,) * 8),
        (66, 1, (1, 1.1, 1.2, 3), (4, 64)),
        (20, 1, (1, 1.1, 1.2, 9), (4, 8, 8)),
    ],
)
def test_the_passes_that_take_least_time_are_chosen(
    count: int, rows: int, seconds: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    costs = dict(zip(GRAPHS.widths, seconds, strict=True))
    chosen = cheapest_passes(count, rows, GRAPHS, costs)
    assert sorted(chosen) == sorted(expected)


@given(st.integers(1, 150), st.data())
def test_passes_take_every_token_once(count: int, data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([1, count]))
    costs = {width: data.draw(st.floats(0.1, 10)) for width in GRAPHS.widths}
    left = count
    for width in cheapest_passes(count, rows, GRAPHS, costs):
        taken = min(width, left)
        left -= taken
        wanted = max(0, min(rows, left + taken) - left)
        assert width != GRAPHS.prefill or wanted <= 1
    assert left == 0
