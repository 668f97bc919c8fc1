"""Heads that draft a block of tokens in one pass, seen as checkpoints: DFlash (Chen et al. 2026, arXiv
2602.06036) and DSpark (arXiv 2607.05147), which adds a bias that chains drafted tokens, and confidences.

Directories have the forms of z-lab, DeepSeek and the ``speculators`` package. GGUF files have llama.cpp's
form (``conversion/qwen.py``, ``src/models/dflash.cpp``).
"""

from typing import Any, Final

from edgespec_export.sources import gguf_checkpoint, hf_checkpoint
from edgespec_export.sources.architectures import BLOCKS, Family
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.heads import GGUFHead, HFHead, fitting
from edgespec_export.sources.hf_config import config_of
from edgespec_models.bundles.config import Block, ModelConfig
from edgespec_models.errors import RequestError, UnsupportedModelError, naming
from edgespec_models.files.facts import Facts

_CHAIN, _CONFIDENCE = "chain_in", "confidence"
_SECOND: Final = (
    "{} is a head of DFlash 2 (convolutions in the block, a selector of paths); edgespec has those of DFlash "
    "and DSpark"
)
_GGUF_GLOBAL = gguf_checkpoint.GLOBAL | {
    "fc.weight": "fuse",
    "enc.output_norm.weight": "fuse_norm",
    "markov_w1.weight": _CHAIN,
    "markov_w2.weight": "chain_out",
    "conf_proj.weight": _CONFIDENCE,
    "conf_proj.bias": "confidence_bias",
}
_HF_GLOBAL = {
    "embed_tokens.weight": "embed",
    "norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
    "fc.weight": "fuse",
    "hidden_norm.weight": "fuse_norm",
    "markov_head.markov_w1.weight": _CHAIN,
    "markov_head.markov_w2.weight": "chain_out",
    "confidence_head.proj.weight": _CONFIDENCE,
    "confidence_head.proj.bias": "confidence_bias",
}


class GGUFBlocks(GGUFHead):
    """A head in a GGUF file."""

    kind, names = BLOCKS, (_GGUF_GLOBAL, gguf_checkpoint.LAYER)

    def reading(self, file: GGUFFile, own: dict[str, object], target: Checkpoint) -> Family:
        """The family of heads that read ``target`` as the file's keys say."""
        where, width = file.path.name, target.config.hidden_size
        if "selector_rank" in own:
            raise UnsupportedModelError(_SECOND.format(where))
        for key, plain in {"hidden_activation": "silu", "attention.value_scale": 1.0}.items():
            if own.get(key, plain) != plain:
                raise UnsupportedModelError(f"{where}: {key} is {own[key]!r}; supported is {plain!r}")
        own |= {"logit_scale": None, "sees_behind": not own.pop("attention.causal", False)}
        own |= {"mask_token_id": file.metadata.get("tokenizer.ggml.mask_token_id")}
        facts, chained = Facts(own, where), file.tensors.get("markov_w1.weight")
        rank = 0 if chained is None else chained.shape[-1]
        block = _block(facts, rank, "conf_proj.weight" in file.tensors, anchored=rank > 0)
        layers = fitting(facts, target, facts.value("target_layers"))
        return _family(block, layers, width)._replace(windowed=True)


class HFBlocks(HFHead):
    """A head in a directory."""

    names = _HF_GLOBAL, hf_checkpoint.LAYER

    def read_config(self, facts: Facts, target: Checkpoint) -> ModelConfig:
        """What the head's graph has to compute."""
        where, named = facts.where, str(facts.value("architectures")).lower()
        if "dflash2" in named or facts.value("selector_rank") is not None:
            raise UnsupportedModelError(_SECOND.format(where))
        if facts.text("markov_head_type", "vanilla") != "vanilla":
            raise UnsupportedModelError(
                f"{where}: markov_head_type is {facts.value('markov_head_type')!r}; supported is 'vanilla'"
            )
        if (self.path / "mask_embedding.pt").is_file():
            raise UnsupportedModelError(f"{where} has a mask of its own (mask_embedding.pt); not supported")
        layers = facts.value("target_layer_ids")
        if isinstance(layers, list) and all(type(layer) is int for layer in layers):
            layers = [layer + 1 for layer in layers]  # what leaves these
        if facts.value("aux_hidden_state_layer_ids") is not None:
            layers = facts.value("aux_hidden_state_layer_ids")
        layers, count = fitting(facts, target, layers), target.config.num_layers
        if facts.integer("num_target_layers", count) != count:
            raise RequestError(
                f"{where} reads a target of {facts.value('num_target_layers')} layers; {target.path.name} "
                f"has {count}. Give the target that the head was trained for, or a head of this target"
            )
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        rank = shapes.get(_CHAIN, (0,))[-1]
        trained = facts.value("aux_hidden_state_layer_ids") or facts.value("transformer_layer_config")
        block = _block(facts, rank, _CONFIDENCE in shapes, anchored="dspark" in named and trained is None)
        family = _family(block, layers, target.config.hidden_size)
        if not facts.boolean("rope_is_neox_style", default=True):
            family = family._replace(fixed={**family.fixed, "rope_interleaved": True})
        scale = facts.value("input_embedding_scale")
        grown = {"embedding_multiplier": target.config.embedding_scale if scale is None else scale}
        return config_of(facts.over(grown), family)


def _block(facts: Facts, rank: int, confident: bool, *, anchored: bool) -> Block:
    with naming(facts.where):
        return Block(
            size=facts.integer("block_size", 16),
            mask=facts.integer("mask_token_id"),
            anchored=rank > 0 and facts.boolean("sample_from_anchor", default=anchored),
            causal=not facts.boolean("sees_behind", default=True),
            causal_windows=not facts.boolean("sliding_window_non_causal", default=True),
            rank=rank,
            confident=confident and rank > 0,
        )


def _family(block: Block, layers: tuple[int, ...], width: int) -> Family:
    fixed: dict[str, Any] = {"block": block, "feature_layers": layers, "feature_width": width}
    return BLOCKS._replace(fixed={**BLOCKS.fixed, **fixed})
