"""Assistants, which draft by attending to their target's keys and values, seen as heads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_export.sources import gguf_checkpoint
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.heads import PICKLED, Head, tensors_of
from edgespec_export.sources.hf_checkpoint import CONFIG, HFCheckpoint
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import ModelFileError, naming
from edgespec_models.families import head_of, in_gguf
from edgespec_models.families.gemma4_assistant import beside
from edgespec_models.families.reading import config_of
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import Reordered, Tensor
from edgespec_models.storage import model_name

_ORDER: Final = "masked_embedding.token_ordering"


class _Assistant(Head):
    """The common part of both forms."""

    def tiles_of(self, name: str) -> str | None:
        """Eight bits: a step reads little."""
        return None if name == "embed" else "Q8_0"

    def _complete(
        self,
        own: Transformer,
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
            self.config = beside(own, self.target, width, clusters)
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
            self.family = in_gguf(self.metadata["general.architecture"], path.name)
            keys = file.facts(self.family.gguf)
            width = Facts(keys, path.name).integer("embedding_length_out")
            self.tensors = gguf_checkpoint.named(file, self.family)
            if "lm_head" in self.tensors:
                self.tensors["embed"] = self.tensors["lm_head"]
            own = self._read_config(file, keys)
            self._complete(own, width, {k: tensor for k, tensor in self.tensors.items() if k != "embed"})


class HFAssistant(_Assistant, HFCheckpoint):
    """An assistant in a directory."""

    def __init__(self, path: Path, target: Checkpoint) -> None:
        self.model_name, self._shards = model_name(path), {}
        with self.opening(path, target):
            head = head_of(Facts.read(path / CONFIG))
            assert head is not None  # whoever opens it has looked
            self.family, facts = head
            clusters = (0, 0)
            if facts.boolean("use_ordered_embeddings", default=False):
                clusters_read = facts.integer("centroid_intermediate_top_k", 32)
                clusters = facts.integer("num_centroids", 2048), clusters_read
            named, tokens = tensors_of(self, _ORDER, "an assistant")
            width = facts.integer("backbone_hidden_size", 1536)
            self._complete(config_of(facts, self.family), width, named, clusters, tokens)
        self.files = self._files_with(path / PICKLED)
