"""The operator of short convolutions: what it computes, where it keeps its inputs, what it refuses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from edgespec_models.decoders.kept import BLOCK, LOGGED
from tests.kernels.test_kernels_refusals import cases_of, refuse
from tests.kit.kernels import everywhere, graph, same_bits, session

F32 = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]

OUTPUTS = dict.fromkeys(("y", "ring_now", "ends_now"), TensorProto.FLOAT)


def model(feeds: Mapping[str, npt.NDArray[Any]], *, channels: int = 32, taps: int = 3) -> bytes:
    return graph("ShortConv", OUTPUTS, feeds, {}, {"channels": channels, "taps": taps})


def weights_of(channels: int, taps: int) -> F32:
    return np.random.default_rng(taps).normal(size=(taps, channels)).astype(np.float32)


def expected(gated: F32, weights: F32) -> tuple[F32, F32]:
    """Of a whole sequence: what comes out and what is kept of its rows. Every sum has this order."""
    b, c, x = np.split(gated, 3, axis=1)
    u, taps = b * x, len(weights)
    y = np.zeros_like(u)
    for j in range(taps):
        back = taps - 1 - j
        y[back:] = y[back:] + weights[j] * u[: len(u) - back]
    return y * c, u


class Kept:
    """A sequence's rows, and where the operator keeps what it read of them."""

    def __init__(self, slot: int, blocks: Sequence[int]) -> None:
        self.slot, self.blocks, self.length, self.behind = slot, blocks, 0, 0


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.sampled_from([32, 96, 288]), st.data())
def test_any_cut_gives_the_bits_of_one_pass(taps: int, channels: int, data: st.DataObject) -> None:
    """Passes over several sequences, of which rows are undone, and which go back to blocks."""
    capacity, count = 160, 3
    rng = np.random.default_rng(data.draw(st.integers(0, 3)))
    gated = rng.normal(size=(count, capacity, 3 * channels)).astype(np.float32)
    weights = weights_of(channels, taps)
    whole = [expected(sequence, weights) for sequence in gated]
    ring = np.full((count + 1, LOGGED + taps - 1, channels), np.nan, np.float32)
    ends = np.full((count * capacity // BLOCK, taps - 1, channels), np.nan, np.float32)
    tables = rng.permutation(len(ends)).reshape(count, -1).tolist()
    running = [Kept(slot, blocks) for slot, blocks in zip((2, 0, 3), tables, strict=True)]
    threads, name = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from(["", "plain"]))
    opened = session(
        model(_feeds(gated[0][:1], weights, [], ring, ends), channels=channels, taps=taps), threads, name
    )
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = data.draw(st.lists(st.sampled_from(running), min_size=1, max_size=count, unique=True))
        rows = [data.draw(st.integers(0, min(70, capacity - sequence.length))) for sequence in chosen]
        parts = list(zip(chosen, rows, strict=True))
        read = [
            gated[running.index(sequence), sequence.length : sequence.length + n] for sequence, n in parts
        ]
        feeds = _feeds(np.concatenate(read), weights, parts, ring, ends)
        y, ring, ends = opened.run(None, feeds)
        wanted = [
            whole[running.index(sequence)][0][sequence.length : sequence.length + n] for sequence, n in parts
        ]
        same_bits(np.concatenate(wanted)[None], y)
        for sequence, n in parts:
            sequence.length += n
            sequence.behind = max(sequence.behind, sequence.length - LOGGED)
            undone = data.draw(st.integers(0, min(n, sequence.length - sequence.behind)))
            sequence.length -= undone
            if data.draw(st.integers(0, 4)) == 0:
                sequence.length = sequence.behind = sequence.length // BLOCK * BLOCK
    assert np.isnan(ring[1]).all()


def _feeds(gated: F32, weights: F32, parts: Sequence[tuple[Kept, int]], ring: F32, ends: F32) -> Arrays:
    return {
        "gated": gated[None],
        "weights": weights,
        "sequences": np.array([(sequence.length, n) for sequence, n in parts], np.int64).reshape(-1, 2),
        "blocks": np.array(
            [b for sequence, n in parts for b in sequence.blocks[: -(-(sequence.length + n) // BLOCK)]], int
        ),
        "places": np.array([(sequence.slot, sequence.behind) for sequence, _ in parts], np.int64).reshape(
            -1, 2
        ),
        "ring": ring,
        "ends": ends,
    }


@pytest.mark.parametrize("taps", [2, 3, 4, 16])
def test_where_rows_are_kept(taps: int) -> None:
    """The last before the end of a block there, the others in the ring."""
    channels, length = 64, 75
    gated = np.random.default_rng(0).normal(size=(length, 3 * channels)).astype(np.float32)
    ring = np.zeros((1, LOGGED + taps - 1, channels), np.float32)
    ends = np.zeros((3, taps - 1, channels), np.float32)
    sequence = Kept(0, range(3))
    feeds = _feeds(gated, weights_of(channels, taps), [(sequence, length)], ring, ends)
    y, ring, ends = everywhere(model(feeds, channels=channels, taps=taps), feeds, threads=2)
    wanted, u = expected(gated, weights_of(channels, taps))
    same_bits(wanted[None], y)
    for block in range(2):
        same_bits(u[(block + 1) * BLOCK - taps + 1 : (block + 1) * BLOCK], ends[block])
    for token in range(length - LOGGED, length):
        if token % BLOCK < BLOCK - taps + 1:
            same_bits(u[token], ring[0, token % (LOGGED + taps - 1)])


def test_numbers_that_are_none_stay_with_their_sequence() -> None:
    gated = np.ones((4, 96), np.float32)
    gated[1] = np.inf
    sequence, other = Kept(0, [0]), Kept(1, [1])
    ring, ends = np.zeros((2, 18, 32), np.float32), np.zeros((2, 2, 32), np.float32)
    feeds = _feeds(gated, weights_of(32, 3), [(sequence, 2), (other, 2)], ring, ends)
    y, ring, _ = everywhere(model(feeds), feeds)
    assert np.isfinite(y[0, 2:]).all() and not np.isfinite(y[0, 1]).any()
    assert np.isfinite(ring[1]).all()


def _ordinary(rows: int = 2, past: int = 5) -> Arrays:
    ring, ends = np.zeros((2, 18, 32), np.float32), np.zeros((2, 2, 32), np.float32)
    sequence = Kept(1, [1])
    sequence.length, sequence.behind = past, past
    return _feeds(np.ones((rows, 96), np.float32), weights_of(32, 3), [(sequence, rows)], ring, ends)


def _zeros(*shape: int) -> F32:
    return np.zeros(shape, np.float32)


def _numbers(name: str, *rows: Sequence[int]) -> Arrays:
    return {name: np.array(rows, np.int64)}


PASSES: dict[str, Sequence[Arrays]] = {
    "a convolution's input": [{"gated": _zeros(1, 2, 95)}, {"gated": _zeros(2, 96)}],
    "a convolution's weights": [
        {"weights": _zeros(32, 3)},
        {"weights": _zeros(96)},
        {"weights": _zeros(4, 32)},
    ],
    "a convolution's ring": [
        {"ring": _zeros(2, 17, 32)},
        {"ring": _zeros(18, 32)},
        {"ring": _zeros(2, 18, 31)},
    ],
    "a convolution's ends": [
        *({"ends": _zeros(*shape)} for shape in ((2, 3, 32), (2, 2, 31), (2, 64))),
    ],
    "impossible number of tokens": [_numbers("sequences", (-1, 2))],
    "fewer blocks": [_numbers("sequences", (31, 2)) | _numbers("places", (1, 31))],
    "none of those that there are": [{"blocks": np.array([value], np.int64)} for value in (2, -1)],
    "the places are no int64": [
        _numbers("places", (1, 5), (0, 0)),
        _numbers("places", (1, 5, 0)),
        {"places": np.zeros(2, np.int64)},
    ],
    "slot is none of those": [_numbers("places", (value, 5)) for value in (-1, 2, 2**62, -(2**63))],
    "behind more tokens than it has, or too few": [
        *(_numbers("places", (1, value)) for value in (6, -1, 2**63 - 1, -(2**63))),
        _numbers("sequences", (22, 2)),
    ],
    "share a slot": [
        _numbers("sequences", (5, 1), (0, 1)) | _numbers("places", (1, 5), (1, 0)) | {"blocks": np.arange(2)}
    ],
}


@pytest.mark.parametrize(("words", "feeds"), cases_of(PASSES))
def test_passes_that_are_refused(words: str, feeds: Arrays) -> None:
    fed = _ordinary() | feeds
    refuse(words, model(fed), fed)


@pytest.mark.parametrize(
    ("words", "attributes"),
    [
        *(("impossible number of taps", {"taps": value}) for value in (1, 0, -3, 17, 1 << 40)),
        *(("impossible number of channels", {"channels": value}) for value in (0, -32, 1 << 40)),
    ],
)
def test_attributes_that_are_refused(words: str, attributes: dict[str, int]) -> None:
    refuse(words, model(_ordinary(), **attributes))
