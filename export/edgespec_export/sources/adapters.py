"""LoRA adapters, merged into a checkpoint: PEFT's directories, and llama.cpp's GGUF files.

For a matrix W an adapter has A ``(rank, inputs)`` and B ``(outputs, rank)``; merged it is W + scale B A
(Hu et al. 2021, "LoRA", arXiv 2106.09685). Exports see it in float32 and round it as they round floats.
Nothing in the files is trusted.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path

import numpy as np

from edgespec_export.sources import gguf_checkpoint, hf_checkpoint
from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.safetensors_file import SafetensorsFile
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import ModelFileError, RequestError, UnsupportedModelError
from edgespec_models.families import of_gguf
from edgespec_models.families.names import own_names
from edgespec_models.files.blocks import F32, unpack, values_of
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import U8, GGMLType, Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PEFT = re.compile(r"base_model\.model\.(?P<name>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")
_GGUF = re.compile(r"(?P<name>.+)\.weight\.lora_(?P<part>[ab])")
_MORE = (
    *("use_dora", "modules_to_save", "lora_bias", "target_parameters", "trainable_token_indices"),
    *("layer_replication", "alora_invocation_tokens", "arrow_config", "use_qalora", "use_bdlora"),
)
"""Keys of PEFT's configuration for what plain LoRA has not."""
_MERGE = "merge the adapter into its base with the program that made it, and export the result"


@dataclass(frozen=True, slots=True)
class Adapted(Tensor):
    """A matrix with the changes of adapters, in float32; ``factors`` are pairs of A and of scaled B."""

    base: Tensor = field(kw_only=True)
    factors: tuple[tuple[F32, F32], ...] = field(kw_only=True)

    def read(self, start: int = 0, stop: int | None = None) -> U8:
        values = _floats(self.base, start, stop).copy()
        for a, b in self.factors:
            values += b[start:stop] @ a
        return values.view(np.uint8).reshape(len(values), -1, 4)


@dataclass(frozen=True, slots=True)
class _Change:
    """What an adapter changes: the matrix ``name`` of ours, or one that holds several, called ``stated``."""

    stated: str
    name: str | None
    a: F32
    b: F32


def adapter_of(text: str) -> tuple[Path, float]:
    """The place and the scale of an adapter, ``PATH`` or ``PATH=SCALE``.

    Raises:
        RequestError: there is no such path, or the scale is no finite number.
    """
    place, _, scale = text.rpartition("=")
    if place and not Path(text).exists():
        try:
            number = float(scale)
        except ValueError:
            number = float("nan")
        if not isfinite(number):
            raise RequestError(f"adapter {text}: the scale is {scale!r}; allowed: a number, such as 0.5")
    else:
        place, number = text, 1.0
    if not Path(place).exists():
        raise RequestError(f"adapter {place} does not exist; give a directory of PEFT or a GGUF file")
    return Path(place), number


def add_adapters(checkpoint: Checkpoint, adapters: Sequence[str]) -> None:
    """Merge adapters (:func:`adapter_of`) into the matrices of ``checkpoint``.

    Raises:
        RequestError: there is no such adapter.
        ModelFileError: one is damaged, or of another model.
        UnsupportedModelError: one changes what edgespec does not merge.
    """
    factors, notes = dict[str, tuple[tuple[F32, F32], ...]](), list[str]()
    for text in adapters:
        path, scale = adapter_of(text)
        file = path / WEIGHTS if path.is_dir() else path
        changes = [*(_peft(path, checkpoint) if path.is_dir() else _gguf(path, checkpoint))]
        if not changes:
            raise ModelFileError(f"{file} holds no adapter; give a directory of PEFT or a GGUF file")
        for change in changes:
            for name, b in _parts(path, change, checkpoint):
                factors[name] = *factors.get(name, ()), (change.a, b * np.float32(scale))
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        notes.append(f"{path.resolve().name} times {scale:g} (SHA-256 {digest})")
    merged = {name: _adapted(checkpoint.tensors[name], pairs) for name, pairs in factors.items()}
    checkpoint.tensors = {**checkpoint.tensors, **merged}
    of_matrices = f"{len(merged)} matrices changed"
    checkpoint.changes = {**checkpoint.changes, "adapters": "; ".join((*notes, of_matrices))}


def _adapted(base: Tensor, factors: tuple[tuple[F32, F32], ...]) -> Adapted:
    return Adapted(base.name, base.shape, GGMLType.F32, base.file, base.offset, base=base, factors=factors)


def _floats(tensor: Tensor, start: int = 0, stop: int | None = None) -> F32:
    values = values_of(unpack(tensor.type, tensor.read(start, stop)))
    if not np.isfinite(values).all():
        raise ModelFileError(f"tensor {tensor.name!r} holds weights that are not finite; download it again")
    return values.reshape(-1, tensor.shape[-1])


def _peft(folder: Path, base: Checkpoint) -> Iterator[_Change]:
    """The changes in a directory of PEFT. Its ``fan_in_fan_out`` counts for GPT-2's layers alone."""
    facts = Facts.read(folder / CONFIG)
    more = [key for key in _MORE if facts.value(key)]
    if facts.text("peft_type", "") != "LORA" or facts.text("bias", "none") != "none" or more:
        stated = ", ".join(f"{key} {facts.value(key)!r:.80}" for key in ("peft_type", "bias", *more))
        raise UnsupportedModelError(
            f"{facts.where} says {stated}; edgespec merges plain LoRA without bias: {_MERGE}"
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelFileError(f"{folder} lacks {WEIGHTS}; save the adapter as safetensors")
    family = base.family
    outer, layers = (own_names(names, "hub") for names in (family.outer, family.layer))
    with closing(SafetensorsFile(folder / WEIGHTS)) as file:
        names = (name for name in file.names if not name.endswith(".base_layer.weight"))  # the base's
        tensors = {name: file.tensor(name) for name in sorted(names)}
        for name, a, b in _pairs(folder, tensors, _PEFT):
            alone = hf_checkpoint.alone(f"{name}.weight", family)
            own = own_name(alone, r"model\.layers\.", outer, layers)
            yield _Change(name, own, a, b * np.float32(_peft_scale(facts, name, len(a))))


def _peft_scale(facts: Facts, name: str, rank: int) -> float:
    patterns = facts.section("alpha_pattern")
    for key in patterns.keys:
        if not re.fullmatch(r"[\w.]+", key):
            raise UnsupportedModelError(f"{facts.where}: alpha_pattern has the expression {key!r}; {_MERGE}")
    own = next((key for key in patterns.keys if f".{name}".endswith(f".{key}")), None)
    alpha = facts.number("lora_alpha", 8.0) if own is None else patterns.number(own)
    return alpha / (sqrt(rank) if facts.boolean("use_rslora", default=False) else rank)


def _gguf(path: Path, base: Checkpoint) -> Iterator[_Change]:
    """The changes in a GGUF file of llama.cpp's converter."""
    with GGUFFile(path) as file:
        kinds = [file.metadata.get(key) for key in ("general.type", "adapter.type")]
        architecture = str(file.metadata.get("general.architecture"))
        family, config = of_gguf(architecture), base.config
        if kinds != ["adapter", "lora"] or "adapter.alora.invocation_tokens" in file.metadata:
            raise UnsupportedModelError(f"{path} is no LoRA adapter that always counts; {_MERGE}")
        own = architecture
        if isinstance(base, gguf_checkpoint.GGUFCheckpoint):
            own = str(base.metadata["general.architecture"])
        if family is None or architecture != own:
            raise ModelFileError(
                f"{path} is an adapter of {architecture!r:.80}, and {base.path.name} of {own!r:.80}"
            )
        alpha = Facts(file.metadata, path.name).number("adapter.lora.alpha", 0.0)
        whole, layers = (own_names(names, "gguf") for names in (family.outer, family.layer))
        for name, a, b in _pairs(path, file.tensors, _GGUF):
            scale = np.float32(alpha / len(a) if alpha else 1.0)
            rows = _for_halves(name, b, config) if family.neighbours else b
            yield _Change(name, own_name(f"{name}.weight", r"blk\.", whole, layers), a, rows * scale)


def _for_halves(name: str, b: F32, config: Transformer) -> F32:
    """B with the rows of queries and keys for rotations of halves, which llama.cpp's converter moved."""
    if not name.endswith((".attn_q", ".attn_k")) or len(b) % config.head_dim:
        return b
    return b.reshape(-1, config.head_dim // 2, 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)


def _for_neighbours(b: F32, config: Transformer) -> F32:
    """The inverse."""
    return b.reshape(-1, 2, config.head_dim // 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)


def _pairs(
    where: Path, tensors: Mapping[str, Tensor], pattern: re.Pattern[str]
) -> Iterator[tuple[str, F32, F32]]:
    """The changed matrices' names with A and B, in the file's order."""
    found = dict[str, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        if match is None or len(tensor.shape) != 2:
            raise UnsupportedModelError(f"{where} has {name!r}, which is no factor of a matrix: {_MERGE}")
        found.setdefault(match["name"], {})[match["part"].lower()] = tensor
    for name, parts in found.items():
        if len(parts) != 2 or parts["a"].shape[0] != parts["b"].shape[1]:
            raise ModelFileError(f"{where} lacks a factor of {name!r}, or its ranks differ; copy it again")
        yield name, _floats(parts["a"]), _floats(parts["b"])


def _parts(path: Path, change: _Change, base: Checkpoint) -> Iterator[tuple[str, F32]]:
    """The matrices of ``base`` that a change is of, each with its rows of B."""
    own, tensors, config = change.name or "", base.tensors, base.config
    layer, _, kind = own.rpartition(".")
    product = record(config).products.get(own)
    stacked = product.matrices if product is not None and layer else ()
    names = [name for name in ([own] if own in tensors else stacked) if name in tensors]
    is_gguf = isinstance(base, gguf_checkpoint.GGUFCheckpoint)
    shapes = [tensors[name].shape for name in names if len(tensors[name].shape) == 2]
    moved = kind.startswith("delta_") and is_gguf != path.is_file()  # llama.cpp orders their heads otherwise
    if not shapes or len(shapes) != len(names) or own in ("embed", "inputs", "score") or moved:
        raise UnsupportedModelError(
            f"the adapter {path} changes {change.stated!r}, which edgespec does not merge into "
            f"{base.path.name} ({config.architecture}): {_MERGE}"
        )
    shape = sum(rows for rows, _ in shapes), shapes[0][1]
    if (len(change.b), change.a.shape[1]) != shape:
        raise ModelFileError(
            f"the adapter {path} changes {change.stated!r} of {len(change.b)} x {change.a.shape[1]} weights, "
            f"and {base.path.name} has {shape[0]} x {shape[1]}: it is of another model"
        )
    start = 0
    for name, (rows, _) in zip(names, shapes, strict=True):
        b = change.b[start : start + rows]
        start += rows
        if base.family.neighbours and config.rope.interleaved and name.endswith((".q", ".k")):
            b = _for_neighbours(b, config)
        yield name, b
