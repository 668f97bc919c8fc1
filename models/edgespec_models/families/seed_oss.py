"""Seed-OSS: queries, keys and values have biases, as in Qwen2."""

from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER

SEED_OSS = Family(
    name="seed_oss",
    hub=("seed_oss",),
    gguf="seed_oss",
    defaults={"head_dim": 128, "vocab_size": 155_136, "max_position_embeddings": 524_288},
    layer={**LAYER, "mlp_norm": ("post_attention_layernorm.weight", "post_attention_norm.weight")},
)
