"""Muse Glimmer's text model: normalized embeddings, gates on attention's outputs, norms around sublayers."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from io import BytesIO
from math import sqrt
from typing import Any

import numpy as np

from edgespec_models.decoders.config import Factor
from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import FULL, SLIDING, Transformer, attend_gated, with_post_norms
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.families.family import Family, Tensors
from edgespec_models.families.gemma2 import capped
from edgespec_models.families.names import LAYER, POST_NORMS
from edgespec_models.families.qwen3 import Qwen3
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import layer_count, sliding_layers
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import GGMLType, Tensor


@dataclass(frozen=True, kw_only=True)
class MuseGlimmer(Qwen3):
    """Logits are capped as Gemma's. Norms behind sublayers have an epsilon of their own."""

    logit_cap: Factor | None = None
    post_norm_epsilon: Factor = 1e-8

    def decode(self, b: Backend) -> None:
        x = b.normalized(b.embed(self.vocab_size, self.hidden_size), "")
        b.write(b.logits(b.wanted(self.through_layers(b, x)), self.vocab_size, self.logit_cap))

    def layer(self, b: Backend, index: int, x: Any) -> Any:
        return with_post_norms(self, b, index, x, self.post_norm_epsilon)

    def mixed(self, b: Backend, index: int, h: Any) -> Any:
        facts = self.attention(index)
        return attend_gated(b, facts, h, self.hidden_size, facts.outputs)


def _usual(facts: Facts) -> Facts:
    """Layers without a window do not rotate: every fourth, counted from the last."""
    layers, width = layer_count(facts), facts.integer("head_dim", 128)
    types = [SLIDING if (layers - 1 - layer) % 4 else FULL for layer in range(layers)]
    scale = facts.positive("qk_scale_factor", 3.87) / sqrt(max(width, 1))
    factor = facts.positive("output_multiplier", 0.19611613513818404)
    changed = {"attention_multiplier": scale, "logits_scaling": 1 / factor}
    return facts.changed(changed).over({"layer_types": types})


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    """Gains of queries have the factor on scores."""
    return {"logit_scale": 1 / keys.positive("logits_scaling", 1.0)}


def _read(facts: Facts, family: Family) -> Transformer:
    sliding, layers = sliding_layers(facts, family), layer_count(facts)
    bases = facts.numbers("layer_rope_theta", layers) or [float(windowed) for windowed in sliding]
    if len({base for base in bases if base}) > 1:
        raise UnsupportedModelError(f"{facts.where}: layer_rope_theta is {bases}; allowed: one base, and 0")
    return trunk(
        facts,
        family,
        sliding=sliding,
        unrotated_layers=tuple(layer for layer, base in enumerate(bases) if not base),
        logit_cap=capped(facts, "final_logit_softcapping"),
        post_norm_epsilon=facts.positive("post_norm_eps", 1e-8),
    )


def _from_hub(config: Transformer, tensors: Tensors) -> tuple[Transformer, Tensors]:
    """Directories have no gains of queries and keys. As in GGUF files, those of queries have the factor."""
    width, scale = config.head_dim, 1 / sqrt(config.head_dim)
    gains, more = {"q": config.attention_scale / scale, "k": 1.0}, dict[str, Tensor]()
    for kind, gain in gains.items():
        data = BytesIO(np.full(width, gain, "<f4").tobytes())
        tensor = Tensor(f"{kind}_norm", (width,), GGMLType.F32, data, 0)
        more |= {f"layers.{layer}.{kind}_norm": tensor for layer in range(config.num_layers)}
    return replace(config, attention_scale=scale), {**tensors, **more}


MUSE_GLIMMER = Family(
    name="muse-glimmer",
    hub=("muse_glimmer_text", "muse_glimmer"),
    gguf="muse-glimmer",
    theta=5e5,
    neighbours=True,
    windowed=True,
    less_one="(attn|mlp)_norm",
    decoder=MuseGlimmer,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
    },
    fixed={"hidden_activation": "silu"},
    layer={**LAYER, **POST_NORMS, "head_gate": ("self_attn.gate_proj.weight", "attn_gate.weight")},
    usual=_usual,
    from_gguf=_from_gguf,
    from_hub=_from_hub,
    read=_read,
)
