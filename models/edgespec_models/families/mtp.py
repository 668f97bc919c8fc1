"""MTP layers, which predict one token more (DeepSeek-AI 2024, arXiv 2412.19437), as heads of their model.

Models that have one state its tensors' names as :attr:`~edgespec_models.families.family.Family.mtp`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import Transformer

T = TypeVar("T", bound="MTPLayer")


@dataclass(frozen=True, kw_only=True)
class MTPLayer(Transformer):
    """The decoder of an MTP layer; one of the model's family says how the layer attends."""

    DRAFTS = True

    def decode(self, b: Backend) -> None:
        """Its product of embedding and state side by side is a sum of two.

        The state of the token before is normalized as for an LM head: the target's stream by the target's
        norm, the layer's own by its own.
        """
        features, states = b.features(self.feature_width), b.states(self.hidden_size)
        normed = b.normalized(features, "target_norm"), b.normalized(states, "final_norm")
        known = b.linear(b.norm(b.joined(*normed), "fuse_norm"), "fuse", self.hidden_size)
        embedding = b.norm(b.embed(self.vocab_size, self.hidden_size, self.embedding_scale), "embed_norm")
        x = b.add(b.linear(embedding, "embed_fuse", self.hidden_size), known)
        x = b.wanted(self.through_layers(b, x))
        b.write(self.logits(b, x))
        b.write_states(x, self.hidden_size)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.num_layers != 1 or self.feature_width != self.hidden_size:
            yield (
                f"{self.num_layers} layers read features {self.feature_width} wide; an MTP layer is alone "
                f"and reads features as wide as its stream, {self.hidden_size}"
            )


def mtp_layer_of(target: Transformer, kind: type[T], architecture: str, **changes: Any) -> T:
    """The layer of ``target``, whose facts it has but for ``changes``. It reads the last layer's output."""
    reads = {"feature_layers": (target.num_layers,), "feature_width": target.hidden_size}
    changes = {"num_layers": 1, "layer_types": (), **reads, **changes}
    return target.become(kind, architecture=architecture, **changes)
