"""Random weights for any architecture, in any format, and what they stand for."""

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec_export.formats.encode import decode_linear, encode_embedding, encode_linear
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.decoders.config import AGAIN
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import BundleError
from edgespec_models.families import decoder_named
from edgespec_models.files.blocks import Blocks
from edgespec_models.graphs.decoder import rotary_rows
from edgespec_models.graphs.plan import FULL, DecoderPlan, EmbeddingSpec, LinearPart, LinearSpec, Precision
from edgespec_models.schema import read

F32 = npt.NDArray[np.float32]


def tiny_plan(
    config: Transformer,
    form: WeightFormat,
    *,
    precision: Precision = FULL,
    head_tokens: tuple[int, ...] | None = None,
) -> DecoderPlan:
    """Every projection in ``form``; the embedding in 4 or 8 bits where ``form`` has as many."""

    hidden = config.hidden_size
    query, kv = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    head_rows = config.vocab_size if head_tokens is None else len(head_tokens)
    head, made = (LinearPart(("lm_head",), head_rows, form),), record(config).products
    linears = {"lm_head": LinearSpec(hidden, head, "lm_head")}

    def add(name: str, width: int, *parts: LinearPart) -> None:
        linears[name] = LinearSpec(width, parts, made[name].path)

    for i in range(config.num_layers):
        biases = ("q_bias", "k_bias", "v_bias") if config.architecture == "qwen2" else ()
        qk = LinearPart(("q", "k"), query + kv, form, biases[:2])
        v = LinearPart(("v",), kv, WeightFormat(32) if form.bits == 8 else form, biases[2:])
        both = LinearPart(("gate", "up"), 2 * config.intermediate_size, form)
        apart = LinearPart(("q",), query, form), LinearPart(("k",), kv, form), v
        stacked = {part.sources[0]: (part,) for part in apart} if config.norms == "wide" else {"qkv": (qk, v)}
        if made.keys() >= {f"layers.{i}.{name}" for name in (*stacked, "o", "gate_up")}:
            for name, parts in stacked.items():
                add(f"layers.{i}.{name}", hidden, *parts)
            add(f"layers.{i}.o", query, LinearPart(("o",), hidden, form))
            add(f"layers.{i}.gate_up", hidden, both)
            add(f"layers.{i}.down", config.intermediate_size, LinearPart(("down",), hidden, form))
    embedding = EmbeddingSpec(WeightFormat(form.bits, 32), offsets=form.bits == 4)
    return DecoderPlan(embedding, linears, head_tokens=head_tokens, precision=precision)


def config_of_json(value: object) -> Transformer:
    """As a manifest has it."""
    decoder = decoder_named(cast(Any, value)["architecture"])
    assert decoder is not None
    return read(decoder, value, "the architecture", BundleError, AGAIN)


def random_blocks(rng: np.random.Generator, shape: tuple[int, int], form: WeightFormat) -> Blocks | F32:
    """A random matrix as a checkpoint would hold it, such that ``form`` has a remainder where it can."""
    rows, columns = shape
    if form.bits == 32:
        return rng.normal(0.0, columns**-0.5, shape).astype(np.float32)
    scales = rng.uniform(0.5, 1.5, (rows, columns // form.block)).astype(np.float32) * columns**-0.5
    if form.bits == 8:
        codes = rng.integers(0, 256, shape, np.uint8)
        return Blocks(codes, 128, (scales / 64).astype(np.float32), None, 8, form.block)
    codes = rng.integers(0, 16, shape, np.uint8)
    scales = (scales / 4).astype(np.float32)
    if not form.minimums:
        return Blocks(codes, 8, scales, None, 4, form.block)
    minimums = (scales * rng.uniform(5.0, 10.0, scales.shape)).astype(np.float32)
    return Blocks(codes, 0, scales, minimums, 4, form.block)


def filled(
    model: ir.Model, config: Transformer, plan: DecoderPlan, rng: np.random.Generator
) -> dict[str, F32]:
    """Give every parameter random data; returns what it stands for."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    weights: dict[str, F32] = {}
    for name, spec in plan.linears.items():
        prefix = spec.path
        decoded = []
        for index, part in enumerate(spec.parts):
            source = random_blocks(rng, (part.out_features, spec.in_features), part.format)
            encoded = encode_linear(source, part.format)
            arrays |= {f"{prefix}.parts.{index}.{key}": value for key, value in encoded.items()}
            decoded.append(decode_linear(encoded, part.format, spec.in_features))
        weights[name] = np.concatenate(decoded)
    form = WeightFormat(plan.embedding.format.bits, 32, minimums=plan.embedding.offsets)
    table = random_blocks(rng, (config.vocab_size, config.hidden_size), form)
    weights["embed"] = table.values() if isinstance(table, Blocks) else table
    arrays |= {f"embedding.{k}": v for k, v in encode_embedding(table, plan.embedding).items()}
    fill_others(model, config, rng, arrays, weights, positions=rotary_rows(config))
    return weights


def fill_others(
    model: ir.Model,
    config: Transformer,
    rng: np.random.Generator,
    arrays: dict[str, npt.NDArray[Any]],
    weights: dict[str, F32],
    *,
    positions: int,
) -> None:
    """Give parameters their ``arrays``, and random ones to norms and biases, which join ``weights``."""
    arrays |= record(config).tables(positions)
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue
        assert value.shape is not None
        if name not in arrays:  # norms and biases
            shape = [int(str(dim)) for dim in value.shape]
            arrays[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            weights[name] = arrays[name]
        assert list(arrays[name].shape) == [int(str(dim)) for dim in value.shape], name
        assert value.dtype is not None
        value.const_value = ir.tensor(np.ascontiguousarray(arrays[name], value.dtype.numpy()), name=name)
