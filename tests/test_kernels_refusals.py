"""Graphs and passes that edgespec's operators must refuse, in words of their own, and never crash on."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto

from edgespec_models.bundles.weight_format import FORMATS, tile_bytes
from tests.kernels_for_tests import graph, session

Arrays = dict[str, npt.NDArray[Any]]

LINEAR = ("x", "gain", "bias", "post_gain", "residual", "w0", "w1")
ATTENTION = ("packed", "past_key", "past_value", "past_length", "cos", "sin", "query_gain", "key_gain")
MANY = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**31, 2**31 - 1]))


def zeros(*shape: int) -> npt.NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def halves(*shape: int) -> npt.NDArray[np.float16]:
    return np.zeros(shape, np.float16)


def refuse(words: str, model: bytes, feeds: Arrays | None = None) -> None:
    """A session over ``model``, or its pass over ``feeds``, must fail in these words."""
    with pytest.raises(Exception, match=f"edgespec: .*(?:{words})"):
        opened = session(model, 2)
        assert feeds is not None, "the graph was accepted"
        opened.run(None, feeds)


def linear(feeds: Arrays | None = None, weights: Arrays | None = None, **attributes: Any) -> bytes:
    """Two matrices of 20 and 7 columns by 256 inputs, unless told otherwise."""
    known: dict[str, Any] = {"inputs": 256, "epsilon": 1e-5, "gate": "", "parts": "Q4_K:20,Q8_0:7"}
    sizes = {"w0": tile_bytes("Q4_K", 20, 256), "w1": tile_bytes("Q8_0", 7, 256)}
    constants = weights if weights is not None else {k: np.zeros(size, np.uint8) for k, size in sizes.items()}
    fed = {"x": zeros(1, 1, 256)} if feeds is None else feeds
    names = [name if name in fed | constants else "" for name in LINEAR]
    while not names[-1]:
        names.pop()
    return graph("Linear", names, {"y": TensorProto.FLOAT}, fed, constants, known | attributes)


# ---- Projections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("Q4_K:20,Q9_9:7", "no format of weights is called Q9_9"),
        ("q4_k:20,Q8_0:7", "no format of weights is called q4_k"),
        ("Q4_K:33,Q8_0:7", "more or fewer bytes than its widths take"),
        ("Q4_K:16,Q8_0:7", "more or fewer bytes than its widths take"),
        ("Q8_0:7,Q4_K:20", "more or fewer bytes than its widths take"),
        ("Q4_K:20,Q8_0:0", "impossible widths"),
        ("Q4_K:20,Q8_0:-7", "impossible widths"),
        ("Q4_K:20,Q8_0:2147483648", "impossible widths"),
        ("Q4_K:20,Q8_0:99999999999999999999999", "impossible widths"),
        ("Q4_K:20,Q8_0:", "impossible widths"),
        ("Q4_K:20,Q8_0", "impossible widths"),
        ("Q4_K:20,,Q8_0:7", "impossible widths"),
        ("", "more matrices than parts"),
        ("Q4_K:20", "more matrices than parts"),
        ("Q4_K:20,Q8_0:7,Q8_0:7", "fewer matrices than parts"),
    ],
)
def test_parts_that_are_none(parts: str, words: str) -> None:
    refuse(words, linear(parts=parts))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"inputs": 0}, "impossible widths"),
        ({"inputs": -256}, "impossible widths"),
        ({"inputs": 1 << 31}, "impossible widths"),
        ({"inputs": 1 << 62}, "impossible widths"),
        ({"inputs": 512}, "more or fewer bytes"),
        ({"inputs": 288}, "no multiple of its format's block"),
        ({"gate": "relu"}, "neither silu nor gelu"),
        ({"gate": "silu"}, "not as wide as what it multiplies"),
        ({"gate": "gelu", "parts": "Q4_K:20,Q8_0:8"}, "not as wide as what it multiplies"),
    ],
)
def test_attributes_of_a_projection(attributes: dict[str, Any], words: str) -> None:
    refuse(words, linear(**attributes))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("more", [-1, 1, 64])
def test_weights_of_other_length(name: str, more: int) -> None:
    inputs = FORMATS[name].inputs
    weights = {"w0": np.zeros(tile_bytes(name, 17, inputs) + more, np.uint8)}
    refuse(
        "more or fewer bytes", linear({"x": zeros(1, 1, inputs)}, weights, inputs=inputs, parts=f"{name}:17")
    )


def test_a_gate_without_its_other_half() -> None:
    weights = {"w0": np.zeros(tile_bytes("Q8_0", 7, 256), np.uint8)}
    refuse("odd number of parts", linear(weights=weights, parts="Q8_0:7", gate="silu"))


def test_weights_that_are_no_constant() -> None:
    fed: Arrays = {"x": zeros(1, 1, 256), "w0": np.zeros(tile_bytes("Q8_0", 7, 256), np.uint8)}
    refuse("not a constant", linear(fed, {}, parts="Q8_0:7"))


@pytest.mark.parametrize("name", ["gain", "bias", "post_gain", "residual"])
def test_an_empty_constant_is_not_none(name: str) -> None:
    weights: Arrays = {"w0": np.zeros(tile_bytes("Q8_0", 7, 256), np.uint8), name: zeros(0)}
    refuse("as wide as|not shaped as", linear(weights=weights, parts="Q8_0:7"), {"x": zeros(1, 1, 256)})


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_weights_of_another_type(dtype: Any) -> None:
    weights = {"w0": np.zeros(tile_bytes("Q8_0", 7, 256), dtype)}
    with pytest.raises(Exception, match=r"(?i)type"):
        session(linear(weights=weights, parts="Q8_0:7"))


@pytest.mark.parametrize("missing", ["inputs", "epsilon", "gate", "parts"])
def test_a_missing_attribute(missing: str) -> None:
    known = {"inputs": 256, "epsilon": 1e-5, "gate": "", "parts": "Q8_0:7"}
    del known[missing]
    feeds, weights = {"x": zeros(1, 1, 256)}, {"w0": np.zeros(tile_bytes("Q8_0", 7, 256), np.uint8)}
    model = graph("Linear", ["x", "", "", "", "", "w0"], {"y": TensorProto.FLOAT}, feeds, weights, known)
    with pytest.raises(Exception, match=missing):
        session(model)


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({"x": zeros(1, 2, 255)}, "not float32 .1, rows, inputs"),
        ({"x": zeros(1, 2, 512)}, "not float32 .1, rows, inputs"),
        ({"x": zeros(2, 256)}, "not float32 .1, rows, inputs"),
        ({"x": zeros(1, 1, 1, 256)}, "not float32 .1, rows, inputs"),
        ({"x": zeros()}, "not float32 .1, rows, inputs"),
        ({"gain": zeros(255)}, "a normalization's gain"),
        ({"gain": zeros(0)}, "a normalization's gain"),
        ({"bias": zeros(28)}, "a bias is not as wide"),
        ({"bias": zeros(0)}, "a bias is not as wide"),
        ({"post_gain": zeros(1)}, "a gain is not as wide as its projection"),
        ({"post_gain": zeros()}, "a gain is not as wide as its projection"),
        ({"residual": zeros(1, 1, 27)}, "a residual is not shaped"),
        ({"residual": zeros(1, 3, 27)}, "a residual is not shaped"),
    ],
)
def test_passes_through_a_projection(feeds: Arrays, words: str) -> None:
    fed = {"x": zeros(1, 2, 256)} | feeds
    refuse(words, linear(fed), fed)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*FORMATS, "", "Q9"]), MANY), max_size=3),
    st.text("Q480_K:,-1 ", max_size=12),
    MANY,
    st.sampled_from(["", "silu", "gelu", "x"]),
    st.lists(st.sampled_from([0, 1, 288, 2368, 4352, 4736]), max_size=3),
)
def test_any_attributes(
    parts: list[tuple[str, int]], text: str, inputs: int, gate: str, sizes: list[int]
) -> None:
    """Whatever a graph says: it is refused, or it runs."""
    written = ",".join(f"{name}:{columns}" for name, columns in parts) + text
    weights = {f"w{index}": np.zeros(size, np.uint8) for index, size in enumerate(sizes[:2])}
    width = inputs if 0 < inputs < 1 << 12 else 256
    feeds = {"x": zeros(1, 2, width)}
    try:
        opened = session(linear(feeds, weights, parts=written, inputs=inputs, gate=gate), 2)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's share no base
        assert not weights or "edgespec: " in str(error)
        return
    assert opened.run(None, feeds)[0].shape[:2] == (1, 2)


# ---- Attention ---------------------------------------------------------------------------------------------


def attention(feeds: Arrays, constants: Arrays | None = None, **attributes: Any) -> bytes:
    """Two heads over one of keys, 16 wide, unless told otherwise."""
    known: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 16, "window": 0, "interleaved": 0}
    known |= {"scale": 0.25, "epsilon": 1e-5}
    weights = constants or {}
    names = [name if name in feeds | weights else "" for name in ATTENTION]
    outputs = {"y": TensorProto.FLOAT, "key": TensorProto.FLOAT16, "value": TensorProto.FLOAT16}
    return graph("Attention", names, outputs, feeds, weights, known | attributes)


def pass_over(rows: int = 2, past: int = 5, capacity: int = 32) -> Arrays:
    feeds: Arrays = {"packed": zeros(1, rows, 64), "past_key": halves(1, 1, capacity, 16)}
    feeds |= {"past_value": halves(1, 1, capacity, 16), "past_length": np.array([past], np.int64)}
    return feeds


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"heads": 0}, "no multiple of heads of keys"),
        ({"heads": -2}, "no multiple of heads of keys"),
        ({"kv_heads": 0}, "no multiple of heads of keys"),
        ({"kv_heads": -1}, "no multiple of heads of keys"),
        ({"heads": 3, "kv_heads": 2}, "no multiple of heads of keys"),
        ({"heads": 1 << 40}, "no multiple of heads of keys"),
        ({"heads": 2**31 - 1, "kv_heads": 2**31 - 1, "head_dim": 2**31 - 1}, "no multiple of heads of keys"),
        ({"head_dim": 0}, "impossible width"),
        ({"head_dim": -16}, "impossible width"),
        ({"head_dim": 1 << 40}, "impossible width"),
        ({"window": -1}, "window is negative"),
    ],
)
def test_attributes_of_attention(attributes: dict[str, Any], words: str) -> None:
    refuse(words, attention(pass_over(), **attributes))


TABLE = zeros(40, 8)


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({"packed": zeros(1, 2, 63)}, "attention's input"),
        ({"packed": zeros(2, 64)}, "attention's input"),
        ({"past_length": np.array([1, 2], np.int64)}, "a KV cache is not"),
        ({"past_length": np.array([1, 2, 3], np.int64)}, "different numbers of tokens"),
        ({"past_length": np.zeros(0, np.int64)}, "past length"),
        ({"past_length": np.array([-1], np.int64)}, "more tokens than its KV cache"),
        ({"past_length": np.array([31], np.int64)}, "more tokens than its KV cache"),
        ({"past_length": np.array([33], np.int64)}, "more tokens than its KV cache"),
        ({"past_length": np.array([2**63 - 1], np.int64)}, "more tokens than its KV cache"),
        ({"past_length": np.array([-(2**63)], np.int64)}, "more tokens than its KV cache"),
        ({"packed": zeros(1, 28, 64)}, "more tokens than its KV cache"),
        (
            {
                "past_key": halves(2, 1, 32, 16),
                "past_value": halves(2, 1, 32, 16),
                "past_length": np.array([5, 32], np.int64),
            },
            "more tokens than its KV cache",
        ),
        (
            {
                "past_key": halves(2, 1, 32, 16),
                "past_value": halves(2, 1, 32, 16),
                "past_length": np.array([4, 6], np.int64),
                "cos": zeros(6, 8),
                "sin": zeros(6, 8),
            },
            "beyond the rotary tables",
        ),
        (
            {"past_key": halves(1, 1, 0, 16), "past_value": halves(1, 1, 0, 16)},
            "more tokens than its KV cache",
        ),
        ({"past_key": halves(1, 1, 24, 16), "past_value": halves(1, 1, 24, 16)}, "no multiple of 16"),
        ({"past_key": halves(1, 1, 48, 16)}, "caches of different length"),
        ({"past_value": halves(1, 1, 16, 16)}, "caches of different length"),
        ({"past_key": halves(1, 2, 32, 16)}, "a KV cache is not"),
        ({"past_key": halves(2, 1, 32, 16)}, "a KV cache is not"),
        ({"past_value": halves(1, 1, 32, 8)}, "a KV cache is not"),
        ({"past_value": halves(1, 32, 16)}, "a KV cache is not"),
        ({"cos": TABLE}, "rotary tables are not"),
        ({"sin": TABLE}, "rotary tables are not"),
        ({"cos": TABLE, "sin": zeros(40, 7)}, "rotary tables are not"),
        ({"cos": zeros(40, 9), "sin": zeros(40, 9)}, "rotary tables are not"),
        ({"cos": zeros(320), "sin": zeros(320)}, "rotary tables are not"),
        ({"cos": zeros(6, 8), "sin": zeros(6, 8)}, "beyond the rotary tables"),
        ({"cos": zeros(0, 8), "sin": zeros(0, 8)}, "beyond the rotary tables"),
        ({"query_gain": zeros(15)}, "as wide as a head"),
        ({"key_gain": zeros(32)}, "as wide as a head"),
        ({"key_gain": zeros(0)}, "as wide as a head"),
    ],
)
def test_passes_through_attention(feeds: Arrays, words: str) -> None:
    fed = pass_over() | feeds
    refuse(words, attention(fed), fed)


@pytest.mark.parametrize("name", ["past_key", "past_value"])
def test_a_cache_of_another_type(name: str) -> None:
    """As graphs had it that were exported before."""
    with pytest.raises(Exception, match=r"(?i)type"):
        session(attention(pass_over() | {name: zeros(1, 1, 32, 16)}))


def stretched(model: bytes, last: int) -> bytes:
    """``model``, whose empty constants say that they are ``last`` wide. NumPy has no such arrays."""
    changed = ModelProto.FromString(model)
    for weight in changed.graph.initializer:
        weight.dims[-1] = last
    content: bytes = changed.SerializeToString()
    return content


def test_rotary_tables_of_no_positions_and_any_width() -> None:
    feeds, tables = pass_over(0, 0), {"cos": zeros(0, 8), "sin": zeros(0, 8)}
    refuse("rotary tables are not", stretched(attention(feeds, tables), 2**62), feeds)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), MANY, st.integers(0, 6), st.integers(0, 40), st.booleans())
def test_any_pass(rows: int, past: int, tiles: int, positions: int, rotated: bool) -> None:
    """Whatever a pass brings: it is refused, or its outputs are right in number."""
    feeds = pass_over(rows, past, tiles * 8)
    if rotated:
        feeds |= {"cos": zeros(positions, 8), "sin": zeros(positions, 8)}
    fits = (
        past >= 0
        and past + rows <= tiles * 8
        and (not rotated or past + rows <= positions)
        and tiles % 2 == 0
    )
    try:
        y, *_ = session(attention(feeds), 2).run(None, feeds)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's share no base
        assert "edgespec: " in str(error)
        assert not fits
        return
    assert fits
    assert y.shape == (1, rows, 32)


# ---- Embeddings and choices --------------------------------------------------------------------------------


def embedding(weights: npt.NDArray[Any] | None = None, **attributes: Any) -> bytes:
    known = {"width": 64, "rows": 21, "format": "Q8_0", "factor": 1.0} | attributes
    table = np.zeros(tile_bytes("Q8_0", 21, 64), np.uint8) if weights is None else weights
    ids = np.zeros((1, 1), np.int64)
    return graph("Embedding", ["ids", "w"], {"y": TensorProto.FLOAT}, {"ids": ids}, {"w": table}, known)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"width": 65}, "no multiple of its format's block"),
        ({"width": 0}, "impossible widths"),
        ({"rows": 0}, "impossible widths"),
        ({"rows": 33}, "more or fewer bytes"),
        ({"format": "F16"}, "no format of weights is called F16"),
        ({"format": ""}, "no format of weights is called"),
        ({"weights": np.zeros(4, np.uint8)}, "more or fewer bytes"),
    ],
)
def test_attributes_of_an_embedding(attributes: dict[str, Any], words: str) -> None:
    refuse(words, embedding(**attributes))


@pytest.mark.parametrize("token", [-1, 21, 31, 2**63 - 1, -(2**63)])
def test_a_token_that_is_not_in_the_vocabulary(token: int) -> None:
    refuse("not in the vocabulary", embedding(), {"ids": np.array([[3, token, 5]], np.int64)})


@pytest.mark.parametrize("shape", [(33,), (2, 33), (1, 1, 2, 33), (1, 2, 0), ()])
def test_logits_of_other_shapes(shape: tuple[int, ...]) -> None:
    feeds = {"logits": zeros(*shape)}
    outputs = {"best": TensorProto.INT64, "likely": TensorProto.FLOAT}
    refuse(
        "logits are not float32 .1, rows, columns", graph("Choose", ["logits"], outputs, feeds, {}, {}), feeds
    )


def test_no_logits_of_any_width() -> None:
    outputs = {"best": TensorProto.INT64, "likely": TensorProto.FLOAT}
    model = graph("Choose", ["logits"], outputs, {}, {"logits": zeros(1, 0, 1)}, {})
    refuse("logits are not float32 .1, rows, columns", stretched(model, 2**63 - 1), {})


def test_choices_of_no_rows() -> None:
    feeds = {"logits": zeros(1, 0, 33)}
    outputs = {"best": TensorProto.INT64, "likely": TensorProto.FLOAT}
    best, likely = session(graph("Choose", ["logits"], outputs, feeds, {}, {})).run(None, feeds)
    assert best.shape == likely.shape == (1, 0)
