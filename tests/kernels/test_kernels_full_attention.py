"""The operator of attention among the rows of a picture: what it computes, and what it refuses."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

from tests.kit.kernels import everywhere, graph, same_bits, session

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def model(feeds: dict[str, F32], heads: int, scale: float = 0.125) -> bytes:
    return graph("FullAttention", {"y": TensorProto.FLOAT}, feeds, {}, {"heads": heads, "scale": scale})


def drawn(rows: int, heads: int, head_dim: int) -> dict[str, F32]:
    """With a large channel in all keys."""
    rng = np.random.default_rng(rows)
    shape = 1, rows, heads * head_dim
    feeds = {name: rng.normal(0, 1, shape).astype(np.float32) for name in ("query", "key", "value")}
    feeds["key"][..., head_dim // 2 :: head_dim] += 30
    return feeds


def rounded(x: F64, most: int, axis: int) -> F64:
    """To whole multiples of a scale of those along ``axis``."""
    scale = np.abs(x).max(axis=axis, keepdims=True) / most
    whole: F64 = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)) * scale
    return whole


def expected(feeds: dict[str, F32], heads: int, scale: float = 0.125, *, exact: bool = False) -> F64:
    """In float64, with codes of 7 and 8 bits unless ``exact``."""
    rows, width = feeds["query"].shape[1:]
    q, k, v = (
        feeds[name].astype(np.float64).reshape(rows, heads, -1).transpose(1, 0, 2)
        for name in ("query", "key", "value")
    )
    if not exact:
        q, k = rounded(q, 63, -1), rounded(k - k.mean(axis=1, keepdims=True), 127, -1)
        v = rounded(v, 127, 1)
    scores = scale * q @ k.transpose(0, 2, 1)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = shares.sum(axis=-1, keepdims=True)
    if not exact:
        blocks = np.pad(shares, ((0, 0), (0, 0), (0, -rows % 32))).reshape(heads, rows, -1, 32)
        shares = rounded(blocks, 127, -1).reshape(heads, rows, -1)[..., :rows]
    y: F64 = (shares / total @ v).transpose(1, 0, 2).reshape(1, rows, width)
    return y


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim"),
    [(1, 1, 16), (2, 3, 5), (16, 2, 64), (49, 4, 72), (100, 1, 80), (531, 2, 32), (1100, 1, 128)],
)
def test_rows_see_all_rows(rows: int, heads: int, head_dim: int) -> None:
    """With the same bits by any set of instructions, and on any number of threads."""
    feeds = drawn(rows, heads, head_dim)
    written = model(feeds, heads)
    (y,) = everywhere(written, feeds, 3)
    for exact, most in ((False, 0.002), (True, 0.025)):
        wanted = expected(feeds, heads, exact=exact)
        assert np.linalg.norm(y - wanted) <= most * np.linalg.norm(wanted)
    same_bits(y, session(written).run(None, feeds)[0])


def test_a_picture_without_rows_has_no_vectors() -> None:
    feeds = {name: np.zeros((1, 0, 32), np.float32) for name in ("query", "key", "value")}
    assert session(model(feeds, 2)).run(None, feeds)[0].shape == (1, 0, 32)


def test_a_row_hangs_on_no_other_query() -> None:
    feeds = drawn(700, 2, 40)
    (whole,) = everywhere(model(feeds, 2), feeds)
    feeds["query"][:, 100:] = 7
    (other,) = session(model(feeds, 2)).run(None, feeds)
    same_bits(whole[:, :100], other[:, :100])


def test_a_query_may_see_a_single_row() -> None:
    """And scores as large as floats lose none."""
    feeds = drawn(600, 1, 32)
    feeds["key"][:] = 0
    feeds["key"][0, 555] = feeds["query"][0, 3] = 1e4
    (y,) = everywhere(model(feeds, 1, 1.0), feeds)
    assert np.abs(y[0, 3] - feeds["value"][0, 555]).max() < 0.005 * np.abs(feeds["value"]).max()


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_does_not_look_sound(name: str, strange: float) -> None:
    feeds = drawn(530, 2, 16)
    feeds[name][0, 520, 3] = strange
    (y,) = everywhere(model(feeds, 2), feeds)
    if name == "query":
        assert np.isnan(y[0, 520, :16]).all() and np.isfinite(np.delete(y, 520, axis=1)).all()
    else:
        assert np.isnan(y[..., 3]).all()
    assert np.isfinite(y[..., 16:]).all()


@pytest.mark.parametrize(
    "changed",
    [
        {"key": (1, 4, 32)},
        {"value": (1, 3, 16)},
        {"query": (3, 32)},
        dict.fromkeys(("query", "key", "value"), (2, 3, 32)),
        dict.fromkeys(("query", "key", "value"), (1, 3, 33)),
        dict.fromkeys(("query", "key", "value"), (1, 3, 0)),
    ],
)
def test_rows_of_another_shape_are_refused(changed: dict[str, Any]) -> None:
    shapes = dict.fromkeys(("query", "key", "value"), (1, 3, 32)) | changed
    feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(Exception, match="queries, keys and values are not float32"):
        session(model(feeds, 2)).run(None, feeds)


@pytest.mark.parametrize("heads", [0, -1, 1 << 40])
def test_heads_of_an_impossible_number_are_refused(heads: int) -> None:
    with pytest.raises(Exception, match="an impossible number of heads"):
        session(model(drawn(2, 1, 16), heads))
