"""How a matrix is stored: bits, blocks, and minimums; or tiles of edgespec's kernels. Needs no extra."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Method", "WeightFormat"]

Method = Literal["keep", "rtn", "fit", "k-quant"]
"""How weights are rounded (``formats.rounding``); ``keep`` repacks those that fit, others it fits."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored: ``bits`` 4 or 8 in blocks of ``block`` along the input; 16, 32 for floats.

    Blocks of 4 bits ``minimums`` lets lie anywhere; without, and with 8 bits, they lie around zero.
    ``tiles`` names a format of edgespec's kernels (:mod:`tiles`); bits and blocks are then
    those that floats are rounded to. It is empty for ONNX Runtime's formats.
    """

    bits: Literal[4, 8, 16, 32]
    block: int = 32
    minimums: bool = False
    tiles: str = ""

    @property
    def is_float(self) -> bool:
        """Whether weights are floats and there are no blocks."""
        return self.bits >= 16

    @property
    def name(self) -> str:
        """Short name for tables, such as ``int4/32+minimums``."""
        if self.tiles or self.is_float:
            return self.tiles or f"float{self.bits}"
        return f"int{self.bits}/{self.block}{'+minimums' if self.minimums else ''}"
