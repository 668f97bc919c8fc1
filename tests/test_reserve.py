"""Room for the KV cache that cannot be had: one clear error, and the next request works, for every cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.bundles.graph_contract import CacheTensor
from edgespec_models.errors import DeviceError
from edgespec_models.graphs.plan import Precision
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from edgespec_runtimes.cuda import CudaSession
from edgespec_runtimes.devices import CPU, Device
from edgespec_runtimes.graph_session import GraphSession
from edgespec_runtimes.kv_buffers import GrowingCache, SharedCache
from edgespec_runtimes.ort import ort, ort_state
from edgespec_runtimes.static import StaticIO, StaticSession
from tests.foreign_for_tests import ForeignSpec, write_genai
from tests.gguf_for_tests import tiny_gguf
from tests.native_for_tests import tiny_native
from tests.toy import INT4, LLAMA, tiny_bundle

ON_CPU = Device(CPU, "ready")
ONE_THREAD = CpuOptions(threads=1)
TOKENS = [(7 * i * i + 3) % 250 for i in range(40)]


def _native(folder: Path) -> CpuSession:
    return CpuSession(tiny_native(folder / "m", LLAMA).bundle, ONE_THREAD)


def _in_place(folder: Path) -> CpuSession:
    return CpuSession(tiny_bundle(folder / "m", LLAMA, INT4).bundle, ONE_THREAD)


def _growing(folder: Path) -> CpuSession:
    return CpuSession(open_bundle(write_genai(folder / "m", ForeignSpec(attention="concat"))), ONE_THREAD)


def _on_device(folder: Path) -> CudaSession:
    model = tiny_bundle(folder / "m", LLAMA, INT4, precision=Precision("float16", "float16"))
    return CudaSession(model.bundle, ON_CPU, ONE_THREAD)


def _fixed_shapes(folder: Path) -> StaticSession:
    source = tiny_gguf("llama", layers=1).write(folder / "m.gguf")
    export_model(source, folder / "m", options=ExportOptions(device="npu-openvino", buckets=(64, 128)))
    return StaticSession(Bundle(folder / "m"), ON_CPU, ONE_THREAD)


@pytest.fixture(scope="module", params=[_native, _in_place, _growing, _on_device, _fixed_shapes])
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GraphSession[Any]:
    opened: GraphSession[Any] = request.param(tmp_path_factory.mktemp("reserve"))
    return opened


def _failing(call: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    """``call``, but for the one numbered ``at``."""
    left = at

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return call(*arguments, **options)

    return counted


def _still_works(session: GraphSession[Any], expected: Any) -> None:
    """But for rounding: a bucket that is opened anew may choose other widths."""
    assert (session.length, session.capacity) == (0, 0)
    np.testing.assert_allclose(session.predict(TOKENS).logits, expected, atol=1e-4)


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize(
    ("error", "raised"), [(MemoryError("no"), DeviceError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_after_a_failure_the_next_request_works(
    session: GraphSession[Any],
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    session.truncate(0)
    expected = session.predict(TOKENS).logits.copy()
    with monkeypatch.context() as patch, pytest.raises(raised) as caught:
        patch.setattr(np, "zeros", _failing(np.zeros, at, error))
        session.reserve(session.capacity + 1)
    if raised is DeviceError:
        assert "not enough memory for a KV cache of" in str(caught.value)
    _still_works(session, expected)


def test_a_device_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = _on_device(tmp_path)
    expected = session.predict(TOKENS).logits.copy()
    allocate = ort.OrtValue.ortvalue_from_shape_and_type
    for at in range(4):
        with monkeypatch.context() as patch, pytest.raises(DeviceError, match=r"no room for .* more bytes"):
            patch.setattr(
                ort.OrtValue,
                "ortvalue_from_shape_and_type",
                _failing(allocate, at, ort_state.RuntimeException("out of memory")),
            )
            session.reserve(session.capacity + 1)
        assert session.kv_bytes == 0
        _still_works(session, expected)


def test_a_longer_bucket_that_does_not_run_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _fixed_shapes(tmp_path)
    expected = session.predict(TOKENS).logits.copy()
    with monkeypatch.context() as patch, pytest.raises(DeviceError, match="driver lost"):
        patch.setattr(StaticIO, "_time", _failing(StaticIO._time, 1, DeviceError("driver lost")))
        session.reserve(128)
    assert session.kv_bytes == 0
    _still_works(session, expected)
    session.reserve(128)
    assert session.predict([5]).logits.shape == (1, session.vocab_size)


def test_a_pass_that_fails_is_an_error_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = _on_device(tmp_path)
    expected = session.predict(TOKENS).logits.copy()
    session.truncate(0)
    for error in (ort_state.RuntimeException("no memory"), ort_state.EPFail("lost"), RuntimeError("lost")):
        with monkeypatch.context() as patch:
            run = _failing(ort.InferenceSession.run_with_iobinding, 0, error)
            patch.setattr(ort.InferenceSession, "run_with_iobinding", run)
            with pytest.raises(DeviceError, match=f"a pass over 40 tokens failed: {error}"):
                session.predict(TOKENS)
        assert session.length == 0
    np.testing.assert_array_equal(session.predict(TOKENS).logits, expected)


@pytest.mark.parametrize("kind", [SharedCache, GrowingCache])
def test_what_nobody_keeps_is_freed_before_more_is_asked_for(kind: type[SharedCache | GrowingCache]) -> None:
    cache = kind([CacheTensor("past", "present", 2, 4, "float32")])
    cache.reserve(16, 0)
    assert cache.nbytes > 0
    with pytest.raises((MemoryError, ValueError)):
        cache.reserve(1 << 58, 0)
    assert cache.nbytes == 0
