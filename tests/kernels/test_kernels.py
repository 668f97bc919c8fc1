"""Projections, embeddings and choices by edgespec's kernels, with every set of instructions there is."""

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from edgespec_models.bundles.tiles import pack
from edgespec_models.bundles.weight_format import FORMATS
from edgespec_models.files.tensors import GGMLType
from tests.kit.gguf import F32
from tests.kit.kernels import Linear, everywhere, graph, random_blocks, same_bits, session, sets
from tests.models.test_blocks import HALVES

SEEDS = st.integers(0, 2**32 - 1)
THREADS = st.integers(1, 4)
by_format = pytest.mark.parametrize("name", FORMATS)


def activations(rng: np.random.Generator, rows: int, width: int) -> F32:
    """Float32 ``(1, rows, width)``, of another magnitude in each row, with blocks of zeros here and there."""
    x = rng.normal(0, 1, (1, rows, width)).astype(np.float32)
    x *= np.float32(10) ** rng.uniform(-3, 3, (1, rows, 1)).astype(np.float32)
    blocks = x.reshape(1, rows, -1, 32)
    blocks[rng.random(blocks.shape[:3]) < 0.1] = 0
    return x


def dequantized(name: str, raw: Any) -> F32:
    values: F32 = dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[name])
    return values


@st.composite
def plain_linears(draw: st.DrawFn, name: str) -> tuple[Linear, F32, int]:
    """One matrix, activations and threads."""
    rng = np.random.default_rng(draw(SEEDS))
    inputs = FORMATS[name].inputs * draw(st.integers(1, 2 if FORMATS[name].inputs > 32 else 9))
    raw = random_blocks(rng, name, draw(st.integers(1, 70)), inputs)
    x = activations(rng, draw(st.integers(1, 40)), inputs)
    return Linear(parts=((name, raw),), inputs=inputs), x, draw(THREADS)


@st.composite
def linears(draw: st.DrawFn) -> tuple[Linear, F32, int]:
    """Parts of several formats and everything else a projection may have."""
    rng = np.random.default_rng(draw(SEEDS))
    gate = draw(st.sampled_from(["", "silu", "gelu", "xielu"]))
    paired = gate in ("silu", "gelu")
    inputs = 256 * draw(st.integers(1, 4))
    columns = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)) * (1 + paired)
    parts = []
    for count in columns:
        name = draw(st.sampled_from(sorted(FORMATS)))
        parts.append((name, random_blocks(rng, name, count, inputs)))
    rows, width = draw(st.integers(1, 60)), sum(columns) // (1 + paired)

    def maybe(*shape: int) -> F32 | None:
        return rng.uniform(-2, 2, shape).astype(np.float32) if draw(st.booleans()) else None

    more: Any = {"gain": maybe(inputs), "bias": maybe(sum(columns)), "post_gain": maybe(width)}
    linear = Linear(parts=tuple(parts), inputs=inputs, gate=gate, residual=maybe(1, rows, width), **more)
    return linear, activations(rng, rows, inputs), draw(THREADS)


def right(linear: Linear, x: F32, threads: int = 1, what: str = "") -> F32:
    """What every set of instructions gives, which must be what is expected."""
    (y,) = everywhere(linear.graph(x), linear.feeds(x), threads)
    linear.expected(x).check(y, what)
    return y


@by_format
@settings(max_examples=12)
@given(data=st.data())
def test_products_lose_what_sums_of_float32_lose(name: str, data: st.DataObject) -> None:
    linear, x, threads = data.draw(plain_linears(name))
    right(linear, x, threads)


@settings(max_examples=80)
@given(linears())
def test_whole_projections(case: tuple[Linear, F32, int]) -> None:
    right(*case)


@settings(max_examples=40)
@given(linears(), st.data())
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    case: tuple[Linear, F32, int], data: st.DataObject
) -> None:
    linear, x, threads = case
    model, feeds = linear.graph(x), linear.feeds(x)
    (whole,) = session(model).run(None, feeds)
    opened = session(model, threads, data.draw(st.sampled_from(sets())))
    at = 0
    while at < x.shape[1]:
        to = min(at + data.draw(st.integers(1, 9)), x.shape[1])
        some = {k: v[:, at:to] if v.ndim == 3 else v for k, v in feeds.items()}
        same_bits(whole[:, at:to], opened.run(None, some)[0])
        at = to


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_matrices_of_many_pieces(threads: int) -> None:
    """Large enough to be cut into as many pieces as a matrix ever is, and into some."""
    rng = np.random.default_rng(threads)
    for columns in (700, 3000):
        parts = tuple((name, random_blocks(rng, name, columns, 512)) for name in ("Q4_K", "Q6_K"))
        x = activations(rng, 9, 512)
        for gate in ("", "silu"):
            linear = Linear(parts=parts, inputs=512, gate=gate)
            (y,) = session(linear.graph(x), threads).run(None, linear.feeds(x))
            linear.expected(x).check(y)


@pytest.mark.parametrize("threads", [2, 40])
def test_more_threads_than_pieces(threads: int) -> None:
    """Some begin nowhere; the gate's other half begins where the first one's does."""
    rng = np.random.default_rng(threads)
    x = activations(rng, 1, 256)
    for columns, parts in ((16, 1), (40, 3)):
        blocks = tuple(("Q4_0", random_blocks(rng, "Q4_0", columns, 256)) for _ in range(2 * parts))
        linear = Linear(parts=blocks, inputs=256, gate="silu")
        (y,) = session(linear.graph(x), threads).run(None, linear.feeds(x))
        linear.expected(x).check(y)


@by_format
def test_no_rows(name: str) -> None:
    linear = Linear(parts=((name, random_blocks(np.random.default_rng(0), name, 5, 256)),), inputs=256)
    x = np.zeros((1, 0, 256), np.float32)
    assert everywhere(linear.graph(x), linear.feeds(x))[0].shape == (1, 0, 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    rng = np.random.default_rng(0)
    linear = Linear(parts=(("Q4_K", random_blocks(rng, "Q4_K", 20, 256)),), inputs=256)
    x = activations(rng, 3, 256)
    (wanted,) = everywhere(linear.graph(x), linear.feeds(x))
    x[0, 1, 77] = bad
    (y,) = everywhere(linear.graph(x), linear.feeds(x))
    assert np.isnan(y[0, 1]).all()
    same_bits(wanted[:, ::2], y[:, ::2])


@by_format
@pytest.mark.parametrize("byte", [0, 255])
def test_extreme_codes(name: str, byte: int) -> None:
    """The largest sums of products of bytes, which AVX2 adds up in 16 bits."""
    inputs = FORMATS[name].inputs
    raw = random_blocks(np.random.default_rng(0), name, 16, inputs)
    raw[:8] = np.where(raw_factors(name), raw[:8], np.uint8(byte))
    signs = np.array([[1, 1, 1, 1], [-1, -1, -1, -1], [1, 1, -1, -1], [1, -1, 1, -1], [1, 1, 0, 0]])
    x = np.tile(signs.astype(np.float32), inputs // 4)[None]
    right(Linear(parts=((name, raw),), inputs=inputs), x)


def raw_factors(name: str) -> Any:
    """Which bytes of a block are float16 numbers, or an exponent."""
    kind = GGMLType[name]
    starts = np.array(HALVES[kind])
    factors = np.concatenate([starts, starts + 1]) if kind.factors else np.zeros(1)
    return np.isin(np.arange(kind.block_bytes), factors)


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e30, 1e32])
def test_extreme_activations(scale: float) -> None:
    rng = np.random.default_rng(0)
    linear = Linear(parts=(("Q8_0", random_blocks(rng, "Q8_0", 20, 64)),), inputs=64)
    right(linear, (rng.uniform(-1, 1, (1, 2, 64)) * scale).astype(np.float32))


def test_gates_far_from_zero() -> None:
    """Where the exponential function overflows or vanishes."""
    raw = np.zeros((2, 1, 34), np.uint8)
    raw[:, 0, 2] = 1  # the first weight of either matrix is 1
    raw[..., :2] = np.array([1], np.float16).view(np.uint8)
    points = [-3e38, -1e20, -1e4, -100, -88, -87, -20, -5, -1, -1e-3, 0, 1e-3, 1, 5, 20, 87, 88, 100, 1e4]
    x = np.zeros((1, len(points), 32), np.float32)
    x[0, :, 0] = np.array(points)
    for gate in ("silu", "gelu"):
        linear = Linear(parts=(("Q8_0", raw[:1]), ("Q8_0", raw[1:])), inputs=32, gate=gate)
        (y,) = everywhere(linear.graph(x), linear.feeds(x))
        assert np.isfinite(y[0, 2:]).all()
        linear.expected(x[:, 2:]).check(y[:, 2:], gate)
        assert not np.isnan(y).any()


def embedding(name: str, raw: Any, ids: Any, factor: float = 1.0) -> bytes:
    attributes = {
        "width": raw.shape[1] * FORMATS[name].inputs,
        "rows": len(raw),
        "format": name,
        "factor": factor,
    }
    weights, outputs = {"table": pack(name, raw)}, {"y": TensorProto.FLOAT}
    return graph("Embedding", outputs, {"ids": ids}, weights, attributes)


@by_format
@settings(max_examples=12)
@given(data=st.data())
def test_rows_of_a_table_are_those_of_the_gguf_package(name: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(SEEDS))
    rows, blocks = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 3))
    raw = random_blocks(rng, name, rows, blocks * FORMATS[name].inputs)
    ids = rng.integers(0, rows, data.draw(st.sampled_from([(1,), (1, 0), (1, 7), (2, 3)])))
    threads = data.draw(THREADS)
    (y,) = everywhere(embedding(name, raw, ids), {"ids": ids}, threads)
    wanted = dequantized(name, raw)[ids]
    same_bits(wanted, y)
    factor = np.float32(data.draw(st.sampled_from([0.5, 33.94112777709961])))
    (y,) = everywhere(embedding(name, raw, ids, float(factor)), {"ids": ids}, threads)
    same_bits(wanted * factor, y)


def choose(logits: F32, threads: int = 1) -> tuple[Any, F32]:
    outputs = {"best": TensorProto.INT64, "likely": TensorProto.FLOAT}
    model = graph("Choose", outputs, {"logits": logits}, {}, {})
    best, likely = everywhere(model, {"logits": logits}, threads)
    return best, likely


WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([8191, 8192, 8193, 8209, 20000]))


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 12), WIDTHS, THREADS)
def test_the_first_of_the_most_likely(seed: int, rows: int, columns: int, threads: int) -> None:
    rng = np.random.default_rng(seed)
    step = rng.choice([1, 500])  # many are equal, or as good as none
    logits = (rng.integers(-20 * step, 20 * step, (1, rows, columns)) / step).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[..., rng.integers(columns)] = 7  # one at least is finite
    best, likely = choose(logits, threads)
    np.testing.assert_array_equal(best, logits.argmax(axis=-1))
    shares = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(likely, 1 / shares.sum(axis=-1), rtol=1e-5)
    assert best.shape == likely.shape == (1, rows)
    for row in range(rows):
        alone = choose(logits[:, row : row + 1])
        same_bits(likely[:, row : row + 1], alone[1])


def test_the_most_likely_anywhere() -> None:
    """At every place of vectors, and of what is left over."""
    for columns in range(1, 60):
        logits = np.random.default_rng(columns).uniform(0, 0.01, (1, columns, columns)).astype(np.float32)
        logits[0] += np.eye(columns, dtype=np.float32) * np.float32(0.01)
        best, _ = choose(logits)
        assert best.tolist() == [list(range(columns))]


@pytest.mark.parametrize("columns", [1, 15, 16, 100, 9000])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_without_a_probability(bad: float, columns: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (1, 4, columns)).astype(np.float32)
    wanted = choose(logits)
    logits[0, 1, columns // 2], logits[0, 3, -1] = bad, bad
    best, likely = choose(logits, 3)
    assert np.isnan(likely[0, 1::2]).all()
    assert (best >= 0).all() and (best < columns).all()
    if bad == np.inf:
        assert best[0, 1::2].tolist() == [columns // 2, columns - 1]
    np.testing.assert_array_equal(best[0, ::2], wanted[0][0, ::2])
    same_bits(likely[0, ::2], wanted[1][0, ::2])


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_rows_of_nothing_else(value: float) -> None:
    best, likely = choose(np.full((1, 2, 33), value, np.float32))
    assert best.tolist() == [[0, 0]]
    assert np.isnan(likely).all()
