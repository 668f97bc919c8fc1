"""Quantization by the user's choice: bits, block size and method, for every matrix the same rule.

Which matrices keep 8 bits in a 4-bit model (``mixed``) follows what each class costs. Measured on
Qwen2.5-Coder-1.5B in trials with one class changed at a time, KL in nats above the file's own weights:
gate and up projections in 4 bits, block 128, .027, block 64 .013; LM head in 4 bits, block 32, .012; the
matrices that Q4_K_M holds in 6 bits (half of the values and down projections) .006; down projections at
block 64 .005; queries and keys .003; attention's output .002. The LM head is one matrix and cheap to spare.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from edgespec_export.gguf import GGMLType
from edgespec_models.errors import RequestError
from edgespec_models.weight_format import Method, WeightFormat

__all__ = ["BLOCKS", "Minimums", "Mixed", "Quantization"]

BLOCKS = (16, 32, 64, 128)
"""Block sizes ONNX Runtime's CPU kernels take and an export offers."""

Mixed = Literal["none", "head", "sensitive"]
Minimums = Literal["columns", "integer", "none"]

_SPARED = {"none": (), "head": ("lm_head",), "sensitive": ("lm_head", "v", "down")}
_EXTREME_LAYERS = 8  # an eighth of the layers at either end is more sensitive than those between
_FLOAT = WeightFormat(32)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How to round a model's matrices; the embedding, which is gathered, stays exact.

    Attributes:
        bits: 4 or 8.
        block: weights that share a scale, one of :data:`BLOCKS`; a matrix whose width has no whole blocks
            of that size takes the next smaller that fits, or stays float32.
        method: how scales and offsets are chosen (:mod:`edgespec_export.rounding`); ``keep`` repacks
            matrices that the source holds in this form already and fits the others; ``gptq``
            (:mod:`edgespec_export.gptq`) runs the model over a calibration text and fits 8-bit matrices.
        mixed: what keeps 8 bits where ``bits`` is 4: ``none``; ``head``, the LM head; ``sensitive``, the
            LM head and, in half of the layers (the first and last, and every third between, as
            llama.cpp's Q4_K_M has it), values and down projections.
        minimums: how 4-bit blocks that do not lie around zero are held: ``columns``, any offset
            (:mod:`edgespec_models.graphs.linear`); ``integer``, a zero point among the codes; ``none``,
            all blocks around zero. 8-bit blocks always lie around zero.

    Raises:
        RequestError: a value that is not offered.
    """

    bits: Literal[4, 8] = 4
    block: int = 32
    method: Method = "fit"
    mixed: Mixed = "head"
    minimums: Minimums = "columns"
    refined: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("bits", (4, 8)),
            ("block", BLOCKS),
            ("method", get_args(Method)),
            ("mixed", get_args(Mixed)),
            ("minimums", get_args(Minimums)),
        ):
            given = getattr(self, name)
            if given not in allowed:
                known = ", ".join(str(value) for value in allowed)
                raise RequestError(f"{name}={given!r} is not offered; allowed: {known}")

    @property
    def name(self) -> str:
        """Short name: ``4/32/fit``, and what is not the default behind it; :meth:`parse` reads it."""
        parts = [str(self.bits), str(self.block), self.method]
        if self.bits == 4 and self.mixed != "head":
            parts.append(f"mixed={self.mixed}")
        if self.bits == 4 and self.minimums != "columns":
            parts.append(f"minimums={self.minimums}")
        return "/".join(parts)

    @classmethod
    def parse(cls, name: str) -> "Quantization":
        """Read :attr:`name`.

        Raises:
            RequestError: not such a name.
        """
        bits, _, rest = name.partition("/")
        block, _, rest = rest.partition("/")
        method, *more = rest.split("/")
        options = dict(item.partition("=")[::2] for item in more)
        if not (bits.isdecimal() and block.isdecimal()) or not options.keys() <= {"mixed", "minimums"}:
            raise RequestError(
                f"{name!r} is no quantization; write BITS/BLOCK/METHOD, such as 4/32/fit or "
                "4/64/k-quant/mixed=none/minimums=integer"
            )
        return cls(int(bits), int(block), method, **options)  # type: ignore[arg-type]

    def format_of(self, name: str, kind: GGMLType, columns: int, layers: int) -> WeightFormat:
        """The format of tensor ``name`` (as :class:`~edgespec_export.checkpoint.Checkpoint` calls it).

        Args:
            name: ``lm_head`` or ``layers.3.down``.
            kind: its format in the source.
            columns: its width.
            layers: how many the model has.
        """
        block = next((b for b in reversed(BLOCKS) if b <= self.block and columns % b == 0), None)
        if block is None:
            return _FLOAT
        if self.bits == 8 or self._spares(name, layers):
            return WeightFormat(8, block)
        held = self.method == "keep" and kind is GGMLType.Q4_0 and block == 32
        if self.minimums == "none" or held:
            return WeightFormat(4, block)
        remainder: Literal["columns", "drop"] = "columns" if self.minimums == "columns" else "drop"
        return WeightFormat(4, block, zero_points=True, remainder=remainder)

    def block_format(self, name: str, layers: int) -> str:
        """The format of tensor ``name`` among those of edgespec's kernels."""
        if self.bits == 8 or self._spares(name, layers):
            return "Q8_0"
        return "Q4_0" if self.minimums == "none" else "Q4_1"

    def _spares(self, name: str, layers: int) -> bool:
        """Whether ``name`` keeps 8 bits."""
        kind = name.rpartition(".")[2]
        if kind not in _SPARED[self.mixed]:
            return False
        if kind == "lm_head":
            return True
        layer, end = int(name.split(".")[1]), layers // _EXTREME_LAYERS
        return layer < end or layer >= layers - end or (layer - end) % 3 == 2
