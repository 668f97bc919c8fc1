"""Qualcomm's compiler and, where there is no such processor, its emulator: bundles made for it run there.

Skipped where the plugin is not installed (``pip install 'edgespec[npu-qnn]'``; on Linux for x86-64 it brings
the emulator). What the emulator computes is held against ONNX Runtime's CPU run of the same quantized graph.
"""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec_export.contexts import compile_graph, compiler_for
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundle import MANIFEST, Bundle, FileRecord
from edgespec_models.chips import find_chip
from edgespec_models.errors import BundleError, DeviceError
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.devices import CPU
from edgespec_runtimes.discovery import Device, OrtRuntime, resolve
from edgespec_runtimes.static_session import StaticSession, open_on
from tests.gguf_for_tests import F32, tiny_gguf
from tests.toy import tiny_bundle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="onnxruntime-qnn is not installed: pip install 'edgespec[npu-qnn]'",
)
TOLERANCE = 0.03
"""Of the largest logit: the processor multiplies 16-bit by 8-bit numbers with other roundings."""
CHIP = "snapdragon-x-elite"
PROMPT = "one two one two one two one two"
TOKENS = [(7 * i * i + 3) % 250 for i in range(40)]
Pair = tuple[StaticSession, StaticSession]


@pytest.fixture(scope="module", autouse=True)
def one_chip() -> Iterator[None]:
    """The emulator knows one chip at a time; told none, it takes another than the binaries are for."""
    options, chip = OrtRuntime.options, find_chip(CHIP).options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OrtRuntime, "options", lambda self, profile: {**options(self, profile), **chip})
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("qnn")
    source = tiny_gguf("llama").write(folder / "m.gguf")
    export_model(source, folder / "bundle", options=ExportOptions(device="npu-qnn", buckets=(64,)))
    return Bundle(folder / "bundle")


@pytest.fixture(scope="module")
def pair(bundle: Bundle) -> Pair:
    """On the processor or its emulator, and on the CPU."""
    options = CpuOptions(threads=1)
    return StaticSession(bundle, resolve("qnn:htp"), options), StaticSession(bundle, Device(CPU, "ready"))


def _near(found: F32, expected: F32) -> None:
    assert found.shape == expected.shape
    assert float(np.abs(found - expected).max()) < TOLERANCE * float(np.abs(expected).max())


def test_passes_of_every_width_agree_with_the_cpu(pair: Pair) -> None:
    for session in pair:
        session.prefill([])
    for count in (1, 4, 8, 3):
        _near(*(session.forward(TOKENS[:count]).copy() for session in pair))
    _near(*(session.next_logits(TOKENS).copy() for session in pair))


def test_a_rollback_is_bookkeeping(pair: Pair) -> None:
    session, _ = pair
    session.prefill([])
    whole = session.forward(TOKENS[:24]).copy()
    session.truncate(16)
    session.forward([9, 9, 9, 9, 9])
    session.truncate(16)
    np.testing.assert_array_equal(session.forward(TOKENS[16:24]), whole[16:24])


def test_speculation_verifies_what_was_drafted(bundle: Bundle) -> None:
    with edgespec.load(bundle.path, "ngram", device="qnn:htp") as model:
        plain, drafted = (
            model.generate(PROMPT, max_new_tokens=12, stop_at_eos=False, speculate=speculate)
            for speculate in (False, True)
        )
        assert model.row_exact
    assert drafted.tokens == plain.tokens
    assert drafted.stats.placement == "target on qnn:htp (asked for)"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same model, compiled ahead."""
    folder = tmp_path_factory.mktemp("compiled")
    source = tiny_gguf("llama").write(folder / "m.gguf")
    export_model(
        source, folder / "bundle", options=ExportOptions(device="npu-qnn", buckets=(64, 96), chip=CHIP)
    )
    return Bundle(folder / "bundle", verify_digests=True)


def test_context_binaries_give_the_same_bits(compiled: Bundle, pair: Pair) -> None:
    session, at_load = StaticSession(compiled, resolve("qnn:htp"), CpuOptions(threads=1)), pair[0]
    assert session.compiled == f"from context binaries for {CHIP}"
    for each in (session, at_load):
        each.prefill([])
    for count in (1, 4, 8, 3):
        np.testing.assert_array_equal(session.forward(TOKENS[:count]), at_load.forward(TOKENS[:count]))
    np.testing.assert_array_equal(session.next_logits(TOKENS), at_load.next_logits(TOKENS))


def test_speculation_from_context_binaries_writes_the_same_tokens(bundle: Bundle, compiled: Bundle) -> None:
    """Beyond the first bucket too."""
    answers = []
    for each in (bundle, compiled):
        with edgespec.load(each.path, "ngram", device="qnn:htp") as model:
            answers.append(model.generate(PROMPT, max_new_tokens=12, stop_at_eos=False))
            if each is compiled:
                longer = model.generate(PROMPT, max_new_tokens=50, stop_at_eos=False)
    assert answers[0].tokens == answers[1].tokens == longer.tokens[:12]
    assert len(longer.tokens) == 50
    assert answers[1].stats.placement.endswith(f"from context binaries for {CHIP})")


def test_damaged_binaries_are_an_error_and_unreadable_ones_compiled_anew(
    compiled: Bundle, tmp_path: Path
) -> None:
    """Unreadable: right by the manifest, and refused by the provider, as a newer one's would be."""
    path = Path(shutil.copytree(compiled.path, tmp_path / "copy"))
    binary = path / "model-64x1.context_qnn.bin"
    binary.write_bytes(bytes(binary.stat().st_size))
    with pytest.raises(BundleError, match=r"model-64x1.context_qnn.bin has changed"):
        StaticSession(Bundle(path), resolve("qnn:htp"))
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"][binary.name]["sha256"] = FileRecord.of(binary).sha256
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    session = StaticSession(Bundle(path), resolve("qnn:htp"))
    assert session.compiled.startswith(f"compiled at load, not from the context binaries for {CHIP}: qnn:htp")


def test_what_the_processor_lacks_is_not_compiled(tmp_path: Path) -> None:
    """A graph made for the CPU: compiling part of it would leave the rest to the CPU."""
    graph = tiny_bundle(tmp_path / "m").bundle.graph
    with pytest.raises(DeviceError, match=r"Qualcomm's compiler refuses model\.onnx"):
        compile_graph(graph, tmp_path / "m.context.onnx", compiler_for(find_chip(CHIP)))


def test_nothing_falls_back_to_the_cpu(tmp_path: Path) -> None:
    """A graph made for the CPU has operators the processor lacks: an error, not a slow run elsewhere."""
    graph = tiny_bundle(tmp_path / "m").bundle.graph
    with pytest.raises(DeviceError, match="qnn:htp cannot run all of"):
        open_on(resolve("qnn:htp"), graph, CpuOptions())
