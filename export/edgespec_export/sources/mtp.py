"""MTP layers, which predict one token more (DeepSeek-AI 2024, arXiv 2412.19437), seen as heads.

A checkpoint has the layer behind its own layers; llama.cpp's converter writes it into the same file, or into
a file ``mtp-*.gguf``. Its names are in ``src/llama-arch.cpp`` (``nextn``) and
``conversion/`` of github.com/ggml-org/llama.cpp, its computation in ``src/models/qwen35.cpp``,
``deepseek2.cpp`` and ``nemotron-h-moe.cpp``.
"""

import re
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal

from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.gguf import GGUFFile, open_parts
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint, family_of, has_trunk, take_mtp
from edgespec_export.sources.heads import Head
from edgespec_export.sources.hf_checkpoint import HFCheckpoint, alone, mtp_place
from edgespec_models.decoders.config import DecoderShape
from edgespec_models.errors import EdgespecError, RequestError, UnsupportedModelError
from edgespec_models.families.heads import OTHER
from edgespec_models.families.names import own_names
from edgespec_models.files.tensors import Tensor
from edgespec_models.storage import model_name

_NONE: Final = "is no head and has no MTP layer; only these have a target. Leave out --target"
_SUBLAYER: Final = re.compile(r"layers\.[01]\.")  # of Nemotron's, which are numbered
_GGUF = {"token_embd.weight": "embed", "output_norm.weight": "target_norm", "output.weight": "lm_head"}


class _Layer(Head):
    """The common part of both forms. Embedding, LM head and the last norm are the target's.

    A file of the layer alone has these, too, perhaps in another format.
    """

    def _complete(self, named: dict[str, Tensor]) -> None:
        """Take the layer's own embedding and LM head, or else the target's, and check all."""
        base, config = self.base, self.base.config.mtp_layer
        assert config is not None  # of a family with such layers
        self.config, self.tower = config, base.tower
        embed = named.pop("embed", base.tensor("embed"))
        head = embed if base.tied_head else named.pop("lm_head", base.tensor("lm_head"))
        tensors = {
            "lm_head": named.pop("own_lm_head", head),
            "embed": named.pop("own_embed", embed),
            "target_norm": base.tensor("final_norm"),
        }
        if tensors["lm_head"] is tensors["embed"]:
            del tensors["lm_head"]
        self.fit(tensors | named)

    def _of_block(self, name: str, kind: str, source: Literal["hub", "gguf"]) -> str:
        """edgespec's name of the tensor ``name``, whose name in its layer is ``kind``."""
        own = own_name(f"layers.0.{kind}", r"layers\.", {}, own_names(self.family.layer, source))
        if own is None:
            raise UnsupportedModelError(
                f"{self.path.name} has a tensor that is unknown in MTP layers: {name!r}"
            )
        return own


class GGUFLayer(_Layer, GGUFCheckpoint):
    """An MTP layer in the GGUF file of its target, or in a file of its own."""

    def __init__(self, path: Path, target: Checkpoint) -> None:
        with self.opening(path, target) as stack:
            file = self._open_file(path, stack)
            if path == target.path:
                self.model_name += "-mtp"
            place = _place(file)
            if place is None:
                raise RequestError(f"{path} {_NONE}")
            if place != (target.config.architecture, target.config.num_layers):
                raise RequestError(
                    f"{path.name} has the MTP layer of a {place[0]} model of {place[1]} layers, and "
                    f"{target.path.name} is {target.config.architecture} of {target.config.num_layers}. "
                    f"{OTHER}"
                )
            self.family, names = target.family, own_names(target.family.mtp, "gguf")
            named = dict[str, Tensor]()
            for name, tensor in file.tensors.items():
                kind = name.removeprefix(f"blk.{place[1]}.")
                own = names.get(kind) if kind != name else _GGUF.get(name)
                if own is None and kind != name:
                    own = self._of_block(name, kind, "gguf")
                if own is not None:
                    named[own] = tensor
            if "target_norm" in named and "own_lm_head" in names.values():  # as in llama.cpp
                named.setdefault("final_norm", named["target_norm"])
            self._complete(named)


class HFLayer(_Layer, HFCheckpoint):
    """An MTP layer in the directory of its target."""

    def __init__(self, path: Path, target: Checkpoint) -> None:
        self.model_name, self._shards = f"{model_name(path)}-mtp", {}
        with self.opening(path, target):
            self.family, names = target.family, own_names(target.family.mtp, "hub")
            named, place = dict[str, Tensor](), mtp_place(self.family, target.config.num_layers)
            for name, file in self.stored():
                inner = alone(name, self.family).replace("model.mtp.", "mtp.", 1)
                kind = inner.removeprefix(place)
                own = names.get(inner, names.get(kind))
                if own is None and kind != inner:
                    own = self._of_block(name, _SUBLAYER.sub("", kind), "hub")
                if own in named:
                    raise UnsupportedModelError(
                        f"{path.name} has {name!r} beside {named[own].name!r}; allowed: one MTP layer"
                    )
                if own is not None:
                    named[own] = file.tensor(name)
            if not any(own.startswith("layers.") for own in named):
                raise RequestError(f"{path} {_NONE}")
            self._complete(named)
        self.files = target.files if path == target.path else self._files_with()


def is_layer(source: Path, target: Path | None) -> bool:
    """Whether a drafter's checkpoint means its MTP layer: it is its target's checkpoint, or has only the
    layer.

    Raises as opening it does.
    """
    if source.is_file():
        with ExitStack() as stack:
            file = open_parts(source, stack)
            return _place(file) is not None and (source == target or not has_trunk(file))
    if source != target:
        return False
    with HFCheckpoint(source) as checkpoint:
        return bool(checkpoint.changes)


def beside(source: Path, target: DecoderShape) -> Path | None:
    """The file with the MTP layer of ``target`` in the folder of ``source``; None without one.

    Among several the one with the name most like the target's counts.
    """

    def alike(file: Path) -> int:
        letters = zip(file.name.removeprefix("mtp-"), source.name, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], letters))

    files = (file for file in source.parent.glob("mtp-*.gguf") if file != source and _fits(file, target))
    return max(sorted(files), key=alike, default=None)


def _fits(path: Path, target: DecoderShape) -> bool:
    try:
        with ExitStack() as stack:
            file = open_parts(path, stack)
            tokens = file.tensors.get("token_embd.weight")
            return (
                _place(file) == (target.architecture, target.num_layers)
                and tokens is not None
                and tokens.shape[0] == target.vocab_size
            )
    except EdgespecError:
        return False  # a file of another model, or a damaged one, which the user did not name


def _place(file: GGUFFile) -> tuple[str, int] | None:
    """The family of the model with this MTP layer, and the layer's block, which is the model's depth.

    None if the file has no such layer.
    """
    if not any(".nextn." in name for name in file.tensors):
        return None
    family = family_of(file)
    blocks = take_mtp(file, file.facts(family.gguf))
    if len(blocks) != 1:
        raise UnsupportedModelError(f"{file.path.name} has {len(blocks)} MTP layers; allowed: one")
    return family.name, blocks[0]
