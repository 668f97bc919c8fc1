"""Gemma 4's assistants, which draft by attending to their target's keys and values.

Directories have Google's form, GGUF files llama.cpp's. The computation is in
``models/gemma4_assistant/modeling_gemma4_assistant.py`` of github.com/huggingface/transformers and
``src/models/gemma4-assistant.cpp`` of github.com/ggml-org/llama.cpp, whose converter leaves out the clusters
of tokens.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from edgespec_models.decoders.operations import Attention, Backend
from edgespec_models.decoders.transformer import FULL, SLIDING, Transformer
from edgespec_models.errors import RequestError
from edgespec_models.families.family import Family
from edgespec_models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED, Gemma4
from edgespec_models.families.heads import OTHER, Target
from edgespec_models.files.facts import Facts
from edgespec_models.schema import within

_ALIKE: Final = (
    *("vocab_size", "num_kv_heads", "head_dim", "local_kv_heads", "local_head_dim"),
    *("sliding_window", "rope", "local_rope"),
)
"""Facts that an assistant and its target share: otherwise its queries do not fit the target's keys."""


@dataclass(frozen=True, kw_only=True)
class Gemma4Assistant(Gemma4):
    """A Gemma 4 whose layers have queries alone.

    Its rotary tables begin at position 1, because it stands at the last token in its target's cache, and its
    queries belong to the token behind.

    Attributes:
        windowed: the layer of the target whose keys and values its layers with a window attend to.
        whole: the same of its layers that see the whole context.
        clusters: the clusters of the rows of its LM head, which have as many tokens each; 0 without them.
        clusters_read: the clusters whose logits are computed for a token: those with the highest scores.
    """

    DRAFTS = True
    windowed: Annotated[int, within(0, 4095)]
    whole: Annotated[int, within(0, 4095)]
    clusters: Annotated[int, within(0, 2**20)] = 0
    clusters_read: Annotated[int, within(0, 2**20)] = 0

    @property
    def reads_cache(self) -> bool:
        return True

    def kv_layer(self, index: int) -> int:
        return self.windowed if self.layer_type(index) == SLIDING else self.whole

    def attention(self, index: int) -> Attention:
        return replace(super().attention(index), projections="q")

    def decode(self, b: Backend) -> None:
        """Its product of embedding and state side by side is a sum of two, as in an MTP layer.

        The target's stream is normalized as for the target's LM head; the states that it writes are as such
        a one.
        """
        width = self.feature_width
        features, states = b.features(width), b.states(width)
        known = b.joined(b.normalized(features, "target_norm"), states)
        embedding = b.embed(self.vocab_size, width, self.embedding_scale)
        x = b.linear(embedding, "embed_fuse", self.hidden_size)
        x = b.wanted(self.through_layers(b, b.add(x, b.linear(known, "fuse", self.hidden_size))))
        b.write(self.logits(b, x))
        b.write_states(b.linear(b.norm(x, "final_norm"), "next_state", width), width)

    def logits(self, b: Backend, x: Any) -> Any:
        if not self.clusters:
            return super().logits(b, x)
        return b.clusters(x, self.vocab_size, self.clusters, self.clusters_read)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not min(1, self.clusters) <= self.clusters_read <= self.clusters:
            yield f"{self.clusters_read} of {self.clusters} clusters of tokens are read; allowed: one to all"
        if self.vocab_size % (16 * max(self.clusters, 1)):
            yield (
                f"{self.vocab_size} tokens lie in {self.clusters} clusters; allowed: clusters of a multiple "
                "of 16 tokens"
            )
        if self.shared_layers or self.layer_inputs or self.tied_values:
            yield "an assistant has shared_layers, layer_inputs or tied_values; allowed: none of them"


def _usual(facts: Facts) -> Facts:
    """Its decoder is a Gemma 4, all of whose layers share keys and values."""
    text = facts.section("text_config")
    own = {"num_kv_shared_layers": 0, "final_logit_softcapping": None, "hidden_size_per_layer_input": 0}
    stated = {key: part.value(key) for part in (facts, text) for key in part.keys}
    unified = stated.get("model_type") in GEMMA4_UNIFIED.hub
    return Facts(stated | own, facts.where).over(
        {"rms_norm_eps": 1e-6, **(GEMMA4_UNIFIED if unified else GEMMA4).defaults}
    )


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    own: dict[str, object] = {"attention.shared_kv_layers": 0, "final_logit_softcapping": None}
    return own | dict(GEMMA4.from_gguf(keys.changed(own), tensors))


def beside(own: Transformer, target: Target, width: int, clusters: tuple[int, int]) -> Gemma4Assistant:
    """An assistant whose layers are those of the Gemma 4 ``own``, for a target of this ``width``.

    ``clusters`` has the number of clusters of tokens, and how many of them a step reads. RequestError if it
    belongs to another model.
    """
    config = target.config
    if not isinstance(config, Gemma4) or not isinstance(own, Gemma4):
        raise RequestError(
            f"the assistant was made for a model whose architecture is {own.architecture!r}; of "
            f"{target.name} it is {config.architecture!r}. {OTHER}"
        )
    stated = {"target width": width} | {name: getattr(own, name) for name in _ALIKE}
    theirs = {"target width": config.hidden_size} | {name: getattr(config, name) for name in _ALIKE}
    last = {config.layer_type(layer): config.kv_layer(layer) for layer in range(config.num_layers)}
    stated["kinds of layers"] = len({own.layer_type(layer) for layer in range(own.num_layers)})
    theirs["kinds of layers"] = len(last)
    for name, value in stated.items():
        if value != theirs[name]:
            raise RequestError(
                f"the assistant was made for a model whose {name} is {value!r}; of {target.name} it is "
                f"{theirs[name]!r}. {OTHER}"
            )
    return own.become(
        Gemma4Assistant,
        architecture=ASSISTANT.name,
        context_length=config.context_length,
        embedding_scale=config.embedding_scale,
        rope=replace(own.rope, first=1),
        local_rope=own.local_rope and replace(own.local_rope, first=1),
        tied_values=False,
        feature_layers=(config.num_layers,),
        feature_width=width,
        windowed=last.get(SLIDING) or 0,
        whole=last.get(FULL) or 0,
        clusters=clusters[0],
        clusters_read=clusters[1],
    )


GEMMA4_ASSISTANT = GEMMA4._replace(
    hub=("gemma4_assistant", "gemma4_unified_assistant"),
    gguf="gemma4-assistant",
    kind="assistant",
    outer={
        **GEMMA4.outer,
        "embed": ("", ""),
        "final_norm": ("norm.weight", "output_norm.weight"),
        "lm_head": ("embed_tokens.weight lm_head.weight", "token_embd.weight output.weight"),
        "both": ("pre_projection.weight", "nextn.pre_projection.weight"),
        "next_state": ("post_projection.weight", "nextn.post_projection.weight"),
        "centroids": ("masked_embedding.centroids.weight", ""),
    },
    usual=_usual,
    from_gguf=_from_gguf,
)
ASSISTANT = Family(name="gemma4-assistant", kind="assistant", decoder=Gemma4Assistant)
"""The family in manifests: beside its target."""
