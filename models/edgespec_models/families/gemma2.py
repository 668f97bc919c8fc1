"""Gemma 2: norms around sublayers, every other layer has a window, scores and logits have caps."""

from collections.abc import Collection

from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER, POST_NORMS
from edgespec_models.files.facts import Facts

_27B = 46  # layers of the one size whose attention scale is not 1 / sqrt(head_dim)


def width_a_head(keys: Facts) -> dict[str, object]:
    """The attention scale of Gemma 2 and 3 of 27B, which GGUF files do not state."""
    heads = max(keys.integer("num_attention_heads"), 1)
    return {"query_pre_attn_scalar": float(keys.integer("hidden_size") // heads)}


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    return width_a_head(keys) if keys.value("num_hidden_layers") == _27B else {}


GEMMA2 = Family(
    name="gemma2",
    hub=("gemma2",),
    gguf="gemma2",
    windowed=True,
    pattern=2,
    grows=True,
    less_one=True,
    fixed={"post_norms": True, "activation": "gelu_tanh"},
    defaults={
        "vocab_size": 256_000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    unstated={  # by the first files
        "attention.sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    layer={**LAYER, **POST_NORMS},
    from_gguf=_from_gguf,
)
