"""Bundles of graphs with fixed shapes, for devices that compile a graph once for all passes.

There is a graph for each number of rows (``verify``, whose passes return all logits, and ``prefill``, whose
passes return one row's) and each length of the KV cache (``buckets``), over one file of weights. Beside each
there may be the result of a device's compiler for one chip (``contexts``): a small graph of one operator, and
its context binary, which holds weights of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Literal

from edgespec_models.decoders.config import Count
from edgespec_models.errors import BundleError, RequestError
from edgespec_models.schema import check_fields, length

ExportDevice = Literal["npu-qnn", "npu-openvino", "cuda"]
"""Kinds of device that ``edgespec export --device`` makes bundles for."""
StaticDevice = Literal["npu-qnn", "npu-openvino"]
"""Kinds of device whose bundles have graphs of fixed shapes."""
Activations = Literal["float32", "uint16"]
GraphKind = Literal["dynamic", "dynamic-float16", "static-float", "static-quantized"]
"""Kinds of graphs: of any shape, float32 or float16; of fixed shapes, float or quantized."""

VERIFY_ROWS = (1, 4, 8)
PREFILL_ROWS = 64
_FIRST_BUCKET = 512
_BUCKETS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A chip with a Hexagon Tensor Processor: its name, Qualcomm's number, the processor's version."""

    name: str
    soc_model: int
    htp_arch: int

    @property
    def options(self) -> dict[str, str]:
        """Options of Qualcomm's provider that name the chip to its compiler and to its emulator."""
        return {"soc_model": str(self.soc_model), "htp_arch": str(self.htp_arch)}


# Models, by part number: SocModelFromName in onnxruntime/core/providers/qnn/soc_utils.cc of
# github.com/onnxruntime/onnxruntime-qnn. Versions: _soc_info_table in
# backends/qualcomm/serialization/qc_schema.py of github.com/pytorch/executorch; for X Elite
# docs/execution_providers/QNN-ExecutionProvider.md of the former; for X2 Elite Qualcomm's machine
# sc8480xp-nsp0 for QEMU.
_ALL = (
    Chip(name="snapdragon-x-elite", soc_model=60, htp_arch=73),  # SC8380XP
    Chip(name="snapdragon-x2-elite", soc_model=88, htp_arch=81),  # SC8480XP
    Chip(name="snapdragon-8-gen-2", soc_model=43, htp_arch=73),  # SM8550
    Chip(name="snapdragon-8-gen-3", soc_model=57, htp_arch=75),  # SM8650
    Chip(name="snapdragon-8-elite", soc_model=69, htp_arch=79),  # SM8750
    Chip(name="snapdragon-8-elite-gen-5", soc_model=87, htp_arch=81),  # SM8850
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _ALL})
"""Chips by name, laptops first."""


def find_chip(name: str) -> Chip:
    """The chip of that name; RequestError if it is not known."""
    chip = CHIPS.get(name)
    if chip is None:
        raise RequestError(f"chip {name!r} is not known; allowed: {', '.join(CHIPS)}")
    return chip


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """The chip for which graphs were compiled ahead, and the version of the provider's package."""

    chip: Chip
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticGraphs:
    """The graphs of a bundle, and the facts that its session needs.

    Attributes:
        device: the device that they were made for.
        verify: rows of the passes that return the logits of all their rows, ascending.
        prefill: rows of the pass that returns the logits of one row; more than ``verify``.
        buckets: tokens the KV cache holds, ascending.
        activations: ``uint16`` where every tensor is quantized, ``float32`` where only weights may be.
        masked: the number that the attention mask adds at hidden places.
        contexts: the compilation of every graph ahead; None if the device compiles.
    """

    device: StaticDevice
    verify: Annotated[tuple[Count, ...], length(1)]
    prefill: Count
    buckets: Annotated[tuple[Count, ...], length(1)]
    activations: Activations
    masked: float
    contexts: Contexts | None = None

    def __post_init__(self) -> None:
        check_fields(self, BundleError)
        for name, numbers in (("verify and prefill", self.widths), ("buckets", self.buckets)):
            if any(a >= b for a, b in pairwise(numbers)):
                raise BundleError(f"{name} are {numbers}; they must be ascending")
        if self.verify[0] != 1 or not self.masked < 0:
            raise BundleError("static graphs need a pass over one row, and a mask below zero")

    @property
    def graph_kind(self) -> GraphKind:
        """The kind of the graphs."""
        return "static-float" if self.activations == "float32" else "static-quantized"

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of every pass, ascending."""
        return (*self.verify, self.prefill)

    @property
    def longest(self) -> int:
        """Tokens the largest bucket holds."""
        return self.buckets[-1]

    @property
    def graphs(self) -> list[str]:
        """Files of the graphs, in the bundle."""
        return [self.file(bucket, rows) for bucket in self.buckets for rows in self.widths]

    @property
    def files(self) -> list[str]:
        """The files of the graphs and of their compiled forms."""
        if self.contexts is None:
            return self.graphs
        return self.graphs + [name for graph in self.graphs for name in self.context_files(graph)]

    @staticmethod
    def file(bucket: int, rows: int) -> str:
        """The graph of passes over ``rows`` tokens behind at most ``bucket`` others."""
        return f"model-{bucket}x{rows}.onnx"

    @staticmethod
    def context_files(graph: str) -> tuple[str, str]:
        """The compiled form of ``graph``: a graph to open, and its context binary, named by the provider."""
        stem = graph.removesuffix(".onnx")
        return f"{stem}.context.onnx", f"{stem}.context_qnn.bin"

    def bucket_for(self, tokens: int) -> int:
        """The smallest bucket that holds ``tokens``; the largest if none does."""
        return next((bucket for bucket in self.buckets if bucket >= tokens), self.longest)


def buckets_for(context_length: int, chosen: Sequence[int] = ()) -> tuple[int, ...]:
    """``chosen``, or 512, 1024 and 2048, as far as the context reaches; RequestError beyond it."""
    if chosen:
        if max(chosen) > context_length:
            raise RequestError(f"a bucket of {max(chosen)} tokens exceeds the context of {context_length}")
        return tuple(sorted(set(chosen)))
    every = [_FIRST_BUCKET << power for power in range(_BUCKETS)]
    return tuple(sorted({min(bucket, context_length) for bucket in every}))
