"""Qualcomm's compiler and, where there is no such processor, its emulator: bundles made for it run there.

Skipped where the plugin is not installed (``pip install 'edgespec[npu-qnn]'``; on Linux for x86-64 it brings
the emulator). What the emulator computes is held against ONNX Runtime's CPU run of the same quantized graph.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec_export.devices import static_export
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import DeviceError
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.discovery import open_on, resolve
from edgespec_runtimes.session import Session
from edgespec_runtimes.static import open_static
from tests.kit.gguf import F32, tiny_gguf
from tests.kit.sessions import ON_CPU, ONE_THREAD, TOKENS
from tests.kit.toy import tiny_bundle

WITH_PLUGIN = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="onnxruntime-qnn is not installed: pip install 'edgespec[npu-qnn]'",
)
pytestmark = WITH_PLUGIN
PROMPT = "one two one two one two one two"
TOLERANCE = 0.03
"""Of the largest logit: the processor multiplies 16-bit by 8-bit numbers with other roundings."""
Pair = tuple[Session, Session]


def made(folder: Path, **options: Any) -> Bundle:
    """A bundle with a layer of each kind."""
    source = tiny_gguf("llama").write(folder / "m.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_export._Watched, "wide_keys", (1,))
        export_model(source, folder / "bundle", options=ExportOptions(device="npu-qnn", **options))
    return Bundle(folder / "bundle", verify_digests=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return made(tmp_path_factory.mktemp("qnn"), buckets=(64,))


@pytest.fixture(scope="module")
def pair(bundle: Bundle) -> Iterator[Pair]:
    """On the processor or its emulator, and on the CPU."""
    both = open_static(bundle, resolve("qnn:htp"), ONE_THREAD), open_static(bundle, ON_CPU)
    yield both
    for session in both:
        session.close()  # the emulator knows one chip at a time, and other tests name another


def _near(found: F32, expected: F32) -> None:
    assert found.shape == expected.shape
    assert float(np.abs(found - expected).max()) < TOLERANCE * float(np.abs(expected).max())


def test_passes_of_every_width_agree_with_the_cpu(pair: Pair) -> None:
    for session in pair:
        session.prefill([])
    for count in (1, 4, 8, 3):
        _near(*(session.predict(TOKENS[:count]).logits.copy() for session in pair))
    _near(*(session.predict_next(TOKENS).logits[0].copy() for session in pair))


def test_a_rollback_is_bookkeeping(pair: Pair) -> None:
    session, _ = pair
    session.prefill([])
    whole = session.predict(TOKENS[:24]).logits.copy()
    session.rewind(16)
    session.predict([9, 9, 9, 9, 9])
    session.rewind(16)
    np.testing.assert_array_equal(session.predict(TOKENS[16:24]).logits, whole[16:24])


def test_speculation_verifies_what_was_drafted(bundle: Bundle) -> None:
    with edgespec.load(bundle.path, "ngram", device="qnn:htp") as model:
        plain, drafted = (
            model.generate(PROMPT, max_new_tokens=12, stop_at_eos=False, speculate=speculate)
            for speculate in (False, True)
        )
        assert model.row_exact
    assert drafted.tokens == plain.tokens
    assert drafted.stats.placement == "target on qnn:htp (asked for)"


def test_nothing_falls_back_to_the_cpu(tmp_path: Path) -> None:
    """A graph made for the CPU has operators the processor lacks: an error, not a slow run elsewhere."""
    graph = tiny_bundle(tmp_path / "m").bundle.graph
    with pytest.raises(DeviceError, match="qnn:htp cannot run all of"):
        open_on(resolve("qnn:htp"), graph, CpuOptions())
