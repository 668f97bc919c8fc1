"""A tiny Gemma 4 and its assistant, as the hub has them and as llama.cpp's converter writes them.

``tools/make_hf_golden.py`` has transformers read the directories. Weights have seven bits, so files in F32
and Q8_0 hold the same values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import converted, q8_0
from tests.kit.hf import (
    TOKENS,
    VOCAB,
    Tensors,
    config_of,
    drawn,
    weights,
    write_directory,
    write_with_tokenizer,
)

HIDDEN, CLUSTERS, READ = 32, 20, 4
LENGTHS = (2, 5, 8, 17, 31, 40)
"""Tokens of texts behind which goldens say what is drafted."""
DRAFTED = (11, 250, 42)
"""Tokens that are read behind a text as if they had been drafted, but the last."""
_LEFT_OUT = ("masked_embedding", "pre_projection", "post_projection")


def target_config() -> dict[str, Any]:
    """The ``config.json`` of the target: Gemma 4 with a window of six tokens and shared layers."""
    return {**config_of("gemma4"), "eos_token_id": 2}


def config(*, clustered: bool = True, **text: Any) -> dict[str, Any]:
    """The ``config.json`` of the assistant; ``text`` are facts of its layers."""
    layers: dict[str, Any] = {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "text_config": {**target_config(), **layers, **text},
        "backbone_hidden_size": target_config()["hidden_size"],
        "use_ordered_embeddings": clustered,
        "num_centroids": CLUSTERS,
        "centroid_intermediate_top_k": READ,
        "tie_word_embeddings": True,
    }


_TARGETS = tuple(f"self_attn.{kind}.weight" for kind in ("k_proj", "v_proj", "k_norm"))
"""What the target has and the assistant lacks."""


def target_tensors() -> Tensors:
    """Those of the target."""
    return weights(target_config())


def tensors(facts: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """The tensors of the assistant, by the names of the hub."""
    width, text, own = (
        facts["backbone_hidden_size"],
        facts["text_config"],
        facts["text_config"]["hidden_size"],
    )
    without_sharing = {**text, "num_kv_shared_layers": 0}
    shaped = {"pre_projection.weight": (own, 2 * width), "post_projection.weight": (width, own)}
    found: dict[str, npt.NDArray[Any]] = dict(weights(without_sharing, 7, _TARGETS))
    if facts["use_ordered_embeddings"]:
        shaped["masked_embedding.centroids.weight"] = facts["num_centroids"], own
        tokens = np.random.default_rng(3).permutation(text["vocab_size"])
        found["masked_embedding.token_ordering"] = tokens
    return found | drawn(shaped, 8)


def write_target(folder: Path, changed: Mapping[str, Any] | None = None) -> Path:
    """The target's directory, with a tokenizer; some of its tensors are ``changed``."""
    return write_with_tokenizer(folder, target_config(), target_tensors() | dict(changed or {}))


def write(folder: Path, facts: Mapping[str, Any], changed: Mapping[str, Any] | None = None) -> Path:
    """The assistant's directory; of its tensors some are ``changed``, and left out where that is None."""
    held = {n: x for n, x in (tensors(facts) | dict(changed or {})).items() if x is not None}
    return write_directory(folder, facts, held)


def target_gguf(kind: str = "Q8_0") -> TinyGGUF:
    """The target's file."""
    return converted("gemma4", target_config(), target_tensors(), kind, tokens=VOCAB)


def gguf(kind: str = "Q8_0") -> TinyGGUF:
    """The assistant's file; llama.cpp's converter leaves out the clusters of tokens."""
    facts = config(clustered=False)
    whole, text = tensors(facts), facts["text_config"]
    layers = {name: values for name, values in whole.items() if not name.startswith(_LEFT_OUT)}
    model = converted("gemma4", text, layers, kind, tokens=VOCAB)
    model.architecture = "gemma4-assistant"
    model.metadata = {
        key.replace("gemma4.", "gemma4-assistant.", 1): value for key, value in model.metadata.items()
    }
    model.metadata |= {
        "gemma4-assistant.embedding_length_out": facts["backbone_hidden_size"],
        "gemma4-assistant.nextn_predict_layers": text["num_hidden_layers"],
    }
    for part in ("pre", "post"):
        values = whole[f"{part}_projection.weight"]
        raw = q8_0(values) if kind == "Q8_0" else values
        model.tensors[f"nextn.{part}_projection.weight"] = kind, raw
    return model


def texts() -> list[list[int]]:
    """Those of the goldens."""
    return [list(TOKENS[:length]) for length in LENGTHS]
