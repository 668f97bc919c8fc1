"""Which devices a machine has, what is missing on others, and where a bundle goes."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edgespec
from edgespec.cli import app
from edgespec.cli.devices import show_devices
from edgespec_models.bundles.bundle import MANIFEST, Bundle
from edgespec_models.bundles.static_graphs import ExportDevice, StaticGraphs, buckets_for
from edgespec_models.errors import BundleError, DeviceError
from edgespec_runtimes.devices import KINDS
from edgespec_runtimes.discovery import devices, export_for, place, resolve
from edgespec_runtimes.ort import warn_of_mix
from tests.kit.machines import EMULATING, PLAIN, SNAPDRAGON, WORKSTATION, Machine, on_machine
from tests.kit.toy import tiny_bundle

QNN = StaticGraphs(
    device="npu-qnn", verify=(1, 4), prefill=64, buckets=(128,), activations="uint16", masked=-50.0
)
Make = Callable[[StaticGraphs | None], Bundle]
EMPTY = replace(WORKSTATION, hardware=(), registered=[])
BROKEN = replace(SNAPDRAGON, broken={"onnxruntime_qnn": "libfoo.so is missing"}, registered=[])
NO_DRIVER = replace(SNAPDRAGON, hardware=SNAPDRAGON.hardware[:1], registered=[])
OPENVINO = replace(QNN, device="npu-openvino", activations="float32")


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("devices") / "dynamic").path


@pytest.fixture
def bundle(dynamic: Path, tmp_path: Path) -> Make:
    """A bundle that says of itself to have these graphs; nothing of it can be loaded."""

    def make(static: StaticGraphs | None) -> Bundle:
        opened = Bundle(dynamic)
        opened.manifest = replace(opened.manifest, static=static, provenance={"source": "m 1.gguf"})
        return opened

    return make


def _states(machine: Machine) -> dict[str, str]:
    return {device.name: device.state for device in devices(machine)}


def test_every_kind_is_listed_with_what_it_would_take() -> None:
    listed = devices(PLAIN)
    assert [device.name for device in listed] == list(KINDS)
    assert (listed[0].name, listed[0].state, listed[0].remedy) == ("cpu", "ready", None)
    assert {(device.state, device.remedy) for device in listed[1:]} == {
        ("missing", f"Add it: {device.kind.install}") for device in listed[1:]
    }


@pytest.mark.parametrize(
    ("machine", "ready"),
    [
        (PLAIN, {"cpu"}),
        (SNAPDRAGON, {"cpu", "qnn:htp"}),
        (WORKSTATION, {"cpu", "cuda", "openvino:npu", "openvino:gpu", "openvino:cpu"}),
        (EMULATING, {"cpu"}),
    ],
)
def test_what_a_machine_has_is_ready(machine: Machine, ready: set[str]) -> None:
    assert {name for name, state in _states(machine).items() if state == "ready"} == ready


def test_an_emulator_is_no_device_that_anything_but_its_name_chooses(bundle: Make) -> None:
    assert _states(EMULATING)["qnn:htp"] == "emulated"
    assert resolve("qnn:htp", EMULATING).handle == "cpu"
    with pytest.raises(DeviceError, match="only emulated here"):
        resolve("npu", EMULATING)
    placed = place(bundle(QNN), "auto", EMULATING)
    assert placed.device.name == "cpu"
    assert "only emulated here" in placed.reason


def test_an_npu_is_whichever_there_is() -> None:
    assert resolve("npu", SNAPDRAGON).name == "qnn:htp"
    assert resolve("npu", WORKSTATION).name == "openvino:npu"
    with pytest.raises(
        DeviceError, match=r"no NPU is available.*onnxruntime-qnn is not installed.*pip install"
    ):
        resolve("npu", PLAIN)


@pytest.mark.parametrize(
    ("machine", "name", "message"),
    [
        (PLAIN, "qnn:htp", r"onnxruntime-qnn is not installed. Add it: pip install .edgespec\[npu-qnn\]"),
        (PLAIN, "cuda", "no CUDAExecutionProvider. Add it: .*onnxruntime-gpu"),
        (EMPTY, "cuda", "finds no such GPU. Needed: .*nvidia-smi"),
        (EMPTY, "openvino:npu", "finds no such NPU. Needed: .*NPU driver"),
        (BROKEN, "qnn:htp", r"cannot be registered \(libfoo.so is missing\)"),
        (NO_DRIVER, "qnn:htp", r"finds no such NPU\. Needed: A Snapdragon processor with Qualcomm's NPU"),
        (PLAIN, "tpu", "device 'tpu' is not known; allowed: auto, cpu, qnn:htp"),
    ],
)
def test_what_cannot_be_had_is_an_error_that_says_why(machine: Machine, name: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        resolve(name, machine)
    with pytest.raises(DeviceError, match=message):
        export_for(name, machine)


@pytest.mark.parametrize(
    ("static", "wanted", "machine", "expected"),
    [
        (None, "auto", WORKSTATION, "cpu"),
        (None, "cpu", PLAIN, "cpu"),
        (QNN, "auto", SNAPDRAGON, "qnn:htp"),
        (QNN, "auto", WORKSTATION, "cpu"),
        (QNN, "cpu", PLAIN, "cpu"),
        (OPENVINO, "auto", WORKSTATION, "openvino:npu"),
        (OPENVINO, "openvino:gpu", WORKSTATION, "openvino:gpu"),
        (OPENVINO, "auto", SNAPDRAGON, "cpu"),
    ],
)
def test_a_bundle_goes_where_it_fits(
    bundle: Make, static: StaticGraphs | None, wanted: str, machine: Machine, expected: str
) -> None:
    placed = place(bundle(static), wanted, machine)
    assert placed.device.name == expected
    assert placed.reason
    assert str(placed) == f"{expected} ({placed.reason})"


@pytest.mark.parametrize(
    ("static", "wanted", "machine", "command"),
    [
        (None, "qnn:htp", SNAPDRAGON, 'edgespec export "m 1.gguf" -o DIR --device npu-qnn'),
        (None, "cuda", WORKSTATION, 'edgespec export "m 1.gguf" -o DIR --device cuda'),
        (QNN, "openvino:npu", WORKSTATION, 'edgespec export "m 1.gguf" -o DIR --device npu-openvino'),
    ],
)
def test_a_bundle_that_does_not_fit_is_refused_with_the_export_that_would(
    bundle: Make, static: StaticGraphs | None, wanted: str, machine: Machine, command: str
) -> None:
    with pytest.raises(DeviceError) as refused:
        place(bundle(static), wanted, machine)
    assert str(refused.value).endswith(command)


@pytest.mark.parametrize(("wanted", "expected"), [("auto", None), ("cpu", None), ("npu", "npu-qnn")])
def test_a_checkpoint_is_exported_for_the_device_that_was_asked_for(
    wanted: str, expected: ExportDevice | None
) -> None:
    assert export_for(wanted, SNAPDRAGON) == expected


def test_load_refuses_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, PLAIN)
    dynamic = tiny_bundle(tmp_path / "dynamic").path
    graph = dynamic / "model.onnx"
    graph.write_bytes(bytes(graph.stat().st_size))
    with pytest.raises(BundleError, match="cannot load"):
        edgespec.load(dynamic, None)
    for device in ("qnn:htp", "openvino:npu", "cuda", "npu"):
        with pytest.raises(DeviceError, match=r"not available|no NPU is available"):
            edgespec.load(dynamic, None, device=device)
        with pytest.raises(DeviceError):
            edgespec.load(dynamic, dynamic, drafter_device=device)


def test_results_say_where_models_ran(dynamic: Path) -> None:
    with edgespec.load(dynamic, dynamic, device="cpu") as model:
        stats = model.generate("a b c", max_new_tokens=2).stats
    assert stats.placement == "target on cpu (asked for); drafter on cpu (the bundle was made for the CPU)"
    assert stats.to_json()["placement"] == stats.placement


def test_the_command_lists_this_machine() -> None:
    result = CliRunner().invoke(app, ["devices", "--json"])
    assert result.exit_code == 0
    listed = json.loads(result.stdout)
    assert [entry["name"] for entry in listed] == list(KINDS)
    assert listed[0]["state"] == "ready"
    assert "auto takes:" in CliRunner().invoke(app, ["devices"]).stdout


def test_the_list_of_a_machine_with_npu_and_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    show_devices(devices(WORKSTATION))
    text = capsys.readouterr().out
    assert "openvino:npu: ready (Intel NPU, Intel, OpenVINOExecutionProvider 9.9)" in text
    assert "cuda: ready (NVIDIA GPU, NVIDIA" in text
    assert "the plugin onnxruntime-qnn is not installed" in text
    assert "auto takes: openvino:npu for bundles made for it" in text


def test_a_manifest_keeps_its_graphs(dynamic: Path) -> None:
    manifest = replace(Bundle(dynamic).manifest, static=QNN)
    value = json.loads(json.dumps(manifest.to_json()))
    assert type(manifest).from_json(value, dynamic / MANIFEST) == manifest
    for name, bad in (("verify", [4, 1]), ("buckets", []), ("activations", "int3"), ("masked", 1.0)):
        value = json.loads(json.dumps(manifest.to_json()))
        value["static"][name] = bad
        with pytest.raises(BundleError):
            type(manifest).from_json(value, dynamic / MANIFEST)


def test_a_bundle_whose_graphs_are_missing_is_refused(dynamic: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    for file in dynamic.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    manifest = replace(Bundle(dynamic).manifest, static=QNN)
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json()), encoding="utf-8")
    with pytest.raises(BundleError, match=r"does not list model-128x1.onnx"):
        Bundle(folder)


@pytest.mark.parametrize(
    ("context", "chosen", "expected"),
    [(8192, (), (512, 1024, 2048)), (640, (), (512, 640)), (300, (), (300,)), (640, (96, 32), (32, 96))],
)
def test_buckets(context: int, chosen: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert buckets_for(context, chosen) == expected


def test_printed_commands_run_in_sh_cmd_and_powershell() -> None:
    """PowerShell 5.1 has no &&, cmd does not know single quotes, and sh takes brackets for a pattern."""
    for kind in KINDS.values():
        for command in kind.install.split("\n"):
            assert not {"&", ";", "|", "'", "$", "%", "`"} & {*command}
            words = shlex.split(command)
            assert words[0] == "pip" and all(f'"{word}"' in command for word in words if "[" in word)


def test_a_gpu_has_a_number() -> None:
    second = resolve("cuda:1", WORKSTATION)
    assert (second.name, second.number, second.options["device_id"]) == ("cuda", 1, "1")
    assert second.identity != resolve("cuda", WORKSTATION).identity
    with pytest.raises(DeviceError, match=r"'cuda:x' is not known; allowed: .*cuda:NUMBER"):
        resolve("cuda:x", WORKSTATION)


def test_packages_that_overwrite_each_other_are_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_mix(["onnxruntime"])
    assert not caplog.records
    warn_of_mix(["onnxruntime", "onnxruntime-gpu"])
    (said,) = caplog.messages
    assert "onnxruntime and onnxruntime-gpu are installed" in said
    assert said.endswith(
        'pip uninstall --yes onnxruntime onnxruntime-gpu, then: pip install "onnxruntime-gpu[cuda,cudnn]"'
    )
