"""Layers with states by edgespec's kernels against plain NumPy, with every set of instructions there is."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.deltas import LOGGED, Kept, Mamba, Net, Sequence, make_mamba, make_net, make_text, run_in_place
from tests.kit.gguf import F32
from tests.kit.kernels import same_bits, session, sets

SEEDS = st.integers(0, 2**32 - 1)
ROWS = st.sampled_from([1, 1, 2, 3, 5, 8, 15, 16, 17, 18, 19, 20, 33, 40])


@st.composite
def nets(draw: st.DrawFn) -> Net:
    key_heads = draw(st.integers(1, 3))
    return make_net(
        np.random.default_rng(draw(SEEDS)),
        key_heads=key_heads,
        value_heads=key_heads * draw(st.integers(1, 3)),
        key_width=draw(st.sampled_from([16, 32, 48])),
        value_width=draw(st.sampled_from([16, 48, 64, 96])),
        taps=draw(st.sampled_from([1, 2, 4, 7])),
        tiled=draw(st.booleans()),
    )


@st.composite
def mambas(draw: st.DrawFn) -> Mamba:
    groups = draw(st.integers(1, 3))
    return make_mamba(
        np.random.default_rng(draw(SEEDS)),
        heads=groups * draw(st.integers(1, 3)),
        head_width=draw(st.sampled_from([16, 48, 64, 96])),
        groups=groups,
        key_width=draw(st.sampled_from([16, 32, 48])),
        taps=draw(st.sampled_from([1, 2, 4, 7])),
    )


LAYERS = st.one_of(nets(), mambas())


def alone(net: Net | Mamba, text: F32, instructions: str = "plain") -> F32:
    """Every row of a text in one pass."""
    opened = session(net.model(), 1, instructions)
    return run_in_place(opened, net, text, Kept(net, 1), (0, len(text)), (0, 0))


@settings(max_examples=40)
@given(LAYERS, SEEDS, st.integers(1, 70), st.integers(1, 4))
def test_a_layer_is_what_it_is_in_float64(net: Net | Mamba, seed: int, rows: int, threads: int) -> None:
    text = make_text(np.random.default_rng(seed), net, rows)
    first = alone(net, text)
    np.testing.assert_allclose(first, net.expected(text), rtol=1e-4, atol=2e-4)
    for name in sets()[1:]:
        kept = Kept(net, 1)
        opened = session(net.model(), threads, name)
        same_bits(first, run_in_place(opened, net, text, kept, (0, rows), (0, 0)), name)


@settings(max_examples=60)
@given(LAYERS, SEEDS, st.integers(1, 3), st.integers(1, 4), st.data())
def test_rows_have_the_bits_of_one_plain_run(
    net: Net | Mamba, seed: int, count: int, threads: int, data: st.DataObject
) -> None:
    """However passes are cut, whoever shares them, and whatever was read and taken back in between."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(count + 1)[:count]
    all_of = [Sequence(int(slot), make_text(rng, net, int(rng.integers(1, 90)))) for slot in slots]
    wanted = [alone(net, sequence.text) for sequence in all_of]
    kept = Kept(net, count + 1)
    opened = session(net.model(), threads, data.draw(st.sampled_from(sets())))
    for _ in range(60):
        parts: list[Any] = []
        for at, sequence in enumerate(all_of):
            right = min(data.draw(ROWS), len(sequence.text) - sequence.length)
            wrong = data.draw(st.integers(0, max(0, LOGGED - right)))
            if right + wrong and data.draw(st.integers(0, 3)):
                rows = sequence.text[sequence.length : sequence.length + right]
                parts.append((at, right, np.concatenate([rows, make_text(rng, net, wrong)])))
        if not parts:
            continue
        places = [(all_of[at].slot, all_of[at].behind) for at, _, _ in parts]
        said = [all_of[at].read(len(rows)) for at, _, rows in parts]
        packed = np.concatenate([rows for _, _, rows in parts])
        y, row = run_in_place(opened, net, packed, kept, said, places), 0
        for (at, right, rows), (past, _) in zip(parts, said, strict=True):
            same_bits(wanted[at][past : past + right], y[row : row + right])
            back = data.draw(st.integers(0, 2)) if right + past < len(all_of[at].text) else 0
            all_of[at].length = max(all_of[at].behind, past + right - back)
            row += len(rows)
        if all(sequence.length == len(sequence.text) for sequence in all_of):
            break
    assert all(np.isnan(array).all() for array in kept.of(int(np.setdiff1d(range(count + 1), slots)[0])))


@pytest.mark.parametrize("name", sets())
@pytest.mark.parametrize("kind", ["delta net", "tiled delta net", "Mamba-2"])
def test_heads_as_wide_as_models_have_them(name: str, kind: str) -> None:
    rng = np.random.default_rng(7)
    shape = {"key_heads": 2, "value_heads": 6, "key_width": 128, "value_width": 128}
    net: Net | Mamba = make_net(rng, **shape, tiled=int(kind == "tiled delta net"))
    if kind == "Mamba-2":
        net = make_mamba(rng, heads=8, head_width=64, groups=1, key_width=128)
    text, kept, opened = make_text(rng, net, 50), Kept(net, 1), session(net.model(), 2, name)
    wanted = alone(net, text)
    np.testing.assert_allclose(wanted, net.expected(text), rtol=1e-4, atol=2e-4)
    sequence = Sequence(0, text)
    for rows in (30, 1, 4, 15):
        place, said = (0, sequence.behind), sequence.read(rows)
        y = run_in_place(opened, net, text[said[0] : sequence.length], kept, said, place)
        same_bits(wanted[said[0] : sequence.length], y)


def test_what_is_not_in_place_is_copied() -> None:
    rng = np.random.default_rng(3)
    net = make_net(rng)
    text, kept, other = make_text(rng, net, 20), Kept(net, 2), Kept(net, 2)
    opened = session(net.model())
    y, *now = opened.run(None, net.feeds(text[None], kept, (0, 20), (1, 0)))
    same_bits(run_in_place(opened, net, text, other, (0, 20), (1, 0)), y[0])
    for mine, theirs, before in zip(now, other.arrays, kept.arrays, strict=True):
        same_bits(mine, theirs)
        assert np.isnan(before).all()


def test_strong_decays_and_huge_inputs() -> None:
    """Decays of nothing and of all, and the exponential's ends."""
    rng = np.random.default_rng(5)
    net = make_net(rng)
    text = make_text(rng, net, 30)
    text[:, -8:] *= 100
    wanted = alone(net, text)
    np.testing.assert_allclose(wanted, net.expected(text), rtol=1e-3, atol=1e-3)
    for name in sets()[1:]:
        same_bits(wanted, alone(net, text, name), name)


@pytest.mark.parametrize("make", [make_net, make_mamba])
def test_no_rows_change_nothing(make: Callable[..., Net | Mamba]) -> None:
    net = make(np.random.default_rng(0))
    kept = Kept(net, 1)
    y = run_in_place(session(net.model()), net, np.zeros((0, net.width), np.float32), kept, (0, 0), (0, 0))
    assert y.shape == (0, net.values)
    assert all(np.isnan(array).all() for array in kept.arrays)
