"""SmolLM3: some layers have no rotary embedding, and these alone may have a window."""

from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.family import Family
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import layer_count, sliding_layers
from edgespec_models.files.facts import Facts


def _read(facts: Facts, family: Family) -> Transformer:
    layers = layer_count(facts)
    unrotated = _unrotated(facts, layers)
    sliding = [layer in unrotated for layer in range(layers)]
    if facts.value("layer_types") is not None:
        sliding = sliding_layers(facts, family)
    return trunk(facts, family, sliding=sliding, unrotated_layers=unrotated)


def _unrotated(facts: Facts, layers: int) -> tuple[int, ...]:
    """A 0 in ``no_rope_layers``, or every n-th."""
    rotated = facts.numbers("no_rope_layers", layers)
    if rotated:
        return tuple(layer for layer, flag in enumerate(rotated) if not flag)
    interval = facts.integer("no_rope_layer_interval", 4)
    return tuple(range(interval - 1, layers, interval)) if interval > 0 else ()


SMOLLM3 = Family(
    name="smollm3",
    hub=("smollm3",),
    gguf="smollm3",
    theta=2e6,
    neighbours=True,
    defaults={"tie_word_embeddings": True},
    read=_read,
)
