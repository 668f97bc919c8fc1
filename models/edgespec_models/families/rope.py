"""Rotary embeddings. Every kind of extended context is a divisor for each frequency and a factor on the
tables (``modeling_rope_utils.py`` of github.com/huggingface/transformers).
"""

from math import ceil, floor, log, pi, sqrt
from typing import Any, Final

from edgespec_models.decoders.operations import Rope
from edgespec_models.errors import ModelFileError, UnsupportedModelError, naming
from edgespec_models.families.family import Family
from edgespec_models.files.facts import Facts

ORIGINAL: Final = "original_max_position_embeddings"
GROWTH: Final = "llama_4_scaling_beta"
"""How fast queries grow behind the original context, in families where they do."""
_STILL = 1e20  # a frequency that is divided by more does not turn


def rope_of(facts: Facts, family: Family, head_dim: int, local_dim: int | None) -> dict[str, Any]:
    """The rotary embeddings and the context, as fields of a decoder.

    Both spellings are read: ``rope_theta`` with ``rope_scaling``, and the ``rope_parameters`` that
    transformers 5 writes. ``local_dim`` is the width of heads in layers with a window, if it is another.
    """
    parameters = facts.section("rope_parameters")
    local = parameters.section("sliding_attention")
    if kind_of(local) != "default":
        raise UnsupportedModelError(
            f"{local.where} scales the local rotary embedding by {kind_of(local)!r}; allowed: 'default'"
        )
    scaling, parameters = scaling_of(facts), _of_whole(parameters)
    proportional = kind_of(parameters) == "proportional"
    share = 1.0
    if proportional or family.partial:
        share = parameters.positive("partial_rotary_factor", facts.positive("partial_rotary_factor", share))
    if share > 1:
        raise ModelFileError(f"{facts.where}: partial_rotary_factor is {share}; allowed: above 0 to 1")
    width = facts.integer("rotary_dim", head_dim if proportional else int(head_dim * share))
    context = facts.integer("max_position_embeddings")
    theta = parameters.positive("rope_theta", facts.positive("rope_theta", family.theta))
    local_theta = facts.positive("rope_local_base_freq", family.local_theta or theta)
    fields: dict[str, Any] = {"context_length": context}
    order = family.interleaved
    rope: dict[str, Any] = {"theta": theta, "width": width, "pairs": width // 2, "interleaved": order}
    if family.local_theta is not None:
        own = local_dim or facts.integer("local_rotary_dim", width)
        local_theta = local.positive("rope_theta", local_theta)
        with naming(facts.where):
            fields["local_rope"] = Rope(
                name="rope_local", theta=local_theta, width=own, pairs=own // 2, interleaved=order
            )
    if proportional:
        rope["pairs"] = int(head_dim * share // 2)
    else:
        original = facts.value(ORIGINAL)
        rope |= scaled(scaling, theta, width, context, original if isinstance(original, int) else context)
        fields["context_length"] = rope.pop("context_length", context)
    with naming(facts.where):
        return fields | {"rope": Rope(**rope)}


def scaling_of(facts: Facts) -> Facts:
    """The facts by which the rotary embedding of layers that see the whole context is scaled."""
    old_style = facts.section("rope_scaling")
    return old_style if kind_of(old_style) != "default" else _of_whole(facts.section("rope_parameters"))


def _of_whole(parameters: Facts) -> Facts:
    return parameters.section("full_attention") if "full_attention" in parameters.keys else parameters


def turning(factors: tuple[float, ...]) -> dict[str, Any]:
    """Fields of a rotary embedding for divisors of frequencies; of large ones a pair does not turn."""
    pairs = sum(factor < _STILL for factor in factors)
    rest = factors[:pairs]
    if any(factor >= _STILL for factor in rest):
        raise UnsupportedModelError("rope_freqs.weight has pairs that turn behind some that do not")
    return {
        "pairs": pairs,
        "factors": () if set(rest) <= {1.0} else rest,
    }


def kind_of(scaling: Facts) -> str:
    """The kind of scaling of the rotary embedding."""
    return scaling.text("rope_type", scaling.text("type", "default"))


def scaled(scaling: Facts, theta: float, width: int, context: int, original: int) -> dict[str, Any]:
    """The effects of ``scaling``, as fields of a rotary embedding, and perhaps ``context_length``.

    Args:
        scaling: ``rope_scaling`` or ``rope_parameters`` of a ``config.json``, or the same facts of a GGUF
            file.
        theta: the base.
        width: elements of a head that are rotated.
        context: positions the model was made for.
        original: positions before its context was extended, if ``scaling`` does not have them.

    Raises:
        ModelFileError: facts are missing or contradict each other.
        UnsupportedModelError: edgespec does not know this kind.
    """
    kind = kind_of(scaling)
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond the context
        return {}
    if kind == "linear":
        return {"factors": (scaling.positive("factor"),) * (width // 2)}
    if kind == "llama3":
        return {"factors": _llama3(scaling, theta, width, context)}
    if kind in ("longrope", "su") or scaling.value("short_factor"):  # Phi's may be called yarn
        return _longrope(scaling, width, context, original)
    if kind == "yarn":
        return _yarn(scaling, theta, width, context, original)
    raise UnsupportedModelError(
        f"{scaling.where} scales the rotary embedding by {kind!r}; allowed: default, dynamic, linear, "
        "llama3, longrope and yarn"
    )


def _llama3(scaling: Facts, theta: float, width: int, context: int) -> tuple[float, ...]:
    """Long waves are stretched by ``factor``, short ones are not, and waves between by a number between."""
    factor = scaling.positive("factor")
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    original = scaling.integer(ORIGINAL, context)
    if high <= low:
        raise ModelFileError(f"{scaling.where}: high_freq_factor must exceed low_freq_factor")
    factors = []
    for pair in range(width // 2):
        turns = original * theta ** (-2 * pair / width) / (2 * pi)  # within the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


def _yarn(scaling: Facts, theta: float, width: int, context: int, original: int) -> dict[str, Any]:
    """Peng et al. 2024, "YaRN": as with llama3, but between two places among the frequencies."""
    original = scaling.integer(ORIGINAL, original)
    factor = scaling.positive("factor", context / max(original, 1))
    fast, slow = scaling.positive("beta_fast", 32.0), scaling.positive("beta_slow", 1.0)
    if original < 1 or theta <= 1:
        raise ModelFileError(f"{scaling.where}: the original context is {original}, the base {theta}")
    if fast <= slow:
        raise ModelFileError(f"{scaling.where}: beta_fast is {fast}; it must exceed beta_slow, {slow}")
    ends = [width * log(original / (turns * 2 * pi)) / (2 * log(theta)) for turns in (fast, slow)]
    if scaling.boolean("truncate", default=True):
        ends = [floor(ends[0]), ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    factors = []
    for pair in range(width // 2):
        stretched = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
        factors.append(1 / (stretched / factor + 1 - stretched))
    whole, all_of_it = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    magnitude = _yarn_magnitude(factor, 1.0)
    if whole and all_of_it:
        magnitude = _yarn_magnitude(factor, whole) / _yarn_magnitude(factor, all_of_it)
    return {
        "context_length": max(context, int(factor * original)),
        "factors": tuple(factors),
        "magnitude": scaling.positive("attention_factor", magnitude),
    }


def _yarn_magnitude(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * log(factor) + 1.0


def _longrope(scaling: Facts, width: int, whole: int, original: int) -> dict[str, Any]:
    """Up to the original context: beyond it every token's frequencies change (Ding et al. 2024).

    A cache of keys that were rotated before the change is of no use after it.
    """
    context = scaling.integer(ORIGINAL, original)
    if context < 2 or whole < 1:
        raise ModelFileError(f"{scaling.where}: the original context is {context}")
    stretch = scaling.positive("factor", whole / context)
    by_stretch = sqrt(1 + log(stretch) / log(context)) if stretch > 1 else 1.0
    factors = scaling.numbers("short_factor", width // 2)
    if not factors:
        raise ModelFileError(f"{scaling.where} lacks 'short_factor'")
    return {
        "context_length": min(context, whole),
        "factors": factors,
        "magnitude": scaling.positive("attention_factor", by_stretch),
    }
