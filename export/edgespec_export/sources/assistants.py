"""Gemma 4's assistants, which draft by attending to their target's keys and values, seen as heads.

Directories are Google's; GGUF files are those of llama.cpp. The computation is in
``models/gemma4_assistant/modeling_gemma4_assistant.py`` of github.com/huggingface/transformers and
``src/models/gemma4-assistant.cpp`` of github.com/ggml-org/llama.cpp, whose converter leaves out the clusters
of tokens.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_export.sources import gguf_checkpoint, hf_checkpoint
from edgespec_export.sources.architectures import ASSISTANT
from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.experts import check_shape
from edgespec_export.sources.gguf import open_parts
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.heads import OTHER, Head
from edgespec_export.sources.hf_checkpoint import CONFIG, INDEX, SINGLE, HFCheckpoint
from edgespec_export.sources.hf_config import assistant_facts, config_of
from edgespec_models.bundles.config import Assistant, ModelConfig
from edgespec_models.errors import ModelFileError, RequestError, UnsupportedModelError, naming
from edgespec_models.files.blocks import Reordered, Tensor
from edgespec_models.files.facts import Facts
from edgespec_models.files.gguf_parts import parts_of, stem_of
from edgespec_models.storage import model_name

_ORDER: Final = "masked_embedding.token_ordering"
_GLOBAL = {
    "model.embed_tokens.weight": "lm_head",
    "model.norm.weight": "final_norm",
    "pre_projection.weight": "both",
    "post_projection.weight": "next_state",
    "masked_embedding.centroids.weight": "centroids",
    "lm_head.weight": "lm_head",
}
_GGUF_GLOBAL = gguf_checkpoint.GLOBAL | {
    "token_embd.weight": "lm_head",
    "nextn.pre_projection.weight": "both",
    "nextn.post_projection.weight": "next_state",
}
_ALIKE: Final = (
    *("vocab_size", "num_kv_heads", "head_dim", "local_kv_heads", "local_head_dim"),
    *("sliding_window", "rope_theta", "rope_local_theta", "turning_pairs", "rope_factors"),
)
"""Facts that an assistant and its target share: otherwise its queries do not fit the target's keys."""


def is_assistant(source: Path) -> bool:
    """Whether a checkpoint's file or directory holds an assistant. Raises as opening it does."""
    if source.is_file():
        with ExitStack() as stack:
            return open_parts(source, stack).metadata.get("general.architecture") == ASSISTANT.gguf
    return assistant_facts(Facts.read(source / CONFIG)) is not None


class _Assistant(Head):
    """The common part of both forms."""

    def tiles_of(self, name: str) -> str | None:
        """Eight bits: a step reads little."""
        return None if name == "embed" else "Q8_0"

    def _complete(
        self,
        own: ModelConfig,
        width: int,
        named: Mapping[str, Tensor],
        clusters: tuple[int, int] = (0, 0),
        tokens: npt.NDArray[Any] | None = None,
    ) -> None:
        """Take the target's embedding and last norm, and check all.

        ``own`` is the decoder of its layers, for a target of this width. ``clusters`` are the number of
        clusters and of those that a step reads; ``tokens`` lists their tokens, cluster by cluster.
        """
        with naming(self.path.name):
            self.config = _config(own, width, self.base, clusters)
        if "lm_head" not in named:
            raise ModelFileError(f"{self.path.name} has no usable token embedding; download it again")
        tensors = {"embed": self.base.tensor("embed"), "target_norm": self.base.tensor("final_norm"), **named}
        both = tensors.pop("both", None)
        if both is not None:
            check_shape(both, (own.hidden_size, 2 * width), self.path.name)
            tensors |= {"embed_fuse": both.columns(0, width), "fuse": both.columns(width, 2 * width)}
        if clusters[0]:
            if tokens is None or not np.array_equal(np.sort(tokens, axis=None), np.arange(own.vocab_size)):
                raise ModelFileError(
                    f"{self.path.name}: {_ORDER} must list each of {own.vocab_size} tokens once; download it "
                    "again"
                )
            self.clustered, head = tokens.ravel().astype(np.int64), tensors["lm_head"]
            place = head.name, head.shape, head.type, head.file, head.offset
            tensors["lm_head"] = Reordered(*place, order=self.clustered)
        self.fit(tensors)


class GGUFAssistant(_Assistant, GGUFCheckpoint):
    """An assistant in a GGUF file."""

    def __init__(self, path: Path, target: Checkpoint) -> None:
        self.path, self.files, self.base = path, tuple(parts_of(path)), target
        self.model_name = stem_of(path)
        with ExitStack() as stack:
            stack.enter_context(target)
            file = open_parts(path, stack)
            self.metadata = file.metadata
            keys = file.facts(ASSISTANT.gguf)
            width = Facts(keys, path.name).integer("embedding_length_out")
            self.tensors = gguf_checkpoint.named(file, ASSISTANT, _GGUF_GLOBAL, gguf_checkpoint.LAYER)
            if "lm_head" in self.tensors:
                self.tensors["embed"] = self.tensors["lm_head"]
            keys |= {"attention.shared_kv_layers": 0, "final_logit_softcapping": None}
            own = self._read_config(ASSISTANT, keys)
            self._complete(own, width, {k: tensor for k, tensor in self.tensors.items() if k != "embed"})
            self.stack = stack.pop_all()


class HFAssistant(_Assistant, HFCheckpoint):
    """An assistant in a directory."""

    def __init__(self, path: Path, target: Checkpoint) -> None:
        self.path, self.model_name, self.base = path, model_name(path), target
        self._shards, self.stack = {}, ExitStack()
        with self.stack as opened:
            opened.enter_context(target)
            facts = assistant_facts(Facts.read(path / CONFIG))
            assert facts is not None  # as is_assistant says
            clusters = (0, 0)
            if facts.boolean("use_ordered_embeddings", default=False):
                read = facts.integer("centroid_intermediate_top_k", 32)
                clusters = facts.integer("num_centroids", 2048), read
            tokens, named = self._read()
            width = facts.integer("backbone_hidden_size", 1536)
            self._complete(config_of(facts, ASSISTANT), width, named, clusters, tokens)
            self.stack = opened.pop_all()
        shards = (shard.path for shard in self._shards.values())
        of_path = (path / name for name in (CONFIG, SINGLE, INDEX))
        self.files = tuple(sorted({file for file in (*of_path, *shards) if file.is_file()}))

    def _read(self) -> tuple[npt.NDArray[Any] | None, dict[str, Tensor]]:
        """The tokens of clusters, and the tensors by edgespec's names."""
        tokens, unknown, named = None, [], dict[str, Tensor]()
        for name, file in self.stored():
            own = own_name(name, r"model\.layers\.", _GLOBAL, hf_checkpoint.POST_NORMED_LAYER)
            if name == _ORDER:
                tokens = file.integers(name, ("I64", "I32"))
            elif own is not None:
                named[own] = file.tensor(name)
            else:
                unknown.append(name)
        if unknown:
            raise UnsupportedModelError(
                f"{self.path.name} has {len(unknown)} tensors that edgespec has no use for in an assistant, "
                f"such as {unknown[0]!r}"
            )
        return tokens, named


def _config(own: ModelConfig, width: int, base: Checkpoint, clusters: tuple[int, int]) -> ModelConfig:
    """The configuration of an assistant of ``base``; RequestError if it belongs to another model."""
    target = base.config
    stated = {"architecture": own.architecture, "target width": width}
    theirs = {"architecture": target.architecture, "target width": target.hidden_size}
    stated |= {name: getattr(own, name) for name in _ALIKE}
    theirs |= {name: getattr(target, name) for name in _ALIKE}
    last = {target.is_global(layer): target.kv_layer(layer) for layer in range(target.num_layers)}
    stated["kinds of layers"] = len({own.is_global(layer) for layer in range(own.num_layers)})
    theirs["kinds of layers"] = len(last)
    for name, value in stated.items():
        if value != theirs[name]:
            raise RequestError(
                f"the assistant was made for a model whose {name} is {value!r}; of {base.path.name} it is "
                f"{theirs[name]!r}. {OTHER}"
            )
    return replace(
        own,
        architecture="assistant",
        context_length=target.context_length,
        embedding_scale=target.embedding_scale,
        tied_values=False,
        feature_layers=(target.num_layers,),
        feature_width=width,
        assistant=Assistant(
            windowed=last.get(False) or 0,
            whole=last.get(True) or 0,
            clusters=clusters[0],
            clusters_read=clusters[1],
        ),
    )
