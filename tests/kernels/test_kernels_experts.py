"""Mixtures of experts by edgespec's kernels against plain NumPy, with every set of instructions there is."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_kernels_refusals import refuse
from tests.kit.experts import Mixture, make_feeds, make_mixture
from tests.kit.kernels import everywhere, same_bits, session, sets

SEEDS = st.integers(0, 2**32 - 1)
VECTORS = ("gain", "router_bias", "bias", "down_bias", "router_gain", "scales", "post_gain", "sum_gain")


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    count, gating = draw(st.integers(1, 40)), draw(st.sampled_from(["softmax", "sigmoid"]))
    vectors = tuple(draw(st.lists(st.sampled_from(VECTORS), unique=True)))
    if draw(st.booleans()):
        vectors += ("selection",)
    wide = draw(st.booleans())
    formats = ("Q4_K", "Q6_K", "Q5_K") if wide else ("Q4_0", "Q8_0", "MXFP4")
    return make_mixture(
        np.random.default_rng(draw(SEEDS)),
        count=count,
        used=draw(st.integers(1, min(count, 8))),
        width=256 if wide else 32 * draw(st.integers(1, 3)),
        inputs=256 if wide else 32 * draw(st.integers(1, 5)),
        formats=formats,
        vectors=vectors,
        shared=draw(st.booleans()),
        scored=draw(st.booleans()),
        gating=gating,
        normalized=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        gate=draw(st.sampled_from(["silu", "gelu", "clamped"])),
    )


@settings(max_examples=30)
@given(mixtures(), SEEDS, st.sampled_from([1, 2, 5, 19]), st.integers(1, 3), st.booleans())
def test_a_mixture_is_what_it_is_in_float64(
    mixture: Mixture, seed: int, rows: int, threads: int, residual: bool
) -> None:
    feeds = make_feeds(np.random.default_rng(seed), mixture, rows, residual=residual)
    y, different = everywhere(mixture.model(feeds), feeds, threads)
    expected = mixture.expected(feeds)
    unsure = np.abs(expected).max() * 2e-2  # where a rounding of activations falls otherwise
    np.testing.assert_allclose(y[0], expected, rtol=1e-3, atol=unsure)
    assert np.median(np.abs(y[0] - expected)) < 1e-3 * np.abs(expected).max()
    assert different.shape == (1,) and 1 <= different[0] <= min(mixture.count, rows * mixture.used)


@settings(max_examples=30)
@given(mixtures(), SEEDS, st.integers(2, 40), st.integers(1, 3), st.data())
def test_a_row_has_the_same_bits_in_any_company(
    mixture: Mixture, seed: int, rows: int, threads: int, data: st.DataObject
) -> None:
    feeds = make_feeds(np.random.default_rng(seed), mixture, rows, residual=True)
    model = mixture.model(feeds)
    wanted, _ = session(model, 1, "plain").run(None, feeds)
    order = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=2 * rows))
    huge, copied = data.draw(st.booleans()), data.draw(st.none() | st.just(0))
    sets_of = data.draw(st.sampled_from(sets()))
    opened = session(model, threads, sets_of, huge_pages=huge, copied_bytes=copied)
    y, different = opened.run(None, {name: value[:, order] for name, value in feeds.items()})
    same_bits(wanted[:, order], y)
    alone = [opened.run(None, {name: value[:, [row]] for name, value in feeds.items()}) for row in order[:3]]
    for at, (row, count) in enumerate(alone):
        same_bits(y[:, [at]], row)
        assert count[0] == mixture.used <= different[0]


def test_of_equal_scores_the_first_are_taken() -> None:
    rng = np.random.default_rng(0)
    mixture = make_mixture(rng, count=20, used=3, vectors=())
    mixture.router[:] = mixture.router[7]
    mixture.router[[4, 11]] = 1.001 * mixture.router[7]
    feeds = make_feeds(rng, mixture, 1, residual=False)
    if (feeds["x"][0, 0] @ mixture.router[7]) < 0:
        feeds["x"] = -feeds["x"]
    best, _ = mixture.chosen(feeds["x"][0])
    assert best.tolist() == [[4, 11, 0]]
    y, _ = everywhere(mixture.model(feeds), feeds)
    np.testing.assert_allclose(y[0], mixture.expected(feeds), rtol=1e-3, atol=1e-3)


def test_different_experts_are_counted() -> None:
    rng = np.random.default_rng(1)
    mixture = make_mixture(rng, count=16, used=2, vectors=())
    feeds = make_feeds(rng, mixture, 12, residual=False)
    best, _ = mixture.chosen(feeds["x"][0])
    _, different = everywhere(mixture.model(feeds), feeds)
    assert different[0] == len(np.unique(best))


def test_numbers_that_are_none_stay_in_their_row() -> None:
    rng = np.random.default_rng(2)
    mixture = make_mixture(rng, scored=True)
    feeds = make_feeds(rng, mixture, 3, residual=True)
    wanted, _ = everywhere(mixture.model(feeds), feeds)
    for strange in (np.nan, np.inf):
        feeds["x"][0, 1, 5] = strange
        y, _ = everywhere(mixture.model(feeds), feeds)
        assert np.isnan(y[0, 1]).all()
        same_bits(wanted[:, [0, 2]], y[:, [0, 2]])


def test_no_rows_have_no_experts() -> None:
    mixture = make_mixture(np.random.default_rng(3))
    feeds = make_feeds(np.random.default_rng(3), mixture, 0, residual=False)
    y, different = session(mixture.model(feeds)).run(None, feeds)
    assert y.shape == (1, 0, mixture.inputs) and different.tolist() == [0]


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("impossible number of experts", {"used": 0}),
        ("impossible number of experts", {"used": 7}),
        ("impossible number of experts", {"experts": 1 << 40}),
        ("impossible widths", {"width": 0}),
        ("impossible widths", {"inputs": 40}),
        ("more or fewer bytes", {"experts": 5}),
        ("more or fewer bytes", {"width": 64}),
        ("no format of weights is called", {"formats": "Q8_0,Q8_0"}),
        ("neither softmax nor sigmoid", {"gating": "hash"}),
        ("have no gate", {"gate": ""}),
        ("a router is not", {"router": np.zeros((8, 64), np.float32)}),
        ("a router is not", {"router": np.zeros((6, 32), np.float32)}),
        ("score has no expert", {"router": np.zeros((7, 64), np.float32)}),
        ("another number of scales", {"scales": np.zeros(7, np.float32)}),
        *(("gain is not as wide", {name: np.ones(32, np.float32)}) for name in ("router_gain", "post_gain")),
        ("gain is not as wide", {"sum_gain": np.ones(32, np.float32)}),
        ("another number of biases", {"selection": np.zeros(5, np.float32)}),
        ("another number of biases", {"router_bias": np.zeros(7, np.float32)}),
        ("not as wide as they", {"bias": np.zeros((6, 32), np.float32)}),
        ("not as wide as they", {"down_bias": np.zeros(6, np.float32)}),
    ],
)
def test_what_is_refused(words: str, changed: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    mixture = make_mixture(rng)
    feeds = make_feeds(rng, mixture, 2, residual=False)
    refuse(words, mixture.model(feeds, **changed), feeds)
