"""Chips that graphs can be compiled for ahead, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from edgespec_models.errors import RequestError

__all__ = ["CHIPS", "Chip", "find_chip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A chip with a Hexagon Tensor Processor.

    Attributes:
        name: what ``edgespec export --chip`` takes.
        soc_model: Qualcomm's number of the chip.
        htp_arch: the processor's version.
    """

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
"""By name, those of laptops first."""


def find_chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
        RequestError: not known.
    """
    chip = CHIPS.get(name)
    if chip is None:
        raise RequestError(f"chip {name!r} is not known; allowed: {', '.join(CHIPS)}")
    return chip
