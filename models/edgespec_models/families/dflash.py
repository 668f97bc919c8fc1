"""Heads that draft a block of tokens in one pass: DFlash (Chen et al. 2026, arXiv 2602.06036) and DSpark.

DSpark (arXiv 2607.05147) adds a bias that chains drafted tokens, and confidences. DFlash 2 adds convolutions
over the block's rows before and behind each sublayer, and a bias among the best candidates.

Directories have the forms of z-lab, DeepSeek and the ``speculators`` package. GGUF files have llama.cpp's
form (``conversion/qwen.py``, ``src/models/dflash.cpp``).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from edgespec_models.decoders.config import Block, Count
from edgespec_models.decoders.operations import Attention, Backend
from edgespec_models.decoders.transformer import SLIDING, Transformer, attend, in_layer
from edgespec_models.errors import RequestError, UnsupportedModelError, naming
from edgespec_models.families.family import Family
from edgespec_models.families.heads import OTHER, Shapes, Target, fitting, of_decoder
from edgespec_models.families.names import LAYER, OUTER
from edgespec_models.families.reading import expect, multiplier, trunk
from edgespec_models.files.facts import Facts
from edgespec_models.schema import within


@dataclass(frozen=True, kw_only=True)
class DFlash(Transformer):
    """A head whose layers see what features of the target give them, and a ``block`` of tokens."""

    DRAFTS = True
    norms = "head"
    block: Block

    def decode(self, b: Backend) -> None:
        """With a chain (DSpark) a bias that follows from the token before changes the logits."""
        features = b.features(len(self.feature_layers) * self.feature_width)
        known = b.post_norm(b.linear(features, "fuse", self.hidden_size), "fuse_norm")
        x = b.embed(self.vocab_size, self.hidden_size, self.embedding_scale)
        for index in range(self.num_layers):
            x = in_layer(b, index, x, partial(self.layer, b, index, known=known))
        x = b.wanted(x)
        logits = self.logits(b, x)
        b.write(logits, self.choices(b, logits, x))

    def choices(self, b: Backend, logits: Any, x: Any) -> Any:
        """The tokens of a block's rows; None if the highest logits say them."""
        return b.chain(logits, x, self.vocab_size, self.block) if self.block.rank else None

    def layer(self, b: Backend, index: int, x: Any, known: Any = None) -> Any:
        y = attend(b, self.attention(index), b.norm(x, "attn_norm"), self.hidden_size, known)
        x = b.add(x, y, "middle")
        return b.add(x, self.mlp(b, index, b.norm(x, "mlp_norm")), "residual")

    def attention(self, index: int) -> Attention:
        block, windowed = self.block, self.layer_type(index) == SLIDING
        causal = block.causal or (block.causal_windows and windowed)
        return replace(super().attention(index), bidirectional=not causal)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.feature_width != self.hidden_size or self.experts is not None:
            yield (
                f"a head of DFlash has feature_width {self.feature_width}, or experts; allowed: "
                f"{self.hidden_size}, as wide as its stream, and an MLP"
            )
        if self.block.mask >= self.vocab_size:
            yield f"the mask of a block is token {self.block.mask}; allowed: 0 to {self.vocab_size - 1}"


@dataclass(frozen=True, kw_only=True)
class DFlash2(DFlash):
    """A head with convolutions over a block's rows, and a bias among the best ``candidates``.

    ``conv_taps`` are the rows that a convolution sees. What a row adds to its weights is the same for
    ``conv_group`` channels.
    """

    candidates: Annotated[int, within(1, 4096)]
    conv_taps: Annotated[int, within(1, 16)]
    conv_group: Count

    def choices(self, b: Backend, logits: Any, x: Any) -> Any:
        return b.chain(logits, x, self.vocab_size, self.block, self.candidates)

    def layer(self, b: Backend, index: int, x: Any, known: Any = None) -> Any:
        attention = partial(attend, b, self.attention(index), outputs=self.hidden_size, known=known)
        for name, computed in (("attn", attention), ("mlp", partial(self.mlp, b, index))):
            h = b.normalized(x, f"{name}_norm")
            taps = b.block_taps(h, f"{name}_conv", self.conv_taps, self.conv_group)
            y = b.block_conv(computed(h=b.block_conv(h, taps, 0)), taps, 1)
            x = b.add(x, y, "middle" if name == "attn" else "residual")
        return x

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.hidden_size % self.conv_group:
            yield f"conv_group is {self.conv_group}; allowed: a divisor of {self.hidden_size}"
        if not self.block.rank:
            yield f"{self.candidates} candidates need a bias, whose rank is 0"


def _usual(facts: Facts) -> Facts:
    usual = of_decoder(facts)
    causal = usual.value("causal") if usual.value("is_causal") is None else usual.value("is_causal")
    trained = usual.value("aux_hidden_state_layer_ids") or usual.value("transformer_layer_config")
    anchored = "dspark" in _classes(usual) and trained is None
    changed = usual.changed({"model_type": "qwen3", "is_causal": None, "sees_behind": not causal})
    if usual.value("model_type") in DFLASH.hub:  # Muse Glimmer's assistant, whose layer types need no switch
        changed = changed.over({"use_sliding_window": True, "rope_theta": 5e5})
    # Directories scale embeddings as the target does, where they state nothing; GGUF files do not scale them.
    return changed.over({"sample_from_anchor": anchored, "input_embedding_scale": "target"})


def _from_gguf(keys: Facts, tensors: Collection[str]) -> dict[str, object]:
    for key, plain in {"hidden_activation": "silu", "attention.value_scale": 1.0}.items():
        if keys.value(key) not in (None, plain):
            raise UnsupportedModelError(f"{keys.where}: {key} is {keys.value(key)!r}; supported is {plain!r}")
    causal = keys.value("is_causal")
    changed: dict[str, object] = {"attention.causal": None, "sees_behind": not causal, "logit_scale": None}
    changed["output_multiplier"] = keys.value("logit_scale")
    return changed | {"use_sliding_window": True, "max_window_layers": 0}


def _classes(facts: Facts) -> str:
    return str(facts.value("architectures")).lower()


def _read(facts: Facts, family: Family, *, shapes: Shapes, target: Target) -> Transformer:
    where, config = facts.where, target.config
    if facts.text("markov_head_type", "vanilla") != "vanilla":
        raise UnsupportedModelError(
            f"{where}: markov_head_type is {facts.value('markov_head_type')!r}; supported is 'vanilla'"
        )
    ids = facts.value("target_layer_ids")
    if isinstance(ids, list) and all(type(layer) is int for layer in ids):
        ids = [layer + 1 for layer in ids]  # what leaves these
    if facts.value("aux_hidden_state_layer_ids") is not None:
        ids = facts.value("aux_hidden_state_layer_ids")
    layers, count = fitting(facts, target, ids), config.num_layers
    if facts.integer("num_target_layers", count) != count:
        raise RequestError(
            f"{where} reads a target of {facts.value('num_target_layers')} layers; {target.name} has "
            f"{count}. {OTHER}"
        )
    fields: dict[str, Any] = {"feature_layers": layers, "feature_width": config.hidden_size}
    scale: Any = facts.value("input_embedding_scale")
    if scale is not None:
        grown = config.embedding_scale if scale == "target" else scale
        fields["embedding_scale"] = multiplier(facts, "embedding_multiplier", grown)
    if facts.value("selector_rank") is not None:  # which reads logits as the target has them
        family = DFLASH2
        expect(facts, family, "output_multiplier", 1)
        names = {"conv_taps": "conv_kernel_size", "conv_group": "conv_group_size"}
        names["candidates"] = "selector_top_k"
        fields |= {name: facts.integer(key) for name, key in names.items()}
    made = trunk(facts, family, block=_block(facts, shapes), **fields)
    neighbours = not facts.boolean("rope_is_neox_style", default=True)
    return replace(made, rope=replace(made.rope, interleaved=neighbours))


def _block(facts: Facts, shapes: Shapes) -> Block:
    is_second = facts.value("selector_rank") is not None
    rank = facts.integer("selector_rank") if is_second else shapes.get("chain_in", (0,))[-1]
    with naming(facts.where):
        return Block(
            size=facts.integer("block_size", 16),
            mask=facts.integer("mask_token_id"),
            anchored=rank > 0 and facts.boolean("sample_from_anchor", default=not is_second),
            causal=not facts.boolean("sees_behind", default=True),
            causal_windows=not facts.boolean("sliding_window_non_causal", default=True),
            rank=rank,
            confident="confidence" in shapes and rank > 0,
        )


DFLASH = Family(
    name="dflash",
    hub=("muse_glimmer_assistant",),
    gguf="dflash",
    kind="head",
    classes=("dflash", "dspark"),
    decoder=DFlash,
    keys={"aux_hidden_state_layer_ids": "target_layers"},
    outer={
        **OUTER,
        "embed": ("embed_tokens.weight", "token_embd.weight"),
        "final_norm": ("norm.weight", "output_norm.weight"),
        "fuse": ("fc.weight encoder.fc.weight", "fc.weight"),
        "fuse_norm": ("hidden_norm.weight encoder.output_norm_enc.weight", "enc.output_norm.weight"),
        "chain_in": (
            "markov_head.markov_w1.weight candidate_selector.predecessor_codebook",
            "markov_w1.weight selector_predecessor.weight",
        ),
        "chain_out": (
            "markov_head.markov_w2.weight candidate_selector.successor_codebook",
            "markov_w2.weight selector_successor.weight",
        ),
        "chain_gate": ("candidate_selector.hidden_projection.weight", "selector_hidden.weight"),
        "confidence": ("confidence_head.proj.weight", "conf_proj.weight"),
        "confidence_bias": ("confidence_head.proj.bias", "conf_proj.bias"),
    },
    layer={  # with those of DFlash 2
        **LAYER,
        "attn_conv": ("attention_conv.kernel_projection.weight", "attn_conv_proj.weight"),
        "attn_conv_base": ("attention_conv.base_kernel", "attn_conv_base"),
        "mlp_conv": ("mlp_conv.kernel_projection.weight", "ffn_conv_proj.weight"),
        "mlp_conv_base": ("mlp_conv.base_kernel", "ffn_conv_base"),
    },
    usual=_usual,
    from_gguf=_from_gguf,
    read=_read,
)
DFLASH2 = DFLASH._replace(name="dflash2", gguf="", decoder=DFlash2)
