"""A tiny LFM2-VL, its pictures, of which one is cut into tiles, and prompts with them.

``tools/make_hf_golden.py`` has transformers read the directory. Needs numpy only, where that runs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.gguf import TinyGGUF
from tests.kit.hf import Tensors, config_of, drawn, weights, write_directory
from tests.kit.seeing import picture_of
from tests.kit.tokenizers import byte_level_json

VOCAB, WIDTH, NEW, EOS = 512, 64, 16, 1
TILES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11))
AROUND = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
SPECIALS = ("<pad>", "<eos>", "<turn>", "<image>", *AROUND, *TILES)
MARKER = 3
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}<turn>"
)
SIZES = ((237, 301), (500, 1100), (9, 400))
"""Heights and widths of the pictures."""
OTHERS = tuple((100 + 311 * at % 2900, 100 + 523 * at % 3700) for at in range(150))
"""Sizes of pictures that are not shown."""
PROMPTS: tuple[tuple[str | int, ...], ...] = (
    ("read it", 0),
    (1, "what do the letters say?"),
    ("first ", 0, " and then ", 2, " and what is the same?"),
)
"""Texts and numbers of pictures."""


def picture(number: int) -> Any:
    return picture_of(number, SIZES[number])


def config() -> dict[str, Any]:
    text = {**config_of("lfm2"), "vocab_size": VOCAB, "max_position_embeddings": 2048, "eos_token_id": EOS}
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_patches": 36,
        "patch_size": 16,
        "vision_use_head": False,
        "layer_norm_eps": 1e-6,
    }
    return {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": MARKER,
        "projector_hidden_size": 96,
        "projector_use_layernorm": True,
        "downsample_factor": 2,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
    }


def tower_tensors() -> Tensors:
    facts = config()["vision_config"]
    hidden, mlp, merged, projected = facts["hidden_size"], facts["intermediate_size"], 4 * 48, 96
    products = {
        "vision_tower.vision_model.embeddings.patch_embedding": (hidden, 768),
        "multi_modal_projector.linear_1": (projected, merged),
        "multi_modal_projector.linear_2": (WIDTH, projected),
    }
    norms = {"vision_tower.vision_model.post_layernorm": hidden, "multi_modal_projector.layer_norm": merged}
    for layer in range(facts["num_hidden_layers"]):
        prefix = f"vision_tower.vision_model.encoder.layers.{layer}."
        norms |= {f"{prefix}layer_norm{number}": hidden for number in (1, 2)}
        kinds = "q_proj", "k_proj", "v_proj", "out_proj"
        products |= {f"{prefix}self_attn.{kind}": (hidden, hidden) for kind in kinds}
        products |= {f"{prefix}mlp.fc1": (mlp, hidden), f"{prefix}mlp.fc2": (hidden, mlp)}
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.vision_model.embeddings.position_embedding.weight": (facts["num_patches"], hidden)
    }
    for name, shape in products.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, width in norms.items():
        shapes |= {f"{name}.{kind}": (width,) for kind in ("weight", "bias")}
    return drawn(shapes, 7)


_NAMES = {
    "vision_tower.vision_model.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.vision_model.embeddings.position_embedding": "v.position_embd",
    "vision_tower.vision_model.post_layernorm": "v.post_ln",
    "multi_modal_projector.layer_norm": "mm.input_norm",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
}
_PARTS = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def mmproj() -> TinyGGUF:
    """The tower as llama.cpp's converter writes it."""
    facts = config()["vision_config"]
    sizes = {
        "vision.projection_dim": WIDTH,
        "vision.embedding_length": facts["hidden_size"],
        "vision.feed_forward_length": facts["intermediate_size"],
        "vision.block_count": facts["num_hidden_layers"],
        "vision.attention.head_count": facts["num_attention_heads"],
        "vision.attention.layer_norm_epsilon": facts["layer_norm_eps"],
        "vision.patch_size": facts["patch_size"],
        "vision.projector.scale_factor": 2,
        "projector_type": "lfm2",
    }
    file = TinyGGUF("clip", {f"clip.{key}": value for key, value in sizes.items()})
    for name, values in tower_tensors().items():
        whole, _, end = name.rpartition(".")
        layer, _, part = whole.partition("encoder.layers.")[2].partition(".")
        stored = _NAMES.get(whole, f"v.blk.{layer}.{_PARTS.get(part)}")
        if stored == "v.patch_embd" and end == "weight":
            values = np.ascontiguousarray(values.reshape(-1, 16, 16, 3).transpose(0, 3, 1, 2))  # noqa: PLW2901
        file.tensors[f"{stored}.{end}"] = "F32", values
    return file


def write(folder: Path) -> Path:
    """The directory as the hub has it."""
    facts = config()
    tensors = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in weights(facts["text_config"]).items()
    }
    tensors |= {f"model.{name}": values for name, values in tower_tensors().items()}
    write_directory(folder, facts, tensors)
    (folder / "tokenizer.json").write_text(byte_level_json(size=VOCAB - 1, specials=SPECIALS), "utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "pad_token": "<pad>"}), "utf-8"
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return folder
