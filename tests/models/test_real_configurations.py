"""Configurations of published models and heads, with fewer layers and narrow random weights: each one runs.

``configurations`` has their facts, without what says nothing of the model; lists have an entry for each layer
that is left.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import LoadOptions
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import UnsupportedModelError
from tests.kit import block_heads as blocks
from tests.kit import heads
from tests.kit.hf import VOCAB, Tensors, drawn, shapes, weights, write_directory, write_with_tokenizer

FOLDER = Path(__file__).parents[1] / "configurations"
MODELS = sorted(file.stem for file in FOLDER.glob("*.json") if not file.stem.startswith("head-"))
HEADS = sorted(file.stem for file in FOLDER.glob("head-*.json"))
RANK = 32
NARROW: Mapping[str, int] = {
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "hidden_size": 64,
    "block_dim": 64,
    "conv_dim": 64,
    "intermediate_size": 96,
    "block_ff_dim": 96,
    "block_multiple_of": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_heads": 4,
    "head_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4096,
    "mask_token_id": blocks.MASK,
    "markov_rank": RANK,
    "num_target_layers": blocks.LAYERS,
}
OPTIONS = LoadOptions(threads=1)

pytestmark = pytest.mark.usefixtures("home")


def narrowed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with small widths; heads share keys and values, and states, in the same proportions."""
    made: dict[str, Any] = {key: NARROW.get(key, value) for key, value in facts.items()}
    for key, value in facts.items():
        if isinstance(value, dict):
            made[key] = narrowed(value)
    if "num_key_value_heads" in facts:
        shared = facts["num_attention_heads"] // facts["num_key_value_heads"]
        made["num_key_value_heads"] = max(1, NARROW["num_attention_heads"] // shared)
    if "linear_num_value_heads" in facts:
        made["linear_num_value_heads"] = 2 * facts["linear_num_value_heads"] // facts["linear_num_key_heads"]
    for key in ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        if key in facts:
            made[key] = [1, *blocks.READS[1:]]
    return made


@pytest.mark.parametrize("name", MODELS)
def test_models_run(tmp_path: Path, name: str) -> None:
    stored = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    config = narrowed(stored["config"])
    text = {**config.get("text_config", config), "tie_word_embeddings": stored["tied"]}
    tensors = {
        tensor.replace("model.", stored.get("names", "model."), 1): values
        for tensor, values in weights(text).items()
    }
    tensors |= dict.fromkeys(stored.get("others", ()), np.ones((2, 3), np.float32))
    folder = write_with_tokenizer(tmp_path / name, {**config, "eos_token_id": 2}, tensors)
    with edgespec.load(folder, "ngram", options=OPTIONS) as model:
        drafted, plain = (
            model.generate("the rain in the rain", max_tokens=8, stop_at_eos=False, speculate=speculate)
            for speculate in (True, False)
        )
    assert drafted.tokens == plain.tokens and len(plain.tokens) == 8


def head_tensors(facts: Mapping[str, Any]) -> Tensors:
    """A head's tensors, by its narrowed facts."""
    layer = {**facts, **facts.get("transformer_layer_config", {}), "model_type": "qwen3"}
    shaped = shapes({**layer, "tie_word_embeddings": True})
    made = {name.removeprefix("model."): shape for name, shape in shaped.items() if "embed" not in name}
    hidden, block = layer["hidden_size"], {**facts, **facts.get("dflash_config", {})}
    read = block.get("target_layer_ids") or block["aux_hidden_state_layer_ids"]
    made |= {"fc.weight": (hidden, len(read) * hidden), "hidden_norm.weight": (hidden,)}
    if "markov_rank" in block:
        made |= {f"markov_head.markov_w{which}.weight": (VOCAB, RANK) for which in (1, 2)}
        made |= {"confidence_head.proj.weight": (1, hidden + RANK), "confidence_head.proj.bias": (1,)}
    return drawn(made, 3)


@pytest.mark.parametrize("name", HEADS)
def test_heads_draft_or_are_refused_by_name(tmp_path: Path, name: str) -> None:
    facts = narrowed(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["config"])
    if "domino" in name or "peagle" in name:
        with pytest.raises(UnsupportedModelError, match=r"a head of another kind \((domino|peagle)"):
            open_checkpoint(write_directory(tmp_path / "head", facts, {}))
        return
    if "eagle3" in name:
        target = heads.target(tmp_path / "target", max_position_embeddings=256)
        source = heads.Head.random(**{**facts, "draft_vocab_size": heads.DRAFTED, "head_dim": heads.HEAD_DIM})
        source.facts |= {"intermediate_size": heads.MLP, "num_attention_heads": heads.HEADS}
        source.facts |= {"num_key_value_heads": heads.KV_HEADS}
        head = source.write(tmp_path / "head")
    else:
        target = blocks.write_target(tmp_path / "target", max_position_embeddings=256)
        head = write_directory(tmp_path / "head", facts, head_tensors(facts))
    with edgespec.load(target, head, options=OPTIONS) as model:
        drafted, plain = (
            model.generate("the rain in the rain", max_tokens=8, stop_at_eos=False, speculate=speculate)
            for speculate in (True, False)
        )
        assert drafted.tokens == plain.tokens and model.drafter is not None
        made = model.drafter.config
    assert isinstance(made, Transformer) and made.rope.width == made.head_dim
    assert (made.block is not None and made.block.causal_windows) == (name == "head-qwen3.6-35b-dspark")
