"""Kinds of device, as data: what each runs, its limits and their reasons, and how to get it.

A :class:`Device` is a kind of device on this machine; a :class:`Placement` says where a model runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from edgespec_models.bundles.static_graphs import ExportDevice, GraphKind
from edgespec_runtimes.session import Session

Hardware = Literal["CPU", "GPU", "NPU"]
State = Literal["ready", "emulated", "missing"]
AUTO = "auto"
"""Names the device that a bundle was made for, or the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        name: The name that ``load(device=...)`` and ``--device`` take.
        title: The name for people.
        provider: ONNX Runtime's name of the provider.
        hardware: The hardware that the provider must find.
        runs: The kinds of graphs that it runs.
        export: The value of ``edgespec export --device`` for it. None needs no option.
        module: The plugin with the provider. None if it is built into ONNX Runtime.
        install: The commands that add the provider, a line each, as sh, cmd and PowerShell take them.
        driver: Other needs of the machine, in a sentence.
        limits: Its limits and unknowns, with reasons.
        memory: ONNX Runtime's name of the memory that holds a session's KV cache.
    """

    name: str
    title: str
    provider: str
    hardware: Hardware
    runs: frozenset[GraphKind]
    export: ExportDevice | None
    module: str | None = None
    install: str
    driver: str
    limits: tuple[str, ...]
    memory: str = "cpu"


_HOST_CACHE = "the KV cache lies in the host's memory: every pass reads it from there"
_INTEL = "Of Intel only: the plugin passes over the devices of other vendors."

CPU = DeviceKind(
    name="cpu",
    title="processor",
    provider="CPUExecutionProvider",
    hardware="CPU",
    runs=frozenset[GraphKind]({"dynamic", "dynamic-float16", "static-float", "static-quantized"}),
    export=None,
    install="pip install onnxruntime",
    driver="",
    limits=("bundles for other devices run too, for comparison: slower than bundles made for the CPU",),
)

_INTEL_NPU = DeviceKind(
    name="openvino:npu",
    title="Intel NPU",
    provider="OpenVINOExecutionProvider",
    hardware="NPU",
    runs=frozenset[GraphKind]({"static-float"}),
    export="npu-openvino",
    module="onnxruntime_ep_openvino",
    install='pip install "edgespec[npu-openvino]"',
    driver="A Core Ultra processor with Intel's NPU driver. " + _INTEL,
    limits=("static shapes: the NPU's compiler takes no others", _HOST_CACHE, "not tried on an NPU yet"),
)
_ALL = (
    CPU,
    DeviceKind(
        name="qnn:htp",
        title="Qualcomm NPU (Hexagon Tensor Processor)",
        provider="QNNExecutionProvider",
        hardware="NPU",
        runs=frozenset[GraphKind]({"static-quantized"}),
        export="npu-qnn",
        module="onnxruntime_qnn",
        install='pip install "edgespec[npu-qnn]"',
        driver="A Snapdragon processor with Qualcomm's NPU driver; Windows on Snapdragon has it.",
        limits=(
            "static shapes: the processor runs what was compiled before",
            "8-bit weights and 16-bit activations, calibrated at export: rounds more than the CPU's bundles",
            "on x86-64 Linux the package emulates the processor: right, and far too slow to use",
        ),
    ),
    _INTEL_NPU,
    replace(
        _INTEL_NPU,
        name="openvino:gpu",
        title="Intel GPU",
        hardware="GPU",
        driver="An Intel GPU with its compute driver (OpenCL). " + _INTEL,
        limits=(_HOST_CACHE, "not tried on a GPU yet"),
    ),
    replace(
        _INTEL_NPU,
        name="openvino:cpu",
        title="Intel processor through OpenVINO",
        hardware="CPU",
        driver="An Intel processor. " + _INTEL,
        limits=(_HOST_CACHE, "for checking bundles of the other two; the device cpu is faster"),
    ),
    DeviceKind(
        name="cuda",
        title="NVIDIA GPU",
        provider="CUDAExecutionProvider",
        hardware="GPU",
        runs=frozenset[GraphKind]({"dynamic-float16"}),
        export="cuda",
        install='pip uninstall --yes onnxruntime onnxruntime-gpu\npip install "onnxruntime-gpu[cuda,cudnn]"',
        driver="An NVIDIA GPU with its driver, which nvidia-smi must list, and CUDA's libraries: "
        'pip install "onnxruntime-gpu[cuda,cudnn]".',
        limits=(
            "no bundles made for the CPU: their attention kernel takes 16-bit floats on CUDA",
            "passes over one, a few and many tokens take other kernels, whose sums differ in the last bits",
            "tried on an H100 alone",
        ),
        memory="cuda",
    ),
)

KINDS: Mapping[str, DeviceKind] = MappingProxyType({kind.name: kind for kind in _ALL})
"""Kinds by name, the CPU first. ``auto`` takes the first one besides the CPU that can run a bundle."""


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device on this machine.

    Attributes:
        kind: The kind of device.
        state: ``ready``, ``emulated`` (for checks) or ``missing``.
        vendor: The vendor of the hardware. Empty where it is missing.
        version: The version of the provider. Empty where it is missing.
        problem: What is missing. None if nothing is.
        remedy: How to add it, by a command if there is one.
        handle: ONNX Runtime's own handle. None for built-in providers.
        options: Options of the provider.
    """

    kind: DeviceKind
    state: State
    vendor: str = ""
    version: str = ""
    problem: str | None = None
    remedy: str | None = None
    handle: Any = field(default=None, repr=False, compare=False)
    options: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """The name of the device for ``load(device=...)``."""
        return self.kind.name

    @property
    def number(self) -> int:
        """The number of a GPU."""
        return int(self.options.get("device_id", "0"))

    @property
    def identity(self) -> str:
        """The key of measurements on it: name and version of the provider."""
        place = f"{self.name}:{self.number}" if self.number else self.name
        return self.name if self.kind is CPU else f"{place} {self.version}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        kind = self.kind
        return {
            "name": self.name,
            "title": kind.title,
            "hardware": kind.hardware,
            "provider": kind.provider,
            "state": self.state,
            "vendor": self.vendor or None,
            "version": self.version or None,
            "runs": sorted(kind.runs),
            "export": kind.export,
            "limits": list(kind.limits),
            "problem": self.problem,
            "remedy": self.remedy,
        }


PROCESSOR = Device(CPU, "ready")
"""The CPU, which every machine has."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model runs."""

    device: Device
    reason: str

    def __str__(self) -> str:
        return f"{self.device.name} ({self.reason})"

    def opened(self, session: Session) -> "Placement":
        """The placement after opening the graphs, which tells whether context binaries are used."""
        compiled = session.model.compiled
        return replace(self, reason=f"{self.reason}; {compiled}") if compiled else self
