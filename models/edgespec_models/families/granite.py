"""Granite 3, and Granite 4 without Mamba-2 layers, dense and with experts: factors on what is added up."""

from edgespec_models.errors import UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.families.names import EXPERTS, LAYER
from edgespec_models.files.facts import Facts


def _usual(facts: Facts) -> Facts:
    """With an MLP that all tokens share; without experts this is the MLP of a Granite 3."""
    model_type = facts.value("model_type")
    if model_type == "granitemoe":
        return facts
    hybrid = model_type == "granitemoehybrid"
    shared = facts.integer("shared_intermediate_size", 1024 if hybrid else 0)
    changed: dict[str, object] = {"shared_expert_intermediate_size": shared}
    if hybrid:
        types = facts.value("layer_types") or facts.value("layers_block_type")
        if not isinstance(types, list) or not {*map(str, types)} <= {"attention", "full_attention"}:
            raise UnsupportedModelError(
                f"{facts.where}: layer_types says that some layers have a recurrent state (Mamba-2), which "
                "edgespec lacks; a Granite 4 without them, such as Granite-4.0-Micro, works"
            )
        rotates = facts.value("position_embedding_type") == "rope"
        changed |= {"layer_types": ["full_attention"] * len(types), "rotates": rotates}
    if facts.integer("num_local_experts", 8) == 0:
        changed["intermediate_size"] = shared
    return facts.changed(changed)


GRANITE = Family(
    name="granite",
    hub=("granite",),
    gguf="granite",
    neighbours=True,
    defaults={"attention_multiplier": 1.0},
)
GRANITE_MOE = GRANITE._replace(
    hub=("granitemoe", "granitemoeshared", "granitemoehybrid"),
    gguf="granitemoe",
    experts={"normalized": True, "shared_gate": False},
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    layer={
        **LAYER,
        **EXPERTS,
        "router": ("block_sparse_moe.router.layer.weight", "ffn_gate_inp.weight"),
        "experts_gate_up": ("block_sparse_moe.input_linear.weight", "ffn_gate_up_exps.weight"),
        "experts_down": ("block_sparse_moe.output_linear.weight", "ffn_down_exps.weight"),
        "shared_gate_up": ("shared_mlp.input_linear.weight", ""),
        "shared_gate": ("", "ffn_gate_shexp.weight"),
        "shared_up": ("", "ffn_up_shexp.weight"),
        "shared_down": ("shared_mlp.output_linear.weight", "ffn_down_shexp.weight"),
    },
    dense=GRANITE._replace(
        layer={
            **LAYER,
            "gate_up": ("shared_mlp.input_linear.weight", ""),
            "down": ("shared_mlp.output_linear.weight", "ffn_down.weight"),
        },
    ),
    usual=_usual,
)
