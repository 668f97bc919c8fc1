"""The decoder graph against a plain numpy transformer, and every weight format against its meaning."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from onnxscript import GraphBuilder

from edgespec_export.formats.encode import decode_linear, encode_linear
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import FULL, SLIDING, Transformer
from edgespec_models.errors import BundleError
from edgespec_models.families.olmo2 import Olmo2
from edgespec_models.families.qwen3 import Qwen3
from edgespec_models.graphs.linear import linear
from edgespec_models.graphs.plan import LinearPart, LinearSpec
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.ort import ort
from tests.kit.native import tiny_native
from tests.kit.toy import COLUMNS, FLOAT, GEMMA, HALVES, INT4, INT8, LLAMA, QWEN, TinyModel, tiny_bundle
from tests.kit.weights import config_of_json, random_blocks

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Norm = Callable[[F64, str], F64]

TOKENS = [5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63, 11, 390]

FACTORS = tuple(np.linspace(1, 8, 16).tolist())
CONFIGS = {
    "llama": LLAMA,
    "qwen2": QWEN,
    "qwen3": QWEN.become(Qwen3, architecture="qwen3"),
    "gemma3": GEMMA,
    "window of one": replace(GEMMA, sliding_window=1),
    "window of all but one": replace(GEMMA, sliding_window=len(TOKENS) - 1),
    "windows everywhere": replace(GEMMA, layer_types=(SLIDING,) * 2),
    "one kv head": replace(LLAMA, num_kv_heads=1, rope=HALVES),
    "a local rotary embedding beside a scaled one": replace(
        GEMMA, rope=replace(GEMMA.rope, factors=FACTORS, magnitude=1.1)
    ),
    "olmo2": LLAMA.become(Olmo2, architecture="olmo2"),
    "phi3": replace(QWEN, architecture="phi3", rope=replace(HALVES, width=16, pairs=8)),
    "smollm3": replace(LLAMA, architecture="smollm3", unrotated_layers=(0,)),
    "llama 3.1": replace(LLAMA, rope=replace(HALVES, factors=FACTORS, magnitude=1.1)),
}


def reference_logits(model: TinyModel, tokens: list[int]) -> F32:
    """Logits of every token, float64 inside; written from the papers, with no cache and no fused operator."""
    config, weights = model.config, {k: v.astype(np.float64) for k, v in model.weights.items()}

    def norm(x: F64, name: str) -> F64:
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon)
        return np.asarray(x * scale * weights[f"{name}.weight"])

    def optional(x: F64, name: str) -> F64:
        return norm(x, name) if f"{name}.weight" in weights else x

    x = weights["embed"][tokens] * config.embedding_scale
    for i in range(config.num_layers):
        at = f"layers.{i}"
        y = _attend(config, weights, optional(x, f"{at}.attn_norm"), i, norm)
        x = x + optional(y, f"{at}.post_attn_norm")
        gate, up = np.split(optional(x, f"{at}.mlp_norm") @ weights[f"{at}.gate_up"].T, 2, axis=-1)
        y = (_activate(config, gate) * up) @ weights[f"{at}.down"].T
        x = x + optional(y, f"{at}.post_mlp_norm")
    return np.asarray(norm(x, "final_norm") @ weights["lm_head"].T, np.float32)


def _attend(config: Transformer, weights: dict[str, F64], x: F64, layer: int, norm: Norm) -> F64:
    at, n, width = f"layers.{layer}", len(x), config.head_dim
    parts = ["qkv"] if f"{at}.qkv" in weights else "qkv"
    packed = np.concatenate([x @ weights[f"{at}.{part}"].T for part in parts], axis=-1)
    if config.architecture == "qwen2":
        packed = packed + np.concatenate([weights[f"{at}.attention.qkv.parts.{p}.bias"] for p in (0, 1)])
    ends = np.cumsum([config.num_heads * width, config.num_kv_heads * width])
    q, k, v = np.split(packed, ends, axis=-1)
    if config.norms == "wide":
        q, k = norm(q, f"{at}.attention.q_norm"), norm(k, f"{at}.attention.k_norm")
    q, k, v = (a.reshape(n, -1, width) for a in (q, k, v))
    if config.norms == "head":
        q, k = norm(q, f"{at}.attention.q_norm"), norm(k, f"{at}.attention.k_norm")
    is_global = config.layer_type(layer) == FULL
    if layer not in config.unrotated_layers:
        q, k = (_rotate(config, a, is_global) for a in (q, k))
    group = config.num_heads // config.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * config.attention_scale
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    seen = distance >= 0
    if not is_global and config.sliding_window is not None:
        seen &= distance < config.sliding_window  # itself and the sliding_window - 1 tokens before
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed: F64 = np.einsum("hqk,khd->qhd", shares, v).reshape(n, -1)
    return mixed @ weights[f"{at}.o"].T


def _rotate(config: Transformer, heads: F64, is_global: bool) -> F64:
    rope = config.rope if is_global or config.local_rope is None else config.local_rope
    x, rest = np.split(heads, [rope.width], axis=-1)
    half = rope.width // 2
    frequencies = rope.theta ** (-np.arange(half) / half) / (rope.factors or 1.0)
    angles = np.outer(np.arange(len(x)), frequencies)[:, None, :]
    cos, sin = np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude
    interleaved = rope.interleaved
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = a * cos - b * sin, b * cos + a * sin
    y = np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)
    return np.concatenate([y, rest], -1)


def _activate(config: Transformer, x: F64) -> F64:
    if config.activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_graph_computes_the_architecture(tmp_path: Path, name: str, native: bool) -> None:
    """By one pass, and token by token."""
    folder, config = tmp_path / "m", CONFIGS[name]
    model = tiny_native(folder, config, "Q8_0") if native else tiny_bundle(folder, config)
    expected, session = reference_logits(model, TOKENS), open_cpu(model.bundle, CpuOptions(threads=1))
    whole = session.predict(TOKENS).logits.copy()
    session.rewind(0)
    stepwise = np.concatenate([session.predict([token]).logits.copy() for token in TOKENS])
    if native:
        assert _relative_error(whole, expected) < 0.03  # int8 activations everywhere
        np.testing.assert_array_equal(stepwise, whole)
    else:
        np.testing.assert_allclose(whole, expected, atol=1e-4)
        np.testing.assert_allclose(stepwise, expected, atol=1e-4)


@pytest.mark.parametrize("width", [32, 96, 576, 1024, 1536])
@pytest.mark.parametrize("form", [INT4, COLUMNS, INT8, WeightFormat(8, 16)], ids=lambda form: form.name)
def test_a_linear_is_its_matrix(form: WeightFormat, width: int) -> None:
    rng = np.random.default_rng(width)
    source = random_blocks(rng, (48, width), form)
    encoded = encode_linear(source, form)
    x = rng.normal(1.0, 1.0, (1, 5, width)).astype(np.float32)  # sums of blocks matter
    spec = LinearSpec(width, (LinearPart(("w",), 48, form),), "m")
    actual = _run_linear(spec, [encoded], x)[0]
    assert _relative_error(actual, x[0] @ decode_linear(encoded, form, width).T) < 8e-3


def test_parts_of_different_formats_are_concatenated() -> None:
    rng = np.random.default_rng(1)
    first = LinearPart(("q", "k"), 64, COLUMNS, ("b", "c"))
    parts = (first, LinearPart(("v",), 32, FLOAT), LinearPart(("w",), 16, INT8))
    encoded = [encode_linear(random_blocks(rng, (p.out_features, 96), p.format), p.format) for p in parts]
    arrays = [dict(e) for e in encoded]
    arrays[0]["bias"] = rng.normal(size=64).astype(np.float32)
    x = rng.normal(size=(1, 3, 96)).astype(np.float32)
    expected = [x[0] @ decode_linear(e, p.format, 96).T for e, p in zip(encoded, parts, strict=True)]
    expected[0] = expected[0] + arrays[0]["bias"]
    actual = _run_linear(LinearSpec(96, parts, "m"), arrays, x)[0]
    assert _relative_error(actual, np.concatenate(expected, axis=-1)) < 8e-3


def _run_linear(spec: LinearSpec, parts: list[dict[str, npt.NDArray[np.generic]]], x: F32) -> F32:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23, "com.microsoft": 1}, name="linear")
    builder = GraphBuilder(graph)
    value = builder.input("x", ir.DataType.FLOAT, [1, "n", spec.in_features])
    output = linear(builder.op, value, spec)
    output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, "n", None])
    builder.add_output(output, "y")
    for name, parameter in graph.initializers.items():
        if parameter.const_value is None:
            _, index, key = name.rsplit(".", 2)
            parameter.const_value = ir.tensor(np.ascontiguousarray(parts[int(index)][key]), name=name)
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    result: F32 = session.run(None, {"x": x})[0]
    return result


def _relative_error(got: F32, expected: F32) -> float:
    return float(np.sqrt(((got - expected) ** 2).sum() / (expected**2).sum()))


def test_facts_survive_json_and_nonsense_is_refused() -> None:
    for config in CONFIGS.values():
        assert config_of_json(json.loads(json.dumps(asdict(config)))) == config
    with pytest.raises(BundleError, match="colour"):
        config_of_json(asdict(LLAMA) | {"colour": 1})
    with pytest.raises(BundleError, match="head_dim"):
        config_of_json({k: v for k, v in asdict(LLAMA).items() if k != "head_dim"})


def test_layers_have_their_own_windows_and_rotations() -> None:
    config = replace(GEMMA, num_layers=6, layer_types=(SLIDING, SLIDING, FULL) * 2, unrotated_layers=(1,))
    local, whole = ("rope_local", 6), ("rope", None)
    assert seen_in(config) == [local, (None, 6), whole, local, local, whole]
    assert seen_in(replace(config, local_rope=None))[0] == ("rope", 6)
    assert seen_in(LLAMA) == [whole, whole]


def seen_in(config: Transformer) -> list[tuple[str | None, int | None]]:
    """By layer the rotary embedding, and the window."""
    facts = record(config).attentions.values()
    return [(layer.rope.name if layer.rope else None, layer.window) for layer in facts]
