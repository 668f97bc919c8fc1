"""Graphs of one of edgespec's operators, written on the spot, and what they must compute."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from edgespec_models.bundles.tiles import pack
from edgespec_models.errors import DeviceError
from edgespec_models.files.blocks import F32, Blocks, unpack
from edgespec_models.files.tensors import U8, GGMLType
from edgespec_runtimes import cpu
from edgespec_runtimes.ort import ort
from tests.models.test_blocks import HALVES

F64 = npt.NDArray[np.float64]
Feeds = Mapping[str, npt.NDArray[Any]]
Outputs = Mapping[str, int]
"""Names and ONNX's types."""
Attributes = Mapping[str, Any]

EPSILON = 1e-5
_HEADERS = Path(__file__).parents[2] / "runtimes" / "kernels"
SHARE, STEPS = 16, 255 * 127  # inputs that share a scale of activations, steps of a row: layout.h
_KINDS = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}
_KINDS |= {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.float64): TensorProto.DOUBLE}
_KINDS |= {np.dtype(np.float16): TensorProto.FLOAT16, np.dtype(np.int8): TensorProto.INT8}


@lru_cache
def inputs_of(kind: str) -> tuple[str, ...]:
    """The names of an operator's inputs, in its order, from where they are declared."""
    texts = [path.read_text(encoding="utf-8") for path in _HEADERS.glob("*.h")]
    (declared,) = (part for text in texts for part in re.findall(rf'"{kind}"[^;]*;\s.*kInputs([^;]*);', text))
    return tuple(re.findall(r'"(\w+)"', declared))


@lru_cache
def sets() -> tuple[str, ...]:
    """The sets of instructions that this processor has, ``plain`` first."""
    names = []
    for name in cpu.INSTRUCTIONS:
        try:
            cpu.register_operators(ort.SessionOptions(), cpu.CpuOptions(instructions=name))
        except DeviceError:
            continue
        names.append(name)
    return tuple(sorted(names, key=lambda name: name != "plain"))


def graph(kind: str, outputs: Outputs, feeds: Feeds, constants: Feeds, attributes: Attributes) -> bytes:
    """A model of one node, whose inputs are ``feeds``, of any shape, and ``constants``."""
    node = node_of(kind, [*feeds, *constants], list(outputs), attributes)
    fed = [helper.make_tensor_value_info(n, _KINDS[value.dtype], None) for n, value in feeds.items()]
    made = [helper.make_tensor_value_info(n, type_, None) for n, type_ in outputs.items()]
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    return model_of(helper.make_graph([node], "test", fed, made, weights))


def node_of(kind: str, inputs: Collection[str], outputs: Sequence[str], attributes: Attributes) -> Any:
    """A node of one of the operators. ``inputs`` go by their names; the last may have any, or several."""
    *known, _ = inputs_of(kind)
    names = [name if name in inputs else "" for name in known]
    names += [name for name in inputs if name not in known]
    while names and not names[-1]:
        names.pop()
    node = helper.make_node(kind, names, list(outputs), domain="edgespec")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return node


def model_of(written: Any) -> bytes:
    """A graph with the operators it needs."""
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("edgespec", 1)]
    model = helper.make_model(written, opset_imports=opsets, ir_version=10)
    content: bytes = model.SerializeToString()
    return content


def session(
    model: bytes | str,
    threads: int = 1,
    instructions: str = "",
    *,
    huge_pages: bool = False,
    copied_bytes: int | None = None,
) -> Any:
    """ONNX Runtime's session over ``model``, or the file there, with edgespec's operators."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = 1
    settings.inter_op_num_threads = 1
    options = cpu.CpuOptions(
        spinning=False, instructions=instructions, huge_pages=huge_pages, copied_bytes=copied_bytes
    )
    object.__setattr__(options, "threads", threads)  # also more than a user may have
    cpu.register_operators(settings, options)
    return ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"], enable_fallback=0)


def everywhere(model: bytes, feeds: Feeds, threads: int = 1) -> list[npt.NDArray[Any]]:
    """A pass's outputs, the same bits by every set of instructions."""
    results = [session(model, threads, name).run(None, dict(feeds)) for name in sets()]
    for other, name in zip(results[1:], sets()[1:], strict=True):
        for wanted, actual in zip(results[0], other, strict=True):
            same_bits(wanted, actual, name)
    first: list[npt.NDArray[Any]] = results[0]
    return first


def same_bits(wanted: npt.NDArray[Any], got: npt.NDArray[Any], what: str = "") -> None:
    """Fail unless both are the same to the bit; any NaN is like any other."""
    assert wanted.shape == got.shape, what
    assert wanted.dtype == got.dtype, what
    if wanted.dtype.kind == "f":
        nans = np.isnan(wanted) & np.isnan(got)
        bits = f"u{wanted.itemsize}"
        wanted, got = (np.where(nans, wanted.dtype.type(0), each).view(bits) for each in (wanted, got))
    np.testing.assert_array_equal(wanted, got, what)


def random_blocks(rng: np.random.Generator, name: str, rows: int, columns: int) -> U8:
    """Random blocks of a format, uint8 ``(rows, blocks, bytes)``, with scales about 0.01."""
    inputs, n_bytes = GGMLType[name].block, GGMLType[name].block_bytes
    raw = rng.integers(0, 256, (rows, columns // inputs, n_bytes), np.uint8)
    for at in HALVES[GGMLType[name]]:
        scales = rng.uniform(0.005, 0.02, raw.shape[:2]) * rng.choice([-1, 1], raw.shape[:2])
        raw[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(118, 125, raw.shape[:2])
    if name == "NVFP4":
        raw[..., :4] = rng.integers(0, 32, (*raw.shape[:2], 4))
    return raw


@dataclass(frozen=True, slots=True)
class Estimate:
    """Numbers and how far float32 may be from them."""

    value: F64
    error: F64

    def part(self, columns: slice) -> "Estimate":
        return Estimate(self.value[..., columns], self.error[..., columns])

    def check(self, got: F32, what: str = "") -> None:
        """Fail where ``got`` is farther off."""
        assert got.shape == self.value.shape, what
        excess = np.abs(got - self.value) - self.error
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        difference = f"{what} {worst}: {got[worst]}, not {self.value[worst]} +- {self.error[worst]}"
        assert excess.max() <= 0, difference


def rounded(x: F32 | F64) -> tuple[F64, F64]:
    """Activations after rounding, and by how much those may differ.

    One is a row's factor times a whole number for 16 times a code of 8 bits. Where a quotient lies as good as
    halfway between two codes, or on a whole number, ``x`` of float64 does not tell which float32 would take.
    """
    grouped = x.reshape(*x.shape[:-1], -1, SHARE)
    largest = np.abs(grouped).max(axis=(-2, -1), keepdims=True).astype(np.float32)
    usable = largest > 1e-30
    steps = np.divide(np.float32(STEPS), largest, out=np.zeros_like(largest), where=usable)
    most = np.abs(grouped).max(axis=-1, keepdims=True).astype(np.float32) * steps * np.float32(1 / 127)
    scales = np.minimum(np.ceil(most), 255)
    inverse = np.divide(steps, scales, out=np.zeros_like(scales), where=scales > 0)
    quotients = grouped.astype(np.float64) * inverse
    codes = np.rint(quotients)
    unit = scales * (largest / np.float32(STEPS)).astype(np.float64)
    error = np.zeros_like(codes)
    if x.dtype == np.float64:
        close = (np.abs(np.abs(quotients - codes) - 0.5) < 1e-4) | (np.abs(most - np.rint(most)) < 1e-4)
        error = unit * close + np.abs(codes) * unit * 1e-6
    return (codes * unit).reshape(x.shape), error.reshape(x.shape)


def product(x: F32 | F64, blocks: Sequence[Blocks]) -> Estimate:
    """``x`` times the matrices side by side, from rounded activations on without error.

    Codes are multiplied and added as integers. What float32 loses are the sums over blocks: a few units of
    2**-24 of the sum of the magnitudes.
    """
    values, magnitudes = zip(*(weights_of(block) for block in blocks), strict=True)
    activations, doubt = rounded(x)
    size = np.concatenate(magnitudes)
    error = 5e-7 * np.abs(activations) @ size.T + doubt @ size.T
    return Estimate(activations @ np.concatenate(values).T, error + 1e-30)


def weights_of(blocks: Blocks) -> tuple[F64, F64]:
    """Weights in float64, and the sums of the magnitudes of what they are differences of."""
    rows, columns = blocks.codes.shape
    grouped = blocks.codes.reshape(rows, -1, blocks.block).astype(np.float64) - blocks.zero
    grouped *= blocks.scales[..., None]
    minimums = np.zeros_like(blocks.scales) if blocks.minimums is None else blocks.minimums
    shift = minimums[..., None].astype(np.float64)
    return (grouped - shift).reshape(rows, columns), (np.abs(grouped) + np.abs(shift)).reshape(rows, columns)


def normed(x: F32 | F64, gain: F32) -> F64:
    """RMS norm of the last axis."""
    exact = x.astype(np.float64)
    scale = 1 / np.sqrt(np.square(exact).mean(axis=-1, keepdims=True) + np.float32(EPSILON))
    result: F64 = exact * scale * gain
    return result


def gated(name: str, gate: Estimate, up: Estimate) -> Estimate:
    """``silu`` or ``gelu`` (by tanh) of one times the other; neither function is steeper than 1.2."""
    x = gate.value
    if name == "silu":
        small = np.exp(-np.abs(x))
        active = x * np.where(x < 0, small, 1) / (1 + small)
    else:
        active = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    error = 1.2 * gate.error + 1e-6 * np.abs(x)
    total = error * (np.abs(up.value) + up.error) + np.abs(active) * up.error
    return Estimate(active * up.value, total + 1e-6 * np.abs(active * up.value))


BEND: Final = {"above": 0.9, "below": 0.7, "slope": 0.4}
"""The numbers of an xIELU."""


def bent(x: Estimate) -> Estimate:
    """xIELU with these numbers, which is nowhere steeper than at x, and at 0, by its slope."""
    low = np.expm1(np.minimum(x.value, 0)) - x.value
    value = np.where(x.value > 0, BEND["above"] * x.value**2, BEND["below"] * low) + BEND["slope"] * x.value
    steep = 2 * BEND["above"] * (np.abs(x.value) + x.error) + BEND["below"] + BEND["slope"]
    return Estimate(value, steep * x.error + 1e-6 * (1 + np.abs(x.value) + np.abs(value)))


def plus(one: Estimate, other: F32) -> Estimate:
    value = one.value + other
    return Estimate(value, one.error + 2e-7 * (np.abs(one.value) + np.abs(other)))


def post_normed(one: Estimate, gain: F32) -> Estimate:
    """RMS norm: numbers are off, and so is the root of the mean of their squares."""
    value = normed(one.value, gain)
    mean = np.square(one.value).mean(axis=-1, keepdims=True) + EPSILON
    relative = np.sqrt(np.square(one.error).mean(axis=-1, keepdims=True) / mean) + 1e-6
    return Estimate(value, np.abs(gain) * one.error / np.sqrt(mean) + 1.1 * relative * np.abs(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A projection: raw blocks of its parts by format, and what else it is given."""

    parts: tuple[tuple[str, U8], ...]
    inputs: int  # width of what it is given
    gate: str = ""  # ``silu``, ``gelu``, ``xielu`` or none
    gain: F32 | None = None  # ``(inputs,)``
    bias: F32 | None = None  # ``(columns,)`` of all parts
    post_gain: F32 | None = None  # ``(width,)``
    residual: F32 | None = None  # ``(1, rows, width)``

    @property
    def width(self) -> int:
        columns = sum(len(raw) for _, raw in self.parts)
        return columns // 2 if self.paired else columns

    @property
    def paired(self) -> bool:
        """Whether half the columns are factors of the other half."""
        return self.gate in ("silu", "gelu")

    def feeds(self, x: F32) -> dict[str, npt.NDArray[Any]]:
        named = {"gain": self.gain, "bias": self.bias, "post_gain": self.post_gain, "residual": self.residual}
        return {"x": x} | {name: value for name, value in named.items() if value is not None}

    def graph(self, x: F32) -> bytes:
        weights = {f"w{index}": pack(name, raw) for index, (name, raw) in enumerate(self.parts)}
        attributes: dict[str, Any] = {"inputs": self.inputs, "epsilon": EPSILON, "gate": self.gate}
        attributes |= BEND if self.gate == "xielu" else {}
        attributes |= {"parts": ",".join(f"{name}:{len(raw)}" for name, raw in self.parts)}
        return graph("Linear", {"y": TensorProto.FLOAT}, self.feeds(x), weights, attributes)

    def expected(self, x: F32) -> Estimate:
        """What it must give for ``x``, float32 ``(1, rows, inputs)``."""
        blocks = [unpack(GGMLType[name], raw) for name, raw in self.parts]
        y = product(x if self.gain is None else normed(x, self.gain), blocks)  # type: ignore[arg-type]
        y = y if self.bias is None else plus(y, self.bias)
        if self.gate == "xielu":
            y = bent(y)
        if self.paired:
            y = gated(self.gate, y.part(slice(self.width)), y.part(slice(self.width, None)))
        y = y if self.post_gain is None else post_normed(y, self.post_gain)
        return y if self.residual is None else plus(y, self.residual)
