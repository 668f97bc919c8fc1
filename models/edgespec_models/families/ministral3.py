"""Ministral 3 and Mistral Small 3: YaRN, and queries that grow beyond the original context."""

from edgespec_models.families.family import Family

MINISTRAL3 = Family(
    name="ministral3",
    hub=("ministral3",),
    gguf="mistral3",
    windowed=True,
    neighbours=True,
    cut="tekken",
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
