"""Graphs in 16-bit floats, and the session that keeps a device's memory, on the CPU provider."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnxscript import GraphBuilder

import edgespec
from edgespec.measuring.audit import audit_answers
from edgespec.measuring.prompts import Prompt
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats.encode import decode_linear, encode_linear
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.decoders.kept import types_of
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import BundleError, DeviceError, UnsupportedModelError
from edgespec_models.graphs.linear import linear
from edgespec_models.graphs.plan import LinearPart, LinearSpec, Precision
from edgespec_runtimes import discovery
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.cuda import DeviceCache, open_cuda
from edgespec_runtimes.devices import KINDS, Device
from edgespec_runtimes.discovery import Runtime, devices, place, resolve
from edgespec_runtimes.graph_io import NativeModel
from edgespec_runtimes.ort import ort
from edgespec_runtimes.session import Session
from tests.kit.gguf import ARCHITECTURES, TinyGGUF, reference_weights, tiny_gguf
from tests.kit.machines import PLAIN, SNAPDRAGON, WORKSTATION
from tests.kit.sessions import ON_CPU, ONE_THREAD, alike, steps
from tests.kit.toy import COLUMNS, FLOAT, GEMMA, INT4, INT8, LLAMA, QWEN, TinyModel, tiny_bundle
from tests.kit.weights import random_blocks
from tests.models.test_graphs import reference_logits

TOKENS = [5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63, 11, 380]
TOLERANCE = {"F32": 5e-3, "Q8_0": 5e-3, "Q4_K": 6e-2}
"""Of the logits' norm: float16 rounds by 5e-4 in every operator, 4-bit remainders come on top in Q4_K."""
PRECISIONS = (Precision("float16", "float16"), Precision("float16", "float32"))
CUDA = ExportOptions(device="cuda")

Make = Callable[[str, str], Bundle]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Bundles of random models in float16, each made once."""
    folder = tmp_path_factory.mktemp("cuda")

    @cache
    def bundle(architecture: str, kind: str) -> Bundle:
        out = folder / f"{architecture}-{kind}"
        return _export(tiny_gguf(architecture, kind), out)

    return bundle


def _export(model: TinyGGUF, out: Path, options: ExportOptions = CUDA) -> Bundle:
    export_model(model.write(out.with_suffix(".gguf")), out, options=options)
    return Bundle(out, verify_digests=True)


def _open(bundle: Bundle) -> Session:
    return open_cuda(bundle, ON_CPU, ONE_THREAD)


def _error(model: TinyGGUF, bundle: Bundle) -> float:
    """Relative error of the logits against numpy over the ``gguf`` package's weights, in float64."""
    assert isinstance(bundle.config, Transformer)
    expected = reference_logits(TinyModel(bundle.path, bundle.config, reference_weights(model)), TOKENS)
    session = _open(bundle)
    actual = session.predict(TOKENS).logits.copy()
    session.close()
    assert actual.dtype == np.float32
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def _types(bundle: Bundle) -> dict[str, str]:
    session = ort.InferenceSession(str(bundle.graph), providers=["CPUExecutionProvider"])
    return {value.name: value.type for value in (*session.get_inputs(), *session.get_outputs())}


@pytest.mark.parametrize("form", [FLOAT, INT8, INT4, COLUMNS], ids=lambda form: form.name)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.residual)
@pytest.mark.parametrize("config", [LLAMA, QWEN, GEMMA], ids=lambda config: config.architecture)
def test_float16_computes_the_architecture(
    tmp_path: Path, config: Transformer, precision: Precision, form: WeightFormat
) -> None:
    """Against the same weights in float64, in one pass and token by token."""
    model = tiny_bundle(tmp_path / "m", config, form, precision=precision)
    expected = reference_logits(model, TOKENS)
    session = _open(model.bundle)
    together = session.predict(TOKENS).logits.copy()
    session.rewind(0)
    stepwise = np.concatenate([session.predict([token]).logits.copy() for token in TOKENS])
    for actual in (together, stepwise):
        assert 1e-5 < float(np.linalg.norm(actual - expected) / np.linalg.norm(expected)) < 5e-3


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float16_computes_what_the_file_says(make: Make, architecture: str, kind: str) -> None:
    bundle = make(architecture, kind)
    error = _error(tiny_gguf(architecture, kind), bundle)
    assert 1e-5 < error < TOLERANCE[kind]  # float32 would be nearer
    assert bundle.report()["activations"]["residual_type"] == "float16"
    manifest = bundle.manifest
    assert (manifest.activations, manifest.device, types_of(manifest.kept)) == ("float16", "cuda", "float16")
    assert (manifest.graph_kind, manifest.made_for) == ("dynamic-float16", "cuda")
    types = _types(bundle)
    assert types["past_key_values.0.key"] == types["present.1.value"] == "tensor(float16)"
    assert types["logits"] == "tensor(float)"


def test_weights_are_in_blocks_that_cuda_has_kernels_for(make: Make) -> None:
    nodes = onnx.load(str(make("llama", "Q4_K").graph), load_external_data=False).graph.node
    products = [
        {attribute.name: attribute.i for attribute in node.attribute}
        for node in nodes
        if node.op_type == "MatMulNBits"
    ]
    assert {product["bits"] for product in products} == {4, 8}
    assert {product["block_size"] for product in products} == {32}
    assert all(product["K"] % 8 == 0 for product in products)
    assert set(make("llama", "F32").manifest.formats) == {"float16"}
    gathers = [node for node in nodes if node.op_type == "GatherBlockQuantized"]
    assert all("zero_points" in node.input[3] for node in gathers) and gathers


@pytest.mark.parametrize("width", [96, 576, 896, 1024, 1536])
def test_block_sums_are_padded_to_whole_words(width: int) -> None:
    rng = np.random.default_rng(width)
    encoded = encode_linear(random_blocks(rng, (48, width), COLUMNS), COLUMNS)
    x = rng.normal(0.2, 1.0, (1, 5, width)).astype(np.float16)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "com.microsoft": 1}, name="linear")
    builder = GraphBuilder(graph)
    value = builder.input("x", ir.DataType.FLOAT16, [1, "n", width])
    output = linear(builder.op, value, LinearSpec(width, (LinearPart(("w",), 48, COLUMNS),), "m"), "float16")
    output.type, output.shape = ir.TensorType(ir.DataType.FLOAT16), ir.Shape([1, "n", None])
    builder.add_output(output, "y")
    for name, parameter in graph.initializers.items():
        if parameter.const_value is None:
            assert parameter.dtype is not None
            array = encoded[name.rsplit(".", 1)[1]].astype(parameter.dtype.numpy())
            parameter.const_value = ir.tensor(np.ascontiguousarray(array), name=name)
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    actual = session.run(None, {"x": x})[0][0]
    expected = x[0].astype(np.float32) @ decode_linear(encoded, COLUMNS, width).T
    assert float(np.linalg.norm(actual - expected) / np.linalg.norm(expected)) < 2e-3
    columns = next(a.i for n in proto.graph.node for a in n.attribute if a.name == "K")
    assert columns % 8 == 0 and 0 <= columns - width - width // 32 < 8


def test_a_residual_stream_that_float16_does_not_hold_is_float32(tmp_path: Path) -> None:
    model = tiny_gguf("gemma3")
    for layer in range(6):
        name = f"blk.{layer}.post_ffw_norm.weight"
        kind, weight = model.tensors[name]
        model.tensors[name] = kind, (weight * np.float32(30_000)).astype(np.float32)
    bundle = _export(model, tmp_path / "m")
    ranges = bundle.report()["activations"]
    assert ranges["residual"] > 65_504 > ranges["inner"] and ranges["residual_type"] == "float32"
    assert _error(model, bundle) < 5e-3


def test_layers_that_float16_does_not_hold_are_refused(tmp_path: Path) -> None:
    model = tiny_gguf("llama")
    kind, weight = model.tensors["blk.1.ffn_down.weight"]
    model.tensors["blk.1.ffn_down.weight"] = kind, (weight * np.float32(1e5)).astype(np.float32)
    with pytest.raises(UnsupportedModelError, match=r"float16 ends at 65,504.*Export it for the CPU"):
        _export(model, tmp_path / "m")
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


@pytest.fixture(scope="module")
def pairs(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """Sessions over the same float weights, in float16 with a device's memory and in float32."""
    folder = tmp_path_factory.mktemp("float32")

    @cache
    def opened(architecture: str) -> tuple[Session, Session]:
        out = folder / architecture
        whole = _export(tiny_gguf(architecture), out, ExportOptions(weights="portable"))
        return _open(make(architecture, "F32")), open_cpu(whole, ONE_THREAD)

    return opened


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, seed=st.integers(0, 99))
def test_whatever_is_asked_comes_near_the_cpu_session(
    architecture: str,
    pairs: Callable[[str], tuple[Session, Session]],
    steps: list[tuple[str, int]],
    seed: int,
) -> None:
    alike(*pairs(architecture), steps, seed, near=2e-2)


def test_a_cache_on_a_device_keeps_its_rows_when_it_grows(make: Make) -> None:
    session = _open(make("llama", "F32"))
    assert isinstance(session.model, NativeModel) and isinstance(session.model.cache, DeviceCache)
    session.predict(TOKENS)
    before = [value.numpy() for value in session.model.cache._values]
    session.reserve(session.capacity + 1)
    for old, new in zip(before, session.model.cache._values, strict=True):
        np.testing.assert_array_equal(new.numpy()[:, :, : len(TOKENS)], old[:, :, : len(TOKENS)])
        assert old[:, :, : len(TOKENS)].any() and not new.numpy()[:, :, len(TOKENS) :].any()
    per_token = make("llama", "F32").manifest.kv_bytes_per_token
    assert session.kv_bytes >= per_token * session.capacity
    session.close()
    assert session.kv_bytes == 0


def test_a_pass_of_few_tokens_is_prepared_once(make: Make) -> None:
    """Its first run captures a graph, which later ones start; a cache elsewhere needs a new one."""
    session = _open(make("llama", "F32"))
    session.reserve(session.capacity + 1)

    def prepares(tokens: list[int]) -> bool:
        session.rewind(0)
        before = session.predict(tokens).logits.copy()
        prepared = session.model.prepared_s > 0.0
        session.rewind(0)
        np.testing.assert_array_equal(session.predict(tokens).logits, before)
        assert session.model.prepared_s == 0.0
        return prepared

    assert [prepares([7]), prepares([7]), prepares(TOKENS), prepares([9])] == [True, False, True, False]
    assert not any(prepares(TOKENS * 2 + [5] * more) for more in range(40))  # more prompts than are kept
    assert not prepares([7])
    session.reserve(session.capacity + 1)
    assert prepares([7])
    session.close()


def test_other_graphs_and_devices_are_refused(make: Make, tmp_path: Path) -> None:
    bundle = make("llama", "F32")
    whole = _export(tiny_gguf("llama", layers=1), tmp_path / "m", ExportOptions())
    with pytest.raises(BundleError, match="no float16 graph"):
        _open(whole)
    missing = Device(KINDS["cuda"], "ready")
    with pytest.raises(DeviceError, match="cuda cannot run all of"), pytest.warns(UserWarning):
        open_cuda(bundle, missing, ONE_THREAD)


def test_a_bundle_goes_to_the_gpu_or_the_cpu_and_says_why(make: Make) -> None:
    bundle = make("llama", "F32")
    assert place(bundle, "auto", WORKSTATION).device.name == "cuda"
    assert place(bundle, "cuda", WORKSTATION).reason == "asked for"
    placed = place(bundle, "auto", PLAIN)
    assert placed.device.name == "cpu" and "no CUDAExecutionProvider" in placed.reason
    with pytest.raises(DeviceError, match=r"float16; qnn:htp runs static.*--device npu-qnn$"):
        place(bundle, "qnn:htp", SNAPDRAGON)


@pytest.mark.parametrize("answers", [True, False])
def test_a_gpu_is_there_if_cuda_answers(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    monkeypatch.setattr(Runtime, "providers", lambda self: ["CUDAExecutionProvider"])
    monkeypatch.setattr(discovery, "cuda_answers", lambda: answers)
    gpu = next(device for device in devices() if device.name == "cuda")
    assert gpu.state == ("ready" if answers else "missing")
    if answers:
        ones = ("enable_skip_layer_norm_strict_mode", "enable_cuda_graph")
        grows = {"arena_extend_strategy": "kSameAsRequested"}  # not by powers of two
        assert gpu.options == dict.fromkeys(ones, "1") | grows
    else:
        with pytest.raises(DeviceError, match=r"finds no such GPU. Needed: .*nvidia-smi"):
            resolve("cuda")


def test_without_cuda_nothing_answers(capfd: pytest.CaptureFixture[str]) -> None:
    discovery.cuda_answers.cache_clear()
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        assert not discovery.cuda_answers()
        assert capfd.readouterr() == ("", "")


def test_speculation_writes_what_plain_decoding_does(make: Make, tmp_path: Path) -> None:
    """Kernels are chosen by the number of rows, so near ties may flip; the audit counts them."""
    drafter = _export(
        tiny_gguf("llama", seed=3), tmp_path / "d", ExportOptions(device="cuda", role="drafter")
    )
    prompts = [Prompt(str(n), "test", (text,)) for n, text in enumerate(("a b a b a", "one two one", "x"))]
    with edgespec.load(make("llama", "Q4_K").path, drafter.path) as model:
        audit = audit_answers(model, prompts, max_new_tokens=24)
        assert model.placement.device.name == "cpu"
    assert audit["prompts"] == 3
    if model.row_exact:
        assert audit["flip_rate"] == 0.0
    assert audit["flip_rate"] < 0.05


def test_a_trimmed_drafter_also_writes_what_it_is_offered(tmp_path: Path) -> None:
    model = tiny_gguf("qwen2", "Q8_0")
    options = ExportOptions(device="cuda", role="drafter", trim=304)
    bundle = _export(model, tmp_path / "m", options)
    session, whole = _open(bundle), _open(_export(model, tmp_path / "w", CUDA))
    kept = bundle.head_tokens
    assert kept is not None and len(kept) == 304
    others = np.setdiff1d(np.arange(bundle.config.vocab_size), kept)[:3].tolist()
    session.model.offer(others)
    session.predict([3])
    assert session.model.prepared_s == 0.0  # every request offers others
    session.rewind(0)
    columns = session.model.head_tokens
    assert columns is not None and columns[-3:].tolist() == others
    predictions = session.predict(TOKENS)
    expected = whole.predict(TOKENS).logits[:, columns]
    np.testing.assert_allclose(predictions.logits, expected, atol=2e-2 * float(np.abs(expected).max()))
    best = [predictions.best(row) for row in range(len(TOKENS))]
    assert best == predictions.logits.argmax(axis=1).tolist()
