"""Sliding windows: which layers have one, and how wide it is."""

from collections.abc import Sequence

from edgespec_models.decoders.transformer import SLIDING, Transformer
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.files.facts import Facts

_MAX_COUNT = 4096  # there are lists with an entry for each; a damaged count may be huge


def counted(facts: Facts, what: str, count: int) -> int:
    """``count`` of ``what`` a model has; UnsupportedModelError if it is out of range."""
    if not 0 < count <= _MAX_COUNT:
        raise UnsupportedModelError(f"{facts.where} says {count} {what}; 1 to {_MAX_COUNT} are supported")
    return count


def layer_count(facts: Facts) -> int:
    """The number of layers."""
    return counted(facts, "layers", facts.integer("num_hidden_layers"))


def layer_kinds(facts: Facts, kinds: Sequence[str], need: str = "") -> list[str] | None:
    """What ``layer_types`` says of each layer, one of ``kinds``; None if it is missing.

    UnsupportedModelError for others, with ``need`` as its message if that says more.
    """
    layers, types = layer_count(facts), facts.value("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or not {*kinds} >= {*map(str, types)}:
        need = need or f"layer_types must say {' or '.join(kinds)}"
        raise UnsupportedModelError(f"{facts.where}: {need} for each of {layers} layers")
    return [*types]


def sliding_layers(facts: Facts, family: Family) -> list[bool]:
    """Whether each layer has a sliding window, if there is one."""
    stated = layer_kinds(facts, Transformer.TYPES)
    if stated is not None:
        return [kind == SLIDING for kind in stated]
    if family.pattern:
        every = facts.integer("sliding_window_pattern", family.pattern)
        return every_nth_sees_all(layer_count(facts), every)
    return last_layers(facts, family)


def every_nth_sees_all(layers: int, every: int) -> list[bool]:
    """With 0 none does."""
    return [every == 0 or (layer + 1) % every != 0 for layer in range(layers)]


def last_layers(facts: Facts, family: Family) -> list[bool]:
    """All layers of families whose window needs no switch, else those from ``max_window_layers`` on."""
    first = 0 if family.windowed else facts.integer("max_window_layers", 28)
    return [layer >= first for layer in range(layer_count(facts))]


def window_of(facts: Facts, family: Family, sliding: Sequence[bool]) -> int | None:
    """The number of tokens that layers with a window see; None without such layers."""
    on = family.windowed or facts.boolean("use_sliding_window", default=False)
    if facts.value("sliding_window") is None or not on:
        return None
    window = facts.integer("sliding_window")
    return window if True in sliding else None
