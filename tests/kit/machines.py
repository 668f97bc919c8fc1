"""Marks of tests for some systems; machines that ONNX Runtime and its plugins find other devices on."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from edgespec_runtimes.devices import DeviceKind
from edgespec_runtimes.discovery import FoundHardware, Runtime
from edgespec_runtimes.memory import MachineMemory

_PROVIDERS = {
    "onnxruntime_qnn": "QNNExecutionProvider",
    "onnxruntime_ep_openvino": "OpenVINOExecutionProvider",
}
PROCESSOR = FoundHardware("CPUExecutionProvider", "CPU", "Example")
POSIX = pytest.mark.skipif(os.name != "posix", reason="a matter of POSIX systems")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or sets filters of calls")
X86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"),
    reason="on other processors a row of ONNX Runtime's operators has other bits in passes of other widths",
)


@dataclass
class Machine(Runtime):
    """A machine: which wheel of ONNX Runtime, which plugins, and what those find once registered."""

    builtin: tuple[str, ...] = ("CPUExecutionProvider",)
    plugins: tuple[str, ...] = ()
    hardware: tuple[FoundHardware, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)
    memory: MachineMemory | None = None

    def providers(self) -> Sequence[str]:
        return self.builtin

    def register(self, module: str) -> str | None:
        if module not in self.plugins:
            raise ModuleNotFoundError(module)
        if module in self.broken:
            return self.broken[module]
        self.registered.append(module)
        return None

    def list_hardware(self) -> Sequence[FoundHardware]:
        known = {*self.builtin, *(_PROVIDERS[module] for module in self.registered)}
        return [PROCESSOR, *(found for found in self.hardware if found.provider in known)]

    def options(self, kind: DeviceKind) -> Mapping[str, str]:
        return {"backend": kind.name}

    def gpu_memory(self, number: int = 0) -> MachineMemory | None:
        return self.memory

    def version(self, kind: DeviceKind) -> str:
        return "9.9"


def on_machine(patch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Have everything that looks for devices find those of ``machine``."""
    for name in ("providers", "register", "list_hardware", "options", "gpu_memory", "version"):
        patch.setattr(Runtime, name, lambda _, *arguments, name=name: getattr(machine, name)(*arguments))


PLAIN = Machine()
SNAPDRAGON = Machine(
    plugins=("onnxruntime_qnn",),
    hardware=(
        FoundHardware("QNNExecutionProvider", "CPU", "Qualcomm"),
        FoundHardware("QNNExecutionProvider", "NPU", "Qualcomm", "htp"),
    ),
)
WORKSTATION = Machine(
    builtin=("CUDAExecutionProvider", "CPUExecutionProvider"),
    plugins=("onnxruntime_ep_openvino",),
    hardware=(
        FoundHardware("CUDAExecutionProvider", "GPU", "NVIDIA"),
        FoundHardware("OpenVINOExecutionProvider", "NPU", "Intel", "npu"),
        FoundHardware("OpenVINOExecutionProvider", "GPU", "Intel", "gpu"),
        FoundHardware("OpenVINOExecutionProvider", "CPU", "Intel", "cpu"),
    ),
)
EMULATING = Machine(
    plugins=("onnxruntime_qnn",), hardware=(FoundHardware("QNNExecutionProvider", "CPU", "Example", "cpu"),)
)
