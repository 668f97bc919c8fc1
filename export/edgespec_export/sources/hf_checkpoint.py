"""A directory as the Hugging Face hub has it, seen as a checkpoint: ``config.json`` and safetensors."""

import json
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.experts import alternating_tensors
from edgespec_export.sources.hf_tokenizer import HFTokenizer
from edgespec_export.sources.nvfp4 import nvfp4_tensors
from edgespec_export.sources.ranking import pair_template, ranking_of
from edgespec_export.sources.safetensors_file import SafetensorsFile
from edgespec_models.bundles.bundle import Embedding, Ranking, Sampling
from edgespec_models.errors import ModelFileError, RequestError, UnsupportedModelError
from edgespec_models.families import NEEDS_TARGET, head_of, model_of, tower_of
from edgespec_models.families.family import Family
from edgespec_models.families.names import own_names
from edgespec_models.families.reading import config_of, logits_factor
from edgespec_models.files.blocks import F32
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import Tensor
from edgespec_models.storage import is_file, model_name, read_text

CONFIG = "config.json"
_POOLING, _MODULES = "1_Pooling/config.json", "modules.json"
_POOLED = {"Transformer", "Pooling", "Normalize"}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PACKED = "is quantized already (GPTQ or AWQ); use the unquantized checkpoint, or a GGUF file"
_ROWS = 1024  # rows that are compared at once
_LOG = logging.getLogger("edgespec")

_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.": "",
    "backbone.": "model.",
}
"""Prefixes of the text model's tensors in multimodal models, and its prefixes alone."""
_VISION_TENSORS = re.compile(
    r"(model\.)?(vision_(tower|embedder|adapter|projection)|audio_tower|embed_vision|embed_audio|visual"
    r"|multi_modal_projector)\..*"
)
_MTP = re.compile(r"(model\.)?mtp\..*")
COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what config.json says
_NOT_EXPORTED = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")


class HFCheckpoint(Checkpoint):
    """A model in a Hugging Face directory."""

    def __init__(self, path: Path) -> None:
        self.path, self.model_name = path, model_name(path)
        self._shards: dict[str, SafetensorsFile] = {}
        self._listed: Collection[str] = ()
        stated = Facts.read(path / CONFIG)
        if head_of(stated) is not None:
            raise RequestError(f"{path} {NEEDS_TARGET}")
        self.family, facts = model_of(stated)
        self.config, self._eyes = config_of(facts, self.family), bool(facts.section("text_config").keys)
        self.logits_factor = logits_factor(facts)
        self.warn_if_shorter(self.config, facts.integer("max_position_embeddings"))
        self._tied = facts.boolean("tie_word_embeddings", default=False)
        self._tokenizer = tokenizer = HFTokenizer(path, facts, self.config.vocab_size)
        self.tokenizer_json, self.special_tokens = tokenizer.json, cache(tokenizer.special_tokens)
        self.chat_templates, self._ending = tokenizer.chat_templates, tokenizer.ending
        self._tower = tower_of(stated, tokenizer.added)
        self.sampling = Sampling.advised(tokenizer.generation)
        self.stack = ExitStack()
        with self.stack as opened:
            self.config, self.tensors = self.family.from_hub(self.config, self._name(self.stored()))
            self.split_stacked()
            self.check_shapes()
            self.stack = opened.pop_all()
        self.files = self._files_with(path / _POOLING, path / _MODULES, *tokenizer.files)

    def values(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """Rows of a tensor, as float32. Some families store their norms' weights less 1."""
        values, kind = super().values(name, start, stop), name.rpartition(".")[2]
        if kind in ("delta_a", "mamba_a"):
            return -np.exp(values, dtype=np.float64).astype(np.float32)  # float32's bits differ by processor
        less = self.family.less_one and re.search(f"{self.family.less_one}$", kind)
        return values + np.float32(1) if less else values

    def embedding(self) -> Embedding | None:
        """By the files of sentence-transformers; None if more than a normalization follows."""
        pooling, where = Facts.read(self.path / _POOLING), self.path / _MODULES
        modes = {key for key in pooling.keys if key.startswith("pooling_mode_") and pooling.value(key)}
        if modes != {"pooling_mode_lasttoken"} and pooling.value("pooling_mode") != "lasttoken":
            return None
        try:
            modules = json.loads(read_text(where)) if where.is_file() else []
            kinds = {module["type"].rpartition(".")[2] for module in modules}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelFileError(f"cannot read {where}: {error!r}. Download or copy it again.") from error
        return Embedding(end=self._ending()) if kinds <= _POOLED else None

    def ranking(self) -> tuple[Ranking, F32] | None:
        """By its head, or by its name."""
        return ranking_of(self, self.model_name, lambda: pair_template(self.tokenizer_json()))

    def stored(self) -> Iterator[tuple[str, SafetensorsFile]]:
        """Every tensor's name and file. Of an index only the names of files count, as in transformers."""
        if (self.path / SINGLE).is_file():
            single = self._open(SINGLE)
            self._listed = single.names
            yield from ((name, single) for name in sorted(single.names))
            return
        if not (self.path / INDEX).is_file():
            others = sorted(file.name for file in self.path.iterdir() if file.suffix in _NOT_EXPORTED)
            hint = f" (there is {others[0]})" if others else ""
            raise ModelFileError(
                f"{self.path} has neither {SINGLE} nor {INDEX}{hint}; edgespec exports safetensors. "
                "Download the checkpoint's safetensors files too."
            )
        index = Facts.read(self.path / INDEX)
        weight_map = index.value("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{index.where} has no weight_map. Download or copy it again.")
        for file in weight_map.values():
            if not isinstance(file, str) or file != Path(file).name or file in ("", ".."):
                raise ModelFileError(f"{index.where} names a file outside the directory: {file!r}")
        self._listed = weight_map.keys()
        for file in sorted({*weight_map.values()}):
            shard = self._open(file)
            yield from ((name, shard) for name in sorted(shard.names))

    def _files_with(self, *others: Path) -> tuple[Path, ...]:
        """The files of the configuration and the tensors, and the ``others`` that exist."""
        shards = (shard.path for shard in self._shards.values())
        files = (self.path / CONFIG, self.path / INDEX, *shards, *others)
        return tuple(sorted({file for file in files if file.is_file()}))

    def _open(self, file: str) -> SafetensorsFile:
        if file not in self._shards:
            if not is_file(self.path / file):
                raise ModelFileError(f"{self.path} lacks {file}. Download or copy it too.")
            self._shards[file] = self.stack.enter_context(closing(SafetensorsFile(self.path / file)))
        return self._shards[file]

    def _name(self, stored: Iterator[tuple[str, SafetensorsFile]]) -> dict[str, Tensor]:
        """Tensors by edgespec's names."""
        outer, layer = own_names(self.family.outer, "hub"), own_names(self.family.layer, "hub")
        files = dict(stored)
        named, taken = alternating_tensors(files) if self.family.alternating else ({}, set[str]())
        scaled, parts = nvfp4_tensors(files)
        unknown, has_mtp, place = [], False, mtp_place(self.family, self.config.num_layers)
        eyes = dict[str, Tensor]()
        for name in (*(name for name in files if name not in taken | parts), *scaled):
            inner = alone(name, self.family)
            own = own_name(inner, r"model\.layers\.", outer, layer)
            if self.family.mtp and (_MTP.fullmatch(name) or inner.startswith(place)):
                has_mtp = True
            elif own is not None:
                named[own] = scaled[name] if name in scaled else files[name].tensor(name, scalars=True)
            elif _VISION_TENSORS.fullmatch(name):
                self._eyes = True
                if self._tower is not None:
                    eyes[name.removeprefix("model.")] = files[name].tensor(name, scalars=True)
            elif not COMPUTED.fullmatch(name):
                unknown += [name] if name in self._listed else []
        for own, tensor in named.items():
            if own.endswith(".conv") and tensor.shape[1:2] == (1,):
                named[own] = replace(tensor, shape=(tensor.shape[0], *tensor.shape[2:]))
        if has_mtp:
            self.leave_out_mtp()
        if self._tower is not None and eyes:
            self.tower = self._tower, eyes
        elif self._eyes:
            _LOG.warning("%s: only the text model is exported; it reads no images", self.path.name)
        if unknown:
            packed = any(name.endswith(".qweight") for name in unknown)
            why = "is not a plain text model of this architecture"
            raise UnsupportedModelError(
                f"{self.path.name} ({self.config.architecture}) has {len(unknown)} unknown tensors, such "
                f"as {unknown[0]!r}: it {_PACKED if packed else why}"
            )
        if self._tied and {"embed", "lm_head"} <= named.keys():
            if _are_equal(named["embed"], named["lm_head"]):
                del named["lm_head"]
            else:
                _LOG.warning(
                    "%s is not tied, because its lm_head.weight is stored and differs", self.path.name
                )
        if not self._tied and not {"lm_head", "score"} & named.keys() and self.embedding() is None:
            raise ModelFileError(
                f"{self.path.name} lacks 'lm_head.weight', and {CONFIG} does not say tie_word_embeddings. "
                "Download the checkpoint again."
            )
        return named


def mtp_place(family: Family, layers: int) -> str:
    """The beginning of the names of the tensors of an MTP layer: a model's, or those of a layer more."""
    first, _ = family.mtp.get("both", ("mtp.", ""))
    return "mtp." if first.startswith("mtp.") else f"model.layers.{layers}."


def alone(name: str, family: Family) -> str:
    """The name of a multimodal model's tensor in the text model alone."""
    for before, text in _TEXT_PREFIXES.items():
        if name.startswith(before):
            return text + name.removeprefix(before)
    bare = name.startswith("layers.") or f"model.{name}" in own_names(family.outer, "hub")
    return f"model.{name}" if bare else name  # of models saved without their LM head


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two matrices have the same bytes."""
    ends = [*range(0, first.shape[0], _ROWS), first.shape[0]]
    return (first.shape, first.type) == (second.shape, second.type) and all(
        np.array_equal(first.read(*span), second.read(*span)) for span in pairwise(ends)
    )
