"""EAGLE-3's heads (Li et al. 2025, arXiv 2503.01840): one layer that reads embedding and state side by side.

Directories have the forms of EAGLE, AngelSlim, SpecForge and the ``speculators`` package. GGUF files have
llama.cpp's form (``conversion/llama.py``, ``src/models/eagle3.cpp``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.family import Family
from edgespec_models.families.heads import Shapes, Target, fitting, of_decoder
from edgespec_models.families.names import LAYER, OUTER
from edgespec_models.families.reading import trunk
from edgespec_models.files.facts import Facts

_IDS: Final = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Eagle3(Transformer):
    """A head of one layer.

    Attributes:
        normed_features: RMSNorm on the features that it reads from the target.
        normed_residual: attention adds to the normalized state.
    """

    DRAFTS = True
    normed_features: bool = False
    normed_residual: bool = False

    def decode(self, b: Backend) -> None:
        """Its product of embedding and state side by side is a sum of two."""
        width, hidden = len(self.feature_layers) * self.feature_width, self.hidden_size
        features, states = b.features(width), b.states(hidden)
        embedding = b.embed(self.vocab_size, hidden)
        known = b.norm(features, "fuse_norm") if self.normed_features else features
        x = b.joined(b.linear(known, "fuse", hidden), states)
        if self.normed_residual:
            x = b.normalized(x, "layers.0.attn_norm")
        with b.layer(0, x):
            h = x if self.normed_residual else b.norm(x, "attn_norm")
            facts = self.attention(0)
            embedded = {f"embed_{name}": rows for name, rows in facts.products.items()}
            qkv = b.add(
                b.linear(b.norm(embedding, "embed_norm"), "embed_qkv", embedded, part="attention"),
                b.linear(h, "qkv", facts.products, biases=None, part="attention"),
            )
            y = b.linear(b.attention(qkv, facts), "o", hidden, part="attention")
            x = b.add(x, y, "middle")
            x = b.add(x, self.mlp(b, 0, b.norm(x, "mlp_norm")), "residual")
        x = b.wanted(x)
        b.write(self.logits(b, x))
        b.write_states(x, hidden)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.num_layers != 1 or self.experts is not None:
            yield f"{self.num_layers} layers of {self.architecture}, or experts; allowed: one with an MLP"


def _read(facts: Facts, family: Family, *, shapes: Shapes, target: Target) -> Transformer:
    """The config of a head; layers whose inputs it reads are listed in two ways.

    For vLLM, llama.cpp and the ``speculators`` package a list of layers at the top means the inputs of these
    layers. SGLang reads a list in ``eagle_config``: if its first id is 1, it means the outputs of its layers,
    as SpecForge and ModelOpt train them (sgl-project/sglang, pull request 25454). Without a list the layers
    are EAGLE's own choice.
    """
    ids = facts.value(_IDS)
    if ids is None:
        ids = facts.section("eagle_config").value(_IDS)
        if isinstance(ids, list) and ids[:1] == [1] and all(type(i) is int for i in ids):
            ids = [i + 1 for i in ids]
    if ids is None:
        count = target.config.num_layers
        ids = [2, count // 2, count - 3]
    return trunk(
        facts,
        family,
        feature_layers=fitting(facts, target, ids),
        feature_width=target.config.hidden_size,
        normed_features=facts.boolean("norm_before_fc", default=False),
        normed_residual=facts.boolean("norm_before_residual", default=False),
    )


EAGLE3 = Family(
    name="eagle3",
    gguf="eagle3",
    kind="head",
    decoder=Eagle3,
    classes=("eagle3",),
    sign="draft_vocab_size",
    neighbours=True,
    keeps_rows=True,
    keys={_IDS: "target_layers"},
    outer={
        **OUTER,
        "embed": ("embed_tokens.weight", "token_embd.weight"),
        "final_norm": ("norm.weight", "output_norm.weight"),
        "fuse": ("fc.weight", "fc.weight"),
        "fuse_norm": ("input_norm.weight", "enc.output_norm.weight"),
    },
    layer={
        **LAYER,
        "embed_norm": ("input_layernorm.weight", "attn_norm.weight"),
        "attn_norm": ("hidden_norm.weight", "attn_norm_2.weight"),
    },
    usual=of_decoder,
    read=_read,
)
