"""The most likely column of each row, found where the model runs, against what the rows of logits say."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from onnxscript import GraphBuilder

import edgespec
from edgespec.decoding.sampling import distribution
from edgespec.drafting.source import Source
from edgespec.running.verifier import Verifier
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import EdgespecError
from edgespec_models.graphs.decoder import choose
from edgespec_models.graphs.plan import Precision
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.cuda import DeviceMemory, open_cuda
from edgespec_runtimes.devices import CPU, Device
from edgespec_runtimes.ort import ort
from edgespec_runtimes.predictions import DevicePredictions, Logits, Predictions
from edgespec_runtimes.session import Rows, Session
from tests.kit.drafters import GREEDY, model_of
from tests.kit.toy import (
    F32,
    GEMMA,
    INT4,
    LLAMA,
    QWEN,
    NextLogits,
    RandomDrafter,
    Silent,
    ToySession,
    decode,
    markov_logits,
    tiny_bundle,
)

VOCAB = 40
HALF = Precision("float16", "float16")
LEVELS = (-np.inf, -1.5, -0.0, 0.0, 0.25, 3.0, 11.0)
DAMAGE = (np.nan, np.inf)


@lru_cache
def chooser() -> Any:
    """The part of the graph that chooses, by itself."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "com.microsoft": 1}, name="choose")
    builder = GraphBuilder(graph)
    logits = builder.input("logits", ir.DataType.FLOAT, [1, "r", "columns"])
    order = builder.input("column_order", ir.DataType.FLOAT, ["columns"])
    outputs = zip(("best", "likely"), choose(builder.op, logits, order), strict=True)
    for (name, value), kind in zip(outputs, (ir.DataType.INT64, ir.DataType.FLOAT), strict=True):
        value.type, value.shape = ir.TensorType(kind), ir.Shape([1, "r"])
        builder.add_output(value, name)
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"])


def chosen(logits: F32, read: Callable[[], Logits]) -> DevicePredictions:
    """What a device would say of ``logits``, which it keeps."""
    order = -np.arange(logits.shape[1], dtype=np.float32)
    best, likely = chooser().run(None, {"logits": logits[None], "column_order": order})
    return DevicePredictions(logits.shape, read, best[0], likely[0])


def outcome(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except EdgespecError as error:
        return str(error)


rows = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=33),
    elements=st.one_of(
        st.sampled_from(LEVELS), st.floats(-30, 30, width=16), st.sampled_from(LEVELS + DAMAGE)
    ),
)


@settings(deadline=None)
@given(rows)
def test_a_device_chooses_what_the_rows_say(logits: F32) -> None:
    """Ties, rows with -inf, and damaged rows, where both say the same."""
    copies, damaged = list[int](), 0

    def read() -> Logits:
        copies.append(1)
        return logits

    plain, device = Predictions(logits), chosen(logits, read)
    assert device.shape == plain.shape
    for row in range(len(logits)):
        expected = outcome(lambda row=row: int(distribution(logits[row], GREEDY).argmax()))  # type: ignore[misc]
        assert outcome(lambda row=row: plain.best(row)) == expected  # type: ignore[misc]
        assert outcome(lambda row=row: device.best(row)) == expected  # type: ignore[misc]
        if isinstance(expected, int):
            assert device.probability(row) == pytest.approx(plain.probability(row), rel=1e-5)
            weights = np.exp(logits[row].astype(np.float64) - logits[row].max())
            assert plain.probability(row) == pytest.approx(1 / weights.sum(), rel=1e-5)
        else:
            damaged = 1
            assert "not a finite number" in str(expected)
    assert len(copies) == damaged  # only to say what is wrong
    assert device.logits is logits and device.logits is logits and len(copies) == 1


class _Choosing(ToySession):
    """A toy that hands out choices and no rows."""

    def pass_over(self, rows: Sequence[Rows]) -> list[Predictions]:
        return [chosen(each.logits, pytest.fail) for each in super().pass_over(rows)]

    def predict_next(self, tokens: Sequence[int]) -> Predictions:
        return chosen(super().predict_next(tokens).logits, pytest.fail)


def _tied(seed: int, levels: int) -> NextLogits:
    """Logits that are a few whole numbers, so that rows have many equals."""
    next_logits = markov_logits(seed, VOCAB)
    return lambda tokens: np.clip(np.round(next_logits(tokens)), -levels, levels)


def _written(target: Session, drafter: Source, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for step in decode(target, drafter, Verifier(GREEDY), tokens, max_new_tokens=count, max_draft=5):
        assert len(step.tokens) <= 6
    return tokens


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(0, 3), st.sampled_from(["none", "random", "model", "other model"]))
def test_greedy_output_is_that_of_the_rows(seed: int, levels: int, kind: str) -> None:
    next_logits, other = _tied(seed, levels), _tied(seed + 1, levels)

    def drafter(session: type[ToySession]) -> Source:
        if kind == "none":
            return Silent()
        if kind == "random":
            return RandomDrafter(seed, VOCAB, next_logits)
        return model_of(session(next_logits if kind == "model" else other, VOCAB))

    prompt = [seed % VOCAB, 7]
    plain = _written(ToySession(next_logits, VOCAB), drafter(ToySession), prompt, 30)
    assert _written(_Choosing(next_logits, VOCAB), drafter(_Choosing), prompt, 30) == plain
    assert _written(ToySession(next_logits, VOCAB), Silent(), prompt, 30) == plain


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of logits that were copied from a device."""
    seen, output = list[tuple[int, ...]](), DeviceMemory.shared_output

    def counting(memory: DeviceMemory, shape: Sequence[int], dtype: Any) -> tuple[Any, Callable[[], Any]]:
        value, read = output(memory, shape, dtype)

        def counted() -> Any:
            seen.append(tuple(shape))
            return read()

        return value, counted

    monkeypatch.setattr(DeviceMemory, "shared_output", counting)
    return seen


def _open(bundle: Bundle) -> Session:
    return open_cuda(bundle, Device(CPU, "ready"), CpuOptions(threads=1))


def _of_before(bundle: Bundle) -> Bundle:
    """As exported before graphs chose: neither the graph nor the manifest knows of it."""
    model = onnx.load(str(bundle.graph), load_external_data=False)
    first = next(i for i, node in enumerate(model.graph.node) if node.op_type == "ArgMax")
    del model.graph.node[first:]
    for values in (model.graph.output, model.graph.input):
        kept = [value for value in values if value.name.partition("_")[0] not in ("best", "column")]
        del values[:]
        values.extend(kept)
    onnx.save(model, str(bundle.graph))
    bundle.manifest = replace(bundle.manifest, choices=False)
    return bundle


@pytest.mark.parametrize("config", [LLAMA, QWEN, GEMMA], ids=lambda config: config.architecture)
def test_a_float16_graph_chooses_what_its_rows_say(
    tmp_path: Path, config: Any, copies: list[tuple[int, ...]]
) -> None:
    """In greedy decoding, of target and drafter, no row reaches the host."""
    target, before, small = (
        tiny_bundle(tmp_path / name, config, INT4, seed=seed, precision=HALF).bundle
        for name, seed in (("target", 0), ("before", 0), ("drafter", 1))
    )
    assert target.manifest.choices
    new, old = _open(target), _open(_of_before(before))
    old.predict([1])
    assert old.model.prepared_s == 0.0  # its logits lie on the host, where no captured pass writes
    old.rewind(0)
    drafter = _open(small)
    copies.clear()
    for prompt in ([1], [5, 17, 300, 2, 2, 41], list(range(200))):
        plain = _written(old, Silent(), prompt, 24)
        assert _written(new, Silent(), prompt, 24) == plain
        assert _written(new, model_of(drafter), prompt, 24) == plain or not new.model.row_exact
    assert drafter.length and not copies
    tokens = [3, 300, 12, 4]
    for session in (new, old):
        session.rewind(0)
    predictions, expected = new.predict(tokens), old.predict(tokens)
    assert not copies and isinstance(predictions, DevicePredictions)
    assert not isinstance(expected, DevicePredictions)
    assert [predictions.best(row) for row in range(4)] == expected.logits.argmax(axis=1).tolist()
    for row in range(4):
        assert predictions.probability(row) == pytest.approx(expected.probability(row), rel=1e-5)
    np.testing.assert_array_equal(predictions.logits, expected.logits)
    assert copies == [(1, 4, config.vocab_size)]


def test_who_samples_reads_rows_once_a_pass(tmp_path: Path, copies: list[tuple[int, ...]]) -> None:
    target, small = (tiny_bundle(tmp_path / name, precision=HALF, seed=n).path for n, name in enumerate("td"))
    with edgespec.load(target, small) as model:
        copies.clear()
        model.generate("one two three", max_new_tokens=8)
        assert not copies
        answer = model.generate("one two three", max_new_tokens=8, temperature=1.0, speculate=False)
        assert len(copies) == answer.stats.rounds
        copies.clear()
        answer = model.generate("one two three", max_new_tokens=8, repetition_penalty=1.3, speculate=False)
        assert len(copies) == answer.stats.rounds
