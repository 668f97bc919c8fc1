"""What a layer of a decoder graph computes, found by running it: is it causal attention?

Masks, scales and repeated heads are written in as many ways as there are architectures, so their operators
are not compared with patterns. The part of the graph between queries, keys, values and the result is cut
out (:mod:`edgespec_export.cache_parts`) and run. That it is a function of those and of the numbers of past
and new tokens alone is seen from the graph. What it computes is compared with attention as
GroupQueryAttention defines it: a causal mask, perhaps with a window, one scale, and as many query heads for
each key head.

The mask is looked at by itself, with scores that are all zero: then every token must give the same weight
to all that it may see, at the beginning, within, across the window's edge and at the end of the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec_export.cache_graph import Attention, UnsuitableError
from edgespec_export.cache_parts import GraphParts, OpenPart

__all__ = ["AttentionFacts", "examine"]

F32 = npt.NDArray[np.float32]

_PLACES = ((0, 1), (0, 9), (7, 1), (5, 4))  # past and new tokens
_EDGE, _LAST = 8, 2  # new tokens across the window's edge, at the end of the context
_TOLERANCE = 1e-4
_SPREAD = 4.0  # standard deviation of trial scores: large enough to tell a soft cap from a scale


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What GroupQueryAttention is told of a layer.

    Attributes:
        heads: of the queries.
        kv_heads: of keys and values.
        width: of a head.
        scale: of the scores.
        window: tokens that a token sees, itself included; 0 where it sees all before it.
    """

    heads: int
    kv_heads: int
    width: int
    scale: float
    window: int


def examine(parts: GraphParts, layers: Sequence[Attention], context: int) -> list[AttentionFacts]:
    """What each of ``layers`` computes.

    Args:
        parts: of the graph.
        layers: its attention.
        context: most tokens the model reads.

    Raises:
        UnsuitableError: something else than attention with a causal mask.
    """
    masks = [parts.cut(layer.weights, [layer.scores]) for layer in layers]
    wholes = [parts.cut(layer.output, [layer.queries, layer.keys, layer.values]) for layer in layers]
    asked = {node.input[0] for part in (*masks, *wholes) for node in part.shapes}
    asked |= {name for each in layers for name in (each.queries, each.keys, each.values, each.scores)}
    parts.measure(asked)
    found = []
    for layer, mask, whole in zip(layers, masks, wholes, strict=True):
        heads, kv_heads, width = _sizes(parts, layer)
        window = _window(parts.open(mask), layer, heads, context)
        attention = parts.open(whole)
        scale = _scale(attention, layer, (heads, kv_heads, width))
        facts = AttentionFacts(heads, kv_heads, width, scale, window)
        _compare(attention, layer, facts, context)
        found.append(facts)
    return found


def _sizes(parts: GraphParts, layer: Attention) -> tuple[int, int, int]:
    """Heads, KV heads and width, of values that have the shapes they should."""
    queries, keys = parts.shape(layer.queries), parts.shape(layer.keys)
    if queries.shape != (3, 4) or keys.shape != (3, 4):
        raise UnsuitableError(f"{layer.queries} is not (batch, heads, tokens, width)")
    heads, kv_heads, width = int(queries[0, 1]), int(keys[0, 1]), int(keys[0, 3])
    none, new, total = [0] * 4, [0, 0, 1, 0], [0, 0, 1, 0]
    expected = {
        layer.queries: [[1, heads, 0, width], none, new],
        layer.keys: [[1, kv_heads, 0, width], total, new],
        layer.values: [[1, kv_heads, 0, width], total, new],
        layer.scores: [[1, heads, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]],
    }
    as_expected = all(np.array_equal(parts.shape(name), shape) for name, shape in expected.items())
    if not as_expected or heads % kv_heads:
        raise UnsuitableError(f"{layer.scores} is no product of heads with heads of the same width")
    return heads, kv_heads, width


def _window(mask: OpenPart, layer: Attention, heads: int, context: int) -> int:
    """The mask's window, 0 where it has none, if it is causal wherever it is looked at."""

    def weights(place: tuple[int, int]) -> F32:
        past, new = place
        return mask.run(place, {layer.scores: np.zeros((1, heads, new, past + new), np.float32)})

    end = (context - _LAST, _LAST)
    seen = int(np.count_nonzero(weights(end)[0, 0, -1]))
    window = 0 if seen == context else seen
    for place in (*_places(window, context), end):
        allowed = _allowed(*place, window)
        expected = allowed / allowed.sum(axis=1, keepdims=True)
        if not np.allclose(weights(place), expected, rtol=_TOLERANCE, atol=0):
            raise UnsuitableError(f"the mask of {layer.scores} is not causal, or the scores have a bias")
    return window


def _scale(attention: OpenPart, layer: Attention, sizes: tuple[int, int, int]) -> float:
    """By how much a product of query and key is multiplied, from the weights of two tokens."""
    heads, kv_heads, width = sizes
    queries = np.ones((1, heads, 1, width), np.float32)
    keys, values = np.zeros((2, 1, kv_heads, 2, width), np.float32)
    keys[:, :, 0], values[:, :, 0] = 1 / width, 1  # products of one and zero
    given = {layer.queries: queries, layer.keys: keys, layer.values: values}
    share = float(attention.run((1, 1), given).mean(dtype=np.float64))
    if not 0.5 < share < 1:
        raise UnsuitableError(f"{layer.scores} is not scaled by a number above zero")
    return _usual_scale(float(np.log(share / (1 - share))), width)


def _usual_scale(measured: float, width: int) -> float:
    """The scale, measured to six digits; exactly, where it is a usual one.

    PyTorch splits the first between queries and keys.
    """
    usual = (width**-0.5, width**-0.25, 1.0)
    return next((exact for exact in usual if abs(measured / exact - 1) < _TOLERANCE), measured)


def _compare(attention: OpenPart, layer: Attention, facts: AttentionFacts, context: int) -> None:
    """Compare with attention of those facts, on random queries, keys and values."""
    spread = (_SPREAD / facts.scale) ** 0.5 * facts.width**-0.25
    for past, new in _places(facts.window, context):
        rng = np.random.default_rng(past)
        queries = rng.normal(0, spread, (1, facts.heads, new, facts.width)).astype(np.float32)
        both = rng.normal(0, spread, (2, 1, facts.kv_heads, past + new, facts.width))
        keys, values = both.astype(np.float32)
        given = attention.run((past, new), {layer.queries: queries, layer.keys: keys, layer.values: values})
        expected = _attention(queries, keys, values, facts)
        if given.shape != expected.shape or not np.allclose(given, expected, atol=_TOLERANCE * spread):
            raise UnsuitableError(f"{layer.output} is not attention of grouped heads with one scale")


def _places(window: int, context: int) -> list[tuple[int, int]]:
    """Past and new tokens to look at, all of them well within the context."""
    edge = (max(window - 3, 0), _EDGE)
    return [*_PLACES, edge] if 0 < window < context - _EDGE else [*_PLACES]


def _allowed(past: int, new: int, window: int) -> npt.NDArray[np.bool_]:
    """Which tokens each new one sees, ``(new, past + new)``."""
    distance = np.arange(past, past + new)[:, None] - np.arange(past + new)
    allowed: npt.NDArray[np.bool_] = (distance >= 0) & (distance < (window or past + new))
    return allowed


def _attention(queries: F32, keys: F32, values: F32, facts: AttentionFacts) -> F32:
    total, new = keys.shape[2], queries.shape[2]
    keys, values = (np.repeat(array, facts.heads // facts.kv_heads, axis=1) for array in (keys, values))
    scores = facts.scale * queries.astype(np.float64) @ keys.transpose(0, 1, 3, 2)
    scores = np.where(_allowed(total - new, new, facts.window), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights @ values, np.float32)
