"""The operations of a decoder layer and their derivatives, in float32.

An operation returns its result and the way back: a function that takes the derivative of the loss by the
result, and returns the derivative by the operation's inputs.
"""

from collections.abc import Callable
from math import sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
_HIDDEN = np.float32(-1e9)
_GELU = np.float32(sqrt(2.0 / np.pi))
_CUBIC = np.float32(0.044715)


def normalize(x: F32, epsilon: float) -> tuple[F32, Callable[[F32], F32]]:
    """RMSNorm without its gain (Zhang and Sennrich 2019)."""
    factor = 1.0 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(epsilon))
    normed: F32 = x * factor

    def back(by_y: F32) -> F32:
        along = (by_y * normed).mean(axis=-1, keepdims=True)
        by_x: F32 = (by_y - normed * along) * factor
        return by_x

    return normed, back


def activate(gate: F32, kind: Literal["silu", "gelu_tanh"]) -> tuple[F32, F32]:
    """The gate's activation and its slope."""
    if kind == "silu":
        share = np.reciprocal(1.0 + np.exp(-gate))
        slope = share - np.square(share)
    else:
        inner = np.tanh(_GELU * (gate + _CUBIC * gate * np.square(gate)))
        share = 0.5 * (1.0 + inner)
        slope = 0.5 * _GELU * (1.0 + 3.0 * _CUBIC * np.square(gate)) * (1.0 - np.square(inner))
    return np.multiply(gate, share), np.add(share, gate * slope)


def rotate(heads: F32, cos: F32, sin: F32, *, interleaved: bool) -> F32:
    """Rotary embedding (Su et al. 2021) of the leading elements; its transpose is ``rotate(..., -sin)``.

    ``heads`` are ``(heads, tokens, head_dim)``, ``cos`` and ``sin`` ``(tokens, rotary width / 2)``.
    """
    half = cos.shape[-1]
    first = np.s_[..., 0 : 2 * half : 2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1 : 2 * half : 2] if interleaved else np.s_[..., half : 2 * half]
    turned = heads.copy()
    turned[first] = heads[first] * cos - heads[second] * sin
    turned[second] = heads[second] * cos + heads[first] * sin
    return turned


def visible(tokens: int, window: int | None) -> F32:
    """The mask for scores, ``(tokens, tokens)``: a token sees itself and earlier ones, ``window`` in all."""
    at = np.arange(tokens)
    ago = at[:, None] - at[None, :]
    seen = (ago >= 0) & (ago < (window or tokens))
    return np.where(seen, np.float32(0.0), _HIDDEN)


def attend(query: F32, key: F32, value: F32, mask: F32) -> tuple[F32, Callable[[F32], tuple[F32, F32, F32]]]:
    """Causal attention of grouped heads; scores are not scaled.

    ``query`` is ``(kv heads, group, tokens, head_dim)``, as the result is; ``key`` and ``value`` are ``(kv
    heads, tokens, head_dim)``; ``mask`` is :func:`visible`.
    """
    scores = query @ key[:, None].swapaxes(-1, -2)
    scores += mask
    scores -= scores.max(axis=-1, keepdims=True)
    probs = np.exp(scores, out=scores)
    probs /= probs.sum(axis=-1, keepdims=True)

    def back(by_y: F32) -> tuple[F32, F32, F32]:
        by_probs = by_y @ value[:, None].swapaxes(-1, -2)
        by_scores = probs * (by_probs - (by_probs * probs).sum(axis=-1, keepdims=True))
        by_query = by_scores @ key[:, None]
        by_key = (by_scores.swapaxes(-1, -2) @ query).sum(axis=1)
        by_value = (probs.swapaxes(-1, -2) @ by_y).sum(axis=1)
        return by_query, by_key, by_value

    return probs @ value[:, None], back
