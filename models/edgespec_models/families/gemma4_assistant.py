"""Gemma 4's assistants, which draft by attending to their target's keys and values.

Directories have Google's form, GGUF files llama.cpp's. The computation is in
``models/gemma4_assistant/modeling_gemma4_assistant.py`` of github.com/huggingface/transformers and
``src/models/gemma4-assistant.cpp`` of github.com/ggml-org/llama.cpp, whose converter leaves out the clusters
of tokens.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from edgespec_models.bundles.config import Assistant, ModelConfig
from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import through_layers
from edgespec_models.errors import RequestError
from edgespec_models.families.family import Family
from edgespec_models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from edgespec_models.families.heads import OTHER, Target
from edgespec_models.files.facts import Facts

_ALIKE: Final = (
    *("vocab_size", "num_kv_heads", "head_dim", "local_kv_heads", "local_head_dim"),
    *("sliding_window", "rope_theta", "rope_local_theta", "turning_pairs", "rope_factors"),
)
"""Facts that an assistant and its target share: otherwise its queries do not fit the target's keys."""


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


def beside(own: ModelConfig, target: Target, width: int, clusters: tuple[int, int]) -> ModelConfig:
    """The config of an assistant whose decoder is ``own``, for a target of this ``width``.

    ``clusters`` has the number of clusters of tokens, and how many of them a step reads. RequestError if it
    belongs to another model.
    """
    config = target.config
    stated = {"architecture": own.architecture, "target width": width}
    theirs = {"architecture": config.architecture, "target width": config.hidden_size}
    stated |= {name: getattr(own, name) for name in _ALIKE}
    theirs |= {name: getattr(config, name) for name in _ALIKE}
    last = {config.is_global(layer): config.kv_layer(layer) for layer in range(config.num_layers)}
    stated["kinds of layers"] = len({own.is_global(layer) for layer in range(own.num_layers)})
    theirs["kinds of layers"] = len(last)
    for name, value in stated.items():
        if value != theirs[name]:
            raise RequestError(
                f"the assistant was made for a model whose {name} is {value!r}; of {target.name} it is "
                f"{theirs[name]!r}. {OTHER}"
            )
    return replace(
        own,
        architecture="assistant",
        context_length=config.context_length,
        embedding_scale=config.embedding_scale,
        tied_values=False,
        feature_layers=(config.num_layers,),
        feature_width=width,
        assistant=Assistant(
            windowed=last.get(False) or 0,
            whole=last.get(True) or 0,
            clusters=clusters[0],
            clusters_read=clusters[1],
        ),
    )


def _decode(b: Backend, f: ModelConfig) -> None:
    """One of Gemma 4's assistants, whose layers have queries alone.

    Its product of embedding and state side by side is a sum of two, as in an MTP layer. The target's stream
    is normalized as for the target's LM head; the states that it writes are as such a one.
    """
    width, assistant = f.feature_width, f.assistant
    assert assistant is not None  # which facts of this architecture have
    features, states = b.features(width), b.states(width)
    known = b.joined(b.normalized(features, "target_norm"), states)
    embedding = b.embed(f.vocab_size, width, f.embedding_scale)
    x = b.add(b.linear(embedding, "embed_fuse", f.hidden_size), b.linear(known, "fuse", f.hidden_size))
    x = b.wanted(through_layers(b, f, x))
    if assistant.clusters:
        b.write(b.clusters(x, f.vocab_size, assistant.clusters, assistant.clusters_read))
    else:
        b.write(b.logits(x, f.vocab_size, f.logit_cap))
    b.write_states(b.linear(b.norm(x, "final_norm"), "next_state", width), width)


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
ASSISTANT = Family(name="assistant", kind="assistant", decode=_decode)
"""The family in manifests: its decoder is no Gemma 4's any more."""
