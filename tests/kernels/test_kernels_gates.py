"""The operator of gates of attention's heads: what it computes, and what it refuses."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

from tests.kit.kernels import everywhere, graph, same_bits, session

F32 = npt.NDArray[np.float32]


def model(x: F32, gates: F32, **attributes: Any) -> bytes:
    return graph("HeadGate", {"y": TensorProto.FLOAT}, {"x": x, "gates": gates}, {}, attributes)


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "width"), [(1, 4, 32), (5, 16, 128), (20, 3, 7), (0, 2, 16), (9, 65, 1)]
)
def test_outputs_of_heads_times_their_gates(rows: int, heads: int, width: int, softplus: bool) -> None:
    """In float64, and each row alone. There may be a gate for each output."""
    rng = np.random.default_rng(heads)
    x = rng.normal(0, 2, (1, rows, heads * width)).astype(np.float32)
    gates = rng.normal(0, 4, (1, rows, heads)).astype(np.float32)
    (y,) = everywhere(model(x, gates, softplus=int(softplus)), {"x": x, "gates": gates}, 3)
    shares = np.logaddexp(0, gates.astype(np.float64)) if softplus else 1 / (1 + np.exp(-gates.astype(float)))
    np.testing.assert_allclose(y, x * np.repeat(shares, width, axis=-1), rtol=1e-6)
    for row in range(rows):
        alone = {"x": x[:, [row]], "gates": gates[:, [row]]}
        same_bits(y[:, [row]], session(model(*alone.values(), softplus=int(softplus))).run(None, alone)[0])


def test_a_gate_far_from_zero_shuts_or_opens_a_head() -> None:
    gates = np.array([[[-1e30, 1e30, -np.inf, np.inf, np.nan]]], np.float32)
    x = np.full((1, 1, 10), 3, np.float32)
    (y,) = everywhere(model(x, gates), {"x": x, "gates": gates})
    np.testing.assert_allclose(y.reshape(5, 2)[:, 0], [0, 3, 0, 3, np.nan], atol=1e-30)


@pytest.mark.parametrize(
    ("x", "gates"),
    [
        ((1, 2, 8), (1, 3, 2)),
        ((1, 2, 8), (1, 2, 3)),
        ((1, 2, 8), (1, 2, 0)),
        ((1, 2, 8), (2, 2)),
        ((2, 2, 8),) * 2,
    ],
)
def test_gates_that_fit_no_outputs_are_refused(x: tuple[int, ...], gates: tuple[int, ...]) -> None:
    feeds = {"x": np.zeros(x, np.float32), "gates": np.zeros(gates, np.float32)}
    with pytest.raises(Exception, match="the gates of heads do not fit the outputs of heads"):
        session(model(**feeds)).run(None, feeds)
