"""A GGUF file seen as a checkpoint.

Its keys state the facts of a ``config.json`` under other names: github.com/ggml-org/llama.cpp,
``src/llama-arch.cpp`` and, for their meaning, ``conversion/``.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.gguf import GGUFFile, open_parts
from edgespec_export.sources.gguf_tokenizer import chat_templates, special_tokens, tokenizer_json
from edgespec_export.sources.mmproj import tower_for
from edgespec_export.sources.ranking import ranking_of
from edgespec_models.bundles.bundle import Embedding, Ranking, Sampling
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import ModelFileError, RequestError, UnsupportedModelError, naming
from edgespec_models.families import NEEDS_TARGET, in_gguf
from edgespec_models.families.family import Family
from edgespec_models.families.names import KEYS, OTHERS, own_names
from edgespec_models.families.reading import CLASSIFIES, config_of, logits_factor
from edgespec_models.families.rope import turning
from edgespec_models.files.blocks import F32
from edgespec_models.files.facts import Facts
from edgespec_models.files.gguf_parts import parts_of, stem_of
from edgespec_models.files.tensors import Tensor
from edgespec_models.schema import shown

_SCALING = "rope.scaling."
_LAST: Final = 3  # llama.cpp's LLAMA_POOLING_TYPE_LAST
_RANK: Final = 4
_SHORT = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_SAMPLING = {name: f"general.sampling.{_SHORT.get(name, name)}" for name in Sampling.__annotations__}
_NO_MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adapter": "an adapter (LoRA); give its base model, and this as --adapter",
        "mmproj": "a projector for images or sound; give the model's own file",
        "imatrix": "an importance matrix for quantization; give the model's own file",
    }
)
"""Files that are no models, by their ``general.type``, and the remedy."""
_MOST_BLOCKS: Final = 1 << 16
_LOG = logging.getLogger("edgespec")
_OLLAMA: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rope.global.freq_base": "rope.freq_base",
        "rope.local.freq_base": "rope.freq_base_swa",
        "rope.scaling_beta": "attention.temperature_scale",
        f"{_SCALING}beta_fast": f"{_SCALING}yarn_beta_fast",
        f"{_SCALING}beta_slow": f"{_SCALING}yarn_beta_slow",
        f"{_SCALING}mscale_all_dim": f"{_SCALING}yarn_log_multiplier",
    }
)
"""Keys of ollama's files, and those of llama.cpp's."""


class _Keys(Facts):
    """The keys of a GGUF file: one table, in which the scaling of rotary embeddings is no section.

    A list of a number for each layer, the same for all, is that number.
    """

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.value(key)
        if isinstance(value, list) and len({*map(repr, value)}) == 1:
            return _Keys({self._names.get(key, key): value[0]}, self.where, self._names).integer(key)
        return super().integer(key, default)

    def section(self, key: str) -> Facts:
        return self if key == "rope_scaling" else Facts({}, self.where)


class GGUFCheckpoint(Checkpoint):
    """A model in a GGUF file or in several, whose key-value pairs are its ``metadata``.

    ``mmproj`` is the file of its tower, if that is not to be one beside it.
    """

    def __init__(self, path: Path, mmproj: Path | None = None) -> None:
        with ExitStack() as stack:
            file = self._open_file(path, stack)
            family = family_of(file)
            own = file.facts(family.gguf)
            if family.dense is not None and not own.get("expert_count"):
                family = family.dense
            self.family = family
            drafter = tuple(f"blk.{block}." for block in take_mtp(file, own))
            if any(".nextn." in name for name in file.tensors):
                if not has_trunk(file):
                    raise RequestError(f"{path} {NEEDS_TARGET}")
                self.leave_out_mtp()
            others = [*filter(OTHERS.match, file.tensors)]
            if others:
                _LOG.warning("%s: only the text model is exported, without %s", path.name, shown(others))
            self.tensors = named(file, family, left_out=drafter)
            if "score" in self.tensors and self._pooling != _RANK:
                raise UnsupportedModelError(f"{path.name} {CLASSIFIES}")
            self.config = self._read_config(file, own)
            self.split_stacked()
            self.check_shapes()
            texts = self.metadata.get("tokenizer.ggml.tokens")
            tower = tower_for(path, self.config, texts if isinstance(texts, list) else (), stack, mmproj)
            if tower is not None:
                self.tower, self.files = tower[:2], (*self.files, tower[2])
            self.stack = stack.pop_all()
        # Cached, so that they warn once.
        self.tokenizer_json = cache(partial(tokenizer_json, self.metadata, self.config.vocab_size))
        self.special_tokens = cache(partial(special_tokens, self.metadata))
        self.chat_templates = partial(chat_templates, self.metadata)
        self.sampling = Sampling.advised(Facts(self.metadata, path.name, _SAMPLING))

    def _open_file(self, path: Path, stack: ExitStack) -> GGUFFile:
        """The file with the tensors of all parts, which ``stack`` closes."""
        self.path, self.files, self.model_name = path, tuple(parts_of(path)), stem_of(path)
        file = open_parts(path, stack)
        self.metadata = file.metadata
        return file

    def embedding(self) -> Embedding | None:
        """By the file's keys."""
        if self._pooling != _LAST:
            return None
        keys, ends = Facts(self.metadata, self.path.name), self.special_tokens().eos
        ended = keys.boolean("tokenizer.ggml.add_eos_token", default=False) and ends
        return Embedding(end=ends[0] if ended else None)

    @property
    def _pooling(self) -> object:
        return self.metadata.get(f"{self.metadata['general.architecture']}.pooling_type")

    def ranking(self) -> tuple[Ranking, F32] | None:
        """By its head, or by its name."""
        return ranking_of(self, f"{self.model_name} {self.metadata.get('general.name')}", self._template)

    def _template(self) -> str:
        """The text of a query and a document, as in llama.cpp's server."""
        stated, special = self.metadata.get("tokenizer.chat_template.rerank"), self.special_tokens()
        if isinstance(stated, str):
            return stated
        keys, tokens = Facts(self.metadata, self.path.name), self.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)  # as the tokenizer's reader checked
        ends = keys.boolean("tokenizer.ggml.add_eos_token", default=False) and special.eos
        begin = str(tokens[special.bos]) if special.add_bos and special.bos is not None else ""
        end = str(tokens[special.eos[0]]) if ends else ""
        return f"{begin}{{query}}{end}{{document}}{end}"

    def _read_config(self, file: GGUFFile, own: dict[str, object], **more: Any) -> Transformer:
        where, family = self.path.name, self.family
        names = {**KEYS, **family.keys}
        if "embed" not in self.tensors:
            raise ModelFileError(f"{where} has no usable token embedding; download or convert it again")
        rows = self.tensors["embed"].shape[0]
        if own.get("vocab_size", rows) != rows:
            raise ModelFileError(f"{where} says {own['vocab_size']} tokens, its embedding has {rows} rows")
        own |= family.from_gguf(_Keys(own, where, names), file.tensors)
        own |= {key: own[other] for other, key in _OLLAMA.items() if other in own and key not in own}
        own |= {key: value for key, value in family.unstated.items() if key not in own}
        own |= {"vocab_size": rows, **self._scaling(own)} | _windows(own)
        facts = _Keys(own, where, names)
        config, self.logits_factor = config_of(facts, family, **more), logits_factor(facts)
        self.warn_if_shorter(config, facts.integer("max_position_embeddings"))
        values = config.attention(0).latent or config.head_dim
        if facts.integer("attention.value_length", values) != values:
            width = facts.integer("attention.value_length")
            raise UnsupportedModelError(
                f"{where} has values {width} wide and keys {config.head_dim} wide; allowed: one width"
            )
        rope = config.rope
        if family.neighbours and rope.width != config.head_dim:
            raise UnsupportedModelError(
                f"{where} rotates {rope.width} of the {config.head_dim} elements of a head; allowed "
                f"for {family.gguf}: all"
            )
        factors = self._taken("rope_factors")
        if factors and rope.factors:
            raise ModelFileError(f"{where} has rope_freqs.weight and scales its rotary embedding besides")
        if factors and len(factors) != rope.width // 2:
            raise UnsupportedModelError(
                f"{where}: there are {len(factors)} rope_factors (rope_freqs.weight) for "
                f"{rope.width // 2} frequencies; download or convert it again"
            )
        with naming(where):
            turned = turning(tuple(factors)) if factors else {}
            order = family.neighbours or rope.interleaved
            return replace(config, rope=replace(rope, interleaved=order, **turned))

    def _scaling(self, own: Mapping[str, object]) -> dict[str, object]:
        """The scaling of rotary embeddings, with the keys of a ``config.json``."""
        short, long = self._taken("short_factors"), self._taken("long_factors")
        factor = own.get(f"{_SCALING}factor", own.get("rope.scale_linear"))
        kind = own.get(f"{_SCALING}type", "linear")
        if short or long:
            kind = "longrope"
        elif kind == "none" or (kind == "linear" and factor is None):
            kind = "default"
        attention = own.get(f"{_SCALING}{'yarn_' * (kind == 'yarn')}attn_factor")
        for key in ("yarn_ext_factor", "attn_factor"):
            if own.get(f"{_SCALING}{key}", 1.0) != 1.0 and (kind, key) != ("longrope", "attn_factor"):
                raise UnsupportedModelError(
                    f"{self.path.name}: {_SCALING}{key} is {own[f'{_SCALING}{key}']!r} beside {kind!r}; "
                    "allowed: 1.0"
                )
        return {
            f"{_SCALING}type": kind,
            f"{_SCALING}factor": factor,
            "short_factor": short,
            "attention_factor": attention,
            "mscale": 1.0,
        }

    def _taken(self, name: str) -> list[float]:
        """A tensor that holds facts instead of weights: the divisors of frequencies."""
        if name not in self.tensors:
            return []
        values = self.values(name).ravel()
        self.tensors = {other: tensor for other, tensor in self.tensors.items() if other != name}
        return [float(value) for value in values]


def _windows(own: Mapping[str, object]) -> dict[str, object]:
    """Sliding windows with the keys of a ``config.json``; 0 is no window, a list has one for each layer."""
    changed: dict[str, object] = {}
    if own.get("attention.sliding_window") == 0:
        changed["attention.sliding_window"] = None
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        kinds = [f"{'sliding' if windowed else 'full'}_attention" for windowed in pattern]
        changed |= {"attention.sliding_window_pattern": None, "layer_types": own.get("layer_types", kinds)}
    return changed


def take_mtp(file: GGUFFile, own: dict[str, object]) -> range:
    """Take the blocks of MTP layers out of ``block_count``, and return them."""
    where = file.path.name
    keys = Facts(own, where)
    blocks, drafters = keys.integer("block_count", 0), keys.integer("nextn_predict_layers", 0)
    if not 0 <= drafters < max(blocks, 1):
        raise ModelFileError(
            f"{where} has {blocks} blocks, {drafters} of them for MTP; download or convert it again"
        )
    if drafters:
        own["block_count"] = blocks - drafters
    taken = range(blocks - drafters, min(blocks, _MOST_BLOCKS))
    for name in file.tensors:
        block, _, kind = name.removeprefix("blk.").partition(".")
        if kind.startswith("nextn.") and block not in map(str, taken):
            raise ModelFileError(
                f"{where} has {name!r}, but block_count {blocks} and nextn_predict_layers {drafters} say "
                f"that block {block} is none for MTP; download or convert it again"
            )
    return taken


def has_trunk(file: GGUFFile) -> bool:
    """Whether the file has a model, and not its MTP layer alone."""
    return "blk.0.attn_norm.weight" in file.tensors


def family_of(file: GGUFFile) -> Family:
    """The family of a file; UnsupportedModelError or RequestError if edgespec cannot export it."""
    architecture, kind = (str(file.metadata.get(f"general.{key}")) for key in ("architecture", "type"))
    instead = _NO_MODELS.get("mmproj" if architecture == "clip" else kind)
    if instead is not None:
        raise UnsupportedModelError(f"{file.path} is {instead}")
    family = in_gguf(architecture, file.path.name, file.tensors)
    if family.kind != "model":
        raise RequestError(f"{file.path} {NEEDS_TARGET}")
    return family


def named(file: GGUFFile, family: Family, *, left_out: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The file's tensors by edgespec's names; UnsupportedModelError for unknown ones.

    Tensors whose names begin with one of ``left_out`` are left out.
    """
    outer, layer = own_names(family.outer, "gguf"), own_names(family.layer, "gguf")
    left = (name for name in file.tensors if not (name.startswith(left_out) or OTHERS.match(name)))
    names = {name: own_name(name, r"blk\.", outer, layer) for name in left}
    names |= dict.fromkeys(file.integers)
    surplus = [name for name, own in names.items() if own is None]
    if any(name.startswith("cls.") for name in surplus):
        raise UnsupportedModelError(f"{file.path.name} {CLASSIFIES}")
    if surplus:
        raise UnsupportedModelError(
            f"{file.path.name} ({family.gguf}) has {len(surplus)} unknown tensors, such "
            f"as {surplus[0]!r}: it is not a plain text model of this architecture"
        )
    return {own: file.tensors[name] for name, own in names.items() if own is not None}
