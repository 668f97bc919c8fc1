"""Quantization by the user's choice of bits, with the same rule for every matrix.

The cost of each class decides which matrices keep 8 bits in a 4-bit model (``mixed``). Measured on
Qwen2.5-Coder-1.5B in trials with one class changed at a time, KL in nats above the file's own weights: LM
head in 4 bits, block 32, .012; the matrices that Q4_K_M holds in 6 bits (half of the values and down
projections) .006. The LM head is one matrix and cheap to spare.
"""

from dataclasses import dataclass
from typing import Literal

from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.files.tensors import GGMLType
from edgespec_models.schema import Checked

Mixed = Literal["none", "head", "sensitive"]

_SPARED = {"none": (), "head": ("lm_head",), "sensitive": ("lm_head", "v", "down")}
_EXTREME_LAYERS = 8  # an eighth of the layers at either end is more sensitive than the layers between
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Quantization(Checked):
    """The number of bits of a model's matrices, in blocks of 32.

    Matrices that the source holds in this form stay unchanged, and so does a quantized embedding.

    Attributes:
        bits: 4 or 8; blocks of 4 bits may lie anywhere, blocks of 8 bits lie around zero.
        mixed: the matrices that keep 8 bits if ``bits`` is 4: ``none``; ``head``, the LM head; ``sensitive``,
            the LM head and, in half of the layers (the first and last, and every third between, as
            llama.cpp's Q4_K_M has it), values and down projections.

    Raises:
        RequestError: a value that is not offered.
    """

    bits: Literal[4, 8] = 4
    mixed: Mixed = "head"

    @property
    def name(self) -> str:
        """Short name: ``4-bit``, then options besides defaults, as in ``4-bit/mixed=none``."""
        spared = f"/mixed={self.mixed}" if self.bits == 4 and self.mixed != "head" else ""
        return f"{self.bits}-bit{spared}"

    def format_of(self, name: str, kind: GGMLType, columns: int, layers: int) -> WeightFormat:
        """The format of tensor ``name`` in a graph of standard operators.

        A matrix whose width has no whole blocks stays in floating point.
        """
        if columns % _BLOCK:
            return WeightFormat(32)
        if self._has_8_bits(name, layers):
            return WeightFormat(8, _BLOCK)
        return WeightFormat(4, _BLOCK, minimums=kind is not GGMLType.Q4_0)

    def block_format(self, name: str, kind: GGMLType, layers: int) -> str:
        """The kernels' format of tensor ``name``, whose format in the source is ``kind``."""
        if self._has_8_bits(name, layers):
            return "Q8_0"
        return "Q4_0" if kind is GGMLType.Q4_0 else "Q4_1"

    def _has_8_bits(self, name: str, layers: int) -> bool:
        kind = name.rpartition(".")[2]
        if self.bits == 8 or kind not in _SPARED[self.mixed]:
            return self.bits == 8
        if kind == "lm_head":
            return True
        layer, end = int(name.split(".")[1]), layers // _EXTREME_LAYERS
        return layer < end or layer >= layers - end or (layer - end) % 3 == 2
