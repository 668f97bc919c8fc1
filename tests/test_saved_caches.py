"""KV caches put aside and taken up again: the same bits, in every kind of cache the host can copy."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from edgespec_runtimes.kv_buffers import KvStore
from edgespec_runtimes.static import StaticSession
from tests.foreign_for_tests import ForeignSpec, write_genai
from tests.gguf_for_tests import tiny_gguf
from tests.models_for_tests import toy_session
from tests.native_for_tests import tiny_native
from tests.test_reserve import ON_CPU
from tests.toy import INT4, LLAMA, tiny_bundle

OPTIONS = CpuOptions(threads=1, prefill_chunk=16)
FIRST = [(7 * i * i + 3) % 250 for i in range(300)]
OTHER = [(5 * i * i + 1) % 250 for i in range(90)]


KINDS: dict[str, Callable[[Path], object]] = {
    "native": tiny_native,
    "in place": lambda folder: tiny_bundle(folder, LLAMA, INT4),
    "shared": lambda folder: write_genai(folder, ForeignSpec()),
    "growing": lambda folder: write_genai(folder, ForeignSpec(attention="concat")),
}


@pytest.fixture(scope="module", params=KINDS)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuSession:
    folder = tmp_path_factory.mktemp("saved") / "m"
    KINDS[request.param](folder)
    return CpuSession(open_bundle(folder), OPTIONS)


def _close(session: CpuSession) -> Callable[..., bool]:
    """What is computed in other chunks has the same bits only where rows are exact."""
    return np.array_equal if session.row_exact else partial(np.allclose, atol=1e-2)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 299])
def test_what_is_restored_is_what_was_saved(session: CpuSession, length: int) -> None:
    session.truncate(0)
    context = min(len(FIRST), session.longest - 2)
    length = min(length, context - 1)
    session.prefill(FIRST[:context])
    session.truncate(length)
    expected = session.predict(FIRST[length : length + 2]).logits.copy()
    session.truncate(length)
    saved = session.save(length)
    assert saved is not None and saved.tokens == tuple(FIRST[:length])
    assert 0 < saved.nbytes <= session.kv_bytes
    session.truncate(0)
    session.prefill(OTHER)
    session.restore(saved, length)
    assert session.length == length
    assert np.array_equal(session.predict(FIRST[length : length + 2]).logits, expected)
    session.restore(saved, length // 2)  # its beginning: another room, other rows behind it
    session.prefill(FIRST[:length])
    again = session.predict(FIRST[length : length + 2]).logits
    assert _close(session)(again, expected)


def test_texts_in_turn_are_read_once(session: CpuSession) -> None:
    session.truncate(0)
    store = KvStore(1 << 30)
    texts = [FIRST[:80], OTHER]
    alone = []
    for text in texts:
        store.fetch(session, text)
        alone.append(session.predict_next(text).logits[0].copy())
    for text, expected in zip(texts, alone, strict=True):
        store.fetch(session, text)
        assert session.shared_prefix(text) == len(text)
        session.truncate(len(text) - 1)
        assert _close(session)(session.predict_next(text).logits[0], expected)


def test_saving_takes_what_tokens_take(session: CpuSession) -> None:
    session.truncate(0)
    session.prefill(FIRST[:64])
    whole, half = session.save(64), session.save(32)
    assert whole is not None and half is not None
    assert whole.nbytes == 2 * half.nbytes <= session.kv_bytes * 64 // session.capacity


def test_graphs_of_fixed_shapes_read_again(tmp_path: Path) -> None:
    source = tiny_gguf("llama", layers=1).write(tmp_path / "m.gguf")
    export_model(source, tmp_path / "m", options=ExportOptions(device="npu-openvino", buckets=(64, 128)))
    session = StaticSession(Bundle(tmp_path / "m"), ON_CPU, OPTIONS)
    session.prefill(FIRST[:40])
    assert session.save(40) is None
    store = KvStore(1 << 20)
    store.fetch(session, OTHER[:40])
    assert store.nbytes == 0 and session.length == 40


def test_a_budget_of_nothing_asks_nothing() -> None:
    store, session = KvStore(0), toy_session()
    session.prefill(FIRST)
    store.fetch(session, OTHER)
    assert store.nbytes == 0 and session.length == len(FIRST)
