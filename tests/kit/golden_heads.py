"""Tiny targets with EAGLE-3 heads (arXiv 2503.01840), written on the spot.

``tests/golden_heads`` has what transformers and llama.cpp made of the same files, by
``tools/head_references.py`` of commit 5ca9c955. Weights have seven bits, so files in F32 and Q8_0 hold the
same values.

Arrays, for P prompts, COUNT tokens behind each and drafts of LENGTH:

- ``prompts`` [P, 40], filled up with -1; ``tokens`` [P, COUNT], the target's greedy continuation, the same in
  both; ``token_margins`` and ``llama_token_margins`` [P, COUNT].
- ``drafts``, ``probabilities``, ``margins``, and llama.cpp's with ``llama_`` before the name,
  [P, COUNT, LENGTH]. Draft k stands behind the prompt and k tokens of the continuation. Probabilities are
  over the draft vocabulary. A margin is how far the best logit is above the second, in standard deviations.
- ``features`` [n, 3, hidden] of the first n tokens of the first prompt and its continuation.
- ``digests``: SHA-256 of the tensors in Q8_0 of target and head.

A head's row i takes what the target knew when it read token i, and token i + 1, and says what token i + 2 is.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import converted
from tests.kit.hf import VOCAB, Tensors, config_of, drawn, weights, write_directory, write_with_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden_heads"
CASES: Mapping[str, tuple[str, bool]] = {
    "llama": ("llama", False),
    "qwen3": ("qwen3", False),
    "llama_normed": ("llama", True),
}
"""The target's ``model_type``, and whether the head has ``norm_before_residual``."""
LAYERS, HIDDEN, MLP, HEADS, HEAD_DIM, DRAFT_VOCAB = 8, 64, 96, 2, 32, 96
TARGET_LAYERS = (2, LAYERS // 2, LAYERS - 3)
"""Layers of the target before which its residual stream is taken."""
TARGET_SEED, HEAD_SEED = 1, 2
_TARGET_SCALES: Mapping[str, float] = {"embed_tokens": 8, "o_proj": 0.5, "down_proj": 0.5}
_HEAD_SCALES: Mapping[str, float] = {"q_proj": 2, "o_proj": 8, "down_proj": 8}
"""What matrices are multiplied by, so that texts are not loops, rounding changes few tokens, and the head's
state is not nearly the one before it."""


def target_config(case: str) -> dict[str, Any]:
    """The target's ``config.json``."""
    kind = CASES[case][0]
    facts = {"architectures": [f"{kind.capitalize()}ForCausalLM"], "head_dim": HEAD_DIM, "eos_token_id": 2}
    facts |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1}
    return config_of(kind) | facts


def head_config(case: str) -> dict[str, Any]:
    """The head's ``config.json``, as SpecForge writes it."""
    config = target_config(case) | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}
    return config | ({"norm_before_residual": True} if CASES[case][1] else {})


def target_weights(case: str) -> Tensors:
    """The target's tensors by the names of its checkpoint."""
    return _scaled(weights(target_config(case), TARGET_SEED), _TARGET_SCALES)


def head_weights() -> Tensors:
    """The head's tensors that are float32 by the names of its checkpoint; every case has the same."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(TARGET_LAYERS) * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": (MLP, HIDDEN),
        "midlayer.mlp.up_proj.weight": (MLP, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, MLP),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    values = drawn(shapes | {f"midlayer.{name}.weight": (HIDDEN,) for name in norms}, HEAD_SEED)
    return _scaled(values, _HEAD_SCALES)


def _scaled(tensors: Tensors, scales: Mapping[str, float]) -> Tensors:
    return {name: x * np.float32(scales.get(name.split(".")[-2], 1)) for name, x in tensors.items()}


def head_tokens() -> npt.NDArray[np.int64]:
    """The draft vocabulary: which of the target's tokens each row of the head's LM head stands for."""
    raw = np.asarray(np.random.PCG64(HEAD_SEED + 1).random_raw(VOCAB), np.uint64)
    return np.sort(np.argsort(raw, kind="stable")[:DRAFT_VOCAB]).astype(np.int64)


def write_target(folder: Path, case: str) -> Path:
    """The target as a Hugging Face directory, with its tokenizer."""
    return write_with_tokenizer(folder, target_config(case), target_weights(case))


def write_head(folder: Path, case: str) -> Path:
    """The head as a Hugging Face directory in SpecForge's form: no embedding, which is the target's."""
    tokens = head_tokens()
    maps = {"d2t": tokens - np.arange(DRAFT_VOCAB), "t2d": np.isin(np.arange(VOCAB), tokens)}
    return write_directory(folder, head_config(case), {**head_weights(), **maps})


def target_gguf(case: str, kind: str = "Q8_0") -> TinyGGUF:
    """The target as llama.cpp's converter writes it, its matrices in ``kind``: Q8_0 or F32."""
    return converted(CASES[case][0], target_config(case), target_weights(case), kind, tokens=VOCAB)


def head_gguf(case: str, kind: str = "Q8_0") -> TinyGGUF:
    """The head as llama.cpp's converter writes it: ``d2t`` holds the target's tokens, not differences."""
    tensors = {name.replace("midlayer", "model.layers.0"): x for name, x in head_weights().items()}
    model = converted("eagle3", head_config(case), tensors, kind, tokens=VOCAB)
    model.metadata |= {
        "eagle3.target_layers": list(TARGET_LAYERS),
        "eagle3.target_hidden_size": HIDDEN,
        "eagle3.norm_before_residual": CASES[case][1],
        "eagle3.norm_before_fc": False,
    }
    model.tensors["d2t"] = "I64", head_tokens()
    return model


def digest(model: TinyGGUF) -> str:
    """SHA-256 of all tensors, whatever version of ``gguf`` writes them."""
    found = sha256()
    for name, (kind, raw) in sorted(model.tensors.items()):
        found.update(f"{name} {kind} {raw.shape} ".encode() + raw.tobytes())
    return found.hexdigest()


def golden(case: str) -> dict[str, npt.NDArray[Any]]:
    """What is stored of a case."""
    with np.load(GOLDEN / f"{case}.npz") as stored:
        return dict(stored)


def compared(
    one: npt.NDArray[Any], other: npt.NDArray[Any], margins: npt.NDArray[Any], least: float
) -> tuple[int, int]:
    """How many drafted tokens are the same, of how many that can be compared, in drafts [..., length].

    They can where all before them in the draft are the same and ``margins`` are ``least`` or more.
    """
    same = one == other
    reached = np.insert(np.cumprod(same, -1)[..., :-1], 0, 1, -1).astype(bool) & (margins >= least)
    return int((same & reached).sum()), int(reached.sum())
