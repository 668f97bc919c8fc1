"""Kinds of device, as data: what each runs, its limits and why, and what it takes to have it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from edgespec_models.bundles.static_graphs import ExportDevice, Form

__all__ = ["CPU", "KINDS", "DeviceKind", "Hardware"]

Hardware = Literal["CPU", "GPU", "NPU"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        name: what ``load(device=...)`` and ``--device`` of commands that load take.
        title: for people.
        provider: ONNX Runtime's execution provider.
        hardware: what the provider must have found.
        runs: forms of bundles it runs.
        export: what ``edgespec export --device`` takes to make such a bundle; None needs no option.
        module: of the plugin that brings the provider; None where it is built into ONNX Runtime.
        install: the command that adds the provider.
        driver: what else the machine needs, in a sentence.
        limits: what it cannot do or what is not known of it, and why.
        memory: where a session's KV cache lies, as ONNX Runtime calls it.
    """

    name: str
    title: str
    provider: str
    hardware: Hardware
    runs: frozenset[Form]
    export: ExportDevice | None
    module: str | None = None
    install: str
    driver: str
    limits: tuple[str, ...]
    memory: str = "cpu"


_OPENVINO = "OpenVINOExecutionProvider"
_STATIC = frozenset[Form]({"static-float"})
_HOST_CACHE = "the KV cache lies in the host's memory: every pass reads it from there"
_INTEL = "Of Intel only: the plugin passes over the devices of other vendors."
_ADD_OPENVINO = "pip install 'edgespec[npu-openvino]'"

CPU = DeviceKind(
    name="cpu",
    title="processor",
    provider="CPUExecutionProvider",
    hardware="CPU",
    runs=frozenset[Form]({"dynamic", "dynamic-float16", "static-float", "static-quantized"}),
    export=None,
    install="pip install onnxruntime",
    driver="",
    limits=("bundles for other devices run too, for comparison: slower than bundles made for the CPU",),
)

_ALL = (
    CPU,
    DeviceKind(
        name="qnn:htp",
        title="Qualcomm NPU (Hexagon Tensor Processor)",
        provider="QNNExecutionProvider",
        hardware="NPU",
        runs=frozenset[Form]({"static-quantized"}),
        export="npu-qnn",
        module="onnxruntime_qnn",
        install="pip install 'edgespec[npu-qnn]'",
        driver="A Snapdragon processor with Qualcomm's NPU driver; Windows on Snapdragon has it.",
        limits=(
            "static shapes: the processor runs what was compiled before",
            "8-bit weights and 16-bit activations, calibrated at export: rounds more than the CPU's bundles",
            "on x86-64 Linux the package emulates the processor: right, and far too slow to use",
        ),
    ),
    DeviceKind(
        name="openvino:npu",
        title="Intel NPU",
        provider=_OPENVINO,
        hardware="NPU",
        runs=_STATIC,
        export="npu-openvino",
        module="onnxruntime_ep_openvino",
        install=_ADD_OPENVINO,
        driver="A Core Ultra processor with Intel's NPU driver. " + _INTEL,
        limits=("static shapes: the NPU's compiler takes no others", _HOST_CACHE, "not tried on an NPU yet"),
    ),
    DeviceKind(
        name="openvino:gpu",
        title="Intel GPU",
        provider=_OPENVINO,
        hardware="GPU",
        runs=_STATIC,
        export="npu-openvino",
        module="onnxruntime_ep_openvino",
        install=_ADD_OPENVINO,
        driver="An Intel GPU with its compute driver (OpenCL). " + _INTEL,
        limits=(_HOST_CACHE, "not tried on a GPU yet"),
    ),
    DeviceKind(
        name="openvino:cpu",
        title="Intel processor through OpenVINO",
        provider=_OPENVINO,
        hardware="CPU",
        runs=_STATIC,
        export="npu-openvino",
        module="onnxruntime_ep_openvino",
        install=_ADD_OPENVINO,
        driver="An Intel processor. " + _INTEL,
        limits=(_HOST_CACHE, "for checking bundles of the other two; the device cpu is faster"),
    ),
    DeviceKind(
        name="cuda",
        title="NVIDIA GPU",
        provider="CUDAExecutionProvider",
        hardware="GPU",
        runs=frozenset[Form]({"dynamic-float16"}),
        export="cuda",
        install="pip uninstall --yes onnxruntime && pip install 'onnxruntime-gpu[cuda,cudnn]'",
        driver="An NVIDIA GPU with its driver, which nvidia-smi must list, and CUDA's libraries: "
        "pip install 'onnxruntime-gpu[cuda,cudnn]'.",
        limits=(
            "no bundles made for the CPU: their attention kernel takes 16-bit floats on CUDA",
            "passes over one, a few and many tokens take other kernels, whose sums differ in the last bits",
            "not tried on a GPU yet",
        ),
        memory="cuda",
    ),
)

KINDS: Mapping[str, DeviceKind] = MappingProxyType({kind.name: kind for kind in _ALL})
"""By name, the CPU first; of several that could run a bundle ``auto`` takes the first but the CPU."""
