"""Context binaries in bundles: who compiles them, when they are used, and what is said where they are not.

The compiler and the provider are doubles: a compiled graph is a copy of the graph, and runs on the CPU.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import edgespec
from edgespec.cli import app
from edgespec_export.devices import device_bundle
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import MANIFEST, Bundle
from edgespec_models.bundles.static_graphs import CHIPS, StaticGraphs
from edgespec_models.errors import BundleError, DeviceError, DoesNotFit
from edgespec_models.progress import Progress
from edgespec_runtimes import discovery
from edgespec_runtimes import static as static_session
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.devices import CPU, KINDS, Device, Placement
from edgespec_runtimes.discovery import open_on
from edgespec_runtimes.ort import ort
from edgespec_runtimes.static import StaticModel, open_static
from tests.kit.gguf import tiny_gguf
from tests.kit.machines import EMULATING, on_machine
from tests.kit.models import runner_of

X_ELITE = CHIPS["snapdragon-x-elite"]
OPTIONS = ExportOptions(device="npu-qnn", buckets=(64,), chip=X_ELITE.name)
EMULATED = Device(KINDS["qnn:htp"], "emulated", version="2.7.0", handle="cpu", options={"path": "lib"})
ON_CPU = Device(CPU, "ready")
Opened = list[str]


class Settings:
    """ONNX Runtime's, which does not take a made-up device."""

    graph_optimization_level = "as sessions have it"

    def add_session_config_entry(self, key: str, value: str) -> None:
        pass

    def add_provider_for_devices(self, handles: list[Any], options: dict[str, str]) -> None:
        self.options = options


class Compiler:
    """ONNX Runtime's, without a device."""

    def __init__(self, settings: Settings, graph: str, graph_optimization_level: str) -> None:
        assert settings.options["enable_htp_prepare_only"] == "1"
        assert graph_optimization_level == "as sessions have it"
        self._graph, self._settings = Path(graph), settings

    def compile_to_file(self, out: str) -> None:
        shutil.copy(self._graph, out)
        Path(out.removesuffix(".onnx") + "_qnn.bin").write_text(str(self._settings.options))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf("llama", layers=1).write(tmp_path_factory.mktemp("source") / "m.gguf")


def _install(patch: pytest.MonkeyPatch, compiler: type[Compiler] = Compiler) -> None:
    on_machine(patch, EMULATING)
    patch.setattr(device_bundle, "session_settings", lambda options: Settings())
    patch.setattr(ort, "ModelCompiler", compiler)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "bundle"
    told: list[Progress] = []
    with pytest.MonkeyPatch.context() as patch:
        _install(patch)
        export_model(source, out, options=OPTIONS, progress=told.append)
    compiling = [(report.done, report.total) for report in told if report.stage == "Compiling"]
    assert compiling == [(done, 4) for done in range(5)]
    return out


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """What the provider was asked to open; it opens everything, on the CPU."""
    return _provider(monkeypatch)


def _provider(monkeypatch: pytest.MonkeyPatch, refuses: Callable[[str], bool] = lambda name: False) -> Opened:
    graphs: Opened = []

    def open_or_refuse(device: Device, graph: Path, options: CpuOptions) -> Any:
        graphs.append(graph.name)
        if refuses(graph.name):
            raise DeviceError(f"{graph.name} is for another chip")
        return open_on(ON_CPU, graph, options)

    monkeypatch.setattr(static_session, "open_on", open_or_refuse)
    return graphs


def _copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def _static(path: Path) -> StaticGraphs:
    static = Bundle(path).manifest.static
    assert static is not None
    return static


def test_the_bundle_lists_what_was_compiled_and_by_what(made: Path) -> None:
    bundle, static = Bundle(made, verify_digests=True), _static(made)
    assert static.contexts is not None
    assert (static.contexts.chip, static.contexts.version) == (X_ELITE, "9.9")
    assert len(static.files) == 3 * len(static.graphs) == 12
    assert {file.name for file in made.iterdir()} == {*bundle.manifest.files, MANIFEST}
    binary = made / static.context_files(static.graphs[0])[1]
    assert "'soc_model': '60', 'htp_arch': '73'" in binary.read_text()
    assert "snapdragon-x-elite: " in CliRunner().invoke(app, ["inspect", str(made)]).stdout


@pytest.mark.parametrize(
    "contexts", [None, {"chip": {"name": "x"}}, {"version": "2"}, [], {"chip": 3, "version": ""}]
)
def test_manifests_without_context_binaries_open_and_damaged_ones_do_not(
    made: Path, tmp_path: Path, contexts: object
) -> None:
    path = _copy(made, tmp_path)
    value = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    del value["static"]["contexts"]  # as those of earlier versions
    if contexts is not None:
        value["static"]["contexts"] = contexts
    (path / MANIFEST).write_text(json.dumps(value), encoding="utf-8")
    if contexts is None:
        assert _static(path).contexts is None
        return
    with pytest.raises(BundleError, match="damaged"):
        Bundle(path)


def test_missing_and_damaged_binaries_are_errors(made: Path, tmp_path: Path, opened: Opened) -> None:
    path = _copy(made, tmp_path)
    binary = path / "model-64x4.context_qnn.bin"
    binary.write_bytes(bytes(binary.stat().st_size))
    with pytest.raises(BundleError, match=r"model-64x4.context_qnn.bin has changed.*export the model again"):
        open_static(Bundle(path), replace(EMULATED, version="9.1"))
    assert opened == []  # it never reaches the provider
    binary.unlink()
    with pytest.raises(BundleError, match=r"lacks model-64x4.context_qnn.bin; export the model again"):
        Bundle(path)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (KeyboardInterrupt("stop"), "stop"),
        (RuntimeError("no such operator"), "Qualcomm's compiler refuses model-64x4.onnx: no such operator"),
        (None, "made no model-64x4.context_qnn.bin"),
    ],
)
def test_what_ends_early_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException | None, message: str
) -> None:
    class Failing(Compiler):
        def compile_to_file(self, out: str) -> None:
            if "x4" not in out:
                super().compile_to_file(out)
            elif raised is not None:
                raise raised
            else:
                shutil.copy(self._graph, out)

    _install(monkeypatch, Failing)
    with pytest.raises((KeyboardInterrupt, DeviceError), match=message):
        export_model(source, tmp_path / "out", options=OPTIONS)
    assert not list(tmp_path.iterdir())


def test_context_binaries_are_opened_where_they_fit(made: Path, opened: Opened) -> None:
    device = replace(EMULATED, version="9.1")
    session = open_static(Bundle(made), device)
    assert opened == [f"model-64x{rows}.context.onnx" for rows in (1, 4, 8, 64)]
    assert session.model.compiled == "from context binaries for snapdragon-x-elite"
    placement = Placement(device, "asked for").opened(session)
    assert str(placement) == "qnn:htp (asked for; from context binaries for snapdragon-x-elite)"
    opened.clear()
    session = open_static(Bundle(made), EMULATED)  # those of another major version are not tried
    assert opened == [f"model-64x{rows}.onnx" for rows in (1, 4, 8, 64)]
    assert session.model.compiled == (
        "compiled at load, not from the context binaries for snapdragon-x-elite: "
        "version 9.9 of the provider compiled them, and this version is 2.7.0"
    )
    session = open_static(Bundle(made), ON_CPU)  # which takes no notice
    assert session.model.compiled == ""
    placement = Placement(ON_CPU, "asked for")
    assert placement.opened(session) is placement


@pytest.mark.parametrize("handle", [None, "a handle"])
def test_a_device_is_asked_for_by_its_handle_or_its_provider(
    monkeypatch: pytest.MonkeyPatch, handle: str | None
) -> None:
    calls = list[tuple[Any, ...]]()
    settings = SimpleNamespace(
        add_session_config_entry=lambda *given: calls.append(given),
        add_provider_for_devices=lambda *given: calls.append(given),
    )
    monkeypatch.setattr(discovery, "session_settings", lambda options: settings)
    monkeypatch.setattr(discovery, "open_session", lambda *given: given)
    device = replace(EMULATED, handle=handle, options={"key": "value"})
    given = open_on(device, Path("model.onnx"), CpuOptions())
    by_name = None if handle else [("QNNExecutionProvider", {"key": "value"})]
    assert given == ("model.onnx", settings, by_name)
    by_handle = [([handle], {"key": "value"})] if handle else []
    assert calls == [("session.disable_cpu_ep_fallback", "1"), *by_handle]


def test_once_one_is_refused_the_graphs_are_compiled(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = replace(EMULATED, version="9.1")
    graphs = _provider(monkeypatch, lambda name: name == "model-64x4.context.onnx")
    session = open_static(Bundle(made), device)
    tried = ["model-64x1.context.onnx", "model-64x4.context.onnx"]
    assert graphs == [*tried, *(f"model-64x{rows}.onnx" for rows in (1, 4, 8, 64))]
    assert session.model.compiled.endswith("snapdragon-x-elite: model-64x4.context.onnx is for another chip")
    _provider(monkeypatch, lambda name: True)
    both = r"^model-64x1.onnx is.*binaries.*: model-64x1.context.onnx is for another chip"
    with pytest.raises(DeviceError, match=both):
        open_static(Bundle(made), device)


def test_results_say_which_were_used(made: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, EMULATING)
    with edgespec.load(made, "ngram", device="qnn:htp") as model:
        stats = model.generate("one two", max_new_tokens=2).stats
        static = runner_of(model).session.model
        assert isinstance(static, StaticModel)
        static._refusal = "no memory"  # as a longer bucket's may be
        later = model.generate("one two", max_new_tokens=2).stats
        assert later.placement.endswith("binaries for snapdragon-x-elite: no memory)")
        assert model.generate("one two", max_new_tokens=64).finish_reason in ("length", "stop")
        with pytest.raises(
            DoesNotFit, match=r"too long: \d+ tokens > 64 maximum, the largest bucket of this bundle"
        ):
            model.generate("one two " * 64)
        with pytest.raises(DoesNotFit, match="> 640 maximum, the model's context"):
            model.generate("one two " * 640)
    assert stats.placement == "target on qnn:htp (asked for; from context binaries for snapdragon-x-elite)"
