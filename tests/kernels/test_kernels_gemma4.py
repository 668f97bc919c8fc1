"""What Gemma 4 asks of the kernels: caches of other layers, normalized values, inputs of layers, caps."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper

from edgespec_models.bundles.tiles import pack
from tests.kernels.test_kernels import dequantized
from tests.kernels.test_kernels_attention import Cache, Layer, by_block, make_layer
from tests.kit.gguf import F32
from tests.kit.kernels import everywhere, graph, random_blocks, same_bits, session

HEADS, KV, WIDTH, ROWS = 4, 2, 32, 21
Y = {"y": TensorProto.FLOAT}


def variant(layer: Layer, **attributes: float) -> bytes:
    """The layer's graph with more attributes."""
    model = onnx.load_from_string(layer.model())
    (node,) = model.graph.node
    kept = [each for each in node.attribute if each.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept + [helper.make_attribute(*each) for each in attributes.items()])
    content: bytes = model.SerializeToString()
    return content


def attending(layer: Layer) -> bytes:
    """The layer's graph without a cache of its own."""
    model = onnx.load_from_string(layer.model())
    (node,) = model.graph.node
    del node.output[1:]
    del model.graph.output[1:]
    content: bytes = model.SerializeToString()
    return content


def layer_of(rng: np.random.Generator, *, positions: int = 64, **more: Any) -> Layer:
    shape: dict[str, Any] = {"heads": HEADS, "kv_heads": KV, "head_dim": WIDTH, "gains": True}
    return make_layer(rng, positions, **shape, **{"rotated": WIDTH, **more})


def packed_of(rng: np.random.Generator, rows: int = ROWS) -> F32:
    return rng.normal(0, 1.5, (1, rows, (HEADS + 2 * KV) * WIDTH)).astype(np.float32)


def test_a_layer_attends_to_what_another_has_written() -> None:
    rng = np.random.default_rng(0)
    layer, packed = layer_of(rng, window=7), packed_of(rng)
    before = layer.feeds(packed, Cache.empty(layer, 32))
    wanted, keys, values = everywhere(layer.model(), before)
    queries = np.ascontiguousarray(packed[..., : HEADS * WIDTH])
    feeds = {**before, "packed": queries, "past_key": keys, "past_value": values}
    for threads in (1, 3):
        (y,) = everywhere(attending(layer), feeds, threads)
        same_bits(wanted, y)
    with pytest.raises(Exception, match="edgespec: a node lacks an output"):
        session(attending(layer)).run(None, before)


def test_values_are_keys_before_their_normalization_and_normalized_themselves() -> None:
    rng = np.random.default_rng(1)
    layer, packed = layer_of(rng), packed_of(rng)
    keys = slice(HEADS * WIDTH, (HEADS + KV) * WIDTH)
    packed[..., keys.stop :] = packed[..., keys]
    cache = Cache.empty(layer, 32)
    model = variant(layer, normed_values=1)
    wanted = everywhere(model, layer.feeds(packed, cache))
    tied = layer.feeds(packed, cache) | {"packed": np.ascontiguousarray(packed[..., : keys.stop])}
    for one, other in zip(wanted, everywhere(model, tied), strict=True):
        same_bits(one, other)
    rows = packed[0, :, keys].reshape(ROWS, KV, WIDTH).swapaxes(0, 1).astype(np.float64)
    normal = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(by_block(wanted[2])[cache.at][0, :, :ROWS], normal, rtol=2**-10, atol=1e-6)


def test_the_first_pairs_turn_as_far_apart_as_they_are() -> None:
    rng = np.random.default_rng(2)
    layer, packed = layer_of(rng), packed_of(rng)
    assert layer.tables is not None
    cos, sin = (table.copy() for table in layer.tables)
    cos[:, 5:], sin[:, 5:] = 1, 0
    feeds = layer.feeds(packed, Cache.empty(layer, 32)) | {"cos": cos, "sin": sin}
    few = {"cos": np.ascontiguousarray(cos[:, :5]), "sin": np.ascontiguousarray(sin[:, :5])}
    model = variant(layer, pair_distance=WIDTH // 2)
    for one, other in zip(everywhere(layer.model(), feeds), everywhere(model, feeds | few), strict=True):
        same_bits(one, other)


def test_queries_grow_by_steps() -> None:
    rng = np.random.default_rng(3)
    layer, packed = layer_of(rng), packed_of(rng)
    feeds = layer.feeds(packed, Cache.empty(layer, 32))
    y, *_ = everywhere(variant(layer, growth_step=8, growth=0.3), feeds)
    for row in range(ROWS):
        scale = np.float32(WIDTH**-0.5) * np.float32(1 + np.float32(0.3) * np.log1p(row // 8))
        wanted, *_ = session(variant(layer, scale=float(scale))).run(None, feeds)
        same_bits(wanted[:, row], y[:, row])


@pytest.mark.parametrize(
    ("attributes", "words"),
    [({"pair_distance": WIDTH}, "farther apart"), ({"growth_step": -1}, "negative number of tokens")],
)
def test_attributes_that_cannot_be(attributes: dict[str, float], words: str) -> None:
    layer = layer_of(np.random.default_rng(0))
    with pytest.raises(Exception, match=words):
        session(variant(layer, **attributes))


def inputs_graph(feeds: dict[str, npt.NDArray[Any]], raw: Any, gain: F32, **more: float) -> bytes:
    facts = {"format": "Q8_0", "rows": len(raw), "width": 96, "part": 32, "factor": 4.0, "epsilon": 0.5}
    constants: dict[str, npt.NDArray[Any]] = {"table": pack("Q8_0", raw), "gain": gain}
    return graph("LayerInputs", Y, feeds, constants, facts | more)


def test_inputs_of_layers() -> None:
    rng = np.random.default_rng(4)
    raw, ids = random_blocks(rng, "Q8_0", 40, 96), rng.integers(0, 40, (1, 9))
    product = rng.normal(0, 2, (1, 9, 96)).astype(np.float32)
    gain = rng.uniform(0.5, 1.5, 32).astype(np.float32)
    feeds: dict[str, npt.NDArray[Any]] = {"ids": ids, "product": product}
    (y,) = everywhere(inputs_graph(feeds, raw, gain), feeds, 2)
    parts = product.reshape(9, 3, 32).astype(np.float64)
    normal = parts / np.sqrt((parts**2).mean(axis=-1, keepdims=True) + 0.5) * gain
    wanted = (normal.reshape(1, 9, 96) + 4.0 * dequantized("Q8_0", raw)[ids]) * np.sqrt(0.5)
    np.testing.assert_allclose(y, wanted, rtol=2e-6, atol=1e-6)
    for row in range(9):
        alone: dict[str, npt.NDArray[Any]] = {"ids": ids[:, [row]], "product": product[:, [row]]}
        same_bits(y[:, [row]], session(inputs_graph(alone, raw, gain)).run(None, alone)[0])
    with pytest.raises(Exception, match="no multiple"):
        session(inputs_graph(feeds, raw, gain, part=36))
    with pytest.raises(Exception, match="not in the vocabulary"):
        session(inputs_graph(feeds, raw, gain)).run(None, {**feeds, "ids": ids + 39})
    with pytest.raises(Exception, match="is not float32"):
        session(inputs_graph(feeds, raw, gain)).run(None, {**feeds, "ids": ids[:, :3]})


def gate_graph(feeds: dict[str, npt.NDArray[Any]], layer: int) -> bytes:
    return graph("InputGate", Y, feeds, {}, {"layer": layer, "gate": "gelu"})


def test_a_layers_inputs_times_their_gate() -> None:
    rng = np.random.default_rng(5)
    x, inputs = (rng.normal(0, 1, (1, 5, width)).astype(np.float32) for width in (32, 96))
    feeds = {"x": x, "inputs": inputs}
    for layer in range(3):
        (y,) = everywhere(gate_graph(feeds, layer), feeds)
        u = np.sqrt(2 / np.pi) * (x + 0.044715 * x.astype(np.float64) ** 3)
        wanted = 0.5 * x * (1 + np.tanh(u)) * inputs[..., 32 * layer : 32 * layer + 32]
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(Exception, match="does not fit the inputs"):
        session(gate_graph(feeds, 3)).run(None, feeds)
    twice = {"x": np.concatenate([x, x]), "inputs": inputs}
    with pytest.raises(Exception, match="does not fit the inputs"):
        session(gate_graph(twice, 0)).run(None, twice)


def test_logits_end_softly() -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(0, 40, (1, 3, 9001)).astype(np.float32)
    model = graph("Cap", Y, {"x": x}, {}, {"most": 30.0})
    (y,) = everywhere(model, {"x": x}, 3)
    np.testing.assert_allclose(y, 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6, atol=5e-6)
    same_bits(y[:, 1:2], session(model).run(None, {"x": x[:, 1:2]})[0])
    x[0, 1, 7:10] = np.inf, -np.inf, np.nan
    (y,) = everywhere(model, {"x": x})
    assert np.isnan(y).nonzero()[2].tolist() == [7, 8, 9]
    with pytest.raises(Exception, match="not above 0"):
        session(graph("Cap", Y, {"x": x}, {}, {"most": 0.0}))


def clusters_graph(
    feeds: dict[str, npt.NDArray[Any]], tokens: npt.NDArray[Any], raw: Any, **more: Any
) -> bytes:
    facts = {"inputs": 96, "clusters": 4, "read": 2, "format": "Q8_0"}
    constants: dict[str, npt.NDArray[Any]] = {"tokens": tokens, "weights": pack("Q8_0", raw)}
    return graph("Clusters", Y, feeds, constants, facts | more)


def test_logits_of_tokens_of_the_clusters_with_the_highest_scores() -> None:
    """They have the bits of a product with the whole matrix; the first of equal clusters is read."""
    rng = np.random.default_rng(6)
    raw, tokens = random_blocks(rng, "Q8_0", 128, 96), rng.permutation(128)
    x, scores = rng.normal(0, 2, (1, 5, 96)), rng.normal(0, 1, (1, 5, 4))
    scores[0, 0], scores[0, 1] = 1, (np.nan, 2, 1, np.nan)
    feeds = {"x": x.astype(np.float32), "scores": scores.astype(np.float32)}
    (y,) = everywhere(clusters_graph(feeds, tokens, raw), feeds, 3)
    facts = {"inputs": 96, "epsilon": 1e-5, "gate": "", "parts": "Q8_0:128"}
    product = graph("Linear", Y, {"x": feeds["x"]}, {"weights": pack("Q8_0", raw)}, facts)
    (whole,) = session(product).run(None, {"x": feeds["x"]})
    for row in (0, 2, 3, 4):
        wanted = np.full(128, -1e30, np.float32)
        for cluster in np.argsort(-scores[0, row], kind="stable")[:2]:
            places = slice(32 * cluster, 32 * cluster + 32)
            wanted[tokens[places]] = whole[0, row, places]
        same_bits(wanted, y[0, row])
    assert (y[0, 1] > -1e29).sum() in (32, 64)  # whatever is no number


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"read": 0}, "or none is read"),
        ({"read": 5}, "or none is read"),
        ({"clusters": 3}, "not of as many whole tiles each"),
        ({"clusters": 16}, "not of as many whole tiles each"),
        ({"inputs": 64}, "more or fewer bytes"),
        ({"twice": 1}, "a token is in two clusters, or in no vocabulary"),
        ({"twice": 128}, "a token is in two clusters, or in no vocabulary"),
        ({"scores": 5}, "with a score for each cluster"),
    ],
)
def test_clusters_that_cannot_be(changed: dict[str, int], words: str) -> None:
    raw, tokens = random_blocks(np.random.default_rng(7), "Q8_0", 128, 96), np.arange(128)
    tokens[0] = changed.pop("twice", 0)
    shape = 1, 2, changed.pop("scores", 4)
    feeds: dict[str, npt.NDArray[Any]] = {"x": np.zeros((1, 2, 96), np.float32)}
    feeds["scores"] = np.zeros(shape, np.float32)
    with pytest.raises(Exception, match=words):
        session(clusters_graph(feeds, tokens, raw, **changed)).run(None, feeds)
