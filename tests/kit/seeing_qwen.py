"""A tiny Qwen3.5 that sees, its pictures, and prompts with them; with an MTP layer where a test wants one.

``tools/make_hf_golden.py`` has transformers read the directory. Needs numpy only, where that runs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kit import seeing
from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import converted
from tests.kit.hf import Tensors, config_of, drawn, weights, write_directory
from tests.kit.mtp import layer_weights
from tests.kit.tokenizers import byte_level_json

VOCAB, WIDTH, NEW = 320, 64, 24
EOS, BEGIN, MARKER, END = 1, 3, 4, 5
SPECIALS = ("<pad>", "<eos>", "<turn>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SHOWN = "".join(SPECIALS[BEGIN:])
TEMPLATE = seeing.TEMPLATE.replace("<|image|>", SHOWN)
SIZES = ((37, 101), (150, 83), (9, 400), (301, 203))
"""Heights and widths of the pictures; the last is shrunk, the others grow."""
BUDGET = 128
PROMPTS: tuple[tuple[str | int, ...], ...] = (
    ("read it", 0),
    (1, "read the letters and tell me what they say"),
    ("first ", 3, " and then ", 2, " and what is the same?"),
    (2, 0, 2),
)
"""Texts and numbers of pictures."""


SHAPES = ((1, 1), (1, 200), (16, 17), (33, 33), (40, 39), (7000, 100), (3000, 4000), (1080, 1920), (500, 513))
"""Heights and widths of pictures whose sizes the goldens hold, for each of :data:`BUDGETS`."""
BUDGETS = (256, 1024, 4096)


def picture(number: int) -> npt.NDArray[np.uint8]:
    return seeing.picture_of(number, SIZES[number])


def config(**vision: Any) -> dict[str, Any]:
    text = {
        **config_of("qwen35"),
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "full_attention_interval": 2,
        "eos_token_id": EOS,
        "hidden_size": WIDTH,
    }
    tower = {
        "model_type": "qwen3_5",
        "deepstack_visual_indexes": [],
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 81,
        "out_hidden_size": WIDTH,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {**tower, **vision},
        "vision_start_token_id": BEGIN,
        "image_token_id": MARKER,
        "vision_end_token_id": END,
        "video_token_id": VOCAB - 1,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }


def tower_tensors(facts: dict[str, Any]) -> Tensors:
    hidden, mlp, side = facts["hidden_size"], facts["intermediate_size"], facts["patch_size"]
    joined = hidden * facts["spatial_merge_size"] ** 2
    products = {"merger.linear_fc1": (joined, joined), "merger.linear_fc2": (WIDTH, joined)}
    norms = ["merger.norm"]
    for layer in range(facts["depth"]):
        prefix = f"blocks.{layer}."
        norms += [f"{prefix}norm1", f"{prefix}norm2"]
        products |= {
            f"{prefix}attn.qkv": (3 * hidden, hidden),
            f"{prefix}attn.proj": (hidden, hidden),
            f"{prefix}mlp.linear_fc1": (mlp, hidden),
            f"{prefix}mlp.linear_fc2": (hidden, mlp),
        }
    every: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, 3, 2, side, side),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (facts["num_position_embeddings"], hidden),
    }
    for name, shape in products.items():
        every |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        every |= {f"{name}.{kind}": (hidden,) for kind in ("weight", "bias")}
    tensors = drawn(every, 5)
    for name in norms:
        tensors[f"{name}.weight"] += not name.endswith("norm")  # those that drawn takes for no norm's
    return {f"visual.{name}": values for name, values in tensors.items()}


def text_tensors(facts: dict[str, Any], *, mtp: bool = False) -> Tensors:
    """Of the text model, perhaps with its MTP layer, by the names that it has alone."""
    tensors = weights(facts) | (layer_weights(facts) if mtp else {})
    for name in tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] += 1  # so that much hangs on positions
    return tensors


def write(folder: Path, *, mtp: bool = False, **vision: Any) -> Path:
    """The directory as the hub has it."""
    facts = config(**vision)
    text, tower = text_tensors(facts["text_config"], mtp=mtp), tower_tensors(facts["vision_config"])
    facts["text_config"]["mtp_num_hidden_layers"] = int(mtp)
    tensors = {name.replace("model.", "model.language_model.", 1): values for name, values in text.items()}
    tensors |= {f"model.{name}": values for name, values in tower.items()}
    write_directory(folder, facts, tensors)
    (folder / "tokenizer.json").write_text(byte_level_json(size=VOCAB - 1, specials=SPECIALS), "utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "pad_token": "<pad>"}), "utf-8"
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    half = [0.5] * 3
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": half, "image_std": half}), "utf-8"
    )
    return folder


def text_gguf() -> TinyGGUF:
    """The text model as llama.cpp's converter writes it, with the tokens that surround pictures."""
    facts = config()["text_config"]
    model = converted("qwen35", facts, text_tensors(facts), "Q8_0", tokens=VOCAB)
    tokens: Any = model.metadata["tokenizer.ggml.tokens"]
    tokens[BEGIN : END + 1] = SPECIALS[BEGIN:]
    return model


def mmproj(**changed: object) -> TinyGGUF:
    """The tower as llama.cpp's converter writes it."""
    facts = config()["vision_config"]
    sizes: dict[str, object] = {
        "projection_dim": WIDTH,
        "embedding_length": facts["hidden_size"],
        "feed_forward_length": facts["intermediate_size"],
        "block_count": facts["depth"],
        "attention.head_count": facts["num_heads"],
        "attention.layer_norm_epsilon": config()["text_config"]["rms_norm_eps"],
        "patch_size": facts["patch_size"],
        "spatial_merge_size": facts["spatial_merge_size"],
        "is_deepstack_layers": [False] * facts["depth"],
        **changed,
    }
    metadata = {f"clip.vision.{key}": value for key, value in sizes.items() if value is not None}
    file = TinyGGUF("clip", {"clip.projector_type": "qwen3vl_merger", **metadata})
    for name, values in tower_tensors(facts).items():
        stored = name.removeprefix("visual.")
        for old, new in _NAMES.items():
            stored = stored.replace(old, new)
        file.tensors[stored] = "F32", values
    frames = file.tensors.pop("v.patch_embd.weight")[1]
    for frame, end in enumerate(("", ".1")):
        file.tensors[f"v.patch_embd.weight{end}"] = "F32", np.ascontiguousarray(frames[:, :, frame])
    return file


_NAMES = {
    "patch_embed.proj": "v.patch_embd",
    "pos_embed": "v.position_embd",
    "blocks.": "v.blk.",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    "norm": "ln",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
