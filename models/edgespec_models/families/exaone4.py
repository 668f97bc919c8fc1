"""EXAONE 4: norms behind sublayers alone; where some layers have a window, the others have no rotation."""

from dataclasses import dataclass

from edgespec_models.decoders.transformer import Transformer, with_post_norms_alone
from edgespec_models.families.family import Family
from edgespec_models.families.names import LAYER, POST_NORMS
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import every_nth_sees_all, layer_count, sliding_layers, window_of
from edgespec_models.files.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Exaone4(Transformer):
    """Its sublayers have no norms before them."""

    norms = "head"

    layer = with_post_norms_alone


def _read(facts: Facts, family: Family) -> Transformer:
    sliding = _sliding_layers(facts, family)
    window = window_of(facts, family, sliding)
    unrotated = [layer for layer, is_sliding in enumerate(sliding) if not is_sliding and window is not None]
    return trunk(facts, family, sliding=sliding, unrotated_layers=tuple(unrotated))


def _sliding_layers(facts: Facts, family: Family) -> list[bool]:
    layers, pattern = layer_count(facts), facts.value("sliding_window_pattern")
    if facts.value("layer_types") is not None or pattern is None:
        return sliding_layers(facts, family)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:  # such as LLLG, over and over
        return [pattern[layer % len(pattern)] == "L" for layer in range(layers)]
    return every_nth_sees_all(layers, facts.integer("sliding_window_pattern"))


EXAONE4 = Family(
    name="exaone4",
    hub=("exaone4",),
    gguf="exaone4",
    windowed=True,
    decoder=Exaone4,
    defaults={"rms_norm_eps": 1e-5},
    layer={**LAYER, **POST_NORMS},
    read=_read,
)
