"""Decoders whose attention is written out in small operators, as PyTorch's exporter writes it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.foreign_for_tests import (
    CONTEXT,
    EOS,
    GRAPH,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    ForeignSpec,
    GraphBuilder,
    decoder_model,
)
from tests.tokenizers_for_tests import byte_level_json

Mask = Literal["positions", "buffer", "everything", "alibi", "first token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOut:
    """How attention is written out.

    Attributes:
        mask: how: from compared positions, as a slice of a stored square, or one that is not causal at all,
            has a bias by distance, or hides the first token beyond 500.
        window: tokens a token of the last layer sees; 0 for all.
        groups: how query heads share key heads: ``repeat``, blocks of heads; ``tile``, in turns.
        scale: of the scores: its root on both factors, behind the product, or with a soft cap.
        cast: whether the cache is handed on by a ``Cast``.
        positions: of the tokens: an input, or counted from the length of the cache.
        gate: whether the weights also depend on the hidden state.
        reader: whether something besides attention reads the cache.
    """

    mask: Mask = "positions"
    window: int = 0
    groups: Literal["repeat", "tile"] = "repeat"
    scale: Literal["roots", "after", "softcap"] = "roots"
    cast: bool = False
    positions: Literal["input", "cache"] = "input"
    gate: bool = False
    reader: bool = False


class _Builder(GraphBuilder):
    def __init__(self, how: WrittenOut) -> None:
        super().__init__(ForeignSpec(attention="concat", positions=how.positions == "input"))
        self.how = how

    def dim(self, value: str, axis: int) -> str:
        return self.op("Gather", self.op("Shape", value), self.const([axis]), axis=0)

    def number(self, value: str) -> str:
        return self.op("Squeeze", value)

    def places(self) -> str:
        """Positions of the new tokens, by the length of the cache; int64 ``(new,)``."""
        past = self.dim("past_key_values.0.key", 2)
        end = self.op("Add", past, self.dim("input_ids", 1))
        return self.op("Range", self.number(past), self.number(end), self.const(1))

    def bias(self, rows: str, window: int) -> str:
        """What is added to the scores, float32, ``(1, 1, new, total)`` or a head more."""
        total = self.dim("attention_mask", 1)
        columns = self.op("Range", self.const(0), self.number(total), self.const(1))
        rows = self.op("Unsqueeze", rows, self.const([1]))
        distance = self.op("Sub", rows, columns)
        if self.how.mask == "buffer":
            square = np.tril(np.ones((CONTEXT, CONTEXT), np.bool_))
            allowed = self.op(
                "Gather", self.const(square, np.bool_), self.op("Squeeze", rows, self.const([1]))
            )
            allowed = self.op("Slice", allowed, self.const([0]), total, self.const([1]))
        else:
            allowed = self.op("GreaterOrEqual", distance, self.const(0))
        if window:
            allowed = self.op("And", allowed, self.op("Less", distance, self.const(window)))
        if self.how.mask == "everything":
            allowed = self.op("Less", distance, self.const(CONTEXT))
        if self.how.mask == "first token":
            near = self.op(
                "Or", self.op("Less", rows, self.const(500)), self.op("Greater", columns, self.const(0))
            )
            allowed = self.op("And", allowed, near)
        bias = self.op("Where", allowed, self.const(0.0, np.float32), self.const(-np.inf, np.float32))
        if self.how.mask == "alibi":
            slopes = self.const(-(0.5 ** np.arange(HEADS)).reshape(1, HEADS, 1, 1), np.float32)
            bias = self.op(
                "Add", bias, self.op("Mul", self.op("Cast", distance, to=TensorProto.FLOAT), slopes)
            )
        return bias

    def written_out(self, layer: int, value: str, bias: str) -> str:
        query, key, inner = (
            self.heads(self.product(value, HIDDEN, n * WIDTH), n) for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        keys, values = (self.grown(layer, kind, new) for kind, new in (("key", key), ("value", inner)))
        root = self.const(WIDTH**-0.25 if self.how.scale == "roots" else 1.0, np.float32)
        turned = self.op("Transpose", self.repeated(keys), perm=[0, 1, 3, 2])
        scores = self.op("MatMul", self.op("Mul", query, root), self.op("Mul", turned, root))
        if self.how.scale != "roots":
            scores = self.op("Div", scores, self.const(3.0, np.float32))
        if self.how.scale == "softcap":
            scores = self.op("Mul", self.op("Tanh", scores), self.const(2.0, np.float32))
        weights = self.op("Softmax", self.op("Add", scores, bias), axis=-1)
        zero = self.const(0.0, np.float32)
        weights = self.op("Where", self.op("IsNaN", weights), zero, weights)
        if self.how.gate:
            gate = self.op("Sigmoid", self.heads(self.product(value, HIDDEN, HEADS), HEADS, 1))
            weights = self.op("Mul", weights, gate)
        result = self.op("MatMul", weights, self.repeated(values))
        result = self.op("Transpose", result, perm=[0, 2, 1, 3])
        result = self.op("Reshape", result, self.const([1, -1, HEADS * WIDTH]))
        return self.product(result, HEADS * WIDTH, HIDDEN)

    def grown(self, layer: int, kind: str, new: str) -> str:
        present, inputs = f"present.{layer}.{kind}", [f"past_key_values.{layer}.{kind}", new]
        name = f"grown_{layer}_{kind}" if self.how.cast else present
        self.nodes.append(helper.make_node("Concat", inputs, [name], axis=-2))
        if self.how.cast:
            self.nodes.append(helper.make_node("Cast", [name], [present], to=TensorProto.FLOAT))
        return name

    def repeated(self, value: str) -> str:
        """Every KV head as often as query heads share it."""
        dims = [self.dim(value, axis) for axis in range(4)]
        many = self.const([HEADS // KV_HEADS])
        front = [dims[0], dims[1], many] if self.how.groups == "repeat" else [dims[0], many, dims[1]]
        place = 2 if self.how.groups == "repeat" else 1
        shape = self.op("Concat", *front, dims[2], dims[3], axis=0)
        wide = self.op("Expand", self.op("Unsqueeze", value, self.const([place])), shape)
        return self.op("Reshape", wide, self.op("Concat", dims[0], self.const([HEADS]), *dims[2:], axis=0))


def written_out(how: WrittenOut) -> onnx.ModelProto:
    """The decoder."""
    b = _Builder(how)
    counted = b.places()
    positions = "position_ids" if how.positions == "input" else counted
    learned = b.op("Gather", b.random(CONTEXT, HIDDEN, scale=0.5), positions)
    hidden = b.op("Add", b.op("Gather", b.random(VOCAB, HIDDEN, scale=1.0), "input_ids"), learned)
    biases = [b.bias(counted, how.window if layer == LAYERS - 1 else 0) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        hidden = b.op("Add", hidden, b.written_out(layer, b.norm(hidden), biases[layer]))
        inner = b.product(b.norm(hidden), HIDDEN, 2 * HIDDEN)
        hidden = b.op("Add", hidden, b.product(b.op("Relu", inner), 2 * HIDDEN, HIDDEN))
    if how.reader:
        hidden = b.op("Add", hidden, b.op("ReduceMean", "present.0.key", keepdims=0))
    scaled = b.op("Mul", b.norm(hidden), b.const(4.0, np.float32))
    b.nodes.append(helper.make_node("Identity", [b.product(scaled, HIDDEN, VOCAB)], ["logits"]))
    return decoder_model(b, b.spec)


def write_written_out(folder: Path, how: WrittenOut, **changes: Any) -> Path:
    """The decoder as Optimum writes it; ``changes`` go into the configuration."""
    folder.mkdir(parents=True)
    kept: dict[str, Any] = {
        "save_as_external_data": True,
        "location": f"{GRAPH}_data",
        "size_threshold": 1024,
    }
    onnx.save(written_out(how), str(folder / GRAPH), **kept)
    config = {"model_type": "llama", "vocab_size": VOCAB, "n_positions": CONTEXT, "n_head": HEADS}
    config |= {"eos_token_id": EOS, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    return folder
