"""Prompts on disk: found by any process, the same bits, within their bound, whatever happens to the files."""

import errno
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import StorageError
from edgespec_models.decoders.kept import BLOCK
from edgespec_models.storage import own_name
from edgespec_runtimes.block_files import BlockFiles, stored
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.session import Session
from tests.export.test_export import NEVER_A_PROCESS
from tests.kit.machines import POSIX
from tests.kit.native import tiny_native
from tests.kit.prompts import KEY, SIZE, Showing, disk_full, request, sizes, text
from tests.kit.sessions import ONE_THREAD, TOKENS, passes
from tests.kit.toy import GEMMA, LLAMA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompt-cache"


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
    for held, hits in ((0, 288), (100, 288), (288, 288), (290, 290)):
        session = Showing()
        session.prefill(first[:held])
        before = session.read
        assert request(folder, first, session) == hits
        assert session.read - before == 300 - hits


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Session]:
    folder = tmp_path_factory.mktemp("native")
    models = {
        "llama": cache(lambda: tiny_native(folder / "a", LLAMA, "Q4_0").bundle),
        "gemma": cache(lambda: tiny_native(folder / "b", GEMMA, "Q8_0").bundle),
    }
    return lambda name: open_cpu(models[name](), ONE_THREAD)


def test_keys_say_the_bundle(make: Callable[[str], Session]) -> None:
    one, same, other = make("llama"), make("llama"), make("gemma")
    assert one.model.prompt_key == same.model.prompt_key != other.model.prompt_key
    assert "" not in (one.model.prompt_key, other.model.prompt_key)


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
    make: Callable[[str], Session],
    tmp_path_factory: pytest.TempPathFactory,
    asked: list[tuple[int, int, bool, int]],
    blocks: int,
    memory: int,
    kind: str,
) -> None:
    folder, session, alone = tmp_path_factory.mktemp("prompts"), make(kind), make(kind)
    session.reserve(1)
    budget = blocks * (BLOCK * session.kv_bytes // session.capacity + 48)
    store = KvStore(memory, BlockFiles(folder, budget))
    for number, length, anew, written in asked:
        tokens = [token % 250 for token in text(number, length)]
        if anew:
            session.rewind(0)
            store = KvStore(memory, BlockFiles(folder, budget))
        store.fetch(session, tokens)
        alone.rewind(0)
        np.testing.assert_array_equal(session.predict_next(tokens).logits, alone.predict_next(tokens).logits)
        pieces = passes(session, TOKENS[:20], 3, 1, 16)
        np.testing.assert_array_equal(pieces, passes(alone, TOKENS[:20], 20))
        left = iter(range(written))
        store.write_behind(lambda left=left: next(left, None) is None)  # type: ignore[misc]
        assert sizes(folder) <= budget


# ---- The bound -------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_ends_before_beginnings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", partial(next, count(10**18, 10**9)))  # a second between requests
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


def test_without_a_number_it_is_a_part_of_the_disk(folder: Path, free_disk: Callable[..., None]) -> None:
    for free, blocks in ((20 * SIZE, 2), (10**15, 4)):
        free_disk(free)
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


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (OSError(errno.EMFILE, "too many files"), True),
        (MemoryError(), True),
        (OSError(errno.EIO, "bad"), False),
    ],
)
def test_a_file_stays_that_only_this_program_cannot_read_now(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, kept: bool
) -> None:
    request(folder, text(0, 32))
    [block], files = stored(folder), BlockFiles(folder)
    read = partial(files.read, KEY, block.path.name, SIZE - 48)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", Mock(side_effect=error))
        assert read() is None
    assert (read() is not None) == kept == block.path.exists()


def test_when_files_can_be_written_again_it_goes_on(folder: Path) -> None:
    store, session, tokens = KvStore(0, BlockFiles(folder)), Showing(), text(0, 200)
    folder.write_text("in the way")
    for _ in range(2):
        store.fetch(session, tokens)
        session.prefill(tokens)
        store.write_behind()
        assert store.problem is not None and folder.is_file()
    folder.unlink()
    store.fetch(session, tokens)
    store.write_behind()
    assert store.problem is None and request(folder, tokens) == 192


def test_what_cannot_be_deleted_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request(folder, text(0, 200))
    monkeypatch.setattr(Path, "unlink", disk_full)
    with pytest.raises(StorageError, match="cannot delete"):
        BlockFiles(folder).forget(KEY)


def test_files_of_others_are_left_alone_and_what_killed_programs_left_goes(folder: Path) -> None:
    request(folder, text(0, 200))
    foreign = folder / KEY / "letter.txt"
    foreign.write_text("mine")
    leftover = folder / KEY / f"{own_name('.edgespec-', NEVER_A_PROCESS)}ab"
    leftover.write_bytes(b"x" * 100)
    request(folder, text(3, 200), budget=0)
    BlockFiles(folder).forget(KEY)
    assert [path.name for path in (folder / KEY).iterdir()] == ["letter.txt"]
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
    assert {stat.S_IMODE(block.path.stat().st_mode) for block in stored(folder)} == {0o600}


def test_threads_of_several_models_may_share_the_folder(folder: Path) -> None:
    def work(seed: int) -> None:
        for number in range(12):
            request(folder, text((seed + number) % 6, 200 + 10 * number), budget=9 * SIZE)
            if number % 5 == seed:
                BlockFiles(folder).forget(KEY)

    with ThreadPoolExecutor(4) as pool:
        assert len([*pool.map(work, range(4))]) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are POSIX's")
@pytest.mark.parametrize(("kind", "kills", "most"), [("blocks", 40, 500), ("states", 20, 100)])
def test_killed_processes_leave_nothing_wrong(folder: Path, kind: str, kills: int, most: int) -> None:
    command = [sys.executable, "-m", "tests.kit.prompts", str(folder), str(kills), kind]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    killed, hits, left = map(int, re.findall(r"\d+", output))
    assert killed == kills and hits > most and left == 0
