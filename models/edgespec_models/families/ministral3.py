"""Ministral 3 and Mistral Small 3: YaRN, and queries that grow beyond the original context."""

from dataclasses import dataclass, replace
from typing import Annotated

from edgespec_models.decoders.operations import Attention
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.family import Family
from edgespec_models.families.reading import trunk
from edgespec_models.families.rope import GROWTH, ORIGINAL, kind_of, scaling_of
from edgespec_models.files.facts import Facts
from edgespec_models.schema import within


@dataclass(frozen=True, kw_only=True)
class Ministral3(Transformer):
    """Queries at position p are multiplied by ``1 + query_growth * ln(1 + p // query_step)``.

    ``query_step`` is 0 if they never grow.
    """

    query_growth: Annotated[float, within(0)] = 0.0
    query_step: Annotated[int, within(0, 2**21)] = 0

    def attention(self, index: int) -> Attention:
        return replace(super().attention(index), growth=self.query_growth, growth_step=self.query_step)

    @property
    def without_growth(self) -> Transformer:
        step = self.query_step
        return replace(self, context_length=step, query_growth=0.0, query_step=0) if step else self


def _read(facts: Facts, family: Family) -> Transformer:
    scaling, made = scaling_of(facts), trunk(facts, family)
    growth = scaling.number(GROWTH, 0.0) if kind_of(scaling) == "yarn" else 0.0
    original = scaling.integer(ORIGINAL, facts.integer(ORIGINAL, facts.integer("max_position_embeddings")))
    if not growth or original >= made.context_length:
        return made
    assert isinstance(made, Ministral3)  # as the family says
    return replace(made, query_growth=growth, query_step=original)


MINISTRAL3 = Family(
    name="ministral3",
    hub=("ministral3",),
    gguf="mistral3",
    windowed=True,
    neighbours=True,
    cut="tekken",
    decoder=Ministral3,
    read=_read,
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
