"""Rotary embeddings. Every kind of extended context is a divisor for each frequency and a factor on the
tables (``modeling_rope_utils.py`` of github.com/huggingface/transformers).
"""

from math import ceil, floor, log, pi, sqrt
from typing import Any

from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.files.facts import Facts

_ORIGINAL = "original_max_position_embeddings"
_STILL = 1e20  # a frequency that is divided by more does not turn


def rope_of(facts: Facts, family: Family, head_dim: int) -> dict[str, Any]:
    """The rotary embedding, as fields of :class:`ModelConfig`.

    Both spellings are read: ``rope_theta`` with ``rope_scaling``, and the ``rope_parameters`` that
    transformers 5 writes.
    """
    parameters = facts.section("rope_parameters")
    local = parameters.section("sliding_attention")
    if kind_of(local) != "default":
        raise UnsupportedModelError(
            f"{local.where} scales the local rotary embedding by {kind_of(local)!r}; allowed: 'default'"
        )
    if "full_attention" in parameters.keys:
        parameters = parameters.section("full_attention")
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
    fields = {
        "rope_theta": theta,
        "rotary_dim": None if width == head_dim else width,
        "rotary_pairs": int(head_dim * share // 2) if proportional else None,
        "context_length": context,
        "rope_local_theta": None if family.local_theta is None else local.positive("rope_theta", local_theta),
    }
    if proportional:
        return fields
    old_style = facts.section("rope_scaling")
    scaling = old_style if kind_of(old_style) != "default" else parameters
    original = facts.value(_ORIGINAL)
    return fields | scaled(scaling, theta, width, context, original if isinstance(original, int) else context)


def turning(factors: tuple[float, ...]) -> dict[str, Any]:
    """Fields for divisors of frequencies; large ones mean that a pair does not turn."""
    pairs = sum(factor < _STILL for factor in factors)
    rest = factors[:pairs]
    if any(factor >= _STILL for factor in rest):
        raise UnsupportedModelError("rope_freqs.weight has pairs that turn behind some that do not")
    return {
        "rotary_pairs": None if pairs == len(factors) else pairs,
        "rope_factors": () if set(rest) <= {1.0} else rest,
    }


def kind_of(scaling: Facts) -> str:
    """The kind of scaling of the rotary embedding."""
    return scaling.text("rope_type", scaling.text("type", "default"))


def scaled(scaling: Facts, theta: float, width: int, context: int, original: int) -> dict[str, Any]:
    """The effects of ``scaling``, as fields of :class:`ModelConfig`.

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
        return {"rope_factors": (scaling.positive("factor"),) * (width // 2)}
    if kind == "llama3":
        return {"rope_factors": _llama3(scaling, theta, width, context)}
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
    original = scaling.integer(_ORIGINAL, context)
    if high <= low:
        raise ModelFileError(f"{scaling.where}: high_freq_factor must exceed low_freq_factor")
    factors = []
    for pair in range(width // 2):
        turns = original * theta ** (-2 * pair / width) / (2 * pi)  # within the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


def _yarn(scaling: Facts, theta: float, width: int, context: int, original: int) -> dict[str, Any]:
    """Peng et al. 2024, "YaRN": as with llama3, but between two places among the frequencies.

    Queries may grow beyond the original context (Ministral 3: ``llama_4_scaling_beta``).
    """
    original = scaling.integer(_ORIGINAL, original)
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
    grows = scaling.number("llama_4_scaling_beta", 0.0)
    longest = max(context, int(factor * original))
    growth = {"query_growth": grows, "query_step": original} if grows and original < longest else {}
    return growth | {
        "context_length": longest,
        "rope_factors": tuple(factors),
        "rope_magnitude": scaling.positive("attention_factor", magnitude),
    }


def _yarn_magnitude(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * log(factor) + 1.0


def _longrope(scaling: Facts, width: int, whole: int, original: int) -> dict[str, Any]:
    """Up to the original context: beyond it every token's frequencies change (Ding et al. 2024).

    A cache of keys that were rotated before the change is of no use after it.
    """
    context = scaling.integer(_ORIGINAL, original)
    if context < 2 or whole < 1:
        raise ModelFileError(f"{scaling.where}: the original context is {context}")
    stretch = scaling.positive("factor", whole / context)
    by_stretch = sqrt(1 + log(stretch) / log(context)) if stretch > 1 else 1.0
    factors = scaling.numbers("short_factor", width // 2)
    if not factors:
        raise ModelFileError(f"{scaling.where} lacks 'short_factor'")
    return {
        "context_length": min(context, whole),
        "rope_factors": factors,
        "rope_magnitude": scaling.positive("attention_factor", by_stretch),
    }
