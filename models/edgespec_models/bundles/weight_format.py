"""How a matrix is stored: floats, ONNX Runtime's blocks, or tiles of edgespec's kernels.

Tiles are the blocks of a GGUF file as the kernels read them (``runtimes/kernels/layout.h``). A tile is 16
rows of a matrix by 32, 64 or 256 inputs, the block of its format. Tiles follow each other along the inputs,
then down the rows; the last rows of a matrix are filled up with zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from edgespec_models.errors import UnsupportedModelError

LANES: Final = 16
"""Rows of a tile."""


class TileFormat(NamedTuple):
    """A tile of a format: its inputs, its bytes, and its codes.

    A code has ``low`` bits in the first lines and ``high`` above them; ``zero`` is the code of zero.
    """

    inputs: int
    n_bytes: int
    low: int
    high: int
    zero: int
    minimums: bool = False


FORMATS: Final[Mapping[str, TileFormat]] = MappingProxyType(
    {
        "Q4_0": TileFormat(32, 288, 4, 0, 8),
        "Q4_1": TileFormat(32, 320, 4, 0, 0, minimums=True),
        "Q5_0": TileFormat(32, 352, 4, 1, 16),
        "Q5_1": TileFormat(32, 384, 4, 1, 0, minimums=True),
        "Q8_0": TileFormat(32, 544, 8, 0, 128),
        "Q2_K": TileFormat(256, 1344, 2, 0, 0, minimums=True),
        "Q3_K": TileFormat(256, 1824, 2, 1, 4),
        "Q4_K": TileFormat(256, 2368, 4, 0, 0, minimums=True),
        "Q5_K": TileFormat(256, 2880, 4, 1, 0, minimums=True),
        "Q6_K": TileFormat(256, 3360, 4, 2, 32),
        "IQ4_NL": TileFormat(32, 288, 4, 0, 128),
        "IQ4_XS": TileFormat(256, 2208, 4, 0, 128),
        "MXFP4": TileFormat(32, 272, 4, 0, 12),
        "IQ2_XS": TileFormat(256, 1824, 2, 1, 128),
        "IQ3_XXS": TileFormat(256, 2208, 4, 0, 31),
        "IQ3_S": TileFormat(256, 2208, 4, 0, 16),
        "NVFP4": TileFormat(64, 608, 4, 0, 12),
    }
)
"""The formats that the kernels multiply by."""


def tile_bytes(name: str, rows: int, columns: int) -> int:
    """Bytes of a matrix; UnsupportedModelError if the format has no whole blocks of this width."""
    form = FORMATS[name]
    if columns % form.inputs:
        raise UnsupportedModelError(
            f"a matrix of {columns} columns has no whole blocks of {name}, which are {form.inputs} wide; "
            "export with --weights portable"
        )
    return -(-rows // LANES) * (columns // form.inputs) * form.n_bytes


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored: ``bits`` 4 or 8 in blocks of ``block`` along the input; 16, 32 for floats.

    With ``minimums`` blocks of 4 bits may lie anywhere; without them, and with 8 bits, they lie around zero.
    ``tiles`` names a format of edgespec's kernels (:data:`FORMATS`), for which floats are rounded to these
    bits and blocks. It is empty for ONNX Runtime's formats.
    """

    bits: Literal[4, 8, 16, 32]
    block: int = 32
    minimums: bool = False
    tiles: str = ""

    @property
    def is_float(self) -> bool:
        """Whether weights are floats, without blocks."""
        return self.bits >= 16

    @property
    def name(self) -> str:
        """Short name for tables, such as ``int4/32+minimums``."""
        if self.tiles or self.is_float:
            return self.tiles or f"float{self.bits}"
        return f"int{self.bits}/{self.block}{'+minimums' if self.minimums else ''}"
