"""Tiny but complete GGUF models, written on the spot with the ``gguf`` package."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from tests.kit.tokenizers import byte_level_json, gguf_metadata

F32 = npt.NDArray[np.float32]
Raw = npt.NDArray[Any]

ARCHITECTURES = ("llama", "qwen2", "gemma3", "olmo2")
BLOCKS_OF_256 = (
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_XS",
    "IQ3_XXS",
    "IQ3_S",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
)
FORMATS = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    *BLOCKS_OF_256,
    "IQ4_NL",
    "MXFP4",
    "NVFP4",
)
HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, CONTEXT, WINDOW = 256, 256, 4, 2, 32, 640, 6


@dataclass
class TinyGGUF:
    """What goes into a file: change it, then :meth:`write`.

    Attributes:
        architecture: ``general.architecture``.
        metadata: every other key.
        tensors: name -> weight format and raw data, rows first.
    """

    architecture: str
    metadata: dict[str, object]
    tensors: dict[str, tuple[str, Raw]] = field(default_factory=dict)

    def write(self, path: Path, most_tensors: int = 0) -> Path:
        """Write the file; with a number of tensors, several parts as llama.cpp's gguf-split leaves them."""
        writer = GGUFWriter(path, self.architecture, split_max_tensors=most_tensors)
        for key, value in self.metadata.items():
            _add(writer, key, value)
        for name, (kind, raw) in self.tensors.items():
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def values(self, name: str) -> F32:
        """A tensor as the ``gguf`` package dequantizes it."""
        kind, raw = self.tensors[name]
        values: F32 = dequantize(raw, GGMLQuantizationType[kind])
        return values


def tiny_gguf(architecture: str, kind: str = "F32", *, seed: int = 0, layers: int | None = None) -> TinyGGUF:
    """A random model of ``architecture``, its matrices in ``kind``, norms and biases in F32."""
    rng = np.random.default_rng(seed)
    layers = layers or (6 if architecture == "gemma3" else 2)
    model = TinyGGUF(architecture, _facts(architecture, layers) | dict(tokenizer_facts()))
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    model.tensors = {
        "token_embd.weight": (kind, random_raw(rng, len(tokens), HIDDEN, kind)),
        "output_norm.weight": ("F32", _vector(rng, HIDDEN)),
    }
    if architecture == "llama":  # the others tie the LM head
        model.tensors["output.weight"] = (kind, random_raw(rng, len(tokens), HIDDEN, kind))
    for layer in range(layers):
        model.tensors |= {
            f"blk.{layer}.{name}": tensor for name, tensor in _layer(rng, architecture, kind).items()
        }
    return model


def random_raw(rng: np.random.Generator, rows: int, columns: int, kind: str) -> Raw:
    """Random blocks of ``kind`` whose weights have a standard deviation of about ``columns ** -0.5``."""
    if kind in _BLOCKS:
        weights = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
        return _blocks(rng, rows * columns // weights, kind).reshape(rows, -1)
    if kind == "NVFP4":
        blocks: Raw = rng.integers(0, 256, (rows, columns // 64, 36), np.uint8)
        blocks[..., :4] = rng.integers(1, 5, (rows, columns // 64, 4))  # scales of 0.001 to 0.004
        return blocks.reshape(rows, -1)
    values = rng.normal(0.0, columns**-0.5, (rows, columns)).astype(np.float32)
    if kind == "F32":
        return values
    raw: Raw = quantize(values, GGMLQuantizationType[kind])
    return raw


_BLOCKS = {
    "Q2_K": (84, 80, 4e-3, 1.5),
    "Q3_K": (110, 108, 1e-3, 0),
    "Q4_K": (144, 0, 4e-4, 7.5),
    "Q5_K": (176, 0, 2e-4, 15.5),
    "Q6_K": (210, 208, 6e-5, 0),
    "IQ4_NL": (18, 0, 9e-4, 0),
    "IQ4_XS": (136, 0, 5e-5, 0),
    "IQ3_XXS": (98, 0, 3e-4, 0),
    "IQ3_S": (110, 0, 5e-4, 0),
    "IQ2_XXS": (66, 0, 1e-3, 0),
    "IQ2_XS": (74, 0, 1e-3, 0),
    "IQ2_S": (82, 0, 1e-3, 0),
}
"""Of formats that the ``gguf`` package does not write: bytes, where the scale is, its size, and that of
minimums beside it, which lie among the codes."""


def _blocks(rng: np.random.Generator, count: int, kind: str) -> Raw:
    size, at, scale, minimum = _BLOCKS[kind]
    raw = rng.integers(0, 256, (count, size), np.uint8)
    scales = scale * rng.uniform(0.5, 1.5, (count, 1))
    raw[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    if minimum:
        raw[:, at + 2 : at + 4] = (minimum * scales).astype(np.float16).view(np.uint8)
    if kind == "Q2_K":
        raw[:, :16] |= 0x88  # every 4-bit scale and minimum is 8 at least
    elif minimum:
        raw[:, 4:12] |= 0xA0  # every 6-bit scale and minimum is 32 at least
    return raw


def _vector(rng: np.random.Generator, width: int) -> F32:
    return rng.uniform(0.5, 1.5, width).astype(np.float32)


def _layer(rng: np.random.Generator, architecture: str, kind: str) -> dict[str, tuple[str, Raw]]:
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "attn_q": (query, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, query),
        "ffn_gate": (MLP, HIDDEN),
        "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }
    norms = {} if architecture == "olmo2" else {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if architecture in ("gemma3", "olmo2"):
        norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
        wide = architecture == "olmo2"
        norms |= {"attn_q_norm": query if wide else HEAD_DIM, "attn_k_norm": kv if wide else HEAD_DIM}
    layer: dict[str, tuple[str, Raw]] = {}
    for name, (rows, columns) in shapes.items():
        form = kind if columns % 256 == 0 or kind not in BLOCKS_OF_256 else "Q8_0"
        layer[f"{name}.weight"] = (form, random_raw(rng, rows, columns, form))
    layer |= {f"{name}.weight": ("F32", _vector(rng, width)) for name, width in norms.items()}
    if architecture == "qwen2":
        widths = {"attn_q": query, "attn_k": kv, "attn_v": kv}
        layer |= {f"{name}.bias": ("F32", _vector(rng, width)) for name, width in widths.items()}
    return layer


def _facts(architecture: str, layers: int) -> dict[str, object]:
    facts: dict[str, object] = {
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6 if architecture == "gemma3" else 1e4,
    }
    if architecture == "gemma3":
        facts["attention.sliding_window"] = WINDOW
    return {f"{architecture}.{key}": value for key, value in facts.items()}


@lru_cache
def tokenizer_facts(size: int = 400) -> tuple[tuple[str, object], ...]:
    """The keys of a tokenizer with so many tokens."""
    return tuple(gguf_metadata(byte_level_json(size=size)).items())


def _add(writer: Any, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))  # type: ignore[call-overload]


def reference_weights(model: TinyGGUF) -> dict[str, F32]:
    """The ``gguf`` package's values under the names that the numpy transformer of the graph tests reads."""
    names = {"attn_norm": "attn_norm", "ffn_norm": "mlp_norm", "post_attention_norm": "post_attn_norm"}
    names |= {"post_ffw_norm": "post_mlp_norm", "attn_q_norm": "attention.q_norm"}
    names |= {"attn_k_norm": "attention.k_norm"}
    weights = {
        "embed": model.values("token_embd.weight"),
        "final_norm.weight": model.values("output_norm.weight"),
        "lm_head": model.values("output.weight" if "output.weight" in model.tensors else "token_embd.weight"),
    }
    for layer in range(sum(name.endswith("attn_q.weight") for name in model.tensors)):
        source, at = f"blk.{layer}.", f"layers.{layer}."
        for name, parts in _FUSED.items():
            weights[at + name] = np.concatenate([model.values(f"{source}{p}.weight") for p in parts])
        for name, ours in names.items():
            if f"{source}{name}.weight" in model.tensors:
                weights[f"{at}{ours}.weight"] = model.values(f"{source}{name}.weight")
        if f"{source}attn_q.bias" in model.tensors:
            biases = [model.values(f"{source}attn_{p}.bias") for p in "qkv"]
            weights[f"{at}attention.qkv.parts.0.bias"] = np.concatenate(biases[:2])
            weights[f"{at}attention.qkv.parts.1.bias"] = biases[2]
    return weights


_FUSED = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
