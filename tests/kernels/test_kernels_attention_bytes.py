"""Attention over keys and values of 8 bits against plain NumPy, with every set of instructions there is."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from edgespec_models.decoders.kept import BLOCK, EXTENT, SCALED
from tests.kernels.test_kernels_attention import LANES, SEEDS, Layer, make_layer, same
from tests.kit.gguf import F32
from tests.kit.kernels import F64, graph, inputs_of, session, sets

I8 = npt.NDArray[np.int8]
OUTPUTS = {"y": TensorProto.FLOAT, "key": TensorProto.INT8, "value": TensorProto.INT8}


@dataclass(frozen=True, slots=True)
class Case:
    """A pass over ``packed`` of a layer, whose keys have channels of these ``sizes``."""

    layer: Layer
    packed: F32
    sizes: F32 | None  # ``(kv_heads * head_dim,)``

    def feeds(self, first: int, rows: int, keys: I8, values: I8) -> dict[str, npt.NDArray[Any]]:
        packed, sequence = self.packed[:, first : first + rows].copy(), np.array([[first, rows]], np.int64)
        tables: tuple[Any, ...] = self.layer.tables or (None, None)
        blocks = np.arange(-(-(first + rows) // BLOCK))
        given = packed, keys, values, sequence, blocks, *tables, self.layer.query_gain, self.layer.key_gain
        named = dict(zip(inputs_of("Attention8"), given, strict=False)) | {"key_sizes": self.sizes}
        return {name: value for name, value in named.items() if value is not None}

    def empty(self) -> tuple[I8, I8]:
        """A cache of what has no meaning."""
        extents, width = -(-self.packed.shape[1] // (BLOCK * EXTENT)), self.layer.head_dim
        shape = max(1, extents), self.layer.kv_heads, EXTENT * BLOCK
        return np.full((*shape, width + width // SCALED * 2), -1, np.int8), np.full(
            (*shape, width + 2), -1, np.int8
        )

    def model(self) -> bytes:
        attributes: dict[str, int | float] = {"heads": self.layer.heads, "kv_heads": self.layer.kv_heads}
        attributes |= {"head_dim": self.layer.head_dim, "window": self.layer.window, "epsilon": 1e-5}
        attributes |= {"interleaved": int(self.layer.interleaved), "scale": self.layer.head_dim**-0.5}
        feeds = self.feeds(0, 1, *self.empty())
        return graph("Attention8", OUTPUTS, feeds, {}, attributes)

    def run(self, opened: Any, cuts: list[int]) -> tuple[F32, I8, I8]:
        """Passes over the rows between ``cuts``: what attention gives, and the cache behind."""
        results, (keys, values), first = list[F32](), self.empty(), 0
        for cut in (*cuts, self.packed.shape[1]):
            y, keys, values = opened.run(None, self.feeds(first, cut - first, keys, values))
            results.append(y)
            first = cut
        return np.concatenate(results, axis=1), keys, values

    def factors(self) -> F64:
        """What keys are divided by, ``(kv_heads, 1, head_dim)``."""
        width, rotated = self.layer.head_dim, self.layer.rotated
        sizes = (
            np.zeros((self.layer.kv_heads, width)) if self.sizes is None else self.sizes.reshape(-1, width)
        )
        squares = np.square(sizes.astype(np.float64))
        if self.layer.key_gain is not None:
            squares += np.square(self.layer.key_gain.astype(np.float64))
        pairs = np.arange(rotated).reshape((-1, 2) if self.layer.interleaved else (2, -1))
        one, other = pairs.T if self.layer.interleaved else pairs
        squares[:, one] = squares[:, other] = squares[:, one] + squares[:, other]
        times = np.maximum(np.sqrt(squares) / 4, 1)
        return np.exp2(np.floor(np.log2(times)))[:, None]


def kept_keys(case: Case, cache: I8) -> tuple[F64, F64]:
    """Keys without their factors, and their steps, ``(kv_heads, rows, head_dim)``.

    Of 16 tokens four channels of a token lie side by side, and the scales behind.
    """
    width, count = case.layer.head_dim, case.packed.shape[1]
    tiles = cache.swapaxes(0, 1).reshape(case.layer.kv_heads, -1, LANES * cache.shape[-1])
    codes = tiles[..., : LANES * width].reshape(*tiles.shape[:2], width // 4, LANES, 4)
    scales = tiles[..., LANES * width :].copy().view(np.uint16).reshape(*tiles.shape[:2], -1, LANES)
    rows = codes.swapaxes(2, 3).reshape(case.layer.kv_heads, -1, width)
    return unscaled(rows[:, :count], scales.swapaxes(2, 3).reshape(*rows.shape[:2], -1)[:, :count])


def kept_values(case: Case, cache: I8) -> tuple[F64, F64]:
    """The same of values: of 32 tokens four lie side by side for each channel, and the scales behind."""
    width, count, heads = case.layer.head_dim, case.packed.shape[1], case.layer.kv_heads
    tiles = cache.swapaxes(0, 1).reshape(heads, -1, BLOCK * cache.shape[-1])
    codes = tiles[..., : BLOCK * width].reshape(heads, -1, width // LANES, BLOCK // 4, LANES, 4)
    rows = codes.transpose(0, 1, 3, 5, 2, 4).reshape(heads, -1, width)
    scales = tiles[..., BLOCK * width :].copy().view(np.uint16).reshape(heads, -1, 1)
    return unscaled(rows[:, :count], scales[:, :count])


def unscaled(codes: I8, scales: npt.NDArray[np.uint16]) -> tuple[F64, F64]:
    steps = (scales.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    steps = np.repeat(steps, codes.shape[-1] // steps.shape[-1], axis=-1)
    return codes * steps, steps


def check_rounded(wanted: F64, kept: tuple[F64, F64], channels: int) -> None:
    """Fail unless numbers are rounded to the nearest step, and a step is a 127th of the largest of some."""
    numbers, steps = kept
    assert (np.abs(numbers - wanted) <= steps * (0.5 + 1e-4) + 1e-5).all()
    largest = np.abs(wanted).reshape(*wanted.shape[:-1], -1, channels).max(axis=-1) / 127
    np.testing.assert_allclose(steps[..., ::channels], largest, rtol=2**-7 + 1e-5)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(SEEDS))
    kv_heads, width, rows = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([32, 64, 96, 128])),
        draw(st.integers(1, 80)),
    )
    shape: dict[str, Any] = {"heads": kv_heads * draw(st.integers(1, 7)), "kv_heads": kv_heads}
    shape |= {"head_dim": width, "window": draw(st.sampled_from([0, 0, 5, 40]))}
    shape |= {"rotated": draw(st.sampled_from([0, 2, width // 2, width])), "interleaved": draw(st.booleans())}
    layer = make_layer(rng, rows, gains=draw(st.booleans()), **shape)
    packed = rng.normal(0, 1.5, (1, rows, layer.width)).astype(np.float32)
    if draw(st.booleans()):
        return Case(layer, packed, None)
    # As in Qwen2.5 a bias makes some channels large.
    sizes = (rng.normal(0, 1, kv_heads * width) ** 5).astype(np.float32)
    first = layer.heads * width
    packed[..., first : first + len(sizes)] += sizes
    return Case(layer, packed, sizes)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 4))
def test_attention_over_bytes_is_what_it_is_in_float64(case: Case, threads: int) -> None:
    model = case.model()
    y, keys, values = case.run(session(model, threads, "plain"), [])
    for name in sets()[1:]:
        same((y, keys, values), case.run(session(model, threads, name), []), name)
    queries, new, added = case.layer.split(case.packed)
    queries, new = case.layer.rotate(queries, 0), case.layer.rotate(new, 0)
    stored, others = kept_keys(case, keys), kept_values(case, values)
    check_rounded(new / case.factors(), stored, SCALED)
    check_rounded(added.astype(np.float64), others, case.layer.head_dim)
    wanted = case.layer.attend(queries, stored[0] * case.factors(), others[0], 0)
    # A query is rounded to 16 bits, and an error in a score is one in the exponent.
    largest = np.abs(
        queries * np.repeat(case.factors(), case.layer.heads // case.layer.kv_heads, axis=0)
    ).max()
    doubt = largest / 65024 * np.abs(stored[0]).sum(axis=-1).max() * case.layer.head_dim**-0.5
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4 + 2 * doubt * np.abs(others[0]).max())


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_a_row_over_bytes_does_not_depend_on_how_rows_are_cut(case: Case, data: st.DataObject) -> None:
    model, rows = case.model(), case.packed.shape[1]
    wanted = case.run(session(model), [])
    cuts = data.draw(st.lists(st.integers(0, rows), max_size=12))
    opened = session(model, data.draw(st.integers(1, 4)), data.draw(st.sampled_from(sets())))
    same(wanted, case.run(opened, sorted(cuts)))


def test_a_large_channel_does_not_drown_its_neighbours() -> None:
    rng = np.random.default_rng(1)
    layer = make_layer(rng, 40, heads=1, kv_heads=1, head_dim=32, rotated=32)
    sizes = np.zeros(32, np.float32)
    sizes[3] = 500
    packed = rng.normal(0, 1, (1, 40, layer.width)).astype(np.float32)
    packed[..., 32:64] += sizes
    steps = [
        kept_keys(case, case.run(session(case.model()), [])[1])[1].max()
        for case in (Case(layer, packed, None), Case(layer, packed, sizes))
    ]
    assert steps[0] > 50 * steps[1]


@pytest.mark.parametrize("name", sets())
@pytest.mark.parametrize("at", [0, 70, 140])  # of a query, a key, a value
def test_what_is_not_finite_reaches_the_rows_that_see_it(name: str, at: int) -> None:
    """In a query it is that row's, in keys and values that of all later rows."""
    layer = make_layer(np.random.default_rng(2), 9, heads=1, kv_heads=1, head_dim=64, rotated=32)
    packed = np.random.default_rng(3).normal(0, 1, (1, 9, layer.width)).astype(np.float32)
    packed[0, 4, at] = np.inf
    y, *_ = Case(layer, packed, None).run(session(Case(layer, packed, None).model(), 1, name), [])
    lost = [row for row in range(9) if np.isnan(y[0, row]).any()]
    assert lost == ([4] if at == 0 else [4, 5, 6, 7, 8])
