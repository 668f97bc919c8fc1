"""Bundles over edgespec's own operators, with random weights: what users get by default."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edgespec_export.gguf import BLOCK_LAYOUT, GGMLType
from edgespec_export.tiles import pack
from edgespec_models.config import ModelConfig
from edgespec_models.graphs.native import Matrix, NativePlan, build_native
from tests.gguf_for_tests import random_raw
from tests.toy import LLAMA, TinyModel, fill_others, write_bundle

F32 = npt.NDArray[np.float32]


def tiny_native(
    folder: Path,
    config: ModelConfig = LLAMA,
    kind: str = "Q4_0",
    *,
    tokenizer_json: str | None = None,
    seed: int = 0,
    role: Literal["target", "drafter"] = "target",
    head_tokens: tuple[int, ...] | None = None,
) -> TinyModel:
    """Build a random model of ``config``, every matrix in ``kind``, in the new directory ``folder``.

    A drafter's gains are tunable, and its LM head may be trimmed to ``head_tokens``.
    """
    plan = native_plan(config, kind, tunable=role == "drafter", head_tokens=head_tokens)
    model, rng = build_native(config, plan), np.random.default_rng(seed)
    arrays: dict[str, npt.NDArray[Any]] = {}
    values: dict[str, F32] = {}
    for name, matrix in plan.matrices().items():
        arrays[name], values[name] = _random(rng, matrix)
    named = {matrix.source: values[name] for name, matrix in plan.matrices().items()}
    weights = {"embed": named["embed"]}
    for linear, parts in plan.linears.items():
        weights[linear] = np.concatenate([named[part.source] for part in parts])
    fill_others(model, config, rng, arrays, weights, positions=config.context_length)
    for layer in range(config.num_layers if plan.biases else 0):
        prefix = f"layers.{layer}.attention.qkv"
        cut = config.query_width + config.kv_width
        bias = weights.pop(f"{prefix}.bias")  # under the names of standard graphs
        weights |= {f"{prefix}.parts.0.bias": bias[:cut], f"{prefix}.parts.1.bias": bias[cut:]}
    facts = {"role": role, "weights": "exact", "formats": {kind: 1}, "choices": True}
    facts |= {"kv": "float16", "operators": "edgespec"}
    write_bundle(folder, model, config, head_tokens, tokenizer_json, facts)
    return TinyModel(folder, config, weights)


def native_plan(
    config: ModelConfig, kind: str, *, tunable: bool = False, head_tokens: tuple[int, ...] | None = None
) -> NativePlan:
    """Every matrix in ``kind``."""
    hidden, query, kv, mlp = config.hidden_size, config.query_width, config.kv_width, config.intermediate_size
    rows = config.vocab_size if head_tokens is None else len(head_tokens)
    linears: dict[str, tuple[Matrix, ...]] = {"lm_head": (Matrix("lm_head", kind, rows, hidden),)}
    shapes = {
        "qkv": {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden)},
        "o": {"o": (hidden, query)},
        "gate_up": {"gate": (mlp, hidden), "up": (mlp, hidden)},
        "down": {"down": (hidden, mlp)},
    }
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for name, parts in shapes.items():
            linears[prefix + name] = tuple(
                Matrix(prefix + part, kind, *shape) for part, shape in parts.items()
            )
    biases = config.architecture == "qwen2"
    embedding = Matrix("embed", kind, config.vocab_size, hidden)
    return NativePlan(embedding, linears, biases=biases, tunable=tunable, head_tokens=head_tokens)


def _random(rng: np.random.Generator, matrix: Matrix) -> tuple[npt.NDArray[np.uint8], F32]:
    """Tiles, and what they stand for."""
    raw = random_raw(rng, matrix.rows, matrix.columns, matrix.format)
    block = BLOCK_LAYOUT[GGMLType[matrix.format]][1]
    values: F32 = dequantize(raw, GGMLQuantizationType[matrix.format])
    return pack(matrix.format, raw.view(np.uint8).reshape(matrix.rows, -1, block)), values
