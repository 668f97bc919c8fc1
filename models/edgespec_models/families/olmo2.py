"""OLMo 2 and 3: norms behind sublayers alone, and on all heads of queries and of keys at once."""

from dataclasses import dataclass

from edgespec_models.decoders.transformer import Transformer, with_post_norms_alone
from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER, POST_NORMS


@dataclass(frozen=True, kw_only=True)
class Olmo2(Transformer):
    """Its sublayers have no norms before them."""

    norms = "wide"

    layer = with_post_norms_alone


OLMO2 = Family(
    name="olmo2",
    hub=("olmo2",),
    gguf="olmo2",
    windowed=True,
    pattern=4,
    local_theta=0.0,
    decoder=Olmo2,
    defaults={"rms_norm_eps": 1e-5},
    layer={**LAYER, **POST_NORMS},
)
OLMO3 = OLMO2._replace(
    hub=("olmo3",), gguf="", theta=5e5, defaults={**OLMO2.defaults, "sliding_window": 4096}
)
