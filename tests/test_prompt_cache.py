"""Prompts on disk: found by any process, the same bits, within their bound, whatever happens to the files."""

import errno
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import LoadOptions, StorageError
from edgespec_models.storage import own_name
from edgespec_runtimes.cpu import CpuSession
from edgespec_runtimes.kv_buffers import KvStore
from edgespec_runtimes.prompt_cache import BLOCK, PromptCache, stored
from tests.models_for_tests import toy_model, toy_session
from tests.native_for_tests import tiny_native
from tests.prompts_for_tests import KEY, Showing, request, text
from tests.sessions_for_tests import ONE_THREAD, TOKENS, passes
from tests.test_export import NEVER_A_PROCESS
from tests.test_threads import until
from tests.tokenizers_for_tests import byte_level_json
from tests.toy import GEMMA, LLAMA, ToySession, settle

SIZE = 48 + 8 * BLOCK  # of a block of the toy
LONG = "A long document, of which much is asked. " * 30
POSIX = pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompt-cache"


def sizes(folder: Path) -> int:
    return sum(each.size for each in stored(folder))


# ---- What is found ---------------------------------------------------------------------------------------


def test_texts_share_whole_blocks_of_what_they_begin_with(folder: Path) -> None:
    first = text(0, 300)
    assert request(folder, first) == 0
    assert len(list(stored(folder))) == 9
    assert request(folder, first) == 288
    assert request(folder, first[:130]) == 128
    assert request(folder, [*first[:200], *range(40)]) == 192
    assert request(folder, [*first, *range(100)]) == 288
    assert request(folder, [*first, *range(100)]) == 384
    assert request(folder, [9, *first]) == 0
    assert request(folder, first[:31]) == 0


def test_what_a_session_holds_is_only_gone_on_with(folder: Path) -> None:
    first = text(0, 300)
    request(folder, first)
    for held, found in ((0, 288), (100, 288), (288, 288), (290, 290)):
        session = Showing()
        session.prefill(first[:held])
        before = session.read
        assert request(folder, first, session) == found
        assert session.read - before == 300 - found


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CpuSession]:
    folder = tmp_path_factory.mktemp("native")
    models = {
        "llama": cache(lambda: tiny_native(folder / "a", LLAMA, "Q4_0").bundle),
        "gemma": cache(lambda: tiny_native(folder / "b", GEMMA, "Q8_0").bundle),
    }
    return lambda name: CpuSession(models[name](), ONE_THREAD)


def test_keys_say_the_bundle(make: Callable[[str], CpuSession]) -> None:
    one, same, other = make("llama"), make("llama"), make("gemma")
    assert one.prompt_key == same.prompt_key != other.prompt_key
    assert "" not in (one.prompt_key, other.prompt_key)


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # a text
        st.integers(1, 300),  # its length
        st.booleans(),  # in a new process
        st.integers(0, 9),  # blocks written before the next request comes
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80)
@given(
    asked=requests,
    blocks=st.sampled_from([0, 1, 3, 1000]),
    memory=st.sampled_from([0, 100_000, 1 << 30]),
    kind=st.sampled_from(["llama", "gemma"]),
)
def test_every_text_has_the_bits_that_it_has_alone(
    make: Callable[[str], CpuSession],
    tmp_path_factory: pytest.TempPathFactory,
    asked: list[tuple[int, int, bool, int]],
    blocks: int,
    memory: int,
    kind: str,
) -> None:
    folder, session, alone = tmp_path_factory.mktemp("prompts"), make(kind), make(kind)
    session.reserve(BLOCK)
    view = session.view(0, BLOCK)
    assert view is not None
    budget = blocks * (view.nbytes + 48)
    store = KvStore(memory, PromptCache(folder, budget))
    for number, length, anew, written in asked:
        tokens = [token % 250 for token in text(number, length)]
        if anew:
            session.truncate(0)
            store = KvStore(memory, PromptCache(folder, budget))
        store.fetch(session, tokens)
        alone.truncate(0)
        np.testing.assert_array_equal(session.predict_next(tokens).logits, alone.predict_next(tokens).logits)
        got = passes(session, TOKENS[:20], 3, 1, 16)
        np.testing.assert_array_equal(got, passes(alone, TOKENS[:20], 20))
        left = iter(range(written))
        store.write_behind(lambda left=left: next(left, None) is None)  # type: ignore[misc]
        assert sizes(folder) <= budget


# ---- In a model ------------------------------------------------------------------------------------------


def keyed(seed: int = 0) -> ToySession:
    session = toy_session(seed)
    session.prompt_key = f"toy{seed}-0123456789abcdef"
    return session


def test_a_new_process_finds_prompt_and_answer(own_prompts: Path) -> None:
    with toy_model(keyed(), keyed(1)) as model:
        answer = model.generate(LONG, max_new_tokens=100)
        settle()
        whole = answer.stats.prompt_tokens + 99
        assert answer.stats.cached_tokens == 0
    target = keyed()
    with toy_model(target, keyed(1)) as model:
        again = model.generate(LONG, max_new_tokens=100)
        assert again.tokens == answer.tokens
        assert again.stats.cached_tokens == answer.stats.prompt_tokens // BLOCK * BLOCK
        assert sum(target.passes) < BLOCK + 200
        assert again.stats.by_source["model"].drafted > 0
        longer = LONG + answer.text
        grown = toy_model(keyed()).generate(longer, max_new_tokens=1)
        assert grown.stats.cached_tokens >= whole // BLOCK * BLOCK - BLOCK
    names = {each.path.parent.name for each in stored(own_prompts)}
    assert names == {target.prompt_key}  # a drafter reads little


def test_what_is_written_is_there_behind_the_answer_and_at_the_end(own_prompts: Path) -> None:
    with toy_model(keyed()) as model:
        model.generate(LONG, max_new_tokens=1)
        settle()
        before = sizes(own_prompts)
        assert before > 0
        with model._worker.paused():
            model._session.prefill([*range(200)])
            model._runner._caches._due.append((model._session, None))
    assert sizes(own_prompts) == before + 6 * SIZE


def test_off_means_that_nothing_is_read_and_written(own_prompts: Path) -> None:
    with toy_model(keyed(), options=LoadOptions(prompt_cache_bytes=0)) as model:
        model.generate(LONG, max_new_tokens=1)
    with toy_model(keyed(), keyed(1)) as model:
        model.generate(LONG, max_new_tokens=1, prompt_cache=False)
    with toy_model() as model:  # whose session promises no bits
        model.generate(LONG, max_new_tokens=1)
    assert not own_prompts.exists()
    with toy_model(keyed()) as model:
        model.generate(LONG, max_new_tokens=1)
    with toy_model(keyed()) as model:
        assert model.generate(LONG, max_new_tokens=1, prompt_cache=False).stats.cached_tokens == 0
    with toy_model(keyed(), options=LoadOptions(prompt_cache_bytes=0)) as model:
        assert model.generate(LONG, max_new_tokens=1).stats.cached_tokens == 0
        model.forget()
    assert sizes(own_prompts) > 0


def test_a_text_that_was_put_aside_in_a_hurry_is_written_later(own_prompts: Path) -> None:
    store, session = KvStore(1 << 20, PromptCache(own_prompts)), Showing()
    for number in (0, 3):
        store.fetch(session, text(number, 200))
        session.prefill(text(number, 200))
    store.fetch(session, text(5, 200), on_disk=False)
    session.prefill(text(5, 200))
    store.write_behind()
    for number, found in ((0, 192), (3, 192), (5, 0)):
        assert request(own_prompts, text(number, 200)) == found


def test_a_text_that_may_not_be_written_never_is(own_prompts: Path) -> None:
    """Not when it is put aside, nor when another text takes up its beginning."""
    store, session = KvStore(1 << 20, PromptCache(own_prompts)), Showing()
    private, other = text(5, 200), text(0, 200)
    for tokens, on_disk in ((private, False), (other, True), ([*private[:100], *range(100)], True)):
        store.fetch(session, tokens, on_disk=on_disk)
        session.prefill(tokens)
    assert session.read == 600 - 100
    store.write_behind()
    assert request(own_prompts, other) == 192
    assert request(own_prompts, private) == 96  # which the last text says itself


def test_a_text_is_written_although_another_took_up_its_beginning(own_prompts: Path) -> None:
    store, session = KvStore(1 << 20, PromptCache(own_prompts)), Showing()
    first = text(0, 200)
    for tokens in (first, text(3, 200), [*first[:100], *range(100)]):
        store.fetch(session, tokens)
        session.prefill(tokens)
    store.write_behind()
    assert request(own_prompts, first) == 192


def test_what_a_session_held_before_is_not_written_for_a_text_it_never_read(own_prompts: Path) -> None:
    """As a drafter whose prompt does not pay leaves its KV cache as it was."""
    store, session = KvStore(1 << 20, PromptCache(own_prompts)), Showing()
    private = text(5, 200)
    store.fetch(session, private, on_disk=False)
    session.prefill(private)
    store.fetch(session, text(0, 200))
    store.write_behind()
    assert request(own_prompts, private) == 0


def test_forgotten_is_forgotten_on_disk_too(own_prompts: Path) -> None:
    request(own_prompts, text(0, 200))  # another model's
    with toy_model(keyed(), keyed(1)) as model:
        model.generate(LONG, max_new_tokens=100)
        model.forget(on_disk=False)
        kept = sizes(own_prompts)
        assert kept > 6 * SIZE
        assert model.generate(LONG, max_new_tokens=1).stats.cached_tokens > 0
        model.forget()
        assert model.generate(LONG, max_new_tokens=1, prompt_cache=False).stats.cached_tokens == 0
    assert sizes(own_prompts) == 6 * SIZE


def test_what_training_changed_is_not_kept(own_prompts: Path) -> None:
    drafter = keyed(1)
    drafter.tunable = frozenset(("gain",))
    with toy_model(keyed(), drafter) as model:
        assert model._side is not None
        model._side.trainer = Untaught()  # type: ignore[assignment]
        model.generate(LONG, max_new_tokens=1)
        drafter.prefill([*range(200)])
    assert drafter.prompt_key not in {each.path.parent.name for each in stored(own_prompts)}


class Untaught:
    def take(self) -> None:
        return None

    pause = resume = take

    def offer(self, lesson: object) -> None:
        pass


def test_writing_is_behind_answers_and_makes_way_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    writes, hold = list[bool](), threading.Event()

    def write(self: PromptCache, key: str, text: Any, stop: Callable[[], bool]) -> bool:
        hold.wait(60)
        writes.append(stop())
        return not writes[-1]

    monkeypatch.setattr(PromptCache, "write", write)
    with toy_model(keyed(), options=LoadOptions(max_waiting=0)) as model:
        model.generate(LONG, max_new_tokens=1)  # answered, though writing waits
        stream = model.stream("Hello", max_new_tokens=1)
        model._worker.submit(stream._answer)  # and the model is not busy
        hold.set()
        assert stream.run().stats.new_tokens == 1
        until(lambda: len(writes) > 1)
        model.generate("Hello", max_new_tokens=1)
    assert writes[0] and not writes[-1]


def test_a_program_that_just_ends_has_written_what_it_read(own_home: Path, tmp_path: Path) -> None:
    target = tiny_native(tmp_path / "m", LLAMA, "Q4_0", tokenizer_json=byte_level_json()).path
    code = f"""if True:
        import edgespec
        model = edgespec.load({str(target)!r}, None, options=edgespec.LoadOptions(threads=1))
        print(model.generate({LONG[:400]!r}, max_new_tokens=2).stats.cached_tokens)"""
    said = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)]
    assert int(said[0]) == 0 and int(said[1]) > 200
    assert list(stored(own_home / "prompt-cache"))


# ---- The bound -------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_ends_before_beginnings(folder: Path) -> None:
    for number in (0, 2, 0):
        request(folder, text(number, 128), budget=8 * SIZE)
    request(folder, text(4, 64), budget=8 * SIZE)
    assert request(folder, text(2, 128), budget=8 * SIZE) == 64
    assert request(folder, text(0, 128), budget=8 * SIZE) == 64  # its end went for the end of the last
    assert sizes(folder) == 8 * SIZE


@pytest.mark.parametrize(("blocks", "kept"), [(0, 0), (0.5, 0), (1, 1), (3, 3), (5, 4)])
def test_of_a_text_too_long_the_beginning_is_kept(folder: Path, blocks: float, kept: int) -> None:
    request(folder, text(0, 128), budget=int(blocks * SIZE))
    assert request(folder, text(0, 128)) == kept * BLOCK


def test_without_a_number_it_is_a_part_of_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, blocks in ((20 * SIZE, 2), (10**15, 4)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        request(folder, text(0, 128))
        assert sizes(folder) == blocks * SIZE


# ---- Faults ----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    at=st.integers(0, 3),
    damage=st.sampled_from(["bit", "cut", "longer", "empty", "other", "swapped", "folder", "gone", "link"]),
    where=st.integers(0, SIZE - 1),
    bit=st.integers(0, 7),
)
def test_a_damaged_file_costs_time_alone(
    tmp_path_factory: pytest.TempPathFactory, at: int, damage: str, where: int, bit: int
) -> None:
    folder, tokens = tmp_path_factory.mktemp("prompts"), text(0, 280)
    request(folder, tokens)
    blocks = sorted(stored(folder), reverse=True)  # the first of the text was used last
    path, other = blocks[at].path, blocks[at - 1].path
    raw = bytearray(path.read_bytes())
    raw[where] ^= 1 << bit
    path.unlink()
    if damage == "folder":
        (path / "in it").mkdir(parents=True)
    elif damage == "link":
        path.symlink_to(other)
    elif damage != "gone":
        whole = bytes(raw[:where]) if damage == "cut" else bytes(raw)
        contents = {"longer": whole + b"x", "empty": b"", "other": b"x" * 99, "swapped": other.read_bytes()}
        path.write_bytes(contents.get(damage, whole))
    assert request(folder, tokens) == at * BLOCK
    assert request(folder, tokens) == (at if damage == "folder" else 8) * BLOCK


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _asked(**options: Any) -> Any:
    with toy_model(keyed(), **options) as model:
        for _ in range(3):
            stats = model.generate(LONG, max_new_tokens=3).stats
            settle()
            model._session.truncate(0)
    return stats


@pytest.mark.parametrize("fault", ["full", "a file", "in a file", "not ours"])
def test_where_nothing_can_be_written_it_is_said_once(
    fault: str, own_prompts: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "full":
        monkeypatch.setattr(os, "fdopen", _full)
    elif fault == "not ours":
        monkeypatch.setattr(Path, "chmod", _full)
    else:
        place = own_prompts / "deeper"
        (own_prompts if fault == "a file" else place).parent.mkdir(exist_ok=True, parents=True)
        (own_prompts if fault == "a file" else place).write_text("x")
        if fault == "in a file":
            monkeypatch.setattr("edgespec.requests.runner.prompts_dir", lambda: place / "deeper")
    stats = _asked()
    assert stats.cached_tokens == 0
    assert stats.prompt_cache_problem.startswith("prompts are not kept on disk: ")
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text
    monkeypatch.undo()


def test_when_there_is_room_again_it_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, session = PromptCache(folder), Showing()
    session.prefill(text(0, 200))
    view = session.view(0, 200)
    assert view is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", _full)
        assert prompts.write(KEY, view, lambda: False) and prompts.problem is not None
    assert not [each for each in folder.rglob("*") if each.is_file()]
    assert prompts.write(KEY, view, lambda: False) and prompts.problem is None
    assert request(folder, text(0, 200)) == 192


def test_what_cannot_be_deleted_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request(folder, text(0, 200))
    monkeypatch.setattr(Path, "unlink", _full)
    with pytest.raises(StorageError, match="cannot delete"):
        PromptCache(folder).forget(KEY)


def test_files_of_others_are_left_alone_and_what_killed_programs_left_goes(folder: Path) -> None:
    request(folder, text(0, 200))
    foreign = folder / KEY / "letter.txt"
    foreign.write_text("mine")
    leftover = folder / KEY / f"{own_name('.edgespec-', NEVER_A_PROCESS)}ab"
    leftover.write_bytes(b"x" * 100)
    request(folder, text(3, 200), budget=0)
    PromptCache(folder).forget(KEY)
    assert [each.name for each in (folder / KEY).iterdir()] == ["letter.txt"]
    leftover.write_bytes(b"x" * 100)
    request(folder, text(3, 200))
    assert not leftover.exists() and foreign.exists()


@POSIX
@pytest.mark.parametrize("umask", [0, 0o77])
def test_nobody_else_may_read_it(folder: Path, umask: int) -> None:
    folder.mkdir(mode=0o755)
    before = os.umask(umask)
    try:
        request(folder, text(0, 200))
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((folder / KEY).stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.path.stat().st_mode) for each in stored(folder)} == {0o600}


def test_threads_of_several_models_may_share_the_folder(folder: Path) -> None:
    failed = list[BaseException]()

    def work(seed: int) -> None:
        try:
            for number in range(12):
                request(folder, text((seed + number) % 6, 200 + 10 * number), budget=9 * SIZE)
                if number % 5 == seed:
                    PromptCache(folder).forget(KEY)
        except BaseException as error:  # noqa: BLE001 - told in the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are POSIX's")
def test_killed_processes_leave_nothing_wrong(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.prompts_for_tests", str(folder), "40"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    kills, found, left = map(int, re.findall(r"\d+", said))
    assert kills == 40 and found > 500 and left == 0


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    settle()
