"""Gemma 2: norms around sublayers, every other layer has a window, scores and logits have caps."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from edgespec_models.decoders.config import Factor
from edgespec_models.decoders.operations import Attention, Backend
from edgespec_models.decoders.transformer import Transformer, with_post_norms
from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER, POST_NORMS
from edgespec_models.families.reading import trunk
from edgespec_models.files.facts import Facts

_27B = 46  # layers of the one size whose attention scale is not 1 / sqrt(head_dim)


@dataclass(frozen=True, kw_only=True)
class Gemma(Transformer):
    """What all Gemmas have.

    Attributes:
        logit_cap: logits z become ``logit_cap * tanh(z / logit_cap)``; None without a cap.
    """

    activation = "gelu_tanh"
    logit_cap: Factor | None = None

    layer = with_post_norms

    def logits(self, b: Backend, x: Any) -> Any:
        return b.logits(x, self.vocab_size, self.logit_cap)


@dataclass(frozen=True, kw_only=True)
class Gemma2(Gemma):
    """Scores s of queries and keys become ``attention_cap * tanh(s / attention_cap)``, if there is a cap."""

    attention_cap: Factor | None = None

    def attention(self, index: int) -> Attention:
        return replace(super().attention(index), cap=self.attention_cap)


def width_a_head(keys: Facts) -> dict[str, object]:
    """The attention scale of Gemma 2 and 3 of 27B, which GGUF files do not state."""
    heads = max(keys.integer("num_attention_heads"), 1)
    return {"query_pre_attn_scalar": float(keys.integer("hidden_size") // heads)}


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    return width_a_head(keys) if keys.value("num_hidden_layers") == _27B else {}


def _read(facts: Facts, family: Family) -> Transformer:
    scores, logits = (capped(facts, key) for key in ("attn_logit_softcapping", "final_logit_softcapping"))
    return trunk(facts, family, attention_cap=scores, logit_cap=logits)


def capped(facts: Facts, key: str) -> float | None:
    """A cap, if there is one."""
    return None if facts.value(key) is None else facts.positive(key)


GEMMA2 = Family(
    name="gemma2",
    hub=("gemma2",),
    gguf="gemma2",
    windowed=True,
    pattern=2,
    grows=True,
    less_one="norm",
    decoder=Gemma2,
    read=_read,
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
