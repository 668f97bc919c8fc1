"""OLMo 2 and 3: norms behind sublayers alone, and on all heads of queries and of keys at once."""

from dataclasses import dataclass
from typing import Any

from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import Transformer, with_post_norms_alone
from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER, POST_NORMS


@dataclass(frozen=True, kw_only=True)
class OLMo(Transformer):
    """Its sublayers have no norms before them."""

    norms = "wide"

    def layer(self, b: Backend, index: int, x: Any) -> Any:
        return with_post_norms_alone(self, b, index, x)


OLMO2 = Family(
    name="olmo2",
    hub=("olmo2",),
    gguf="olmo2",
    windowed=True,
    pattern=4,
    local_theta=0.0,
    decoder=OLMo,
    defaults={"rms_norm_eps": 1e-5},
    layer={**LAYER, **POST_NORMS},
)
OLMO3 = OLMO2._replace(
    hub=("olmo3",), gguf="", theta=5e5, defaults={**OLMO2.defaults, "sliding_window": 4096}
)
