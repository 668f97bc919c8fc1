"""Bundles over edgespec's own operators, with random weights: what users get by default."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edgespec_models.bundles.bundle import GRAPH, MANIFEST
from edgespec_models.bundles.tiles import pack
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.files.tensors import GGMLType
from edgespec_models.graphs.native import build_native
from edgespec_models.graphs.plan import DecoderPlan, EmbeddingSpec, LinearPart, LinearSpec
from tests.kit.gguf import random_raw
from tests.kit.toy import LLAMA, TinyModel, write_bundle
from tests.kit.weights import fill_others

F32 = npt.NDArray[np.float32]
Edit = Callable[[Any], object]


def tiny_native(
    folder: Path,
    config: Transformer = LLAMA,
    kind: str = "Q4_0",
    *,
    tokenizer_json: str | None = None,
    seed: int = 0,
    role: Literal["target", "drafter"] = "target",
    head_tokens: tuple[int, ...] | None = None,
    template: str | None = None,
) -> TinyModel:
    """Build a random model of ``config``, every matrix in ``kind``, in the new directory ``folder``.

    Its LM head may be trimmed to ``head_tokens``.
    """
    plan = native_plan(config, kind, head_tokens=head_tokens)
    model, rng = build_native(config, plan), np.random.default_rng(seed)
    arrays: dict[str, npt.NDArray[Any]] = {}
    table, embed = _random(rng, kind, (config.vocab_size, config.hidden_size))
    arrays["embedding.weight"], weights = table, {"embed": embed}
    for linear, spec in plan.linears.items():
        values = []
        for index, part in enumerate(spec.parts):
            packed, value = _random(rng, kind, (part.out_features, spec.in_features))
            arrays[f"{spec.path}.parts.{index}.weight"] = packed
            values.append(value)
        weights[linear] = np.concatenate(values)
    fill_others(model, config, rng, arrays, weights, positions=config.context_length)
    for layer in range(config.num_layers if plan.biases else 0):
        prefix = f"layers.{layer}.attention.qkv"
        cut = (config.num_heads + config.num_kv_heads) * config.head_dim
        bias = weights.pop(f"{prefix}.bias")  # under the names of standard graphs
        weights |= {f"{prefix}.parts.0.bias": bias[:cut], f"{prefix}.parts.1.bias": bias[cut:]}
    facts: dict[str, Any] = {"role": role, "weights": "exact", "formats": {kind: 1}, "choices": True}
    facts |= {"kept": record(config).kept_in("float16"), "operators": "edgespec"}
    write_bundle(folder, model, config, head_tokens, tokenizer_json, facts, template)
    return TinyModel(folder, config, weights)


def edit_manifest(folder: Path, edit: Edit) -> None:
    value = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    edit(value)
    (folder / MANIFEST).write_text(json.dumps(value), encoding="utf-8")


def edit_graph(folder: Path, edit: Edit) -> None:
    """Change the graph, without a word to the manifest."""
    model = onnx.load(folder / GRAPH, load_external_data=False)
    edit(model.graph)
    (folder / GRAPH).write_bytes(model.SerializeToString())


def keep_weights_at(folder: Path, key: str, value: str) -> None:
    """Have the graph look for all weights there: ``key`` is "location", or "offset"."""

    def edit(graph: Any) -> None:
        for entry in (entry for tensor in graph.initializer for entry in tensor.external_data):
            entry.value = value if entry.key == key else entry.value

    edit_graph(folder, edit)


def native_plan(config: Transformer, kind: str, *, head_tokens: tuple[int, ...] | None = None) -> DecoderPlan:
    """Every matrix in ``kind``."""
    form, made = WeightFormat(8, 32, tiles=kind), record(config)

    def part(name: str) -> LinearPart:
        rows, biased = made.tensors[name][0], config.architecture == "qwen2" and f"{name}_bias" in made.biases
        kept = len(head_tokens) if name == "lm_head" and head_tokens is not None else rows
        return LinearPart((name,), kept, form, (f"{name}_bias",) * biased)

    linears = dict[str, LinearSpec]()
    head_first = sorted(made.products.items(), key=lambda product: product[0] != "lm_head")
    for name, product in head_first:  # random weights go by this order
        columns = made.tensors[product.matrices[0]][1]
        linears[name] = LinearSpec(columns, tuple(map(part, product.matrices)), product.path)
    return DecoderPlan(EmbeddingSpec(form), linears, head_tokens=head_tokens)


def _random(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> tuple[npt.NDArray[np.uint8], F32]:
    """Tiles, and what they stand for."""
    raw = random_raw(rng, *shape, kind)
    block = GGMLType[kind].block_bytes
    values: F32 = dequantize(raw, GGMLQuantizationType[kind])
    return pack(kind, raw.view(np.uint8).reshape(shape[0], -1, block)), values
