"""OLMo 2 and 3: norms behind sublayers alone, and on all heads of queries and of keys at once."""

from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER, POST_NORMS

OLMO2 = Family(
    name="olmo2",
    hub=("olmo2",),
    gguf="olmo2",
    windowed=True,
    pattern=4,
    local_theta=0.0,
    fixed={"qk_norm": True, "wide_qk_norm": True, "pre_norms": False, "post_norms": True},
    defaults={"rms_norm_eps": 1e-5},
    layer={**LAYER, **POST_NORMS},
)
OLMO3 = OLMO2._replace(
    hub=("olmo3",), gguf="", theta=5e5, defaults={**OLMO2.defaults, "sliding_window": 4096}
)
