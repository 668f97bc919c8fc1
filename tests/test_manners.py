"""Good manners: pausing, giving memory back, threads that give way, fewer of them on a battery."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from time import sleep
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

import edgespec
from edgespec import Generation, LoadOptions, RequestError
from edgespec_models.errors import DeviceError
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.own_thread import OwnThread
from tests.kit.machines import LINUX
from tests.kit.models import Gated, queue_of, runner_of, slow_session, toy_model
from tests.kit.native import tiny_native
from tests.kit.sessions import ONE_THREAD
from tests.kit.toy import LLAMA, until

PROMPT, NEW = "the quick brown fox", 24
TOKENS = [(i * 31) % 400 for i in range(40)]


def alone(prompt: str = PROMPT, new: int = NEW) -> Generation:
    with toy_model() as model:
        return model.generate(prompt, max_new_tokens=new)


def test_a_paused_answer_stands_still_and_goes_on_with_the_same_text() -> None:
    session = Gated()
    with toy_model(session) as model, ThreadPoolExecutor(2) as pool:
        running = pool.submit(model.generate, PROMPT, max_new_tokens=NEW)
        session.do(6)
        pausing = pool.submit(model.pause)
        until(lambda: queue_of(model).is_held)
        assert not pausing.done()  # a pass runs
        session.open()
        pausing.result(60)
        before = len(session.passes)
        waits = model.stream("jumps over", max_new_tokens=NEW)
        waits.start()
        sleep(0.3)
        assert len(session.passes) == before and not running.done() and waits.place == 1
        with pytest.raises(RequestError, match="resume"):
            model.forget()
        model.resume()
        assert running.result(60).text == alone().text
        assert waits.run().text == alone("jumps over").text


def test_trim_gives_back_what_no_answer_uses() -> None:
    session = slow_session()
    with toy_model(session, options=LoadOptions(parallel=1)) as model:
        texts = [model.generate(prompt, max_new_tokens=NEW).text for prompt in (PROMPT, "jumps over")]
        kept, held = runner_of(model).caches.nbytes, session.kv_bytes
        assert kept > 0 and held > 0
        assert model.trim() == kept + held
        assert session.kv_bytes == runner_of(model).caches.nbytes == 0 == model.trim()
        again = model.generate(PROMPT, max_new_tokens=NEW)
        assert (again.text, again.stats.cached_tokens) == (texts[0], 0)
        stream = model.stream("jumps over", max_new_tokens=500)
        next(stream)
        model.pause()
        held = session.length
        with ThreadPoolExecutor(4) as pool:  # one after the other
            assert sum(pool.map(lambda _: model.trim(), range(4))) >= 0
        assert session.length == held > 0  # of the answer under way
        model.resume()
        assert stream.run().tokens == alone("jumps over", 500).tokens


def test_what_is_trimmed_comes_from_the_disk(tmp_path: Path) -> None:
    """Also where the model was paused before there was time to write it."""
    with edgespec.load(tiny_native(tmp_path / "m").path, None, options=LoadOptions(threads=1)) as model:
        cast(Any, runner_of(model)).write_behind = lambda stop: None
        model.generate("many words, " * 20, max_new_tokens=1)
        assert model.trim() > 0
        assert model.generate("many words, " * 20, max_new_tokens=1).stats.cached_tokens >= 32


def test_what_is_trimmed_beside_an_answer_comes_from_the_disk_too(tmp_path: Path) -> None:
    """And so does the answer, once it is over."""
    path, texts = tiny_native(tmp_path / "m").path, ("many words, " * 20, "other text; " * 20)
    with edgespec.load(path, None, options=LoadOptions(threads=1)) as model:
        cast(Any, runner_of(model)).write_behind = lambda stop: None
        model.generate(texts[0], max_new_tokens=1)
        stream = model.stream(texts[1], max_new_tokens=100)
        next(stream)
        model.pause()
        assert model.trim() > 0
        model.resume()
        stream.run()
    with edgespec.load(path, None, options=LoadOptions(threads=1)) as model:
        for text, least in zip(texts, (32, 96), strict=True):
            assert model.generate(text, max_new_tokens=1).stats.cached_tokens >= least


def test_a_session_gives_its_part_of_the_cache_back(tmp_path: Path) -> None:
    session = open_cpu(tiny_native(tmp_path / "m", LLAMA, "Q4_1").bundle, ONE_THREAD)
    expected = session.predict(TOKENS).logits.copy()
    other = session.model.session()
    other.prefill(TOKENS[:20])
    taken, kept = session.kv_bytes, other.kv_bytes
    assert session.release() >= taken > 0 == session.kv_bytes == session.length
    assert other.kv_bytes == kept  # at the front now, with what it held
    np.testing.assert_array_equal(other.predict(TOKENS[20:]).logits, expected[20:])
    np.testing.assert_array_equal(session.predict(TOKENS).logits, expected)


def test_a_cache_that_could_not_be_given_back_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_cpu(tiny_native(tmp_path / "m", LLAMA, "Q4_1").bundle, ONE_THREAD)
    expected = session.predict(TOKENS).logits.copy()
    other = session.model.session()
    other.prefill(TOKENS[:20])
    cache: Any = other.model.cache

    def reserve(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(cache, "reserve", reserve)
        with pytest.raises(DeviceError, match="not enough memory"):
            session.release()
    assert other.length == other.capacity == 0
    np.testing.assert_array_equal(other.predict(TOKENS).logits, expected)


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is another thing there")
def test_a_pass_that_gives_way_is_waited_for_whatever_happens() -> None:
    over = list[object]()

    def run_with_iobinding(binding: object, options: object) -> None:
        until(lambda: sys._current_frames()[caller].f_code.co_name == "wait")
        os.kill(os.getpid(), signal.SIGINT)
        sleep(0.2)
        over.append(binding)

    caller = get_ident()
    session = OwnThread(lambda: SimpleNamespace(run_with_iobinding=run_with_iobinding), "low")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            session.run_with_iobinding("a pass")
    finally:
        signal.signal(signal.SIGINT, before)
    assert over == ["a pass"]


def niceness() -> dict[str, int]:
    """Of each thread of this process."""
    levels = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ends
            levels[task.name] = int((task / "stat").read_text().rpartition(")")[2].split()[16])
    return levels


@LINUX
def test_threads_that_compute_give_way_and_no_others(tmp_path: Path) -> None:
    bundle = tiny_native(tmp_path / "m", LLAMA, "Q4_1").bundle
    expected = open_cpu(bundle, ONE_THREAD).predict(TOKENS).logits.copy()
    before, own = set(niceness()), os.getpriority(os.PRIO_PROCESS, 0)
    session = open_cpu(bundle, CpuOptions(threads=3, low_priority=True))
    np.testing.assert_array_equal(session.predict(TOKENS).logits, expected)
    after = niceness()
    assert [after[each] for each in after.keys() - before] == [19] * 3  # a caller and two helpers
    assert 19 not in [after[each] for each in before & after.keys()]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    session.close()
    until(lambda: 19 not in niceness().values())


def test_on_a_battery_as_many_threads_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    options = LoadOptions(threads=2, battery_threads=1)
    for battery, threads in ((None, 2), (True, 2), (False, 1)):
        state = None if battery is None else SimpleNamespace(power_plugged=battery)
        monkeypatch.setattr(psutil, "sensors_battery", lambda state=state: state, raising=False)
        assert options.cpu().threads == threads
        assert replace(options, battery_threads=None).cpu().threads == 2
    monkeypatch.delattr(psutil, "sensors_battery")  # systems that psutil knows nothing of
    assert options.cpu().threads == 2
