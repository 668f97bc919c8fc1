"""Mixtures of experts by edgespec's kernels, and what they must compute."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from edgespec_models.bundles.tiles import pack
from edgespec_models.files.blocks import F32, Blocks, unpack
from edgespec_models.files.tensors import U8, GGMLType
from tests.kit.kernels import EPSILON, F64, graph, normed, random_blocks, rounded, weights_of

Floats = npt.NDArray[Any]
MATRICES = ("gate", "up", "down")


@dataclass(frozen=True)
class Mixture:
    """The operator's constants and attributes; vectors go by the names of its inputs."""

    formats: tuple[str, str, str]
    raw: dict[str, U8]
    router: F32
    used: int
    width: int
    vectors: dict[str, F32] = field(default_factory=dict)
    gating: str = "softmax"
    normalized: bool = True
    scale: float = 1.0
    gate: str = "silu"
    shared: bool = False

    @property
    def inputs(self) -> int:
        return int(self.router.shape[1])

    @property
    def count(self) -> int:
        return len(self.raw["gate"]) // self.width

    @cached_property
    def weights(self) -> dict[str, F64]:
        """``(experts, rows, inputs)`` each, in float64."""
        pairs = zip(MATRICES, self.formats, strict=True)
        flat = {name: _weights(form, self.raw[name]) for name, form in pairs}
        return {name: values.reshape(self.count, -1, values.shape[1]) for name, values in flat.items()}

    def feeds(self, x: F32, **more: F32) -> dict[str, Floats]:
        return {"x": x, **more}

    def model(self, feeds: dict[str, Floats], **changed: Any) -> bytes:
        """``changed`` are attributes, or constants by their inputs' names; None leaves one out."""
        pairs = zip(MATRICES, self.formats, strict=True)
        constants: dict[str, Any] = {name: pack(form, self.raw[name]) for name, form in pairs}
        constants |= {"router": self.router, **self.vectors}
        attributes: dict[str, Any] = {"inputs": self.inputs, "width": self.width, "experts": self.count}
        attributes |= {"used": self.used, "gating": self.gating, "normalized": int(self.normalized)}
        attributes |= {"scale": self.scale, "epsilon": EPSILON, "gate": self.gate}
        attributes["formats"] = ",".join(self.formats)
        for name, value in changed.items():
            (attributes if name in attributes else constants)[name] = value
        constants = {name: value for name, value in constants.items() if value is not None}
        outputs = {"y": TensorProto.FLOAT, "different": TensorProto.INT64}
        return graph("Experts", outputs, feeds, constants, attributes)

    def chosen(self, x: Floats) -> tuple[npt.NDArray[np.int64], F64]:
        """The experts of each row, from the best on, and their weights; ``x`` is normalized."""
        scores = x.astype(np.float64) @ self.router[: self.count].T.astype(np.float64)
        scores = scores + self.vectors.get("router_bias", np.float32(0))
        if self.gating == "sigmoid":
            worth = _sigmoid(scores)
        else:
            worth = np.exp(scores - scores.max(axis=1, keepdims=True))
            worth = worth / worth.sum(axis=1, keepdims=True)
        order = np.argsort(-(worth + self.vectors.get("selection", np.float32(0))), axis=1, kind="stable")
        best = order[:, : self.used]
        weights = np.take_along_axis(worth, best, axis=1)
        if self.normalized:
            weights = weights / weights.sum(axis=1, keepdims=True)
        weights = weights * np.float32(self.scale)
        return best, weights * self.vectors.get("scales", np.ones(self.count, np.float32))[best]

    def expected(self, feeds: dict[str, Floats]) -> F64:
        """In float64, but for the rounding of activations: ``(rows, inputs)``."""
        stream = feeds["x"][0].astype(np.float64)
        x, read = self._normed("gain", stream), self._normed("router_gain", stream)
        read = read if "router_gain" in self.vectors else x
        best, weights = self.chosen(read)
        y, activations = np.zeros_like(x), rounded(x.astype(np.float32))[0]
        bias = self.vectors.get("bias", np.zeros((2, self.count, self.width), np.float32))
        down_bias = self.vectors.get("down_bias", np.zeros((self.count, self.inputs), np.float32))
        for row, (experts, shares) in enumerate(zip(best, weights, strict=True)):
            for e, share in zip(experts, shares, strict=True):
                gate, up = (self.weights[name][e] @ activations[row] for name in ("gate", "up"))
                inner = _gated(self.gate, gate + bias[0, e], up + bias[1, e])
                result = self.weights["down"][e] @ rounded(inner.astype(np.float32)[None])[0][0]
                y[row] += share * (result + down_bias[e])
        y = self._normed("post_gain", y)
        if self.shared:
            scored = len(self.router) > self.count
            score = read @ self.router[self.count].astype(np.float64) if scored else np.full(len(x), np.inf)
            y += feeds["shared"][0] * _sigmoid(score)[:, None]
        y = self._normed("sum_gain", y)
        return y + (feeds["residual"][0] if "residual" in feeds else 0)

    def _normed(self, name: str, x: F64) -> F64:
        return normed(x, self.vectors[name]) if name in self.vectors else x


def _weights(form: str, raw: U8) -> F64:
    blocks = unpack(GGMLType[form], raw)
    assert isinstance(blocks, Blocks)
    return weights_of(blocks)[0]


def _sigmoid(x: F64) -> F64:
    """Without powers of e, which overflow where random scales are large."""
    share: F64 = 0.5 * (1 + np.tanh(0.5 * x))
    return share


def _gated(name: str, gate: F64, up: F64) -> F64:
    if name == "gelu":
        active: F64 = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    elif name == "silu":
        active = gate * _sigmoid(gate) * up
    else:
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        active = gate * _sigmoid(1.702 * gate) * (up + 1)
    return active


def make_mixture(
    rng: np.random.Generator,
    *,
    count: int = 6,
    used: int = 2,
    width: int = 32,
    inputs: int = 64,
    formats: tuple[str, str, str] = ("Q8_0", "Q8_0", "Q8_0"),
    vectors: tuple[str, ...] = ("gain",),
    shared: bool = False,
    scored: bool = False,
    **options: Any,
) -> Mixture:
    """A random one."""
    shapes = dict(zip(MATRICES, ((width, inputs), (width, inputs), (inputs, width)), strict=True))
    raw = {
        name: random_blocks(rng, form, count * shapes[name][0], shapes[name][1])
        for name, form in zip(MATRICES, formats, strict=True)
    }
    router = rng.normal(0.0, inputs**-0.5, (count + scored, inputs)).astype(np.float32)
    sizes: dict[str, tuple[int, ...]] = {"gain": (inputs,), "router_bias": (count,), "selection": (count,)}
    sizes |= {"bias": (2, count, width), "down_bias": (count, inputs), "scales": (count,)}
    sizes |= dict.fromkeys(("router_gain", "post_gain", "sum_gain"), (inputs,))
    made = {name: rng.uniform(0.1, 1.0, sizes[name]).astype(np.float32) for name in vectors}
    return Mixture(formats, raw, router, used, width, made, shared=shared or scored, **options)


def make_feeds(rng: np.random.Generator, mixture: Mixture, rows: int, *, residual: bool) -> dict[str, Floats]:
    """Random rows, and what else ``mixture`` is given with them."""
    names = ["x"] + ["residual"] * residual + ["shared"] * mixture.shared
    return {name: rng.normal(size=(1, rows, mixture.inputs)).astype(np.float32) for name in names}
