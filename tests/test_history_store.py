"""The history's file: nothing lost, nothing shared between scopes, and no way to break an application."""

import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Self, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.history import database
from edgespec.history.memory import Delta, Found, Memory, Snapshot
from edgespec.history.passages import Passage, cut
from edgespec.history.store import Store
from tests.histories_for_tests import OTHERS, SCOPE, delta_of, merge, passage_of, stored, text_of
from tests.kills_for_tests import kill_writers

POSIX = pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "histories" / f"me{database.SUFFIX}"


class _Refusing:
    """Stands for a connection whose first statements fail."""

    def __init__(self, code: int, times: int) -> None:
        self.code, self.left, self.asked = code, times, 0

    def execute(self, statement: str) -> Self:
        self.asked, self.left = self.asked + 1, self.left - 1
        if self.left >= 0:
            error = sqlite3.OperationalError("no")
            error.sqlite_errorcode = self.code
            raise error
        return self

    def fetchone(self) -> None:
        pass


@pytest.mark.parametrize(
    ("code", "patience", "asked"),
    [
        (sqlite3.SQLITE_LOCKED, 60.0, 3),
        (sqlite3.SQLITE_BUSY_RECOVERY, 60.0, 3),
        (sqlite3.SQLITE_READONLY, 60.0, 1),
        (sqlite3.SQLITE_BUSY, -1.0, 1),
    ],
)
def test_opening_waits_for_programs_that_hold_the_file_alone_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, code: int, patience: float, asked: int
) -> None:
    monkeypatch.setattr(database, "_BUSY_S", patience)
    connection = _Refusing(code, times=2)
    with nullcontext() if asked > 2 else pytest.raises(sqlite3.OperationalError):
        database._use_wal(cast(sqlite3.Connection, connection))
    assert connection.asked == asked


class TestStore:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=90), min_size=1, max_size=5),
        st.integers(1, 4),
    )
    def test_what_is_stored_is_what_was_in_memory(
        self, tmp_path: Path, answers: list[list[int]], splits: int
    ) -> None:
        path = tmp_path / f"{time.monotonic_ns()}{database.SUFFIX}"
        store, pending = Store.open(path), Delta()
        memory = Memory(Snapshot(), max_tokens=1 << 20, tell=lambda note: note(pending))
        for number, answer in enumerate(answers):
            memory.learn(cut(answer))
            memory.refresh()
            for end in range(1, len(answer)):
                found = memory.find(answer[:end])
                if found is not None:
                    memory.judge(found, found.token == answer[end])
            if number % splits == 0:
                store.merge(SCOPE, pending, text_of)
                pending = Delta()
        store.merge(SCOPE, pending, text_of)
        snapshot = store.read(SCOPE)
        store.close()
        assert snapshot.clock == memory.clock
        stored = {entry.passage: entry for entry in snapshot.entries}
        assert stored.keys() == {entry.passage for entry in memory.entries}
        for entry in memory.entries:
            assert stored[entry.passage].worth(memory.clock) == pytest.approx(
                entry.worth(memory.clock), rel=0.05
            )

    def test_scopes_share_nothing(self, path: Path) -> None:
        store = Store.open(path)
        store.merge(SCOPE, delta_of(passage_of(1)), text_of)
        for number, scope in enumerate(OTHERS):
            assert store.read(scope).entries == []
            store.merge(scope, delta_of(passage_of(2 + number)), text_of)
        assert [entry.passage for entry in store.read(SCOPE).entries] == [passage_of(1)]
        assert set(store.scopes()) == {SCOPE, *OTHERS}
        store.close()

    def test_deltas_of_two_connections_add_up(self, path: Path) -> None:
        one, two = Store.open(path), Store.open(path)
        passage, delta = passage_of(1), Delta()
        one.merge(SCOPE, delta_of(passage), text_of)
        two.merge(SCOPE, delta_of(passage, passage_of(2)), text_of)
        found = _found(two.read(SCOPE), passage)
        delta.judged("unique 1", found, False)
        one.merge(SCOPE, delta, text_of)
        two.merge(SCOPE, delta, text_of)
        snapshot = one.read(SCOPE)
        entry = next(entry for entry in snapshot.entries if entry.passage == passage)
        assert entry.uses == pytest.approx(2.0, rel=0.01)
        assert entry.wrong[0] == 2
        assert snapshot.clock == 60
        assert snapshot.tallies["unique 1"].judged == pytest.approx(2.0, rel=0.01)
        one.close()
        two.close()

    def test_verdicts_on_what_was_forgotten_do_not_bring_it_back(self, path: Path) -> None:
        store, passage, delta = Store.open(path), passage_of(1), Delta()
        store.merge(SCOPE, delta_of(passage), text_of)
        (learned,) = store.learned()
        assert (learned.before, learned.text, learned.scope) == (b"", b"x" * 20, SCOPE)
        assert learned.worth == pytest.approx(1.0)
        delta.judged("unique 1", _found(store.read(SCOPE), passage), True)
        store.remove([learned])
        store.merge(SCOPE, delta, text_of)
        assert store.read(SCOPE).entries == []
        store.close()

    def test_a_scope_is_bounded_and_keeps_what_is_used(self, path: Path) -> None:
        store = Store.open(path, max_tokens=400)
        for number in range(100):
            store.merge(SCOPE, delta_of(passage_of(number), passage_of(777)), text_of)
            assert sum(store.scopes().values()) <= 400
        assert passage_of(777) in {entry.passage for entry in store.read(SCOPE).entries}
        store.close()

    def test_a_delta_that_is_stored_is_no_error_where_tidying_up_fails(self, path: Path) -> None:
        class Locked(Store):
            def _vacuum(self) -> None:
                raise sqlite3.OperationalError("database is locked")

        store = Locked.open(path)
        store.merge(SCOPE, delta_of(passage_of(1)), text_of)
        store.close()
        assert [entry.uses for entry in stored(path).entries] == [1.0]

    def test_where_room_cannot_be_made_nothing_is_stored(self, path: Path) -> None:
        class Full(Store):
            def _keep(self, key: int, clock: int, tokens: int) -> None:
                raise sqlite3.OperationalError("database or disk is full")

        store = Full.open(path, max_bytes=4096)
        with pytest.raises(sqlite3.OperationalError, match="full"):
            store.merge(SCOPE, delta_of(passage_of(1)), text_of)
        store.close()
        assert stored(path).entries == []

    def test_the_file_is_bounded_and_gives_up_other_scopes_first(self, path: Path) -> None:
        limit = 200_000
        store = Store.open(path, max_bytes=limit)
        store.merge(OTHERS[0], delta_of(*(passage_of(n) for n in range(200))), text_of)
        for start in range(0, 3000, 100):
            store.merge(SCOPE, delta_of(*(passage_of(start + n) for n in range(100))), text_of)
            store._overwrite()
            assert path.stat().st_size <= limit + 4096
        assert OTHERS[0] not in store.scopes()
        assert store.scopes()[SCOPE] > 1000
        store.close()

    def test_an_import_is_bounded_too(self, tmp_path: Path, path: Path) -> None:
        elsewhere = Store.open(tmp_path / "elsewhere.history")
        elsewhere.merge(SCOPE, delta_of(*(passage_of(n) for n in range(1000))), text_of)
        limit = 100_000
        store = Store.open(path, max_bytes=limit)
        store.merge(OTHERS[0], delta_of(passage_of(1)), text_of)
        kept = store.put(elsewhere.learned())
        store._overwrite()
        assert path.stat().st_size <= limit + 4096
        assert set(store.scopes()) == {SCOPE} and store.scopes()[SCOPE] > 1000
        assert kept == (len(list(store.learned())), 0) and kept[0] < 1000
        elsewhere.close()
        store.close()

    def test_deleted_text_is_gone_from_the_file(self, path: Path) -> None:
        store = Store.open(path)
        store.merge(
            SCOPE, delta_of(*(passage_of(n) for n in range(50))), lambda tokens: b"s3cret" * len(tokens)
        )
        store._overwrite()
        assert b"s3cret" in path.read_bytes()
        store.remove(list(store.learned()))
        for file in path.parent.iterdir():
            assert b"s3cret" not in file.read_bytes()
        store.close()

    @POSIX
    def test_files_and_new_folders_are_the_users_alone(self, path: Path) -> None:
        before = os.umask(0)
        try:
            store = Store.open(path)
            store.merge(SCOPE, delta_of(passage_of(1)), text_of)
            modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
            store.close()
        finally:
            os.umask(before)
        assert len(modes) == 3 and set(modes.values()) == {0o600}
        assert path.parent.stat().st_mode & 0o777 == 0o700
        path.chmod(0o644)
        Store.open(path).close()
        assert path.stat().st_mode & 0o777 == 0o600


def _found(snapshot: Snapshot, passage: Passage) -> Found:
    entry = next(entry for entry in snapshot.entries if entry.passage == passage)
    return Found(passage.body[0], 1, 1, 1.0, entry, 0)


def test_killed_at_any_moment_nothing_is_lost(path: Path) -> None:
    path.parent.mkdir()
    promised, lost = kill_writers(path, 20, seed=int(time.time()))
    assert lost == 0
    assert promised > 50


def test_programs_that_open_and_write_at_once_lose_nothing(path: Path) -> None:
    """Threads, each with a connection of its own, as processes have."""

    def work(worker: int) -> None:
        for number in range(10):
            merge(path, delta_of(passage_of(100 * worker + number), passage_of(9999)))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    entries = {entry.passage: entry for entry in stored(path).entries}
    assert len(entries) == 41
    assert entries[passage_of(9999)].uses == pytest.approx(40.0, rel=0.01)


def test_a_sound_file_is_not_set_aside(path: Path) -> None:
    Store.open(path).close()
    assert database.set_aside(path) is None
    assert path.is_file()
