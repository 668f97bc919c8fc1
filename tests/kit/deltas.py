"""Layers with states in plain NumPy, and what a sequence keeps: gated delta nets (arXiv 2412.06464) and
Mamba-2 (arXiv 2405.21060), from their formulas.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from tests.kit.gguf import F32
from tests.kit.kernels import F64, graph, inputs_of

LOGGED = 16
INPUTS = inputs_of("Delta")
KEPT = INPUTS[1:4]
EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A layer's shape and weights. ``tiled`` value heads that share a key head lie apart, others together."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    tiled: bool
    weights: F32  # ``(taps, channels)``
    a: F32  # ``(value_heads,)``, below 0
    bias: F32
    gain: F32  # ``(value_width,)``

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def width(self) -> int:
        return self.channels + self.values + 2 * self.value_heads

    @property
    def ring(self) -> int:
        return LOGGED + len(self.weights) - 1

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what a sequence keeps: its state, its log and its ring."""
        state = self.value_heads, self.value_width // 16, self.key_width, 16
        return state, (LOGGED, self.keys + self.values + self.value_heads), (self.ring, self.channels)

    def attributes(self) -> dict[str, int | float]:
        names = ("key_heads", "value_heads", "key_width", "value_width", "tiled")
        return {name: int(getattr(self, name)) for name in names} | {"epsilon": EPSILON}

    def feeds(self, packed: F32, kept: "Kept", sequences: Any, places: Any) -> dict[str, npt.NDArray[Any]]:
        numbers = [np.array(x, np.int64).reshape(-1, n) for x, n in ((sequences, 2), (places, 2))]
        values: list[npt.NDArray[Any]] = [packed, *kept.arrays, *numbers]
        values += self.weights, self.a, self.bias, self.gain
        return dict(zip(INPUTS, values, strict=True))

    def model(self) -> bytes:
        feeds = self.feeds(np.zeros((1, 0, self.width), np.float32), Kept(self, 1), (), ())
        outputs = dict.fromkeys(("y", *(f"{name}_now" for name in KEPT)), TensorProto.FLOAT)
        return graph("Delta", outputs, feeds, {}, self.attributes())

    def expected(self, packed: F32) -> F64:
        """What a text's rows ``(rows, width)`` give, ``(rows, values)``."""
        rows, taps = packed.astype(np.float64), len(self.weights)
        inputs = np.concatenate([np.zeros((taps - 1, self.channels)), rows[:, : self.channels]])
        mixed = sum(self.weights[tap] * inputs[tap : tap + len(rows)] for tap in range(taps))
        mixed = mixed * _sigmoid(mixed)
        query, key = (
            _unit(part.reshape(len(rows), self.key_heads, self.key_width))
            for part in np.split(mixed[:, : 2 * self.keys], 2, axis=1)
        )
        query /= np.sqrt(self.key_width)
        value = mixed[:, 2 * self.keys :].reshape(len(rows), self.value_heads, self.value_width)
        gate, alpha, beta = np.split(
            rows[:, self.channels :], [self.values, self.values + self.value_heads], axis=1
        )
        decay, strength = np.exp(self.a * np.logaddexp(0, alpha + self.bias)), _sigmoid(beta)
        y = np.empty_like(value)
        for head in range(self.value_heads):
            shared = self.value_heads // self.key_heads
            of_key = head % self.key_heads if self.tiled else head // shared
            state = np.zeros((self.key_width, self.value_width))
            for row in range(len(rows)):
                k, q = key[row, of_key], query[row, of_key]
                state *= decay[row, head]
                state += np.outer(k, strength[row, head] * (value[row, head] - k @ state))
                y[row, head] = q @ state
        y *= self.gain / np.sqrt(np.square(y).mean(axis=-1, keepdims=True) + EPSILON)
        result: F64 = y.reshape(len(rows), -1) * gate * _sigmoid(gate)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """A layer's shape and weights."""

    heads: int
    head_width: int
    groups: int
    key_width: int
    weights: F32  # ``(taps, channels)``
    conv_bias: F32  # ``(channels,)``
    a: F32  # ``(heads,)``, below 0
    bias: F32
    skip: F32
    gain: F32  # ``(values,)``

    @property
    def keys(self) -> int:
        return self.groups * self.key_width

    @property
    def values(self) -> int:
        return self.heads * self.head_width

    @property
    def width(self) -> int:
        return 2 * self.values + 2 * self.keys + self.heads

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what a sequence keeps: its state, its log and its ring."""
        state = self.heads, self.head_width // 16, self.key_width, 16
        ring = LOGGED + len(self.weights) - 1, self.values + 2 * self.keys
        return state, (LOGGED, self.keys + self.values + self.heads), ring

    def feeds(self, packed: F32, kept: "Kept", sequences: Any, places: Any) -> dict[str, npt.NDArray[Any]]:
        numbers = [np.array(x, np.int64).reshape(-1, n) for x, n in ((sequences, 2), (places, 2))]
        values: list[npt.NDArray[Any]] = [packed, *kept.arrays, *numbers]
        values += self.weights, self.conv_bias, self.a, self.bias, self.skip, self.gain
        return dict(zip(inputs_of("Mamba"), values, strict=True))

    def model(self) -> bytes:
        feeds = self.feeds(np.zeros((1, 0, self.width), np.float32), Kept(self, 1), (), ())
        outputs = dict.fromkeys(("y", *(f"{name}_now" for name in KEPT)), TensorProto.FLOAT)
        numbers = {"heads": self.heads, "width": self.head_width, "groups": self.groups}
        facts = numbers | {"key_width": self.key_width, "epsilon": EPSILON}
        return graph("Mamba", outputs, feeds, {}, facts)

    def expected(self, packed: F32) -> F64:
        """What a text's rows ``(rows, width)`` give, ``(rows, values)``."""
        rows, taps = packed.astype(np.float64), len(self.weights)
        gate, inputs, steps = np.split(rows, [self.values, rows.shape[1] - self.heads], axis=1)
        padded = np.concatenate([np.zeros((taps - 1, inputs.shape[1])), inputs])
        mixed = sum(self.weights[tap] * padded[tap : tap + len(rows)] for tap in range(taps)) + self.conv_bias
        mixed = mixed * _sigmoid(mixed)
        value, key, query = np.split(mixed, [self.values, self.values + self.keys], axis=1)
        value = value.reshape(len(rows), self.heads, self.head_width)
        key, query = (part.reshape(len(rows), self.groups, self.key_width) for part in (key, query))
        step = np.logaddexp(0, steps + self.bias)
        y = np.empty_like(value)
        for head in range(self.heads):
            group, state = head * self.groups // self.heads, np.zeros((self.key_width, self.head_width))
            for row in range(len(rows)):
                state *= np.exp(step[row, head] * self.a[head])
                state += np.outer(key[row, group], step[row, head] * value[row, head])
                y[row, head] = query[row, group] @ state + self.skip[head] * value[row, head]
        gated = (y.reshape(gate.shape) * gate * _sigmoid(gate)).reshape(len(rows), self.groups, -1)
        normed = gated / np.sqrt(np.square(gated).mean(axis=-1, keepdims=True) + EPSILON)
        result: F64 = normed.reshape(gate.shape) * self.gain
        return result


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _unit(x: F64) -> F64:
    unit: F64 = x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + 1e-6)
    return unit


@dataclass(slots=True)
class Kept:
    """What the sequences in ``slots`` keep, NaN where there is nothing yet."""

    net: Net | Mamba
    slots: int
    arrays: tuple[F32, ...] = field(init=False)

    def __post_init__(self) -> None:
        shapes = ((self.slots, *shape) for shape in self.net.shapes())
        self.arrays = tuple(np.full(shape, np.nan, np.float32) for shape in shapes)

    def of(self, slot: int) -> list[F32]:
        return [array[slot].copy() for array in self.arrays]


@dataclass(slots=True)
class Sequence:
    """A text as far as it was read, and behind which token its state lies."""

    slot: int
    text: F32  # ``(tokens, width)``
    length: int = 0
    behind: int = 0

    def read(self, rows: int) -> tuple[int, int]:
        """Read so many; what a pass is told of it."""
        before = self.length, rows
        self.behind, self.length = max(self.length, self.length + rows - LOGGED), self.length + rows
        return before


def make_net(rng: np.random.Generator, **shape: int) -> Net:
    """Two value heads of 16 for each of two key heads of 16, unless told otherwise."""
    heads = {"key_heads": 2, "value_heads": 4, "key_width": 16, "value_width": 16}
    known: dict[str, Any] = heads | {"taps": 4, "tiled": 0} | shape
    taps, tiled = known.pop("taps"), bool(known.pop("tiled"))
    keys, values = (known[f"{kind}_heads"] * known[f"{kind}_width"] for kind in ("key", "value"))
    a, bias = -rng.uniform(0.1, 2, known["value_heads"]), rng.normal(0, 1, known["value_heads"])
    named = {"weights": rng.normal(0, 0.5, (taps, 2 * keys + values)), "a": a, "bias": bias}
    named |= {"gain": rng.uniform(0.5, 1.5, known["value_width"])}
    return Net(**known, tiled=tiled, **{name: x.astype(np.float32) for name, x in named.items()})


def make_mamba(rng: np.random.Generator, **shape: int) -> Mamba:
    """Two heads of 16 for each of two groups, unless told otherwise."""
    heads_of_16: dict[str, Any] = {"heads": 4, "head_width": 16, "groups": 2, "key_width": 16, "taps": 4}
    known = heads_of_16 | shape
    taps, heads = known.pop("taps"), known["heads"]
    values = heads * known["head_width"]
    channels = values + 2 * known["groups"] * known["key_width"]
    named: dict[str, Any] = {
        "weights": rng.normal(0, 0.5, (taps, channels)),
        "conv_bias": rng.normal(0, 0.5, channels),
    }
    named |= {"a": -rng.uniform(0.1, 2, heads), "bias": rng.normal(0, 1, heads)}
    named |= {"skip": rng.normal(0, 1, heads), "gain": rng.uniform(0.5, 1.5, values)}
    return Mamba(**known, **{name: x.astype(np.float32) for name, x in named.items()})


def make_text(rng: np.random.Generator, net: Net | Mamba, tokens: int) -> F32:
    """Rows as a product gives them."""
    return rng.normal(0, 1, (tokens, net.width)).astype(np.float32)


def run_in_place(opened: Any, net: Net | Mamba, packed: F32, kept: Kept, sequences: Any, places: Any) -> F32:
    """A pass over ``(rows, width)`` whose states are written where they lie; ``(rows, values)``."""
    binding, feeds = opened.io_binding(), net.feeds(packed[None], kept, sequences, places)
    y = np.full((1, len(packed), net.values), np.nan, np.float32)
    for name, value in feeds.items():
        binding.bind_input(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
        if name in KEPT:
            binding.bind_output(f"{name}_now", "cpu", 0, np.float32, value.shape, value.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    opened.run_with_iobinding(binding)
    whole: F32 = y[0]
    return whole
