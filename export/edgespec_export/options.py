"""The options of an export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from edgespec_export.formats.quantization import Quantization
from edgespec_models.bundles.bundle import WEIGHTS, Role
from edgespec_models.bundles.static_graphs import PREFILL_ROWS, ExportDevice
from edgespec_models.schema import Checked, length, one_of, within

TrimSize = Annotated[int, within(1)] | Literal["auto", "full"]


@dataclass(frozen=True, slots=True)
class ExportOptions(Checked):
    """The bundle to make of a checkpoint.

    Attributes:
        weights: ``exact`` keeps the file's blocks, for edgespec's kernels on CPUs; ``portable`` rounds them
            to the nearest formats of ONNX Runtime's operators. Without it ``exact`` on CPUs.
        quantization: how to round every matrix, instead of keeping the file's blocks.
        name: The model's name; without it the source's.
        overwrite: Replace an existing bundle.
        trim: rows that a drafter's LM head keeps; ``auto`` takes the number with the most expected tokens per
            second, ``full`` keeps all; None is ``auto`` for drafters and ``full`` for targets. Heads
            keep their own LM head; of their target's ``auto`` keeps 32,768 rows.
        calibration: Texts of targets, in JSON Lines files under the key ``text``, for the choice of rows and
            the ranges of activations.
        calibrate_with: A target's bundle that writes such texts now.
        device: the device of the bundle; None is the CPU. ``cuda`` computes in float16, with a KV cache in
            float16. Graphs for NPUs have fixed shapes, and the device determines the formats of weights and
            KV cache.
        buckets: with an NPU, lengths of the KV cache in tokens; empty takes 512, 1024 and 2048.
        alignment: A file of 'edgespec align' for this drafter; it is added to the weights before they are
            rounded.
        chip: With ``npu-qnn``, the chip for which every graph is compiled now instead of at each load:
            snapdragon-x-elite, -x2-elite, -8-gen-2, -8-gen-3, -8-elite or -8-elite-gen-5.
        adapters: LoRA adapters that are merged into the weights before they are rounded, each ``PATH`` or
            ``PATH=SCALE``: a directory of PEFT, or a GGUF file.
        mmproj: The file of the tower by which a target in a GGUF file sees; None takes one beside it.
        chat_template: A file with a chat template in Jinja, in place of the source's.
        target: the GGUF file or Hugging Face directory of the target of a head or an MTP layer
            (:mod:`edgespec_export.sources.open`).
    """

    role: Role = "target"
    weights: Annotated[str, one_of(WEIGHTS)] | None = None
    quantization: Quantization | None = None
    name: Annotated[str, length(1, 200)] | None = None
    overwrite: bool = False
    trim: TrimSize | None = None
    calibration: tuple[Path, ...] = ()
    calibrate_with: tuple[Path, ...] = ()
    device: ExportDevice | None = None
    buckets: tuple[Annotated[int, within(PREFILL_ROWS)], ...] = ()
    chip: str | None = None
    alignment: Path | None = None
    target: Path | None = None
    chat_template: Path | None = None
    adapters: tuple[str, ...] = ()
    mmproj: Path | None = None

    @property
    def native(self) -> bool:
        """Whether the graph consists of edgespec's own operators."""
        return self.weights in (None, "exact") and self.device is None
