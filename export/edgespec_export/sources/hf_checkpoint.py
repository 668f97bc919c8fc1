"""A directory as the Hugging Face hub has it, seen as a checkpoint: ``config.json`` and safetensors."""

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from edgespec_export.sources.blocks import F32, Tensor
from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.hf_config import read_config
from edgespec_export.sources.hf_tokenizer import HFTokenizer
from edgespec_export.sources.safetensors_file import SafetensorsFile
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.facts import Facts
from edgespec_models.storage import is_file, model_name
from edgespec_models.text.tokenizer import SpecialTokens

CONFIG = "config.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LOG = logging.getLogger("edgespec")

_GLOBAL = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
_GEMMA3_LAYER = _LAYER | {
    "post_attention_layernorm.weight": "post_attn_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "post_mlp_norm",
}
_TIED = ("gemma3", "smollm3")  # where config.json does not say
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what config.json says
_NOT_EXPORTED = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")


class HFCheckpoint(Checkpoint):
    """A model in a Hugging Face directory."""

    def __init__(self, path: Path) -> None:
        self.path, self.model_name = path, model_name(path)
        self._shards: dict[str, SafetensorsFile] = {}
        facts = Facts.read(path / CONFIG)
        self.config = read_config(facts)
        longest = facts.integer("max_position_embeddings")
        if self.config.context_length < longest:
            _LOG.warning(
                "%s: exported for %d tokens; its rotary embedding changes for longer texts, up to %d",
                *(path.name, self.config.context_length, longest),
            )
        self._tied = facts.boolean("tie_word_embeddings", default=self.config.architecture in _TIED)
        self._tokenizer = HFTokenizer(path, facts, self.config.vocab_size)
        self.stack = ExitStack()
        with self.stack as opened:
            self.tensors: dict[str, Tensor] = self._name(self._stored())
            self.check_shapes()
            self.stack = opened.pop_all()
        texts = (path / CONFIG, path / _INDEX, *self._tokenizer.files)
        shards = (shard.path for shard in self._shards.values())
        self.files = tuple(sorted({file for file in (*texts, *shards) if file.is_file()}))

    def values(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """Rows of a tensor, as float32. Gemma stores its norms' weights less 1."""
        values = super().values(name, start, stop)
        gemma_norm = self.config.architecture == "gemma3" and name.endswith("norm")
        return values + np.float32(1) if gemma_norm else values

    def tokenizer_json(self) -> str:
        """The directory's ``tokenizer.json``, or what its ``tokenizer.model`` says."""
        return self._tokenizer.json

    def special_tokens(self) -> SpecialTokens:
        """As the directory's configuration says."""
        return self._tokenizer.special_tokens()

    def chat_template(self) -> str | None:
        """``chat_template.jinja``, or the template in ``tokenizer_config.json``."""
        return self._tokenizer.chat_template()

    def _stored(self) -> Iterator[tuple[str, SafetensorsFile]]:
        """Every tensor's name and file."""
        if (self.path / _SINGLE).is_file():
            single = self._open(_SINGLE)
            yield from ((name, single) for name in sorted(single.names))
            return
        if not (self.path / _INDEX).is_file():
            others = sorted(file.name for file in self.path.iterdir() if file.suffix in _NOT_EXPORTED)
            hint = f" (there is {others[0]})" if others else ""
            raise ModelFileError(
                f"{self.path} has neither {_SINGLE} nor {_INDEX}{hint}; edgespec exports safetensors. "
                "Download the checkpoint's safetensors files too."
            )
        index = Facts.read(self.path / _INDEX)
        weight_map = index.value("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{index.where} has no weight_map. Download or copy it again.")
        for name, file in sorted(weight_map.items()):
            if not isinstance(file, str) or file != Path(file).name or file in ("", ".."):
                raise ModelFileError(f"{index.where} names a file outside the directory: {file!r}")
            shard = self._open(file)
            if name not in shard.names:
                raise ModelFileError(
                    f"{index.where} says that {file} holds {name!r}, but it does not. "
                    "Download or copy both again."
                )
            yield name, shard

    def _open(self, file: str) -> SafetensorsFile:
        if file not in self._shards:
            if not is_file(self.path / file):
                raise ModelFileError(f"{self.path} lacks {file}. Download or copy it too.")
            self._shards[file] = self.stack.enter_context(closing(SafetensorsFile(self.path / file)))
        return self._shards[file]

    def _name(self, stored: Iterator[tuple[str, SafetensorsFile]]) -> dict[str, Tensor]:
        """Tensors by edgespec's names; fused ones as the rows of their parts."""
        gemma = self.config.architecture == "gemma3"
        names = _GEMMA3_LAYER if gemma else _LAYER
        named: dict[str, Tensor] = {}
        unknown = []
        for name, file in stored:
            if _COMPUTED.fullmatch(name) or (name == "lm_head.weight" and self._tied):
                continue
            layer = re.fullmatch(r"model\.layers\.(0|[1-9][0-9]{0,5})\.(.+)", name)
            own = own_name(name, r"model\.layers\.", _GLOBAL, names)
            if own is not None:
                named[own] = file.tensor(name)
            elif layer and layer[2] in self._fused():
                named |= self._split(file.tensor(name), f"layers.{layer[1]}.", self._fused()[layer[2]])
            else:
                unknown.append(name)
        if unknown:
            raise UnsupportedModelError(
                f"{self.path.name} ({self.config.architecture}) has {len(unknown)} tensors that edgespec has "
                f"no use for, such as {unknown[0]!r}: it is not a plain text model of this architecture"
            )
        if not self._tied and "lm_head" not in named:
            raise ModelFileError(
                f"{self.path.name} lacks 'lm_head.weight', and {CONFIG} does not say tie_word_embeddings. "
                "Download the checkpoint again."
            )
        return named

    def _fused(self) -> dict[str, dict[str, int]]:
        """Phi's fused tensors: which parts their rows are, and how many of each."""
        config = self.config
        if config.architecture != "phi3":
            return {}
        return {
            "self_attn.qkv_proj.weight": {
                "q": config.query_width,
                "k": config.kv_width,
                "v": config.kv_width,
            },
            "mlp.gate_up_proj.weight": dict.fromkeys(("gate", "up"), config.intermediate_size),
        }

    def _split(self, fused: Tensor, prefix: str, parts: dict[str, int]) -> dict[str, Tensor]:
        expected = (sum(parts.values()), self.config.hidden_size)
        if fused.shape != expected:
            raise ModelFileError(
                f"tensor {fused.name!r} of {self.path.name} has shape {fused.shape}; "
                f"its {CONFIG} asks for {expected}. Download or convert it again."
            )
        split, at = {}, 0
        for name, rows in parts.items():
            split[prefix + name] = fused.rows(at, at + rows)
            at += rows
        return split
