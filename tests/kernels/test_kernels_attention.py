"""Attention by edgespec's kernels against plain NumPy, with every set of instructions there is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from edgespec_models.decoders.kept import BLOCK, EXTENT
from tests.kit.gguf import F32
from tests.kit.kernels import F64, graph, inputs_of, normed, same_bits, session, sets

LANES = 16
SEEDS = st.integers(0, 2**32 - 1)
OUTPUTS = {"y": TensorProto.FLOAT, "key": TensorProto.FLOAT16, "value": TensorProto.FLOAT16}
F16 = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """An attention layer's shape and weights."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    rotated: int = 0  # channels of a head
    interleaved: bool = False  # pairs lie side by side, not half a head apart
    tables: tuple[F32, F32] | None = None  # cosines and sines, ``(positions, rotated / 2)``
    query_gain: F32 | None = None  # ``(head_dim,)``, as ``key_gain``
    key_gain: F32 | None = None
    sinks: F32 | None = None  # ``(heads,)``
    cap: float = 0.0
    gated: bool = False  # behind each query lies its gate
    row_tables: bool = False  # of the pass's rows, not of positions
    normed_last: bool = False  # heads are normalized behind their rotation
    later: npt.NDArray[np.int64] | None = None  # rows behind each row that it sees, too

    @property
    def width(self) -> int:
        return ((1 + self.gated) * self.heads + 2 * self.kv_heads) * self.head_dim

    def model(self) -> bytes:
        feeds = self.feeds(np.zeros((1, 1, self.width), np.float32), Cache.empty(self, BLOCK))
        attributes: dict[str, int | float] = {"heads": self.heads, "kv_heads": self.kv_heads}
        attributes |= {"head_dim": self.head_dim, "window": self.window, "interleaved": int(self.interleaved)}
        attributes |= {"scale": self.head_dim**-0.5, "epsilon": 1e-5}
        attributes |= {"cap": self.cap} if self.cap else {}
        attributes |= {"row_tables": 1} if self.row_tables else {}
        attributes |= {"normed_last": 1} if self.normed_last else {}
        return graph("Attention", OUTPUTS, feeds, {}, attributes)

    def feeds(self, packed: F32, cache: "Cache") -> dict[str, npt.NDArray[Any]]:
        sequence, tables = np.array([[cache.length, packed.shape[1]]], np.int64), self.tables or (None, None)
        blocks = cache.blocks[: -(-(cache.length + packed.shape[1]) // BLOCK)]
        values: tuple[Any, ...] = (packed, cache.keys, cache.values, sequence, blocks, *tables)
        values += self.query_gain, self.key_gain, self.sinks
        if self.later is not None:
            rows = np.arange(packed.shape[1])
            values += None, None, cache.length + 1 + rows + self.later[: len(rows)]
        named = zip(inputs_of("Attention"), values, strict=False)  # no injected keys and values
        return {name: value for name, value in named if value is not None}

    def split(self, packed: F32) -> tuple[F64, F64, F32]:
        """Queries, keys and values, ``(heads, rows, head_dim)``, normalized but not rotated."""
        rows = packed.reshape(packed.shape[1], -1, self.head_dim).transpose(1, 0, 2)
        ends = np.cumsum([(1 + self.gated) * self.heads, self.kv_heads])
        queries, keys, values = np.split(rows, ends)
        queries = queries[:: 1 + self.gated]
        normal = [
            x.astype(np.float64) if gain is None or self.normed_last else normed(x, gain)
            for x, gain in ((queries, self.query_gain), (keys, self.key_gain))
        ]
        return normal[0], normal[1], values

    def rotate(self, x: F64, first: int) -> F64:
        """``(heads, rows, head_dim)``, whose rows are tokens ``first`` on."""
        if self.tables is None:
            return x
        cos, sin = (table[first : first + x.shape[1]].astype(np.float64) for table in self.tables)
        half = self.rotated // 2
        even, odd = (slice(0, self.rotated, 2), slice(1, self.rotated, 2))
        if not self.interleaved:
            even, odd = slice(0, half), slice(half, self.rotated)
        turned = x.copy()
        turned[..., even] = x[..., even] * cos - x[..., odd] * sin
        turned[..., odd] = x[..., odd] * cos + x[..., even] * sin
        return turned

    def gates(self, packed: F32) -> F64 | float:
        """What the results of all heads are multiplied by, ``(1, rows, heads * head_dim)``."""
        if not self.gated:
            return 1.0
        queries = packed[..., : 2 * self.heads * self.head_dim].astype(np.float64)
        apart = queries.reshape(1, packed.shape[1], self.heads, 2, self.head_dim)
        gates: F64 = 1 / (1 + np.exp(-apart[..., 1, :]))
        return gates.reshape(1, packed.shape[1], -1)

    def attend(self, queries: F64, keys: F64, values: F64, past: int) -> F64:
        """Rotated queries of tokens ``past`` on, ``(heads, rows, head_dim)``; keys and values of all tokens.

        Returns ``(1, rows, heads * head_dim)``.
        """
        group = self.heads // self.kv_heads
        keys, values = (np.repeat(x, group, axis=0) for x in (keys, values))
        scores = np.einsum("hqd,hkd->hqk", queries, keys) * np.float32(self.head_dim**-0.5)
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        at = past + np.arange(queries.shape[1])[:, None]
        token = np.arange(keys.shape[1])
        last = at if self.later is None else at + self.later[:, None]
        seen = (token <= last) & (token > at - (self.window or 1 << 40))
        scores = np.where(seen, scores, -np.inf)
        most = scores.max(axis=-1, keepdims=True)
        if self.sinks is not None:
            sinks = np.broadcast_to(self.sinks[:, None, None], most.shape)
            scores, most = np.concatenate([scores, sinks], axis=-1), np.maximum(most, sinks)
        shares = np.exp(scores - most)
        shares /= shares.sum(axis=-1, keepdims=True)
        shares = shares[..., : keys.shape[1]]
        mixed: F64 = np.einsum("hqk,hkd->qhd", shares, values).reshape(1, queries.shape[1], -1)
        return mixed


def by_block(pool: F16) -> F16:
    """A view of a pool of keys or values, ``(blocks / 8, 8, kv_heads, 32, head_dim)``."""
    extents, heads, _, width = pool.shape
    return pool.reshape(extents, heads, EXTENT, BLOCK, width).swapaxes(1, 2)


@dataclass(slots=True)
class Cache:
    """Keys and values of ``length`` tokens as the kernels keep them, NaN where there are none.

    ``blocks`` are a shuffled part of the pool, of which some follow each other.
    """

    keys: F16
    values: F16
    blocks: npt.NDArray[np.int64]
    length: int = 0

    @classmethod
    def empty(cls, layer: Layer, capacity: int) -> "Cache":
        count, rng = -(-capacity // BLOCK), np.random.default_rng(capacity)
        extents, run = -(-2 * count // EXTENT), rng.integers(1, EXTENT + 1)
        shape = (extents, layer.kv_heads, EXTENT * BLOCK, layer.head_dim)
        runs = np.arange(extents * EXTENT // run * run).reshape(-1, run)
        blocks = rng.permutation(runs).reshape(-1)[:count]
        return cls(np.full(shape, np.nan, np.float16), np.full(shape, np.nan, np.float16), blocks)

    def copy(self) -> "Cache":
        return Cache(self.keys.copy(), self.values.copy(), self.blocks, self.length)

    @property
    def at(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Extents, and where in each the blocks lie."""
        return np.divmod(self.blocks, EXTENT)

    def key_rows(self) -> F16:
        """``(kv_heads, capacity, head_dim)``: of 16 tokens, channel by channel."""
        count, heads, width = len(self.blocks), *self.keys.shape[1::2]
        tiles = by_block(self.keys)[self.at].reshape(count, heads, -1, width, LANES)
        return tiles.transpose(1, 0, 2, 4, 3).reshape(heads, -1, width)

    def value_rows(self) -> F16:
        """``(kv_heads, capacity, head_dim)``."""
        heads, width = self.values.shape[1::2]
        return by_block(self.values)[self.at].transpose(1, 0, 2, 3).reshape(heads, -1, width)

    def put(self, keys: Any, values: Any) -> None:
        """Write tokens ``(kv_heads, tokens, head_dim)`` behind the others."""
        to = self.length + keys.shape[1]
        rows, others = self.key_rows(), self.value_rows()
        rows[:, self.length : to], others[:, self.length : to] = keys, values
        count, heads, width = len(self.blocks), *self.keys.shape[1::2]
        tiles = rows.reshape(heads, count, -1, LANES, width).transpose(1, 0, 2, 4, 3)
        by_block(self.keys)[self.at] = tiles.reshape(count, heads, BLOCK, width)
        by_block(self.values)[self.at] = others.reshape(heads, count, BLOCK, width).transpose(1, 0, 2, 3)
        self.length = to


@dataclass(slots=True)
class Case:
    """A pass over ``packed`` behind what is in ``cache``."""

    layer: Layer
    cache: Cache
    packed: F32

    def check(self, y: F32, keys: F16, values: F16) -> None:
        """Fail unless a pass's outputs are right, and nothing else in the cache has changed."""
        past, rows = self.cache.length, self.packed.shape[1]
        queries, new, added = self.layer.split(self.packed)
        queries, new = self.layer.rotate(queries, past), self.layer.rotate(new, past)
        if self.layer.normed_last and self.layer.query_gain is not None and self.layer.key_gain is not None:
            queries, new = normed(queries, self.layer.query_gain), normed(new, self.layer.key_gain)
        now = Cache(keys, values, self.cache.blocks)
        kept = now.key_rows()[:, past : past + rows]
        np.testing.assert_allclose(kept, new, rtol=2**-11 + 2e-6, atol=1e-5)
        same_bits(added.astype(np.float16), now.value_rows()[:, past : past + rows])
        pairs = (self.cache.key_rows(), now.key_rows()), (self.cache.value_rows(), now.value_rows())
        for old, new_rows in pairs:
            same_bits(old[:, :past], new_rows[:, :past])
            same_bits(old[:, past + rows :], new_rows[:, past + rows :])
        keys_64 = now.key_rows()[:, : past + rows].astype(np.float64)
        values_64 = now.value_rows()[:, : past + rows].astype(np.float64)
        wanted = self.layer.attend(queries, keys_64, values_64, past) * self.layer.gates(self.packed)
        # Scores go up to a hundred, and an error in a score is one in the exponent.
        np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5)


def same(wanted: Sequence[npt.NDArray[Any]], got: Sequence[npt.NDArray[Any]], what: str = "") -> None:
    """Every output to the bit."""
    for expected, other in zip(wanted, got, strict=True):
        same_bits(expected, other, what)


def make_case(rng: np.random.Generator, layer: Layer, past: int, rows: int, capacity: int) -> Case:
    cache = Cache.empty(layer, capacity)
    cache.put(*rng.normal(0, 1, (2, layer.kv_heads, past, layer.head_dim)))
    packed = rng.normal(0, 1.5, (1, rows, layer.width)).astype(np.float32)
    return Case(layer, cache, packed)


def fixed_case(past: int, rows: int, capacity: int, *, seed: int = 0, **shape: Any) -> Case:
    """One that is not drawn; two heads of 16 channels over one of keys, unless told otherwise."""
    rng = np.random.default_rng(seed)
    layer = make_layer(rng, capacity, **({"heads": 2, "kv_heads": 1, "head_dim": 16} | shape))
    return make_case(rng, layer, past, rows, capacity)


def make_layer(
    rng: np.random.Generator, positions: int, *, gains: bool = False, sinks: bool = False, **shape: Any
) -> Layer:
    rotated, width = shape.get("rotated", 0), shape["head_dim"]
    angles = rng.uniform(-np.pi, np.pi, (positions, rotated // 2))
    tables = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)) if rotated else None
    query, key = rng.uniform(0.5, 1.5, (2, width)).astype(np.float32) if gains else (None, None)
    lost = rng.normal(0, 3, shape["heads"]).astype(np.float32) if sinks else None
    return Layer(**shape, tables=tables, query_gain=query, key_gain=key, sinks=lost)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(SEEDS))
    kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 24, 32, 80, 128, 256]))
    capacity = LANES * draw(st.integers(3, 20))
    rows = draw(st.integers(1, 40))
    past = draw(st.one_of(st.sampled_from([0, 1, 15, 16, 17, 255, capacity - rows]), st.integers(0, 300)))
    past = min(past, capacity - rows)
    shape: dict[str, Any] = {"heads": kv_heads * draw(st.integers(1, 4)), "kv_heads": kv_heads}
    shape |= {"head_dim": head_dim, "window": draw(st.sampled_from([0, 0, 1, 5, 16, 40, 1000]))}
    shape |= {"rotated": draw(st.sampled_from([0, 2, head_dim // 2, head_dim]))}
    shape |= {"interleaved": draw(st.booleans()), "gains": draw(st.booleans())}
    shape |= {"normed_last": draw(st.booleans())}
    shape |= {
        "gated": draw(st.booleans()),
        "sinks": draw(st.booleans()),
        "cap": draw(st.sampled_from([0.0, 3.0])),
    }
    layer = make_layer(rng, past + rows + draw(st.integers(0, 5)), **shape)
    return make_case(rng, layer, past, rows, capacity)


def run_in_place(opened: Any, layer: Layer, packed: F32, cache: Cache) -> F32:
    """A pass whose cache is written where it lies; ``cache`` grows."""
    binding = opened.io_binding()
    feeds = layer.feeds(packed, cache)  # lives as long as it is bound
    for name, value in feeds.items():
        kind = value.dtype.type
        binding.bind_input(name, "cpu", 0, kind, value.shape, value.ctypes.data)
        if name in ("past_key", "past_value"):
            binding.bind_output(name.removeprefix("past_"), "cpu", 0, kind, value.shape, value.ctypes.data)
    y = np.full((1, packed.shape[1], layer.heads * layer.head_dim), np.nan, np.float32)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    opened.run_with_iobinding(binding)
    cache.length += packed.shape[1]
    return y


def copied(opened: Any, case: Case) -> tuple[F32, F16, F16]:
    before = case.cache.copy()
    y, keys, values = opened.run(None, case.layer.feeds(case.packed, case.cache))
    same_bits(before.keys, case.cache.keys, "what was there before is not written to")
    same_bits(before.values, case.cache.values)
    return y, keys, values


@settings(max_examples=80)
@given(cases(), st.integers(1, 4))
def test_attention_is_what_it_is_in_float64(case: Case, threads: int) -> None:
    model = case.layer.model()
    first = copied(session(model, threads, "plain"), case)
    case.check(*first)
    for name in sets()[1:]:
        opened, cache = session(model, threads, name), case.cache.copy()
        same(first, copied(opened, case), name)
        y = run_in_place(opened, case.layer, case.packed, cache)
        same(first, (y, cache.keys, cache.values), name)


@settings(max_examples=60)
@given(cases(), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=3), st.integers(1, 4))
def test_rows_see_as_far_as_they_are_told(case: Case, runs: list[tuple[int, int]], threads: int) -> None:
    """The rows of a run see each other; so a row may be read behind the others of its run."""
    rows = case.packed.shape[1]
    later, start = np.zeros(rows, np.int64), 0
    for skipped, count in runs:
        start = min(start + skipped, rows)
        stop = min(start + count, rows)
        later[start:stop] = np.arange(stop - start)[::-1]
        start = stop
    case = replace(case, layer=replace(case.layer, later=later))
    model = case.layer.model()
    first = copied(session(model, threads, "plain"), case)
    case.check(*first)
    for name in sets()[1:]:
        same(first, copied(session(model, threads, name), case), name)
    if later.any():  # again from within a run
        behind = replace(case.cache.copy(), keys=first[1].copy(), values=first[2].copy())
        at = int(later.argmax()) + 1
        behind.length += at
        layer = replace(case.layer, later=later[at:])
        y = run_in_place(session(model), layer, case.packed[:, at:].copy(), behind)
        same_bits(first[0][:, at:], y)


@settings(max_examples=60)
@given(cases(), st.data())
def test_a_row_does_not_depend_on_how_rows_are_grouped(case: Case, data: st.DataObject) -> None:
    model = case.layer.model()
    wanted, keys, values = copied(session(model), case)
    opened = session(model, data.draw(st.integers(1, 4)), data.draw(st.sampled_from(sets())))
    cache, at = case.cache.copy(), 0
    while at < case.packed.shape[1]:
        some = case.packed[:, at : at + data.draw(st.sampled_from([1, 1, 2, 3, 5, 8, 13]))]
        to = at + some.shape[1]
        same_bits(wanted[:, at:to], run_in_place(opened, case.layer, some.copy(), cache))
        at = to
    same((keys, values), (cache.keys, cache.values))


@settings(max_examples=60)
@given(cases(), st.lists(st.integers(0, 300), max_size=4), st.integers(1, 4), st.data())
def test_sequences_of_a_pass_are_as_if_alone(
    case: Case, lengths: list[int], threads: int, data: st.DataObject
) -> None:
    """Each has blocks of its own and as many rows as it wants; those with the same tokens share them."""
    layer, rng = case.layer, np.random.default_rng(len(lengths))
    positions = 1 << 20 if layer.tables is None else len(layer.tables[0])
    cases = [case]
    for length in lengths:
        rows = data.draw(st.integers(0, min(20, positions)))
        past = min(length, positions - rows)
        cases.append(make_case(rng, layer, past, rows, max(1, past + rows)))
    firsts = np.cumsum([0, *(len(case.cache.keys) for case in cases)])
    tables = [
        EXTENT * first + layer.feeds(case.packed, case.cache)["blocks"]
        for first, case in zip(firsts[:-1], cases, strict=True)
    ]
    whole = case.cache.length // BLOCK  # which the last shares, and reads some rows behind
    again = case.packed[:, : data.draw(st.integers(0, min(5, case.packed.shape[1])))]
    packed = [*(case.packed for case in cases), again]
    feeds = layer.feeds(np.concatenate(packed, axis=1), case.cache)
    ends = [(case.cache.length, case.packed.shape[1]) for case in cases]
    feeds["sequences"] = np.array([*ends, (case.cache.length, again.shape[1])], np.int64)
    own = np.arange(-(-(case.cache.length + again.shape[1]) // BLOCK) - whole)
    feeds["blocks"] = np.concatenate([*tables, tables[0][:whole], EXTENT * firsts[-1] + own])
    pools = [
        np.concatenate([*arrays, np.zeros((2, *arrays[0].shape[1:]), np.float16)])
        for arrays in zip(*((case.cache.keys, case.cache.values) for case in cases), strict=True)
    ]
    if case.cache.length % BLOCK:
        for pool in pools:
            by_block(pool)[firsts[-1], 0] = by_block(pool)[divmod(tables[0][whole], EXTENT)]
    feeds["past_key"], feeds["past_value"] = pools
    y, *caches = session(layer.model(), threads, data.draw(st.sampled_from(sets()))).run(None, feeds)
    row = 0
    for at, member in enumerate(cases):
        rows = member.packed.shape[1]
        outputs = y[:, row : row + rows], *(cache[firsts[at] : firsts[at + 1]] for cache in caches)
        same(copied(session(layer.model()), member), outputs)
        row += rows
    same_bits(y[:, : again.shape[1]], y[:, row:], "of shared blocks")
    if layer.tables is not None:
        turns = np.concatenate([np.arange(past, past + rows) for past, rows in feeds["sequences"]])
        feeds |= {name: table[turns] for name, table in zip(("cos", "sin"), layer.tables, strict=True)}
        by_row = session(replace(layer, row_tables=True).model(), threads)
        same((y, *caches), by_row.run(None, feeds), "with tables of rows")


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 20])
@pytest.mark.parametrize("past", [0, 1, 15, 16, 17, 255, -1])
def test_edges_of_the_cache(past: int, rows: int) -> None:
    past = 304 - rows if past < 0 else past
    shape: Any = {"heads": 4, "kv_heads": 2, "head_dim": 32, "window": (past * 7) % 30, "rotated": 32}
    case = fixed_case(past, rows, 304, seed=rows, gains=True, **shape)
    case.check(*copied(session(case.layer.model(), 2), case))


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sets())
def test_any_number_of_rows_gives_the_same_bits(name: str, threads: int) -> None:
    case = fixed_case(27, 40, 80, heads=6, kv_heads=2, head_dim=80, window=33, rotated=80)
    layer = case.layer
    wanted, keys, values = copied(session(layer.model(), 1, "plain"), case)
    opened = session(layer.model(), threads, name)
    for rows in range(1, 41):
        cache = case.cache.copy()
        same_bits(wanted[:, :rows], run_in_place(opened, layer, case.packed[:, :rows].copy(), cache))
    same((keys, values), (cache.keys, cache.values))


def narrowed(values: F32) -> F16:
    """What the cache keeps of ``values``, which come to attention as they are."""
    width, rows = 512, -(-values.size // 512)
    layer = Layer(heads=1, kv_heads=1, head_dim=width)
    packed = np.zeros((1, rows, layer.width), np.float32)
    packed[0, :, 2 * width :] = np.resize(values, (rows, width))
    cache = Cache.empty(layer, rows)
    _, keys, kept = session(layer.model()).run(None, layer.feeds(packed, cache))
    flat: F16 = Cache(keys, kept, cache.blocks).value_rows()[0, :rows].reshape(-1)[: values.size]
    return flat


def test_the_cache_rounds_to_the_nearest_float16() -> None:
    """Every float16, what lies halfway to the next, and its neighbours."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:-1] + halves[1:]) / 2
    floats = np.concatenate(
        [halves, ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf)], dtype=np.float32
    )
    for values in (floats, -floats):
        same_bits(values.astype(np.float16), narrowed(values))


def test_what_float16_cannot_hold() -> None:
    values = np.array([65505, 65520, 1e6, 3e38, 1e-8, 1e-40, np.inf, np.nan], np.float32)
    wanted = np.array([65504, 65504, 65504, 65504, 0, 0, np.inf, np.nan], np.float16)
    same_bits(wanted, narrowed(values))
    same_bits(-wanted, narrowed(-values))


def test_huge_keys_and_values_leave_attention_finite() -> None:
    case = fixed_case(20, 3, 32, heads=1)
    case.packed[..., 16:] *= 1e6
    y, keys, values = copied(session(case.layer.model()), case)
    assert np.isfinite(y).all()
    now = Cache(keys, values, case.cache.blocks)
    assert np.abs(now.value_rows()[0, 20:23]).max() == 65504
    assert np.abs(now.key_rows()[0, 20:23]).max() == 65504


def test_no_rows() -> None:
    case = fixed_case(7, 0, 32, rotated=16)
    y, keys, values = copied(session(case.layer.model()), case)
    assert y.shape == (1, 0, 32)
    same((case.cache.keys, case.cache.values), (keys, values))


def test_scores_that_overflow_the_exponential_function() -> None:
    """One key outweighs the others by far more than float32 can tell."""
    case = fixed_case(20, 3, 32, heads=1)
    case.packed[..., :32] *= 1e3
    y, keys, values = copied(session(case.layer.model()), case)
    assert np.isfinite(y).all()
    kept = Cache(keys, values, case.cache.blocks).value_rows()[0, :23]
    rows = {row.tobytes() for row in kept.astype(np.float32)}
    assert all(row.tobytes() in rows for row in y[0])


@pytest.mark.parametrize("name", sets())
def test_what_later_tokens_hold_is_not_read(name: str) -> None:
    """A cache that was rolled back holds tokens beyond its length; they are overwritten or left alone."""
    case = fixed_case(21, 2, 48, gains=True, rotated=16)
    opened = session(case.layer.model(), 1, name)
    y, *_ = copied(opened, case)
    stale = case.cache.copy()
    stale.put(np.full((1, 20, 16), 6e4), np.full((1, 20, 16), np.inf))
    stale.length = 21
    same_bits(y, opened.run(None, case.layer.feeds(case.packed, stale))[0])


@pytest.mark.parametrize("name", sets())
def test_a_value_that_is_no_number_reaches_the_rows_that_see_it_alone(name: str) -> None:
    """Rows are computed in groups, whose size differs from set to set."""
    case = fixed_case(29, 16, 64, window=3)
    by_block(case.cache.values)[divmod(case.cache.blocks[0], EXTENT)][:, 28] = np.nan
    y, *_ = copied(session(case.layer.model(), 1, name), case)
    assert [row for row in range(16) if np.isnan(y[0, row]).any()] == [0, 1]  # tokens 29 and 30
