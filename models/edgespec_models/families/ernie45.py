"""ERNIE 4.5, dense and with experts: neighbouring elements of a head are rotated, in directories too."""

from edgespec_models.errors import UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.families.names import EXPERTS, LAYER, SHARED_EXPERT
from edgespec_models.families.windows import layer_count
from edgespec_models.files.facts import Facts


def _usual(facts: Facts) -> Facts:
    last = layer_count(facts) - 1
    if facts.integer("moe_layer_end_index", -1) not in (-1, last):
        raise UnsupportedModelError(
            f"{facts.where}: moe_layer_end_index is {facts.value('moe_layer_end_index')}; allowed: {last}, "
            "the last layer"
        )
    shared = facts.integer("moe_num_shared_experts", 2) * facts.integer("moe_intermediate_size", 1536)
    names = {"num_experts": ("moe_num_experts", 64), "num_experts_per_tok": ("moe_k", 6)}
    names["num_dense_layers"] = "moe_layer_start_index", 1
    changed = {name: facts.integer(key, default) for name, (key, default) in names.items()}
    return facts.changed({**changed, "shared_expert_intermediate_size": shared})


ERNIE45 = Family(
    name="ernie4_5",
    hub=("ernie4_5",),
    gguf="ernie4_5",
    interleaved=True,
    theta=5e5,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    fixed={"use_bias": False, "moe_layer_interval": 1, "interleave_moe_layer_step": 1},
)
ERNIE45_MOE = ERNIE45._replace(
    name="ernie4_5-moe",
    hub=("ernie4_5_moe",),
    gguf="ernie4_5-moe",
    experts={"selection_bias": True, "shared_gate": False},
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
    },
    keys={"interleave_moe_layer_step": "interleave_moe_layer_step"},
    layer={
        **LAYER,
        **EXPERTS,
        **SHARED_EXPERT,
        "selection_bias": ("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"),
    },
    usual=_usual,
)
