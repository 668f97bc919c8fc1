"""Graphs and passes that edgespec's operators must refuse, in words of their own, and never crash on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto

from edgespec_models.bundles.weight_format import FORMATS, tile_bytes
from tests.kit.deltas import Kept, make_net
from tests.kit.kernels import graph, session

Arrays = dict[str, npt.NDArray[Any]]
Attributes = dict[str, Any]

MANY = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**31, 2**31 - 1]))


def zeros(*shape: int) -> npt.NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def halves(*shape: int) -> npt.NDArray[np.float16]:
    return np.zeros(shape, np.float16)


def tiles(name: str, columns: int, inputs: int) -> npt.NDArray[np.uint8]:
    return np.zeros(tile_bytes(name, columns, inputs), np.uint8)


def cases_of(table: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any]]:
    """Words and case, for each case."""
    return [(words, case) for words, cases in table.items() for case in cases]


def refuse(words: str, model: bytes, feeds: Arrays | None = None) -> None:
    """A session over ``model``, or its pass over ``feeds``, must fail in these words."""
    with pytest.raises(Exception, match=f"edgespec: .*(?:{words})"):
        opened = session(model, 2)
        assert feeds is not None, "the graph was accepted"
        opened.run(None, feeds)


def linear(feeds: Arrays | None = None, weights: Arrays | None = None, **attributes: Any) -> bytes:
    """Two matrices of 20 and 7 columns by 256 inputs, unless told otherwise; None leaves an attribute out."""
    known: Attributes = {"inputs": 256, "epsilon": 1e-5, "gate": "", "parts": "Q4_K:20,Q8_0:7"}
    two = {"w0": tiles("Q4_K", 20, 256), "w1": tiles("Q8_0", 7, 256)}
    constants = two if weights is None else weights
    fed = {"x": zeros(1, 1, 256)} if feeds is None else feeds
    said = {name: value for name, value in (known | attributes).items() if value is not None}
    return graph("Linear", {"y": TensorProto.FLOAT}, fed, constants, said)


MATRICES: Arrays = {"w0": tiles("Q8_0", 7, 256)}
BYTES, WIDTHS, WIDER = "more or fewer bytes", "impossible widths", "not as wide as what it multiplies"
ATTRIBUTES: dict[str, Sequence[Attributes]] = {
    BYTES: [
        *({"parts": value} for value in ("Q4_K:33,Q8_0:7", "Q4_K:16,Q8_0:7", "Q8_0:7,Q4_K:20")),
        {"inputs": 512},
    ],
    WIDTHS: [
        *({"inputs": value} for value in (0, -256, 1 << 31, 1 << 62)),
        *({"parts": f"Q4_K:20,Q8_0:{value}"} for value in (0, -7, 1 << 31, 99999999999999999999999, "")),
        *({"parts": value} for value in ("Q4_K:20,Q8_0", "Q4_K:20,,Q8_0:7")),
    ],
    "no format of weights is called Q9_9": [{"parts": "Q4_K:20,Q9_9:7"}],
    "no format of weights is called q4_k": [{"parts": "q4_k:20,Q8_0:7"}],
    "more matrices than parts": [{"parts": ""}, {"parts": "Q4_K:20"}],
    "fewer matrices than parts": [{"parts": "Q4_K:20,Q8_0:7,Q8_0:7"}],
    "no multiple of its format's block": [{"inputs": 288}],
    "neither silu nor gelu": [{"gate": "relu"}],
    WIDER: [{"gate": "silu"}, {"gate": "gelu", "parts": "Q4_K:20,Q8_0:8"}],
    "odd number of parts": [{"weights": MATRICES, "parts": "Q8_0:7", "gate": "silu"}],
    "not a constant": [{"feeds": {"x": zeros(1, 1, 256)} | MATRICES, "weights": {}, "parts": "Q8_0:7"}],
}


@pytest.mark.parametrize(("words", "attributes"), cases_of(ATTRIBUTES))
def test_attributes_of_a_projection(words: str, attributes: Attributes) -> None:
    refuse(words, linear(**attributes))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("more", [-1, 1, 64])
def test_weights_of_other_length(name: str, more: int) -> None:
    inputs = FORMATS[name].inputs
    weights = {"w0": np.zeros(tile_bytes(name, 17, inputs) + more, np.uint8)}
    refuse(BYTES, linear({"x": zeros(1, 1, inputs)}, weights, inputs=inputs, parts=f"{name}:17"))


@pytest.mark.parametrize("name", ["gain", "bias", "post_gain", "residual"])
def test_an_empty_constant_is_not_none(name: str) -> None:
    model = linear(weights=MATRICES | {name: zeros(0)}, parts="Q8_0:7")
    refuse("as wide as|not shaped as", model, {"x": zeros(1, 1, 256)})


def test_other_types_and_missing_attributes() -> None:
    for dtype in (np.float32, np.int64):
        with pytest.raises(Exception, match=r"(?i)type"):
            session(linear(weights={"w0": MATRICES["w0"].astype(dtype)}, parts="Q8_0:7"))
    for missing in ("inputs", "epsilon", "gate", "parts"):
        with pytest.raises(Exception, match=missing):
            given: Attributes = {"parts": "Q8_0:7"} | {missing: None}
            session(linear(weights=MATRICES, **given))


PASSES: dict[str, Sequence[Arrays]] = {
    "not float32 .1, rows, inputs": [
        {"x": zeros(*shape)} for shape in ((1, 2, 255), (1, 2, 512), (2, 256), (1, 1, 1, 256), ())
    ],
    "a normalization's gain": [{"gain": zeros(255)}, {"gain": zeros(0)}],
    "a bias is not as wide": [{"bias": zeros(28)}, {"bias": zeros(0)}],
    "a gain is not as wide as its projection": [{"post_gain": zeros(1)}, {"post_gain": zeros()}],
    "a residual is not shaped": [{"residual": zeros(1, 1, 27)}, {"residual": zeros(1, 3, 27)}],
}


@pytest.mark.parametrize(("words", "feeds"), cases_of(PASSES))
def test_passes_through_a_projection(words: str, feeds: Arrays) -> None:
    fed = {"x": zeros(1, 2, 256)} | feeds
    refuse(words, linear(fed), fed)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from([*FORMATS, "", "Q9"]), MANY), max_size=3),
    st.text("Q480_K:,-1 ", max_size=12),
    MANY,
    st.sampled_from(["", "silu", "gelu", "x"]),
    st.lists(st.sampled_from([0, 1, 288, 2368, 4352, 4736]), max_size=3),
)
def test_any_attributes(parts: list[Any], text: str, inputs: int, gate: str, sizes: list[int]) -> None:
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


def attention(feeds: Arrays, constants: Arrays | None = None, **attributes: Any) -> bytes:
    """Two heads over one of keys, 16 wide, unless told otherwise."""
    known: Attributes = {"heads": 2, "kv_heads": 1, "head_dim": 16, "window": 0, "interleaved": 0}
    known |= {"scale": 0.25, "epsilon": 1e-5}
    weights = constants or {}
    outputs = {"y": TensorProto.FLOAT, "key": TensorProto.FLOAT16, "value": TensorProto.FLOAT16}
    return graph("Attention", outputs, feeds, weights, known | attributes)


def pass_over(rows: int = 2, past: int = 5) -> Arrays:
    """Of one sequence, in block 1 of eight."""
    cache = halves(1, 1, 256, 16)
    feeds: Arrays = {"packed": zeros(1, rows, 64), "past_key": cache, "past_value": cache}
    return feeds | sequences((past, rows)) | blocks(1)


HUGE = dict.fromkeys(("heads", "kv_heads", "head_dim"), 2**31 - 1)
LAYERS: dict[str, Sequence[Attributes]] = {
    "no multiple of heads of keys": [
        *({"heads": value} for value in (0, -2, 1 << 40)),
        *({"kv_heads": value} for value in (0, -1)),
        *({"heads": 3, "kv_heads": 2}, HUGE),
    ],
    "impossible width": [{"head_dim": value} for value in (0, -16, 1 << 40)],
    "window is negative": [{"window": -1}],
    "end at an impossible number": [{"cap": value} for value in (-1.0, np.inf, np.nan)],
}


@pytest.mark.parametrize(("words", "attributes"), cases_of(LAYERS))
def test_attributes_of_attention(words: str, attributes: Attributes) -> None:
    refuse(words, attention(pass_over(), **attributes))


def sequences(*parts: tuple[int, int]) -> Arrays:
    """Tokens that each has, and rows that follow."""
    return {"sequences": np.array(parts, np.int64).reshape(-1, 2)}


def blocks(*numbers: int) -> Arrays:
    return {"blocks": np.array(numbers, np.int64)}


def caches(*shape: int) -> Arrays:
    return dict.fromkeys(("past_key", "past_value"), halves(*shape))


def tables(*shape: int) -> Arrays:
    return dict.fromkeys(("cos", "sin"), zeros(*shape))


def ends(*numbers: int) -> Arrays:
    return {"row_ends": np.array(numbers, np.int64)}


BEHIND: dict[str, Sequence[Arrays]] = {
    "attention's input": [{"packed": zeros(1, 2, 63)}, {"packed": zeros(2, 64)}],
    "impossible number of tokens": [
        *(sequences((past, 2)) for past in (-1, 2**63 - 1, -(2**63), 2**41)),
        *(sequences((5, rows)) for rows in (-1, -(2**63))),
    ],
    "fewer blocks than their tokens": [
        *(blocks(), sequences((31, 2)), sequences((64, 2)) | blocks(0, 1), sequences((2**40, 2))),
        sequences((5, 1), (32, 1)) | blocks(0, 1),
    ],
    "more blocks than their tokens": [blocks(0, 1), sequences((30, 2)) | blocks(0, 1)],
    "none of those that there are": [
        *(blocks(value) for value in (-1, 8, 2**62, -(2**63))),
        caches(0, 1, 256, 16),
    ],
    "is there twice": [
        *(
            sequences((5, 1), (5, 1)) | blocks(1, 1),
            sequences((32, 1), (0, 1)) | blocks(0, 1, 0),
            sequences((5, 1), (32, 1)) | blocks(0, 0, 1),
            sequences((33, 2)) | blocks(1, 1),
            sequences((31, 2)) | blocks(1, 1),
            sequences((5, 2), (5, 0)) | blocks(1, 1),
        ),
    ],
    "the blocks are no int64": [{"blocks": np.zeros(shape, np.int64)} for shape in ((), (1, 1))],
    "more rows than the pass": [
        *(sequences((5, rows)) for rows in (3, 2**63 - 1)),
        sequences((5, 2), (0, 1)) | blocks(0, 1),
    ],
    "fewer rows than the pass": [sequences(), sequences((5, 1)), {"packed": zeros(1, 3, 64)}],
    "sequences are no int64": [
        *({"sequences": np.zeros(shape, np.int64)} for shape in ((2,), (1, 3), (1, 2, 1))),
    ],
    "caches of different length": [
        *({name: halves(2, 1, 256, 16)} for name in ("past_key", "past_value")),
    ],
    "a KV cache is not": [
        *({"past_key": halves(1, 2, 256, 16)}, {"past_key": halves(8, 1, 32, 16)}),
        *({"past_value": halves(1, 1, 256, 8)}, {"past_value": halves(1, 256, 16)}),
    ],
    "rotary tables are not": [
        *({"cos": zeros(40, 8)}, {"sin": zeros(40, 8)}, {"cos": zeros(40, 8), "sin": zeros(40, 7)}),
        *(tables(40, 9), tables(320)),
    ],
    "beyond the rotary tables": [
        *(tables(6, 8), tables(0, 8), sequences((4, 1), (6, 1)) | blocks(0, 1) | tables(6, 8)),
    ],
    "ends are no int64": [ends(7), ends(6, 7, 7), {"row_ends": np.array([[6, 7]], np.int64)}],
    "sees less than itself": [
        *(ends(*pair) for pair in ((5, 7), (6, 6), (7, 6), (8, 8), (6, 2**62), (-1, 7), (-(2**63), 7))),
        sequences((5, 1), (5, 1)) | blocks(0, 1) | ends(6, 7),
    ],
    "as wide as a head": [{"query_gain": zeros(15)}, {"key_gain": zeros(32)}, {"key_gain": zeros(0)}],
}


@pytest.mark.parametrize(("words", "feeds"), cases_of(BEHIND))
def test_passes_through_attention(words: str, feeds: Arrays) -> None:
    fed = pass_over() | feeds
    refuse(words, attention(fed), fed)


@pytest.mark.parametrize("rows", [0, 1, 3, 40])
def test_tables_of_other_rows_than_the_pass_has(rows: int) -> None:
    fed = pass_over() | tables(rows, 8)
    refuse("another number of rows", attention(fed, row_tables=1), fed)


@pytest.mark.parametrize("name", ["past_key", "past_value"])
def test_a_cache_of_another_type(name: str) -> None:
    """As graphs had it that were exported before."""
    with pytest.raises(Exception, match=r"(?i)type"):
        session(attention(pass_over() | {name: zeros(1, 1, 256, 16)}))


def stretched(model: bytes, last: int) -> bytes:
    """``model``, whose empty constants say that they are ``last`` wide. NumPy has no such arrays."""
    changed = ModelProto.FromString(model)
    for weight in changed.graph.initializer:
        weight.dims[-1] = last
    content: bytes = changed.SerializeToString()
    return content


def test_rotary_tables_of_no_positions_and_any_width() -> None:
    feeds = pass_over(0, 0) | blocks()
    refuse("rotary tables are not", stretched(attention(feeds, tables(0, 8)), 2**62), feeds)


@settings(max_examples=100)
@given(st.integers(0, 40), MANY, st.integers(0, 10), st.integers(0, 40), st.booleans())
def test_any_pass(rows: int, past: int, count: int, positions: int, rotated: bool) -> None:
    """Whatever a pass brings: it is refused, or its outputs are right in number."""
    feeds = pass_over(rows, past) | blocks(*range(count)) | caches(1, 1, 256, 16)
    if rotated:
        feeds |= {"cos": zeros(positions, 8), "sin": zeros(positions, 8)}
    held = past + rows <= positions or not rotated
    fits = past >= 0 and held and count == -(-(past + rows) // 32) <= 8
    try:
        y, *_ = session(attention(feeds), 2).run(None, feeds)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's share no base
        assert "edgespec: " in str(error)
        assert not fits
        return
    assert fits
    assert y.shape == (1, rows, 32)


def embedding(weights: npt.NDArray[Any] | None = None, **attributes: Any) -> bytes:
    known = {"width": 64, "rows": 21, "format": "Q8_0", "factor": 1.0} | attributes
    table = tiles("Q8_0", 21, 64) if weights is None else weights
    ids = np.zeros((1, 1), np.int64)
    return graph("Embedding", {"y": TensorProto.FLOAT}, {"ids": ids}, {"w": table}, known)


TABLES: dict[str, Sequence[Attributes]] = {
    "no multiple of its format's block": [{"width": 65}],
    WIDTHS: [{"width": 0}, {"rows": 0}],
    BYTES: [{"rows": 33}, {"weights": np.zeros(4, np.uint8)}],
    "no format of weights is called F16": [{"format": "F16"}],
    "no format of weights is called": [{"format": ""}],
}


@pytest.mark.parametrize(("words", "attributes"), cases_of(TABLES))
def test_attributes_of_an_embedding(words: str, attributes: Attributes) -> None:
    refuse(words, embedding(**attributes))


@pytest.mark.parametrize("token", [-1, 21, 31, 2**63 - 1, -(2**63)])
def test_a_token_that_is_not_in_the_vocabulary(token: int) -> None:
    refuse("not in the vocabulary", embedding(), {"ids": np.array([[3, token, 5]], np.int64)})


def choose(feeds: Arrays, constants: Arrays | None = None) -> bytes:
    outputs = {"best": TensorProto.INT64, "likely": TensorProto.FLOAT}
    return graph("Choose", outputs, feeds, constants or {}, {})


@pytest.mark.parametrize("shape", [(33,), (2, 33), (1, 1, 2, 33), (1, 2, 0), ()])
def test_logits_of_other_shapes(shape: tuple[int, ...]) -> None:
    feeds = {"logits": zeros(*shape)}
    refuse("logits are not float32 .1, rows, columns", choose(feeds), feeds)


def test_no_logits_of_any_width() -> None:
    model = stretched(choose({}, {"logits": zeros(1, 0, 1)}), 2**63 - 1)
    refuse("logits are not float32 .1, rows, columns", model, {})


def test_choices_of_no_rows() -> None:
    feeds = {"logits": zeros(1, 0, 33)}
    best, likely = session(choose(feeds)).run(None, feeds)
    assert best.shape == likely.shape == (1, 0)


NET = make_net(np.random.default_rng(0))
DELTA_ATTRIBUTES: dict[str, Sequence[Attributes]] = {
    "no multiple of its key heads": [
        *({"key_heads": value} for value in (0, -2, 3, 1 << 40)),
        *({"value_heads": value} for value in (0, -2, 5, 1 << 40)),
    ],
    "impossible width": [
        {f"{of}_width": value} for of in ("key", "value") for value in (0, -16, 24, 1 << 40)
    ],
}


@pytest.mark.parametrize(("words", "attributes"), cases_of(DELTA_ATTRIBUTES))
def test_attributes_of_a_delta_net(words: str, attributes: Attributes) -> None:
    refuse(words, delta(delta_pass(), **attributes))


def delta(feeds: Arrays, **attributes: Any) -> bytes:
    outputs = dict.fromkeys(("y", "state_now", "log_now", "ring_now"), TensorProto.FLOAT)
    return graph("Delta", outputs, feeds, {}, NET.attributes() | attributes)


def delta_pass(rows: int = 2, slots: int = 2) -> Arrays:
    """Behind five tokens, of which the state has three."""
    return NET.feeds(zeros(1, rows, NET.width), Kept(NET, slots), (5, rows), (1, 3))


def places(*parts: tuple[int, int]) -> Arrays:
    return {"places": np.array(parts, np.int64).reshape(-1, 2)}


STATES: dict[str, Sequence[Arrays]] = {
    "a delta net's input": [{"packed": zeros(1, 2, NET.width - 1)}, {"packed": zeros(2, NET.width)}],
    "a convolution's weights": [
        *({"weights": zeros(*shape)} for shape in ((4, NET.channels - 1), (0, NET.channels), (4,))),
        {"weights": zeros(65, NET.channels)},
    ],
    "another number of decays": [{"a": zeros(3)}, {"bias": zeros(5)}],
    "a gain is not as wide": [{"gain": zeros(15)}],
    "a state is not shaped": [
        *({"state": zeros(*shape)} for shape in ((), (2, 4, 1, 16), (2, 4, 1, 15, 16), (2, 3, 1, 16, 16))),
        *({"log": zeros(2, 15, 132)}, {"log": zeros(1, 16, 132)}, {"ring": zeros(2, 18, NET.channels)}),
    ],
    "are no int64": [places(), {"places": np.zeros((1, 3), np.int64)}],
    "more rows than the pass": [sequences((5, 3))],
    "fewer rows than the pass": [sequences((5, 1)), sequences((5, 0)), sequences()],
    "impossible number of tokens": [
        sequences((5, -1)),
        *(sequences((value, 2)) for value in (-1, 2**63 - 1)),
    ],
    "none of those that there are": [places((value, 3)) for value in (2, -1, 2**63 - 1)],
    "share a slot": [sequences((5, 1), (5, 1)) | places((1, 3), (1, 4))],
    "behind more tokens than it has, or too few": [
        *(places((1, value)) for value in (6, -1, 2**63 - 1)),
        sequences((20, 2)) | places((1, 3)),
    ],
}


@pytest.mark.parametrize(("words", "feeds"), cases_of(STATES))
def test_passes_through_a_delta_net(words: str, feeds: Arrays) -> None:
    fed = delta_pass() | feeds
    refuse(words, delta(fed), fed)
