"""Context binaries by Qualcomm's compiler, run on its emulator; skipped where ``test_qnn.py`` is."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec_export.devices.device_bundle import compile_graph, compiler_for
from edgespec_models.bundles.bundle import MANIFEST, Bundle, FileRecord
from edgespec_models.bundles.static_graphs import find_chip
from edgespec_models.errors import BundleError, DeviceError
from edgespec_runtimes.discovery import Runtime, resolve
from edgespec_runtimes.static import StaticModel, open_static
from tests.kit.sessions import ONE_THREAD, TOKENS
from tests.kit.toy import tiny_bundle
from tests.runtimes.test_qnn import PROMPT, WITH_PLUGIN, made

pytestmark = WITH_PLUGIN
CHIP = "snapdragon-x-elite"


@pytest.fixture(scope="module", autouse=True)
def one_chip() -> Iterator[None]:
    """The emulator knows one chip at a time; told none, it takes another than the binaries are for."""
    options, chip = Runtime.options, find_chip(CHIP).options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "options", lambda self, kind: {**options(self, kind), **chip})
        yield


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return made(tmp_path_factory.mktemp("compiled"), buckets=(64, 96), chip=CHIP)


def _copy(bundle: Bundle, folder: Path) -> Path:
    return Path(shutil.copytree(bundle.path, folder / "copy"))


@pytest.fixture
def at_load(compiled: Bundle, tmp_path: Path) -> Bundle:
    """The same graphs, for the device to compile."""
    path, static = _copy(compiled, tmp_path), compiled.manifest.static
    assert static is not None
    manifest = replace(compiled.manifest, static=replace(static, contexts=None))
    (path / MANIFEST).write_text(json.dumps(manifest.to_json()), encoding="utf-8")
    return Bundle(path)


def test_they_give_the_same_bits(compiled: Bundle, at_load: Bundle) -> None:
    """In passes of the same widths, whatever those cost now."""
    session, other = (open_static(b, resolve("qnn:htp"), ONE_THREAD) for b in (compiled, at_load))
    assert (session.model.compiled, other.model.compiled) == (f"from context binaries for {CHIP}", "")
    for each in (session, other):
        assert isinstance(each.model, StaticModel)
        each.model.seconds = dict.fromkeys((1, 4, 8, 64), 1.0)
        each.prefill([])
    for count in (1, 4, 8, 3):
        found, expected = (each.predict(TOKENS[:count]).logits for each in (session, other))
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(session.predict_next(TOKENS).logits, other.predict_next(TOKENS).logits)


@pytest.mark.slow
def test_speculation_writes_the_same_tokens(compiled: Bundle, at_load: Bundle) -> None:
    """Beyond the first bucket too."""
    answers = []
    for bundle in (compiled, at_load):
        with edgespec.load(bundle.path, "ngram", device="qnn:htp") as model:
            for count in (12, 50):
                answers.append(model.generate(PROMPT, max_new_tokens=count, stop_at_eos=False))
    assert [len(answer.tokens) for answer in answers] == [12, 50, 12, 50]
    assert {answer.tokens[:12] for answer in answers} == {answers[0].tokens}
    assert answers[0].stats.placement == f"target on qnn:htp (asked for; from context binaries for {CHIP})"
    assert answers[2].stats.placement == "target on qnn:htp (asked for)"


def test_damaged_ones_are_an_error_and_refused_ones_compiled_anew(compiled: Bundle, tmp_path: Path) -> None:
    """Refused: right by the manifest, and unreadable for the provider, as a newer one's would be."""
    path = _copy(compiled, tmp_path)
    binary = path / "model-64x1.context_qnn.bin"
    binary.write_bytes(bytes(binary.stat().st_size))
    with pytest.raises(BundleError, match=r"model-64x1.context_qnn.bin has changed"):
        open_static(Bundle(path), resolve("qnn:htp"))
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"][binary.name]["sha256"] = FileRecord.of(binary).sha256
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    session = open_static(Bundle(path), resolve("qnn:htp"))
    assert session.model.compiled.startswith(
        f"compiled at load, not from the context binaries for {CHIP}: qnn:htp"
    )


def test_what_the_processor_lacks_is_not_compiled(tmp_path: Path) -> None:
    """A graph made for the CPU: compiling part of it would leave the rest to the CPU."""
    graph = tiny_bundle(tmp_path / "m").bundle.graph
    with pytest.raises(DeviceError, match=r"Qualcomm's compiler refuses model\.onnx"):
        compile_graph(graph, tmp_path / "m.context.onnx", compiler_for(find_chip(CHIP)))
