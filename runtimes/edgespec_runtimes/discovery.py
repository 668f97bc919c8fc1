"""Devices of this machine in ONNX Runtime, and the choice of a device for a bundle.

A device that the user names is used or is an error. A device that edgespec chooses is explained.
"""

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from ctypes import CDLL, byref, c_uint64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from io import StringIO
from pathlib import Path
from threading import get_ident
from types import MappingProxyType
from typing import Any, TextIO

import numpy as np

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.static_graphs import ExportDevice, GraphKind
from edgespec_models.errors import DeviceError
from edgespec_runtimes.cpu import CpuOptions, session_settings
from edgespec_runtimes.devices import AUTO, CPU, KINDS, PROCESSOR, Device, DeviceKind, Hardware, Placement
from edgespec_runtimes.memory import MachineMemory
from edgespec_runtimes.ort import open_session, ort

_NPU, _CUDA = "npu", "CUDAExecutionProvider"
_NUMBERED = re.compile("cuda:([0-9]{1,2})")

_KINDS_OF_GRAPHS: Mapping[GraphKind, str] = MappingProxyType(
    {
        "dynamic": "graphs of any shape",
        "dynamic-float16": "graphs of any shape in float16",
        "static-float": "static shapes in floating point",
        "static-quantized": "static shapes with quantized activations",
    }
)


@dataclass(frozen=True, slots=True)
class FoundHardware:
    """A device that a provider found: its name, kind and vendor of hardware, and ONNX Runtime's handle."""

    provider: str
    hardware: Hardware
    vendor: str
    handle: Any = None


class Runtime:
    """ONNX Runtime and its plugins on this machine, as far as discovery needs them; tests use others."""

    def providers(self) -> Sequence[str]:
        """Providers built into ONNX Runtime."""
        return list(ort.get_available_providers())

    def register(self, module: str) -> str | None:
        """Register a plugin; return None or the reason why it failed.

        ModuleNotFoundError if it is missing.
        """
        return _register(module)

    def list_hardware(self) -> Sequence[FoundHardware]:
        """The devices that all known providers found."""
        hardware = [
            FoundHardware(d.ep_name, d.device.type.name, d.device.vendor, d) for d in ort.get_ep_devices()
        ]
        # A listed graphics card may lack CUDA's libraries, and in a container a card may be there but not
        # listed. CUDA itself knows.
        hardware = [part for part in hardware if part.provider != _CUDA]
        if _CUDA in self.providers() and cuda_answers():
            hardware.append(FoundHardware(_CUDA, "GPU", "NVIDIA"))
        return hardware

    def options(self, kind: DeviceKind) -> Mapping[str, str]:
        """Options of the kind's provider."""
        if kind.provider == _CUDA:
            # Normalizations sum squares in 32 bits, because sums in float16 end at 65,504.
            # Memory grows by what is needed; by default it doubles.
            grows = {"arena_extend_strategy": "kSameAsRequested"}
            return {"enable_skip_layer_norm_strict_mode": "1", "enable_cuda_graph": "1"} | grows
        if kind.name != "qnn:htp":
            return {}
        plugin = importlib.import_module("onnxruntime_qnn")
        # By default quantizing inputs is offloaded to the CPU, which counts as falling back.
        return {"backend_path": plugin.get_qnn_htp_path(), "offload_graph_io_quantization": "0"}

    def gpu_memory(self, number: int = 0) -> MachineMemory | None:
        """The memory of an NVIDIA GPU, by the driver's own library; None if that does not say."""
        memory = (c_uint64 * 3)()  # in all, free, used
        try:
            driver, handle = CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"), c_void_p()
            failed = driver.nvmlInit_v2() or driver.nvmlDeviceGetHandleByIndex_v2(number, byref(handle))
            failed = failed or driver.nvmlDeviceGetMemoryInfo(handle, byref(memory))
        except (OSError, AttributeError):
            return None
        return None if failed else MachineMemory(memory[0], memory[1])

    def version(self, kind: DeviceKind) -> str:
        """The version of the provider's package."""
        if kind.module is None:
            return str(ort.__version__)
        try:
            return metadata.version(kind.module.replace("_", "-"))
        except metadata.PackageNotFoundError:
            return "unknown"


@cache
def _register(module: str) -> str | None:
    """ONNX Runtime refuses to register a library twice in a process."""
    plugin = importlib.import_module(module)
    try:
        ort.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own exceptions share no base class
        return " ".join(str(error).split())
    return None


class _Others(StringIO):
    """A stream that drops this thread's output, and passes the output of other threads to ``out``."""

    def __init__(self, out: TextIO | None) -> None:
        super().__init__()
        self._out, self._thread = out, get_ident()

    def write(self, text: str) -> int:
        if self._out is None or get_ident() == self._thread:
            return len(text)
        return self._out.write(text)


@cache
def cuda_answers() -> bool:
    """Whether CUDA gives memory: libraries, driver and a GPU are there."""
    with redirect_stdout(_Others(sys.stdout)):  # it prints names of missing libraries
        ort.preload_dlls()
    try:
        ort.OrtValue.ortvalue_from_shape_and_type([1], np.uint8, "cuda", 0)
    except Exception:  # noqa: BLE001 - ONNX Runtime's own exceptions share no base class
        return False
    return True


def devices(runtime: Runtime | None = None) -> tuple[Device, ...]:
    """Every kind of device edgespec knows, the CPU first, and whether this machine has it.

    Installed plugins are registered with ONNX Runtime; other sessions do not notice.
    """
    machine = runtime or Runtime()
    return tuple(_look(kind, machine) for kind in KINDS.values())


def resolve(name: str, runtime: Runtime | None = None) -> Device:
    """The device of a name.

    ``name`` is a kind, ``npu`` for any NPU, or ``cuda:1`` for the second GPU. Without a ``runtime`` it is
    this machine's.

    Raises:
        DeviceError: the name is unknown, or this machine lacks the device. The message says how to add it.
    """
    machine = runtime or Runtime()
    if name == _NPU:
        return _any_npu(machine)
    numbered = _NUMBERED.fullmatch(name)
    kind = KINDS.get(name if numbered is None else "cuda")
    if kind is None:
        known = ", ".join((AUTO, *KINDS, "cuda:NUMBER", _NPU))
        raise DeviceError(f"device {name!r} is not known; allowed: {known}")
    device = _look(kind, machine)
    if device.state == "missing":
        raise DeviceError(f"device {name} is not available: {device.problem}. {device.remedy}")
    if numbered is not None:
        return replace(device, options={**device.options, "device_id": numbered[1]})
    return device


def _any_npu(machine: Runtime) -> Device:
    npus = [_look(kind, machine) for kind in KINDS.values() if kind.hardware == "NPU"]
    ready = next((npu for npu in npus if npu.state == "ready"), None)
    if ready is not None:
        return ready
    reasons = "; ".join(
        f"{npu.name}: {npu.problem or 'only emulated here, ask for it by name'}. {npu.remedy or ''}".rstrip()
        for npu in npus
    )
    raise DeviceError(f"no NPU is available. {reasons}")


def _look(kind: DeviceKind, machine: Runtime) -> Device:
    problem = _provider_problem(kind, machine)
    if problem is not None:
        return Device(kind, "missing", problem=problem, remedy=f"Add it: {kind.install}")
    mine = [part for part in machine.list_hardware() if part.provider == kind.provider]
    exact = next((part for part in mine if part.hardware == kind.hardware), None)
    # If Qualcomm's plugin offers a processor of another vendor, it emulates the NPU there. A processor of
    # Qualcomm's own belongs to a Snapdragon whose NPU has no driver.
    others = (part for part in mine if "qualcomm" not in part.vendor.lower())
    emulator = next(others, None) if kind.name == "qnn:htp" else None
    chosen = exact or emulator
    if chosen is None:
        problem = f"{kind.provider} is installed and finds no such {kind.hardware}"
        return Device(kind, "missing", problem=problem, remedy=f"Needed: {kind.driver}")
    return Device(
        kind,
        "ready" if chosen is exact else "emulated",
        vendor=chosen.vendor,
        version=machine.version(kind),
        handle=None if kind.module is None else chosen.handle,
        options=machine.options(kind),
    )


def _provider_problem(kind: DeviceKind, machine: Runtime) -> str | None:
    if kind.module is None:
        if kind.provider in machine.providers():
            return None
        return f"this ONNX Runtime has no {kind.provider}"
    try:
        problem = machine.register(kind.module)
    except ModuleNotFoundError:
        return f"the plugin {kind.module.replace('_', '-')} is not installed"
    return problem and f"the plugin {kind.module.replace('_', '-')} cannot be registered ({problem})"


def place(bundle: Bundle, wanted: str = AUTO, runtime: Runtime | None = None) -> Placement:
    """Decide where ``bundle`` runs, before anything of it is loaded.

    ``wanted`` is a device's name, ``npu``, or ``auto``: the bundle's own device if this machine has it, else
    the CPU. Without a ``runtime`` it is this machine's.

    Raises:
        DeviceError: the device is unknown, missing, or cannot run this bundle. The message says which export
            can.
    """
    if wanted != AUTO:
        device = resolve(wanted, runtime)
        _check_fit(bundle, device)
        return Placement(device, "asked for")
    graphs = bundle.manifest.graph_kind
    if graphs == "dynamic":
        return Placement(PROCESSOR, "the bundle was made for the CPU")
    return _best(bundle, graphs, devices(runtime))


def export_for(wanted: str, runtime: Runtime | None = None) -> ExportDevice | None:
    """The device for which a checkpoint is exported; None is the CPU. DeviceError as for :func:`resolve`."""
    return None if wanted == AUTO else resolve(wanted, runtime).kind.export


def _best(bundle: Bundle, graphs: GraphKind, devices: Sequence[Device]) -> Placement:
    cpu, *others = devices
    suited = [device for device in others if graphs in device.kind.runs]
    made_for = bundle.manifest.made_for
    suited.sort(key=lambda device: device.kind.export != made_for)
    ready = next((device for device in suited if device.state == "ready"), None)
    if ready is not None:
        return Placement(
            ready, f"the bundle has {_KINDS_OF_GRAPHS[graphs]}, and this machine has a device for it"
        )
    missing = "; ".join(f"{d.name}: {d.problem or 'only emulated here'}" for d in suited)
    return Placement(cpu, f"the bundle has {_KINDS_OF_GRAPHS[graphs]}, but {missing}")


def _check_fit(bundle: Bundle, device: Device) -> None:
    graphs, kind = bundle.manifest.graph_kind, device.kind
    if graphs in kind.runs:
        return
    source = str(bundle.manifest.provenance.get("source", "SOURCE"))
    if not re.fullmatch(
        r"[\w./\\:+-]+", source
    ):  # every shell takes double quotes, and runs what others hold
        source = f'"{source}"' if re.fullmatch(r"[\w ./\\:+-]+", source) else "SOURCE"
    option = "" if kind.export is None else f" --device {kind.export}"
    role = "" if bundle.manifest.role == "target" else f" --role {bundle.manifest.role}"
    runs = " or ".join(_KINDS_OF_GRAPHS[name] for name in sorted(kind.runs))
    raise DeviceError(
        f"{bundle.path} has {_KINDS_OF_GRAPHS[graphs]}; {device.name} runs {runs}. "
        f"Export it for this device: edgespec export {source} -o DIR{role}{option}"
    )


def open_on(device: Device, graph: Path, options: CpuOptions) -> Any:
    """ONNX Runtime's session over ``graph`` on ``device``; DeviceError if it cannot run the whole graph."""
    settings, providers = session_settings(options), None
    if device.kind is not CPU:
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if device.handle is None:
        providers = [(device.kind.provider, dict(device.options))]
    else:
        settings.add_provider_for_devices([device.handle], dict(device.options))
    try:
        return open_session(str(graph), settings, providers)
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise DeviceError(f"{device.name} cannot run all of {graph}: {error}") from error
