"""An int8 KV cache: a quarter of the memory, with scales found at export.

ONNX Runtime's GroupQueryAttention keeps keys and values as int8 with one constant scale per channel of
a head. The scales come from running the finished graph, piece by piece, over the texts below; what lies
beyond the largest magnitude seen there, and a margin, is clipped.

Models whose keys have a bias (Qwen2, Qwen2.5) may have channels that stay near 100 in every token, with most
others near 1. Their steps, though small beside such a channel, are rounding noise in the scores as large as
what the other channels say. A layer with such a channel keeps its cache in float32.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper

from edgespec_export.graphs.calibration import prompt_start
from edgespec_export.graphs.pieces import cut, walk
from edgespec_export.sources.blocks import F32
from edgespec_models.bundles.config import DecoderShape
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer

Statistics = Mapping[str, tuple[F32, F32]]

_MARGIN = np.float32(1.25)
_LARGEST_CODE = np.float32(127)
_LARGEST_STEP = np.float32(1)
_SCALE_INPUTS = 12  # GroupQueryAttention's k_scale; v_scale is the next
_PAST, _PRESENT = "past_key_values.", "present."
_TEXTS = (
    "The lighthouse stood at the end of a long gravel path. Every evening the keeper climbed 214 steps, "
    "trimmed the wick and wrote the weather into a grey book: wind from the north, 12 knots, fog by nine.",
    "Als der Zug endlich in den Bahnhof einfuhr, war es schon dunkel. Auf dem Gleis standen nur noch zwei "
    "Reisende, die übermüdet ihre Koffer zählten und nach dem Ausgang suchten.",
    "图书馆每天早上八点开门。学生们在门口排队，有的在看手机，有的在复习昨天的笔记。下雨的时候，大家都挤在屋檐下面。",
    "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError('no values')\n"
    "    total = 0.0\n    for value in values:\n        total += value\n    return total / len(values)\n",
    '{"name": "sensor-7", "readings": [18.25, 18.5, 19.0], "unit": "C", "ok": true}\n\n| a | b |\n|---|---|\n'
    "| 1 | 2 |\n\n**Question:** What is 17 * 23?\n**Answer:** 17 * 23 = 391.",
)


def calibration_tokens(tokenizer: Tokenizer, special: SpecialTokens) -> list[list[int]]:
    """Token ids of the texts the scales are found on, begun as the model's prompts are."""
    return [prompt_start(special) + tokenizer.encode(text) for text in _TEXTS]


def quantize_cache(graph: Path, config: DecoderShape, texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Rewrite the decoder ``graph``, its weights beside it, to keep keys and values as int8.

    Returns:
        The layers that stay float32: their keys have channels too large for the others.

    Raises:
        BundleError: ONNX Runtime cannot load the graph.
    """
    texts = [tokens[: config.context_length] for tokens in texts]
    pieces = cut(graph)
    try:
        statistics = cache_statistics(pieces, config, texts)
    finally:
        for piece in pieces:
            piece.unlink()
    kept = tuple(
        layer for layer in range(config.num_layers) if not _bears_int8(*statistics[f"{_PAST}{layer}.key"])
    )
    kept_names = tuple(f"{end}{layer}." for layer in kept for end in (_PAST, _PRESENT))
    model = onnx.load(str(graph), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention" and not node.input[3].startswith(kept_names):
            _scale(model, node, statistics)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith((_PAST, _PRESENT)) and not value.name.startswith(kept_names):
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    onnx.save(model, str(graph))
    return kept


def cache_statistics(
    pieces: Sequence[Path], config: DecoderShape, texts: Sequence[Sequence[int]]
) -> Statistics:
    """What ``texts`` leave in the KV cache of a graph in ``pieces``.

    By the names of the cache's inputs, of each channel its largest magnitude and its standard deviation over
    all tokens: float32 ``(kv heads, head_dim)`` each.

    Raises:
        BundleError: ONNX Runtime cannot load a piece.
    """
    found: dict[str, tuple[F32, F32]] = {}
    seen = defaultdict[str, list[F32]](list)
    for step in walk(pieces, config, texts):
        for name, array in step.cache.items():
            seen[name].append(array[0, :, : len(texts[step.text])])
        if step.last:
            for name, rows in seen.items():
                values = np.concatenate(rows, axis=1)
                found[name] = np.abs(values).max(axis=1), values.std(axis=1)
            seen.clear()
    return found


def _bears_int8(largest: F32, spread: F32) -> bool:
    """Whether no channel's rounding drowns what the other channels of its head say."""
    step = _scales(largest).max(axis=1)
    return bool((step <= _LARGEST_STEP * np.median(spread, axis=1)).all())


def _scales(largest: F32) -> F32:
    """One for each channel."""
    # A channel that was never used keeps what little may come.
    largest = np.maximum(largest, largest.max() / _LARGEST_CODE)
    return np.where(largest == 0, np.float32(1), largest * (_MARGIN / _LARGEST_CODE))


def _scale(model: onnx.ModelProto, node: onnx.NodeProto, statistics: Statistics) -> None:
    """Give one attention its scales."""
    node.input.extend([""] * (_SCALE_INPUTS - len(node.input)))
    for past in node.input[3:5]:
        scales = _scales(statistics[past][0]).ravel()
        model.graph.initializer.append(onnx.numpy_helper.from_array(scales, f"{past}.scale"))
        node.input.append(f"{past}.scale")
    node.attribute.extend(
        onnx.helper.make_attribute(name, value)
        for name, value in (
            ("k_quant_type", "PER_CHANNEL"),
            ("v_quant_type", "PER_CHANNEL"),
            ("kv_cache_bit_width", 8),
        )
    )
