"""Directories as onnxruntime-genai's builder, mobius and Optimum write them, with tiny random models."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.kit.tokenizers import byte_level_json

VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH, LAYERS, CONTEXT = 404, 64, 4, 2, 16, 2, 640
GRAPH = "model.onnx"
_FLOATS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
EOS = 2  # <|im_end|> of the test tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSpec:
    """A tiny decoder.

    Attributes:
        attention: GroupQueryAttention, or written out: products with a concatenated cache.
        positions: whether position ids are an input.
        kv: what the KV cache holds; GroupQueryAttention then computes in it.
        weights: of the projections.
        external: keep weights in a file of their own.
        seed: of the weights.
        window: tokens a token of the last layer sees; 0 for all.
        alibi: whether the scores have a bias, counted from the sequence's end as MPT's is.
        counted: whether the graph counts positions from the length of the cache.
        cast: whether the cache is handed on by a ``Cast``.

    The last four are of attention that is written out.
    """

    attention: Literal["gqa", "concat"] = "gqa"
    positions: bool = False
    kv: Literal["float32", "float16"] = "float32"
    weights: Literal["float32", "int4"] = "float32"
    external: bool = False
    seed: int = 0
    window: int = 0
    alibi: bool = False
    counted: bool = False
    cast: bool = False


class GraphBuilder:
    """Collects nodes and weights; every method adds an operator and returns its output's name."""

    def __init__(self, spec: ForeignSpec) -> None:
        self.spec, self.nodes, self.weights = spec, list[Any](), list[Any]()
        self._rng = np.random.default_rng(spec.seed)

    def op(self, kind: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any) -> str:
        names = [f"{kind}_{len(self.nodes)}{'' if i == 0 else f'_{i}'}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        return names[0]

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"const_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def random(self, *shape: int, scale: float | None = None) -> str:
        return self.const(self._rng.normal(0.0, scale or shape[0] ** -0.5, shape), np.float32)

    def product(self, value: str, rows: int, columns: int) -> str:
        if self.spec.weights == "float32":
            return self.op("MatMul", value, self.random(rows, columns))
        codes = self.const(self._rng.integers(0, 256, (columns, rows // 32, 16)), np.uint8)
        scales = self.const(self._rng.uniform(0.5, 1.5, columns * rows // 32) * rows**-0.5 / 4, np.float32)
        facts: dict[str, Any] = {"K": rows, "N": columns, "bits": 4, "block_size": 32, "accuracy_level": 4}
        return self.op("MatMulNBits", value, codes, scales, domain="com.microsoft", **facts)

    def norm(self, value: str) -> str:
        weight = self.const(np.ones(HIDDEN), np.float32)
        return self.op("SimplifiedLayerNormalization", value, weight, axis=-1, epsilon=1e-5)

    def gqa(self, layer: int, value: str, shared: dict[str, str]) -> str:
        """Rotary embedding inside; the mask tells how long the sequence is."""
        query = self.product(value, HIDDEN, HEADS * WIDTH)
        key = self.product(value, HIDDEN, KV_HEADS * WIDTH)
        inner = self.product(value, HIDDEN, KV_HEADS * WIDTH)
        if self.spec.kv == "float16":
            query, key, inner = (self.op("Cast", x, to=TensorProto.FLOAT16) for x in (query, key, inner))
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        name = f"attention_{layer}"
        inputs = [query, key, inner, *past, shared["seqlens"], shared["total"], shared["cos"], shared["sin"]]
        if self.spec.positions:
            inputs.append("position_ids")
        outputs = [name, f"present.{layer}.key", f"present.{layer}.value"]
        facts: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1}
        node = helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **facts)
        self.nodes.append(node)
        if self.spec.kv == "float16":
            name = self.op("Cast", name, to=TensorProto.FLOAT)
        return self.product(name, HEADS * WIDTH, HIDDEN)

    def concat(self, layer: int, value: str, bias: str) -> str:
        """The cache grows by a concatenation; ``bias`` is added to the scores."""
        query, key, inner = (
            self.heads(self.product(value, HIDDEN, n * WIDTH), n) for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        keys, values = (self.grown(layer, kind, new) for kind, new in (("key", key), ("value", inner)))
        root = self.const(WIDTH**-0.25, np.float32)
        turned = self.op("Transpose", self.repeated(keys), perm=[0, 1, 3, 2])
        scores = self.op("MatMul", self.op("Mul", query, root), self.op("Mul", turned, root))
        weights = self.op("Softmax", self.op("Add", scores, bias), axis=-1)
        weights = self.op("Where", self.op("IsNaN", weights), self.const(0.0, np.float32), weights)
        result = self.op("MatMul", weights, self.repeated(values))
        result = self.op("Transpose", result, perm=[0, 2, 1, 3])
        result = self.op("Reshape", result, self.const([1, -1, HEADS * WIDTH]))
        return self.product(result, HEADS * WIDTH, HIDDEN)

    def grown(self, layer: int, kind: str, new: str) -> str:
        """The cache with ``new`` behind it, in float32."""
        half, present = self.spec.kv == "float16", f"present.{layer}.{kind}"
        new = self.op("Cast", new, to=TensorProto.FLOAT16) if half else new
        name = f"grown_{layer}_{kind}" if self.spec.cast else present
        inputs = [f"past_key_values.{layer}.{kind}", new]
        self.nodes.append(helper.make_node("Concat", inputs, [name], axis=-2))
        if self.spec.cast:
            self.nodes.append(helper.make_node("Cast", [name], [present], to=_FLOATS[self.spec.kv]))
        return self.op("Cast", name, to=TensorProto.FLOAT) if half else name

    def repeated(self, value: str) -> str:
        """Every KV head as often as query heads share it."""
        dims = [self.dim(value, axis) for axis in range(4)]
        shape = self.op("Concat", *dims[:2], self.const([HEADS // KV_HEADS]), *dims[2:], axis=0)
        wide = self.op("Expand", self.op("Unsqueeze", value, self.const([2])), shape)
        return self.op("Reshape", wide, self.op("Concat", dims[0], self.const([HEADS]), *dims[2:], axis=0))

    def dim(self, value: str, axis: int) -> str:
        return self.op("Gather", self.op("Shape", value), self.const([axis]), axis=0)

    def heads(self, value: str, heads: int, width: int = WIDTH) -> str:
        value = self.op("Reshape", value, self.const([1, -1, heads, width]))
        return self.op("Transpose", value, perm=[0, 2, 1, 3])

    def shared_gqa(self) -> dict[str, str]:
        """``seqlens_k`` and the total length from the mask, as builders derive them; rotary tables."""
        total = self.op("ReduceSum", "attention_mask", self.const([1]), keepdims=0)
        seqlens = self.op("Cast", self.op("Sub", total, self.const([1])), to=TensorProto.INT32)
        length = self.op("Gather", self.op("Shape", "attention_mask"), self.const(1), axis=0)
        angles = np.outer(np.arange(CONTEXT), 10_000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH))
        dtype = np.float16 if self.spec.kv == "float16" else np.float32
        return {
            "seqlens": seqlens,
            "total": self.op("Cast", length, to=TensorProto.INT32),
            "cos": self.const(np.cos(angles), dtype),
            "sin": self.const(np.sin(angles), dtype),
        }

    def places(self) -> str:
        """Positions of the new tokens, by the length of the cache; int64 ``(new,)``."""
        past = self.dim("past_key_values.0.key", 2)
        end = self.op("Add", past, self.dim("input_ids", 1))
        return self.op("Range", self.op("Squeeze", past), self.op("Squeeze", end), self.const(1))

    def bias(self, rows: str, window: int) -> str:
        """What is added to the scores, float32, ``(new, total)`` or ``(1, heads, new, total)``."""
        total = self.dim("attention_mask", 1)
        columns = self.op("Range", self.const(0), self.op("Squeeze", total), self.const(1))
        distance = self.op("Sub", self.op("Unsqueeze", rows, self.const([1])), columns)
        allowed = self.op("GreaterOrEqual", distance, self.const(0))
        if window:
            allowed = self.op("And", allowed, self.op("Less", distance, self.const(window)))
        bias = self.op("Where", allowed, self.const(0.0, np.float32), self.const(-np.inf, np.float32))
        if not self.spec.alibi:
            return bias
        slopes = self.const(-(0.5 ** np.arange(HEADS)).reshape(1, HEADS, 1, 1), np.float32)
        behind = self.op("Cast", self.op("Sub", total, columns), to=TensorProto.FLOAT)
        return self.op("Add", bias, self.op("Mul", behind, slopes))


def graph(spec: ForeignSpec) -> onnx.ModelProto:
    """The decoder."""
    b = GraphBuilder(spec)
    hidden = b.op("Gather", b.random(VOCAB, HIDDEN, scale=1.0), "input_ids")
    if spec.attention == "gqa":
        attend = partial(b.gqa, shared=b.shared_gqa())
    else:
        places = b.places()
        if spec.positions or spec.counted:  # learned positions, as in GPT-2
            learned = b.random(CONTEXT, HIDDEN, scale=0.5)
            hidden = b.op("Add", hidden, b.op("Gather", learned, places if spec.counted else "position_ids"))
    for layer in range(LAYERS):
        if spec.attention == "concat":
            attend = partial(b.concat, bias=b.bias(places, spec.window if layer == LAYERS - 1 else 0))
        hidden = b.op("Add", hidden, attend(layer, b.norm(hidden)))
        inner = b.product(b.norm(hidden), HIDDEN, 2 * HIDDEN)
        hidden = b.op("Add", hidden, b.product(b.op("Relu", inner), 2 * HIDDEN, HIDDEN))
    scaled = b.op("Mul", b.norm(hidden), b.const(4.0, np.float32))
    b.nodes.append(helper.make_node("Identity", [b.product(scaled, HIDDEN, VOCAB)], ["logits"]))
    return _decoder(b, spec)


def _decoder(b: GraphBuilder, spec: ForeignSpec) -> onnx.ModelProto:
    """What was built, with inputs and outputs."""
    info, kv = helper.make_tensor_value_info, _FLOATS[spec.kv]
    inputs = [info("input_ids", TensorProto.INT64, ["batch", "n"])]
    inputs += [info("attention_mask", TensorProto.INT64, ["batch", "total"])]
    if spec.positions:
        inputs += [info("position_ids", TensorProto.INT64, ["batch", "n"])]
    outputs = [info("logits", TensorProto.FLOAT, ["batch", "n", VOCAB])]
    for layer in range(LAYERS):
        for kind in ("key", "value"):
            inputs += [info(f"past_key_values.{layer}.{kind}", kv, ["batch", KV_HEADS, "past", WIDTH])]
            outputs += [info(f"present.{layer}.{kind}", kv, ["batch", KV_HEADS, "present", WIDTH])]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_graph(b.nodes, "decoder", inputs, outputs, b.weights)
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


def write_genai(folder: Path, spec: ForeignSpec | None = None, **changes: Any) -> Path:
    """A directory with ``genai_config.json``; ``changes`` go into its ``model.decoder``."""
    spec = spec or ForeignSpec()
    _write(folder, spec, folder / GRAPH)
    past, present = "past_key_values.%d", "present.%d"
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    inputs |= {"past_key_names": f"{past}.key", "past_value_names": f"{past}.value"}
    outputs = {"logits": "logits"}
    outputs |= {"present_key_names": f"{present}.key", "present_value_names": f"{present}.value"}
    decoder = {"filename": GRAPH, "head_size": WIDTH, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    decoder |= {"num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS}
    decoder |= {"inputs": inputs, "outputs": outputs, **changes}
    model = {"type": "llama", "vocab_size": VOCAB, "context_length": CONTEXT, "decoder": decoder}
    model |= {"bos_token_id": 0, "eos_token_id": [EOS, 0], "pad_token_id": 0}
    config = {"model": model, "search": {"past_present_share_buffer": True}}
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_optimum(folder: Path, spec: ForeignSpec | None = None, **changes: Any) -> Path:
    """A directory with ``config.json`` and ``onnx/model.onnx``; ``changes`` go into the configuration."""
    spec = spec or ForeignSpec(attention="concat", positions=True)
    _write(folder, spec, folder / "onnx" / GRAPH)
    return _configured(folder, {"model_type": "gpt2", **changes})


def write_written_out(folder: Path, *, seed: int = 0, **how: Any) -> Path:
    """A decoder as Optimum writes it, its attention as told in :class:`ForeignSpec`."""
    spec = ForeignSpec(attention="concat", positions=not how.get("counted"), seed=seed, **how)
    _save(folder / GRAPH, graph(spec), f"{GRAPH}_data", 1024)
    return _configured(folder, {"model_type": "llama"})


def _configured(folder: Path, changes: dict[str, Any]) -> Path:
    config = {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_head": HEADS, "eos_token_id": EOS} | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    return folder


def _write(folder: Path, spec: ForeignSpec, where: Path) -> None:
    _save(where, graph(spec), f"{GRAPH}.data" if spec.external else "", 64)
    (folder / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")


def _save(where: Path, model: onnx.ModelProto, data: str, threshold: int) -> None:
    """Save it, weights of so many bytes and more in a file ``data`` of their own."""
    where.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = {"save_as_external_data": True, "location": data, "size_threshold": threshold}
    onnx.save(model, str(where), **(kept if data else {}))


def edit_graph(where: Path, edit: Any) -> None:
    """Change the graph in the file ``where`` by ``edit(graph)``."""
    model = onnx.load(str(where), load_external_data=False)
    edit(model.graph)
    onnx.save(model, str(where))
