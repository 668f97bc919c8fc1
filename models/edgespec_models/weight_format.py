"""How a matrix is stored: bits, blocks, and what makes up for rounding. Needs no extra."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Method", "WeightFormat"]

Method = Literal["keep", "rtn", "fit", "k-quant", "hqq", "gptq"]
"""How weights are rounded (``edgespec_export.rounding``, ``gptq``); ``keep`` repacks those that fit."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored: ``bits`` 4 or 8 in blocks of ``block`` along the input; 16, 32 for floats."""

    bits: Literal[4, 8, 16, 32]
    block: int = 32
    zero_points: bool = False
    remainder: Literal["drop", "columns", "matmul"] = "drop"

    @property
    def is_float(self) -> bool:
        """Whether weights are floats and there are no blocks."""
        return self.bits >= 16

    @property
    def even_rows(self) -> bool:
        """Whether MatMulNBits computes pairs of rows and an odd last row with sums in another order.

        Seen on ONNX Runtime 1.31 with AVX-512 VNNI: a row's bits are the same in every pass for blocks of
        16 and 32 (4 bits) and up to 64 (8 bits), and in every pass over an even number of rows for the
        others.
        """
        return (self.bits == 4 and self.block > 32) or (self.bits == 8 and self.block > 64)

    @property
    def name(self) -> str:
        """Short name for tables, such as ``int4/32+columns``."""
        if self.is_float:
            return f"float{self.bits}"
        extra = "" if self.remainder == "drop" else f"+{self.remainder}"
        return f"int{self.bits}/{self.block}{'z' if self.zero_points else ''}{extra}"
