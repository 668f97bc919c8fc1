"""EXAONE 4 and EXAONE's experts: where some layers have a window, the others have no rotation.

EXAONE 4 has norms behind sublayers alone; models with experts have them before sublayers.
"""

from dataclasses import dataclass

from edgespec_models.decoders.transformer import Transformer, with_post_norms_alone
from edgespec_models.families.experts import dense_layers
from edgespec_models.families.family import Family
from edgespec_models.families.names import EXPERTS, LAYER, POST_NORMS, SHARED_EXPERT
from edgespec_models.families.qwen3 import Qwen3
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import (
    every_nth_sees_all,
    layer_count,
    sliding_layers,
    window_of,
)
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


def _usual(facts: Facts) -> Facts:
    dense = dense_layers(facts, facts.integer("first_k_dense_replace", 1))
    shared = facts.integer("num_shared_experts", 1) * facts.integer("moe_intermediate_size", 1024)
    return facts.changed({"num_dense_layers": dense, "shared_expert_intermediate_size": shared})


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
EXAONE_MOE = EXAONE4._replace(
    name="exaone-moe",
    hub=("exaone_moe",),
    gguf="exaone-moe",
    decoder=Qwen3,
    experts={"gating": "sigmoid", "shared_gate": False},
    defaults={
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.5,
    },
    layer={
        **LAYER,
        **EXPERTS,
        **SHARED_EXPERT,
    },
    usual=_usual,
)
