"""The rotary embedding that a Hugging Face ``config.json`` asks for.

Both spellings are read: ``rope_theta`` with ``rope_scaling``, and the ``rope_parameters`` that transformers
5 writes. Scaling follows ``modeling_rope_utils.py`` of github.com/huggingface/transformers. Every kind comes
down to a divisor for each frequency and a factor on the tables.
"""

from dataclasses import dataclass, replace
from math import log, pi, sqrt

from edgespec_models.bundles.config import Architecture
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.facts import Facts

__all__ = ["Rope", "read_rope"]

_LONG = ("longrope", "su")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding.

    Attributes:
        theta: base of the frequencies.
        width: elements of a head that are rotated.
        context: positions for which the frequencies are exact.
        local_theta: base in sliding-window layers where they have one of their own.
        factors: what each frequency is divided by; empty where by nothing.
        magnitude: factor on every cosine and sine.
    """

    theta: float
    width: int
    context: int
    local_theta: float | None = None
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0


def read_rope(facts: Facts, architecture: Architecture, head_dim: int) -> Rope:
    """Read the rotary embedding of heads of ``head_dim`` elements.

    Raises:
        ModelFileError: facts are missing or malformed.
        UnsupportedModelError: a kind of scaling that edgespec lacks.
    """
    parameters, local_theta = facts.section("rope_parameters"), None
    if architecture == "gemma3":
        local = parameters.section("sliding_attention")
        local_theta = local.positive("rope_theta", facts.positive("rope_local_base_freq", 1e4))
        if _kind(local) != "default":
            raise UnsupportedModelError(f"{local.where} scales the local rotary embedding; not supported yet")
        parameters = parameters.section("full_attention")
    default = {"gemma3": 1e6, "smollm3": 2e6}.get(architecture, 1e4)
    share = parameters.positive("partial_rotary_factor", facts.positive("partial_rotary_factor", 1.0))
    if share > 1:
        raise ModelFileError(f"{facts.where}: partial_rotary_factor is {share}; it is a share of a head")
    rope = Rope(
        theta=parameters.positive("rope_theta", facts.positive("rope_theta", default)),
        width=int(head_dim * share),
        context=facts.integer("max_position_embeddings"),
        local_theta=local_theta,
    )
    old_style = facts.section("rope_scaling")
    scaling = old_style if _kind(old_style) != "default" else parameters
    return _scaled(rope, scaling, facts.value("original_max_position_embeddings"))


def _kind(scaling: Facts) -> str:
    return scaling.text("rope_type", scaling.text("type", "default"))


def _scaled(rope: Rope, scaling: Facts, original: object) -> Rope:
    """``rope`` with the frequencies that ``scaling`` asks for."""
    kind = _kind(scaling)
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond the context
        return rope
    if kind == "linear":
        return replace(rope, factors=(scaling.positive("factor"),) * (rope.width // 2))
    if kind == "llama3":
        return replace(rope, factors=_llama3_factors(rope, scaling))
    if kind in _LONG:
        return _longrope(rope, scaling, original)
    raise UnsupportedModelError(
        f"{scaling.where} scales the rotary embedding by {kind!r}, which is not supported yet; "
        "supported are default, dynamic, linear, llama3 and longrope"
    )


def _llama3_factors(rope: Rope, scaling: Facts) -> tuple[float, ...]:
    """Long waves are stretched by ``factor``, short ones not, those between by something between."""
    factor = scaling.positive("factor")
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    original = scaling.integer("original_max_position_embeddings", rope.context)
    if high <= low:
        raise ModelFileError(f"{scaling.where}: high_freq_factor must exceed low_freq_factor")
    factors = []
    for pair in range(rope.width // 2):
        turns = original * rope.theta ** (-2 * pair / rope.width) / (2 * pi)  # within the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


def _longrope(rope: Rope, scaling: Facts, original: object) -> Rope:
    """Up to the original context: beyond it every token's frequencies change (Ding et al. 2024).

    A cache of keys that were rotated before the change is of no use after it.
    """
    context = original if isinstance(original, int) else rope.context
    context = scaling.integer("original_max_position_embeddings", context)
    if context < 2 or rope.context < 1:
        raise ModelFileError(f"{scaling.where}: the original context is {context}")
    stretch = scaling.positive("factor", rope.context / context)
    by_stretch = sqrt(1 + log(stretch) / log(context)) if stretch > 1 else 1.0
    factors = scaling.numbers("short_factor", rope.width // 2)
    if not factors:
        raise ModelFileError(f"{scaling.where} lacks 'short_factor'")
    return replace(
        rope,
        context=min(context, rope.context),
        factors=factors,
        magnitude=scaling.positive("attention_factor", by_stretch),
    )
