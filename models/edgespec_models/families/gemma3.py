"""Gemma 3: as Gemma 2, but queries and keys have norms instead of caps, windowed layers rotate otherwise."""

from collections.abc import Collection
from dataclasses import dataclass

from edgespec_models.families.family import Family
from edgespec_models.families.gemma2 import Gemma, width_a_head
from edgespec_models.families.names import LAYER, OTHERS, POST_NORMS
from edgespec_models.files.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Gemma3(Gemma):
    """Queries and keys have norms."""

    norms = "head"


_27B = 62  # layers of the one size whose attention scale is not 1 / sqrt(head_dim)


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    changed = width_a_head(keys) if keys.value("num_hidden_layers") == _27B else {}
    stretched = keys.value("max_position_embeddings") == 131_072 and keys.value("factor") is None
    if stretched and any(map(OTHERS.match, tensors)):  # all with eyes are, which ollama's files do not state
        changed["rope.scaling.factor"] = 8.0
    return changed


GEMMA3 = Family(
    name="gemma3",
    hub=("gemma3_text",),
    gguf="gemma3",
    theta=1e6,
    windowed=True,
    pattern=6,
    local_theta=1e4,
    grows=True,
    less_one="norm",
    one_vocabulary=True,
    decoder=Gemma3,
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256.0,
        "tie_word_embeddings": True,
    },
    unstated={"attention.layer_norm_rms_epsilon": 1e-6},  # by ollama's files
    layer={**LAYER, **POST_NORMS},
    from_gguf=_from_gguf,
)
