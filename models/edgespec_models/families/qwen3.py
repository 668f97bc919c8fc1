"""Qwen3, dense and with experts."""

from dataclasses import dataclass

from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.family import Family
from edgespec_models.families.names import EXPERTS


@dataclass(frozen=True, kw_only=True)
class Qwen3(Transformer):
    """A decoder with norms on each head of queries and of keys."""

    norms = "head"


QWEN3 = Family(
    name="qwen3",
    hub=("qwen3",),
    gguf="qwen3",
    decoder=Qwen3,
    defaults={"head_dim": 128},
    reranker="qwen3.reranker",
)
QWEN3_MOE = QWEN3._replace(
    hub=("qwen3_moe",),
    gguf="qwen3moe",
    layer={**QWEN3.layer, **EXPERTS},
    experts={},
    defaults={
        **QWEN3.defaults,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
)
