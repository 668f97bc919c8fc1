"""An alignment: a change of a drafter's weights, as a file, and in its checkpoint.

It is a safetensors file, in 8 bits. For a vector ``NAME`` of the checkpoint (:mod:`checkpoint`) it holds
``NAME``, the change itself; for a matrix in floats ``NAME.lora_a`` and ``NAME.lora_b``, whose product is the
change (Hu et al. 2021, "LoRA", arXiv 2106.09685). Each is int8 ``(rows, columns)`` with a float32 factor for
every row under ``....scales``; ``lora_b`` lies transposed, so that a row of either is one component. For a
quantized matrix it holds ``NAME.blocks``, transposed too: the relative growth of the float16 factors of each
block, its scale and perhaps its minimum (Kim et al. 2023, "PEQA", arXiv 2305.14152), so codes and the cost of
a step stay the same. The metadata have its origin. Nothing in the file is trusted.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.open import open_checkpoint
from edgespec_export.sources.safetensors_file import SafetensorsFile
from edgespec_models.errors import ModelFileError
from edgespec_models.files.blocks import F32
from edgespec_models.files.tensors import FLOATS, GGMLType, Tensor
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.schema import length, matching, parse, read, within
from edgespec_models.storage import replacing, writing

_KEY, _VERSION = "edgespec_alignment", 1
_SCALES, _A, _B, BLOCKS = ".scales", ".lora_a", ".lora_b", ".blocks"
_REMEDY = "The file is damaged or of another version; make the alignment again"
_Share = Annotated[float, within(0, 1)]


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin and purpose of an alignment.

    Attributes:
        model: name of the drafter's checkpoint.
        source_sha256: digest of its files; no other checkpoint takes the alignment.
        target: name of the model that wrote the answers.
        tokens: the number of answer tokens for training, in the drafter's vocabulary.
        right_before: share of right first guesses on held-out answers before the training.
        right_after: the same after it.
        recipe: settings of the training, by name.
        licence: known licences of the drafter and of the answers.
        version: version of the file's form.
    """

    model: Annotated[str, length(1, 200)]
    source_sha256: Annotated[str, matching("[0-9a-f]{64}")]
    target: Annotated[str, length(1, 200)]
    tokens: Annotated[int, within(0)]
    right_before: _Share
    right_after: _Share
    recipe: Mapping[str, str]
    licence: Annotated[str, length(0, 2000)] = ""
    version: Annotated[int, within(_VERSION, _VERSION)] = _VERSION


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix in 8 bits: ``codes`` int8 ``(rows, columns)``, ``scales`` float32 ``(rows,)``."""

    codes: npt.NDArray[np.int8]
    scales: F32

    @classmethod
    def of(cls, values: F32) -> "Codes":
        """The nearest codes of ``values``, float32 ``(rows, columns)``."""
        scales = np.abs(values).max(axis=1) / np.float32(127)
        safe = np.where(scales > 0, scales, np.float32(1))
        return cls(np.rint(values / safe[:, None]).astype(np.int8), scales.astype(np.float32))

    def values(self) -> F32:
        """The values of the codes."""
        return self.codes * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Alignment:
    """A change of the weights of a drafter.

    ``parts`` are changes and factors of changes, by the names in the file.
    """

    origin: Origin
    parts: Mapping[str, Codes]

    @property
    def tensors(self) -> frozenset[str]:
        """The tensors that it changes, by the checkpoint's names."""
        return frozenset(_tensor(name) for name in self.parts)

    @property
    def digest(self) -> str:
        """The name of the alignment: SHA-256 (hex) over its changes."""
        hasher = hashlib.sha256(self.origin.source_sha256.encode())
        for name, part in sorted(self.parts.items()):
            hasher.update(repr((name, part.codes.shape)).encode())
            hasher.update(part.codes.tobytes() + part.scales.tobytes())
        return hasher.hexdigest()

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of a tensor's change (a vector is a row), or rows and factors of blocks."""
        if self.of_scales(name):
            columns, rows = self.parts[name + BLOCKS].codes.shape
            return rows, columns
        if name in self.parts:
            rows, columns = self.parts[name].codes.shape
            return rows, columns
        return self.parts[name + _B].codes.shape[1], self.parts[name + _A].codes.shape[1]

    def change(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """The addend of a vector, or of rows ``start`` to ``stop`` of a matrix: ``(rows, columns)``."""
        if name in self.parts:
            return self.parts[name].values()
        b, a = self.parts[name + _B], self.parts[name + _A]
        rows: F32 = Codes(b.codes[:, start:stop], b.scales).values().T @ a.values()
        return rows

    def of_scales(self, name: str) -> bool:
        """Whether it changes the factors of a tensor's blocks, and not their codes."""
        return name + BLOCKS in self.parts

    def factors(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """The multipliers of factors in a tensor's rows ``start`` to ``stop``: ``(rows, factors)``."""
        blocks = self.parts[name + BLOCKS]
        grown: F32 = np.float32(1) + Codes(blocks.codes[:, start:stop], blocks.scales).values().T
        return grown

    def write(self, path: Path) -> int:
        """Write the file to ``path``, complete or not at all (StorageError); returns its size in bytes."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, part in sorted(self.parts.items()):
            arrays |= {name: part.codes, name + _SCALES: part.scales}
        header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(asdict(self.origin))}}
        at = 0
        for name, array in arrays.items():
            kind, end = "I8" if array.dtype == np.int8 else "F32", at + array.nbytes
            header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with writing(path), replacing(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).data)
        return path.stat().st_size


def read_alignment(path: Path) -> Alignment:
    """Read an alignment file; ModelFileError if it is none, damaged, or of another version."""
    file = SafetensorsFile(path)
    try:
        text = file.metadata.get(_KEY)
        if text is None:
            raise ModelFileError(f"{path} is not an alignment that 'edgespec align' wrote")
        value = parse(text, f"{path}, metadata", ModelFileError, _REMEDY)
        origin = read(Origin, value, str(path), ModelFileError, _REMEDY)
        names = sorted(name for name in file.names if not name.endswith(_SCALES))
        alignment = Alignment(origin, {name: _codes(file, name) for name in names})
    finally:
        file.close()
    _check_pairs(alignment, path)
    return alignment


def _codes(file: SafetensorsFile, name: str) -> Codes:
    codes = file.integers(name)
    where = f"{name} of {file.path}"
    if codes.ndim != 2 or name + _SCALES not in file.names:
        raise ModelFileError(f"{where} is no matrix with a scale for every row. {_REMEDY}.")
    tensor = file.tensor(name + _SCALES)
    if tensor.shape == codes.shape[:1] and tensor.type.name == "F32":
        scales = tensor.read().reshape(-1).view(np.float32)
        if np.isfinite(scales).all():
            return Codes(codes, scales)
    raise ModelFileError(f"the scales of {where} are not finite numbers, one for every row. {_REMEDY}.")


def _tensor(part: str) -> str:
    """The tensor that a part of the file changes."""
    return part.removesuffix(_A).removesuffix(_B).removesuffix(BLOCKS)


def _check_pairs(alignment: Alignment, path: Path) -> None:
    """Check that every tensor has its change of one row, or both factors of one rank."""
    for name in alignment.tensors:
        a, b, row = (alignment.parts.get(name + end) for end in (_A, _B, ""))
        alone = (row is not None and len(row.codes) == 1) + alignment.of_scales(name)
        if alone == 1 and a is None and b is None:
            continue
        if alone or a is None or b is None or len(a.codes) != len(b.codes):
            raise ModelFileError(f"{path} lacks a factor of the change of {name}. {_REMEDY}.")


class AlignedCheckpoint(Checkpoint):
    """A drafter's checkpoint with its alignment; changed tensors become float32.

    It closes ``base``.

    Raises:
        ModelFileError: it was made for another checkpoint, or does not fit.
    """

    def __init__(self, base: Checkpoint, alignment: Alignment) -> None:
        self.path, self.files, self.model_name = base.path, base.files, base.model_name
        self.config, self.family, self.stack = base.config, base.family, base.stack
        self.base, self.alignment = base, alignment
        self.take_texts(base)
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

    def digest(self, progress: ProgressCallback) -> str:
        """The digest of the files, which is the one in the alignment."""
        return self.alignment.origin.source_sha256

    def read(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[GGMLType, npt.NDArray[np.uint8]]:
        """Raw rows; see :class:`Checkpoint`."""
        if self.stored_name(name) not in self.alignment.tensors:
            return self.base.read(name, start, stop)
        if self.alignment.of_scales(self.stored_name(name)):
            return self._scaled(name, start, stop)
        values = np.ascontiguousarray(self.values(name, start, stop))
        return GGMLType.F32, values.view(np.uint8).reshape(len(values), -1, 4)

    def values(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """Rows of a tensor with the alignment's change."""
        stored = self.stored_name(name)
        if self.alignment.of_scales(stored):
            return super().values(name, start, stop)
        values = self.base.values(name, start, stop)
        if stored not in self.alignment.tensors:
            return values
        changed: F32 = values + self.alignment.change(stored, start, stop).reshape(values.shape)
        return changed

    def _scaled(self, name: str, start: int, stop: int | None) -> tuple[GGMLType, npt.NDArray[np.uint8]]:
        """Raw rows with changed factors in every block."""
        kind, raw = self.base.read(name, start, stop)
        at, end = kind.factors_at, kind.factors_at + 2 * kind.factors
        grown = self.alignment.factors(self.stored_name(name), start, stop)
        raw = raw.copy()
        halves = np.ascontiguousarray(raw[..., at:end]).view(np.float16)
        with np.errstate(over="ignore"):  # values that are not finite are refused when they are read
            changed = (halves.astype(np.float32) * grown.reshape(halves.shape)).astype(np.float16)
        raw[..., at:end] = changed.view(np.uint8)
        return kind, raw


def open_aligned(source: Path, alignment: Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory with an alignment in it.

    Raises:
        ModelFileError: either is damaged, or the alignment is another checkpoint's.
        UnsupportedModelError: a model that edgespec cannot export.
    """
    aligned = read_alignment(alignment)
    checkpoint = open_checkpoint(source)
    try:
        return AlignedCheckpoint(checkpoint, aligned)
    except BaseException:
        checkpoint.close()
        raise


def _merged(base: Checkpoint, alignment: Alignment, name: str) -> Tensor:
    """The tensor with its change, if the change fits."""
    tensor, scaled, expected = base.tensors.get(name), alignment.of_scales(name), None
    if tensor is not None and scaled == (tensor.type not in FLOATS):
        rows, columns = (1, *tensor.shape)[-2:]
        expected = rows, columns // tensor.type.block * tensor.type.factors if scaled else columns
    if tensor is None or alignment.shape(name) != expected:
        what = "scales" if scaled else "weights"
        raise ModelFileError(
            f"the alignment changes {what} of {name!r}, {alignment.shape(name)} of them, but "
            f"{base.path.name} has {'none' if expected is None else expected}. Make the alignment again."
        )
    return tensor if scaled else replace(tensor, type=GGMLType.F32)
