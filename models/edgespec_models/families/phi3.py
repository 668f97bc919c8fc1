"""Phi-3 and Phi-4-mini: products of queries, keys and values, and of gate and factor, are one tensor each."""

from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER

PHI3 = Family(
    name="phi3",
    hub=("phi3",),
    gguf="phi3",
    windowed=True,
    partial=True,
    takes_space=True,
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    layer={**LAYER, "gate_up": ("mlp.gate_up_proj.weight", "ffn_up.weight")},
)
