"""The facts of experts."""

from collections.abc import Mapping
from typing import Any, Final

from edgespec_models.decoders.operations import Experts
from edgespec_models.errors import UnsupportedModelError, naming
from edgespec_models.families.family import Family
from edgespec_models.families.windows import layer_count
from edgespec_models.files.facts import Facts

_GATINGS: Final[Mapping[int, dict[str, Any]]] = {
    0: {},
    1: {"gating": "softmax"},
    2: {"gating": "sigmoid"},
    3: {"gating": "softmax", "normalized": True},  # over the logits of the chosen ones
}
"""By ``expert_gating_func`` in GGUF files; 0 leaves it to the family."""
_CLAMPED: Final = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
COUNTS: Final = ("expert_count", "num_experts", "num_local_experts")
"""Keys for the number of experts, of any family."""


def dense_layers(facts: Facts, otherwise: int) -> int:
    """The number of first layers with an MLP, by ``mlp_layer_types``; ``otherwise`` without these.

    UnsupportedModelError where a layer behind them has one.
    """
    kinds, layers = facts.value("mlp_layer_types"), layer_count(facts)
    if not isinstance(kinds, list):
        return otherwise
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedModelError(
            f"{facts.where}: mlp_layer_types is {kinds!r:.80}; allowed: 'dense' in the first layers, "
            f"'sparse' in the others, {layers} in all"
        )
    return dense


def experts_of(facts: Facts, family: Family) -> dict[str, Any]:
    """The experts of a model of ``family``, as fields of a decoder.

    Raises:
        ModelFileError: facts are missing or contradict each other.
        UnsupportedModelError: edgespec lacks the experts' choice or layout.
    """
    if family.experts is None:
        return {}
    beside = family.experts.get("beside_mlp", False)
    if not facts.boolean("enable_moe_block", default=not beside):
        return {}
    _refuse_others(facts, family)
    shared = facts.integer("shared_expert_intermediate_size", 0) if "shared_gate" in family.experts else 0
    scale = facts.number("routed_scaling_factor", 1.0)
    own = {
        "normalized": facts.boolean("norm_topk_prob", default=True),
        "selection_bias": family.experts.get("gating") == "sigmoid"
        and facts.boolean("use_expert_bias", default=True),
        "shared_width": shared,
        **family.experts,
        **_gating(facts),
    }
    with naming(facts.where):
        experts = Experts(
            count=facts.integer("num_experts", facts.integer("num_local_experts", 0)),
            used=facts.integer("top_k_experts" if beside else "num_experts_per_tok"),
            width=facts.integer("moe_intermediate_size", facts.integer("intermediate_size", 0)),
            dense_layers=facts.integer("num_dense_layers", 0),
            scale=scale or 1.0,  # 0 stands for none in GGUF files
            **own,
        )
    return {"experts": experts, "intermediate_size": facts.integer("intermediate_size", experts.width)}


def _gating(facts: Facts) -> dict[str, Any]:
    number = facts.integer("expert_gating_func", 0)
    if number not in _GATINGS:
        raise UnsupportedModelError(
            f"{facts.where}: expert_gating_func is {number}; allowed: 1 (softmax), 2 (sigmoid) and 3 "
            "(softmax of the used experts)"
        )
    return _GATINGS[number]


def _refuse_others(facts: Facts, family: Family) -> None:
    """Refuse layouts and choices of experts that edgespec lacks."""
    plain: dict[str, float] = {"decoder_sparse_step": 1, "n_group": 1, "expert_group_count": 1}
    if family.experts and family.experts.get("clamped"):
        plain |= _CLAMPED
    for key, value in plain.items():
        if facts.value(key) not in (None, 0, value):
            raise UnsupportedModelError(
                f"{facts.where}: {key} is {facts.value(key)!r}; {family.name} with experts is supported with "
                f"{value}"
            )
    if facts.value("mlp_only_layers"):
        raise UnsupportedModelError(
            f"{facts.where}: mlp_only_layers is {facts.value('mlp_only_layers')!r:.80}; layers without "
            "experts are supported at a model's beginning only"
        )
