"""Gemma 4's assistants, which draft by attending to their target's keys and values, seen as heads.

Directories have Google's form, GGUF files llama.cpp's. The computation is in
``models/gemma4_assistant/modeling_gemma4_assistant.py`` of github.com/huggingface/transformers and
``src/models/gemma4-assistant.cpp`` of github.com/ggml-org/llama.cpp, whose converter leaves out the clusters
of tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_export.sources import gguf_checkpoint, hf_checkpoint
from edgespec_export.sources.architectures import ASSISTANT
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.heads import OTHER, PICKLED, Head, tensors_of
from edgespec_export.sources.hf_checkpoint import CONFIG, HFCheckpoint
from edgespec_export.sources.hf_config import assistant_facts, config_of
from edgespec_models.bundles.config import Assistant, ModelConfig
from edgespec_models.errors import ModelFileError, RequestError, naming
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import Reordered, Tensor
from edgespec_models.storage import model_name

_ORDER: Final = "masked_embedding.token_ordering"
_GLOBAL = {
    "embed_tokens.weight": "lm_head",
    "norm.weight": "final_norm",
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

        ``own`` is the decoder of its layers, for a target of this width. ``clusters`` has the number of
        clusters and how many of them a step reads; ``tokens`` lists their tokens, cluster by cluster.
        """
        with naming(self.path.name):
            self.config = _config(own, width, self.base, clusters)
        if "lm_head" not in named:
            raise ModelFileError(f"{self.path.name} has no usable token embedding; download it again")
        tensors = {"embed": self.base.tensor("embed"), "target_norm": self.base.tensor("final_norm"), **named}
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
        with self.opening(path, target) as stack:
            file = self._open_file(path, stack)
            keys = file.facts(ASSISTANT.gguf)
            width = Facts(keys, path.name).integer("embedding_length_out")
            self.tensors = gguf_checkpoint.named(file, ASSISTANT, _GGUF_GLOBAL, gguf_checkpoint.LAYER)
            if "lm_head" in self.tensors:
                self.tensors["embed"] = self.tensors["lm_head"]
            keys |= {"attention.shared_kv_layers": 0, "final_logit_softcapping": None}
            own = self._read_config(ASSISTANT, keys)
            self._complete(own, width, {k: tensor for k, tensor in self.tensors.items() if k != "embed"})


class HFAssistant(_Assistant, HFCheckpoint):
    """An assistant in a directory."""

    def __init__(self, path: Path, target: Checkpoint) -> None:
        self.model_name, self._shards = model_name(path), {}
        with self.opening(path, target):
            facts = assistant_facts(Facts.read(path / CONFIG))
            assert facts is not None  # whoever opens it has looked
            clusters = (0, 0)
            if facts.boolean("use_ordered_embeddings", default=False):
                clusters_read = facts.integer("centroid_intermediate_top_k", 32)
                clusters = facts.integer("num_centroids", 2048), clusters_read
            names = _GLOBAL, hf_checkpoint.POST_NORMED_LAYER
            named, tokens = tensors_of(self, names, _ORDER, "an assistant")
            width = facts.integer("backbone_hidden_size", 1536)
            self._complete(config_of(facts, ASSISTANT), width, named, clusters, tokens)
        self.files = self._files_with(path / PICKLED)


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
