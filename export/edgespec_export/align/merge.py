"""A checkpoint with an alignment in it: what an export of an aligned drafter reads."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec_export.align.alignment import Alignment, read_alignment
from edgespec_export.sources.blocks import F32, FLOATS, GGMLType, Tensor
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.errors import ModelFileError
from edgespec_models.progress import ignore_progress
from edgespec_models.text.tokenizer import SpecialTokens

__all__ = ["FACTORS", "AlignedCheckpoint", "open_aligned"]


FACTORS: Final = MappingProxyType(
    {
        **dict.fromkeys((GGMLType.Q4_0, GGMLType.Q5_0, GGMLType.Q8_0), (0, 1)),
        **dict.fromkeys((GGMLType.Q4_1, GGMLType.Q5_1, GGMLType.Q4_K, GGMLType.Q5_K), (0, 2)),
        GGMLType.Q2_K: (80, 2),
        GGMLType.Q3_K: (108, 1),
        GGMLType.Q6_K: (208, 1),
    }
)
"""Where in a block the float16 factors of all that it holds lie, and how many: of scales, and of minimums."""


class AlignedCheckpoint(Checkpoint):
    """A drafter's checkpoint, changed as its alignment says; tensors that are changed become float32.

    Args:
        base: the drafter's; closed with this one.
        alignment: made for it.

    Raises:
        ModelFileError: it was made for another checkpoint, or does not fit.
    """

    def __init__(self, base: Checkpoint, alignment: Alignment) -> None:
        self.path, self.files, self.model_name = base.path, base.files, base.model_name
        self.config, self.stack, self._base, self.alignment = base.config, base.stack, base, alignment
        origin = alignment.origin
        if base.digest(ignore_progress) != origin.source_sha256:
            raise ModelFileError(
                f"the alignment was made for another checkpoint than {base.path.name}: for {origin.model}, "
                f"SHA-256 {origin.source_sha256[:12]}... Give the checkpoint that it was made for, or align "
                "this one."
            )
        merged = {name: _merged(base, alignment, name) for name in alignment.tensors}
        self.tensors: Mapping[str, Tensor] = {**base.tensors, **merged}
        self.changes = {
            "alignment": alignment.digest,
            "aligned": f"with {origin.target}, on {origin.tokens:,} tokens of answers; right first guesses "
            f"{origin.right_before:.3f} before, {origin.right_after:.3f} after",
        }

    def read(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[GGMLType, npt.NDArray[np.uint8]]:
        """Raw rows; see :class:`Checkpoint`."""
        if self.stored_name(name) not in self.alignment.tensors:
            return self._base.read(name, start, stop)
        if self.alignment.of_scales(self.stored_name(name)):
            return self._scaled(name, start, stop)
        values = np.ascontiguousarray(self.values(name, start, stop))
        return GGMLType.F32, values.view(np.uint8).reshape(len(values), -1, 4)

    def values(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """Rows of a tensor, with what the alignment adds."""
        stored = self.stored_name(name)
        if self.alignment.of_scales(stored):
            return super().values(name, start, stop)
        values = self._base.values(name, start, stop)
        if stored not in self.alignment.tensors:
            return values
        vector = values.ndim == 1
        change = self.alignment.change(stored)[0] if vector else self.alignment.change(stored, start, stop)
        changed: F32 = values + change
        return changed

    def _scaled(self, name: str, start: int, stop: int | None) -> tuple[GGMLType, npt.NDArray[np.uint8]]:
        """Raw rows, the factors in every block changed."""
        kind, raw = self._base.read(name, start, stop)
        at, count = FACTORS[kind]
        grown = self.alignment.factors(self.stored_name(name), start, stop)
        raw = raw.copy()
        halves = np.ascontiguousarray(raw[..., at : at + 2 * count]).view(np.float16)
        with np.errstate(over="ignore"):  # what is not finite is refused where it is read
            changed = (halves.astype(np.float32) * grown[..., None]).astype(np.float16)
        raw[..., at : at + 2 * count] = changed.view(np.uint8)
        return kind, raw

    def tiles_of(self, name: str) -> str | None:
        """Eight bits for a changed matrix that was quantized.

        Its weights stand on a grid, and most of what an alignment adds is smaller than half a step of 4 bits:
        there it would be rounded away, or drowned by the rounding (docs/align.md).
        """
        stored = self.stored_name(name)
        changed = stored in self.alignment.tensors
        return "Q8_0" if changed and self._base.tensor(stored).type not in FLOATS else None

    def tokenizer_json(self) -> str:
        """The drafter's."""
        return self._base.tokenizer_json()

    def special_tokens(self) -> SpecialTokens:
        """The drafter's."""
        return self._base.special_tokens()

    def chat_template(self) -> str | None:
        """The drafter's."""
        return self._base.chat_template()


def open_aligned(source: Path, alignment: Path | None) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory, with an alignment in it if one is named.

    Raises:
        ModelFileError: either is damaged, or the alignment is another checkpoint's.
        UnsupportedModelError: a model that edgespec cannot export.
    """
    if alignment is None:
        return open_checkpoint(source)
    read = read_alignment(alignment)
    checkpoint = open_checkpoint(source)
    try:
        return AlignedCheckpoint(checkpoint, read)
    except BaseException:
        checkpoint.close()
        raise


def _merged(base: Checkpoint, alignment: Alignment, name: str) -> Tensor:
    """The tensor as the alignment makes it, if that fits."""
    tensor, scaled = base.tensors.get(name), alignment.of_scales(name)
    expected: tuple[int, ...] | None = None
    if tensor is not None and not scaled:
        expected = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
    elif tensor is not None and tensor.type in FACTORS:
        expected = tensor.shape[0], tensor.shape[1] // tensor.type.block
    if tensor is None or alignment.shape(name) != expected:
        what = "scales" if scaled else "weights"
        raise ModelFileError(
            f"the alignment changes {what} of {name!r}, {alignment.shape(name)} of them, but "
            f"{base.path.name} has {'none' if expected is None else expected}. Make the alignment again."
        )
    return tensor if scaled else replace(tensor, type=GGMLType.F32)
