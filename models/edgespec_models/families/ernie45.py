"""ERNIE 4.5, dense: neighbouring elements of a head are rotated, in directories too."""

from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.family import Family
from edgespec_models.families.reading import expect, trunk
from edgespec_models.files.facts import Facts


def _read(facts: Facts, family: Family) -> Transformer:
    expect(facts, family, "use_bias", value=False)
    return trunk(facts, family)


ERNIE45 = Family(
    name="ernie4_5",
    hub=("ernie4_5",),
    gguf="ernie4_5",
    interleaved=True,
    theta=5e5,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    read=_read,
)
