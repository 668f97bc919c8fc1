"""Decoders whose attention is written out in small operators, as PyTorch's exporter writes it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOut:
    """How attention is written out.

    Attributes:
        window: tokens a token of the last layer sees; 0 for all.
        alibi: whether the scores have a bias, counted from the sequence's end as MPT's is.
        counted: whether the graph counts positions from the length of the cache; else they are an input.
        cast: whether the cache is handed on by a ``Cast``.
    """

    window: int = 0
    alibi: bool = False
    counted: bool = False
    cast: bool = False


class _Builder(GraphBuilder):
    def __init__(self, how: WrittenOut, seed: int) -> None:
        super().__init__(ForeignSpec(attention="concat", positions=not how.counted, seed=seed))
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
        """What is added to the scores, float32, ``(new, total)`` or ``(1, heads, new, total)``."""
        total = self.dim("attention_mask", 1)
        columns = self.op("Range", self.const(0), self.number(total), self.const(1))
        distance = self.op("Sub", self.op("Unsqueeze", rows, self.const([1])), columns)
        allowed = self.op("GreaterOrEqual", distance, self.const(0))
        if window:
            allowed = self.op("And", allowed, self.op("Less", distance, self.const(window)))
        bias = self.op("Where", allowed, self.const(0.0, np.float32), self.const(-np.inf, np.float32))
        if not self.how.alibi:
            return bias
        slopes = self.const(-(0.5 ** np.arange(HEADS)).reshape(1, HEADS, 1, 1), np.float32)
        behind = self.op("Cast", self.op("Sub", total, columns), to=TensorProto.FLOAT)
        return self.op("Add", bias, self.op("Mul", behind, slopes))

    def written_out(self, layer: int, value: str, bias: str) -> str:
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
        present, inputs = f"present.{layer}.{kind}", [f"past_key_values.{layer}.{kind}", new]
        name = f"grown_{layer}_{kind}" if self.how.cast else present
        self.nodes.append(helper.make_node("Concat", inputs, [name], axis=-2))
        if self.how.cast:
            self.nodes.append(helper.make_node("Cast", [name], [present], to=TensorProto.FLOAT))
        return name

    def repeated(self, value: str) -> str:
        """Every KV head as often as query heads share it."""
        dims = [self.dim(value, axis) for axis in range(4)]
        shape = self.op("Concat", *dims[:2], self.const([HEADS // KV_HEADS]), *dims[2:], axis=0)
        wide = self.op("Expand", self.op("Unsqueeze", value, self.const([2])), shape)
        return self.op("Reshape", wide, self.op("Concat", dims[0], self.const([HEADS]), *dims[2:], axis=0))


def written_out(how: WrittenOut, seed: int) -> onnx.ModelProto:
    """The decoder."""
    b = _Builder(how, seed)
    places = b.places()
    learned = b.op("Gather", b.random(CONTEXT, HIDDEN, scale=0.5), places if how.counted else "position_ids")
    hidden = b.op("Add", b.op("Gather", b.random(VOCAB, HIDDEN, scale=1.0), "input_ids"), learned)
    biases = [b.bias(places, how.window if layer == LAYERS - 1 else 0) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        hidden = b.op("Add", hidden, b.written_out(layer, b.norm(hidden), biases[layer]))
        inner = b.product(b.norm(hidden), HIDDEN, 2 * HIDDEN)
        hidden = b.op("Add", hidden, b.product(b.op("Relu", inner), 2 * HIDDEN, HIDDEN))
    scaled = b.op("Mul", b.norm(hidden), b.const(4.0, np.float32))
    b.nodes.append(helper.make_node("Identity", [b.product(scaled, HIDDEN, VOCAB)], ["logits"]))
    return decoder_model(b, b.spec)


def write_written_out(folder: Path, how: WrittenOut, *, seed: int = 0) -> Path:
    """The decoder as Optimum writes it."""
    folder.mkdir(parents=True)
    kept: dict[str, Any] = {
        "save_as_external_data": True,
        "location": f"{GRAPH}_data",
        "size_threshold": 1024,
    }
    onnx.save(written_out(how, seed), str(folder / GRAPH), **kept)
    config = {"model_type": "llama", "vocab_size": VOCAB, "n_positions": CONTEXT, "n_head": HEADS}
    config["eos_token_id"] = EOS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    return folder
