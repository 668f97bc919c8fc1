"""Tiny models of Gemma 4 that see, their pictures, and prompts with them.

``tools/make_hf_golden.py`` has transformers read the directory. Needs numpy only, where that runs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kit.gguf import TinyGGUF
from tests.kit.hf import Tensors, config_of, drawn, weights, write_directory
from tests.kit.tokenizers import byte_level_json

VOCAB, WIDTH, NEW = 320, 64, 24
BEGIN, MARKER, END = 3, 4, 5
SPECIALS = ("<pad>", "<eos>", "<turn>", "<|image>", "<|image|>", "<image|>")
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}<turn>"
)
SIZES = ((37, 101), (150, 83), (9, 400))
"""Heights and widths of the pictures."""
PROMPTS: tuple[tuple[str | int, ...], ...] = (
    ("read it", 0),
    (1, "read the letters and tell me what they say"),
    ("first ", 0, " and then ", 1, " and what is the same?"),
    (2, 0, 2),
)
"""Texts and numbers of pictures."""
EOS = 1


OTHER = {"use_clipped_linears": False, "standardize": True}
"""Facts of another tower."""
KINDS = ("seeing", "whole", "embedder")
"""Like E2B; like 26B and 31B, where rows of a picture see each other; like 12B, which has no tower."""


def picture(number: int) -> npt.NDArray[np.uint8]:
    return picture_of(number, SIZES[number])


def picture_of(number: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Soft shapes under noise, the same with every version of NumPy."""
    high, wide = size
    raw = np.asarray(np.random.PCG64(number).random_raw(high * wide * 3), np.uint64) >> np.uint64(58)
    rows, columns, colours = np.mgrid[:high, :wide, :3]
    soft = 96 + 64 * np.sin(rows / (5 + number)) * np.cos(columns / 7 + colours)
    made: npt.NDArray[np.uint8] = (soft + raw.reshape(high, wide, 3)).astype(np.uint8)
    return made


_ENDS = ("weight", "bias")


def config(kind: str = "seeing", **vision: Any) -> dict[str, Any]:
    text = {
        **config_of("gemma4" if kind == "seeing" else "gemma4_tied"),
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "max_position_embeddings": 1024,
        "sliding_window": 40,
        "eos_token_id": EOS,
        "hidden_size": WIDTH,
    }
    model, tower = "gemma4", _EMBEDDER
    if kind == "embedder":
        model = "gemma4_unified"
    else:
        tower = {**_TOWER, **({**OTHER, "intermediate_size": 90} if kind == "whole" else {})}  # no 32s
    text["model_type"] = f"{model}_text"
    return {
        "architectures": [f"Gemma4{'Unified' * (kind == 'embedder')}ForConditionalGeneration"],
        "model_type": model,
        "text_config": text,
        "vision_config": {**tower, **vision},
        "audio_config": None,
        "boi_token_id": BEGIN,
        "image_token_id": MARKER,
        "eoi_token_id": END,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
    }


_TOWER: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "patch_size": 8,
    "position_embedding_size": 256,
    "use_clipped_linears": True,
    "standardize": False,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    "rms_norm_eps": 1e-6,
}
_EMBEDDER: dict[str, Any] = {
    "model_type": "gemma4_unified_vision",
    "patch_size": 8,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 64,
    "output_proj_dims": 64,
    "mm_posemb_size": 72,
    "rms_norm_eps": 1e-6,
}


def text_weights(facts: dict[str, Any]) -> Tensors:
    """The text model's tensors, by its names when it is alone."""
    return weights({**facts["text_config"], "model_type": "gemma4_text"})


def tower_tensors(facts: dict[str, Any]) -> Tensors:
    if "mm_embed_dim" in facts:
        return _embedder_tensors(facts)
    hidden, mlp = facts["hidden_size"], facts["intermediate_size"]
    inner = facts["num_attention_heads"] * facts["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embedder.input_proj.weight": (hidden, 3 * facts["patch_size"] ** 2),
        "vision_tower.patch_embedder.position_embedding_table": (2, facts["position_embedding_size"], hidden),
        "embed_vision.embedding_projection.weight": (WIDTH, hidden),
    }
    if facts["standardize"]:
        shapes |= {f"vision_tower.std_{kind}": (hidden,) for kind in ("bias", "scale")}
    limits = dict[str, Any]()
    for layer in range(facts["num_hidden_layers"]):
        prefix = f"vision_tower.encoder.layers.{layer}."
        norms = "input", "post_attention", "pre_feedforward", "post_feedforward"
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in norms}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (facts["head_dim"],) for name in "qk"}
        products = {f"self_attn.{name}_proj": (inner, hidden) for name in "qkv"}
        products |= {"self_attn.o_proj": (hidden, inner), "mlp.down_proj": (hidden, mlp)}
        products |= {f"mlp.{name}_proj": (mlp, hidden) for name in ("gate", "up")}
        for name, shape in products.items():
            shapes[f"{prefix}{name}.linear.weight"] = shape
            if facts["use_clipped_linears"]:
                sides = {"input_min": -0.75, "input_max": 1.0, "output_min": -0.5, "output_max": 0.625}
                limits |= {f"{prefix}{name}.{k}": np.array(v, np.float32) for k, v in sides.items()}
    tensors = drawn(shapes, 5)
    for name in tensors:
        if name.endswith("q_norm.weight"):
            tensors[name] /= 4  # whose products with keys are not scaled otherwise
    return tensors | limits


def _embedder_tensors(facts: dict[str, Any]) -> Tensors:
    width, area = facts["mm_embed_dim"], 3 * (facts["patch_size"] * facts["pooling_kernel_size"]) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "vision_embedder.patch_dense.weight": (width, area),
        "vision_embedder.patch_dense.bias": (width,),
        "vision_embedder.pos_embedding": (facts["mm_posemb_size"], 2, width),
        "embed_vision.embedding_projection.weight": (WIDTH, width),
    }
    for name, size in (("patch_ln1", area), ("patch_ln2", width), ("pos_norm", width)):
        shapes |= {f"vision_embedder.{name}.{kind}": (size,) for kind in ("weight", "bias")}
    return drawn(shapes, 5)


_NAMES = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    **{f"self_attn.{kind}_proj": f"attn_{kind}" for kind in "qkv"},
    **{f"self_attn.{kind}_norm": f"attn_{kind}_norm" for kind in "qk"},
    "self_attn.o_proj": "attn_out",
    **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
}
_OUTER = {
    "vision_tower.patch_embedder.input_proj.weight": "v.patch_embd.weight",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
    "vision_embedder.patch_dense.weight": "v.patch_embd.weight",
    "vision_embedder.patch_dense.bias": "v.patch_embd.bias",
    "vision_embedder.pos_embedding": "v.position_embd.weight",
    **{f"vision_embedder.patch_ln{n}.{kind}": f"v.patch_norm.{n}.{kind}" for n in (1, 2) for kind in _ENDS},
    **{f"vision_embedder.pos_norm.{kind}": f"v.patch_norm.3.{kind}" for kind in _ENDS},
    "embed_vision.embedding_projection.weight": "mm.input_projection.weight",
}


def mmproj(kind: str = "seeing", **changed: object) -> TinyGGUF:
    """The tower as llama.cpp's converter writes it."""
    facts = config(kind)["vision_config"]
    merged = kind == "embedder"
    sizes = {
        "projection_dim": WIDTH,
        "embedding_length": facts["mm_embed_dim" if merged else "hidden_size"],
        "feed_forward_length": 0 if merged else facts["intermediate_size"],
        "block_count": 0 if merged else facts["num_hidden_layers"],
        "attention.head_count": 0 if merged else facts["num_attention_heads"],
        "attention.layer_norm_epsilon": facts["rms_norm_eps"],
        "patch_size": facts["patch_size"],
        "projector_type": "gemma4uv" if merged else "gemma4v",
        **changed,
    }
    file = TinyGGUF("clip", {f"clip.vision.{key}": value for key, value in sizes.items()})
    side = facts["patch_size"] * (3 if merged else 1)
    for name, values in tower_tensors(facts).items():
        layer, _, rest = name.replace(".linear.", ".").partition("encoder.layers.")[2].partition(".")
        part, _, end = rest.rpartition(".")
        stored = _OUTER.get(name, f"v.blk.{layer}.{_NAMES.get(part)}.{end}")
        file.tensors[stored] = "F32", np.atleast_1d(values)
    squares = ["v.patch_embd.weight", *["v.patch_norm.1.weight", "v.patch_norm.1.bias"] * merged]
    for name in squares:  # colour by colour
        values = file.tensors[name][1]
        apart = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        file.tensors[name] = "F32", np.ascontiguousarray(apart.reshape(values.shape) if merged else apart)
    if merged:
        table = file.tensors["v.position_embd.weight"][1]
        file.tensors["v.position_embd.weight"] = "F32", np.ascontiguousarray(table.transpose(1, 0, 2))
    return file


def write(folder: Path, kind: str = "seeing", **vision: Any) -> Path:
    """The directory as the hub has it."""
    facts = config(kind, **vision)
    tensors = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in text_weights(facts).items()
    }
    tensors |= {f"model.{name}": values for name, values in tower_tensors(facts["vision_config"]).items()}
    write_directory(folder, facts, tensors)
    (folder / "tokenizer.json").write_text(byte_level_json(size=VOCAB - 1, specials=SPECIALS), "utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "pad_token": "<pad>"}), "utf-8"
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return folder
