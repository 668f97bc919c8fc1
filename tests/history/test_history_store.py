"""The history's file: nothing lost, nothing shared between scopes, and no way to break an application."""

import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.history import database
from edgespec.history.memory import Delta, Match, Memory, Snapshot
from edgespec.history.store import Store
from tests.kit.histories import OTHERS, SCOPE, cut, delta_of, merge, passage_of, stored, text_of
from tests.kit.kills import kill_writers
from tests.kit.machines import POSIX


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "histories" / f"me{database.SUFFIX}"


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
    error = sqlite3.OperationalError("no")
    error.sqlite_errorcode = code
    connection = Mock(**{"execute.side_effect": [error, error, Mock()]})
    monkeypatch.setattr(database, "_BUSY_S", patience)
    with nullcontext() if asked > 2 else pytest.raises(sqlite3.OperationalError):
        database._use_wal(connection)
    assert connection.execute.call_count == asked


class TestStore:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=90), min_size=1, max_size=5),
        st.integers(1, 4),
    )
    def test_what_is_stored_is_what_was_in_memory(
        self, tmp_path: Path, answers: list[list[int]], splits: int
    ) -> None:
        path = tmp_path / f"{len([*tmp_path.iterdir()])}{database.SUFFIX}"
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
        stored = {entry.passage: entry.worth(memory.clock) for entry in snapshot.entries}
        expected = {entry.passage: entry.worth(memory.clock) for entry in memory.entries}
        assert stored == {passage: pytest.approx(worth, rel=0.05) for passage, worth in expected.items()}
        judged = {kind: pytest.approx(tally.judged, rel=0.4) for kind, tally in memory.tallies.items()}
        assert {kind: tally.judged for kind, tally in snapshot.tallies.items()} == judged

    def test_scopes_share_nothing(self, path: Path) -> None:
        with closing(Store.open(path)) as store:
            for number, scope in enumerate((SCOPE, *OTHERS)):
                assert store.read(scope).entries == []
                store.merge(scope, delta_of(passage_of(number)), text_of)
            assert [entry.passage for entry in store.read(SCOPE).entries] == [passage_of(0)]
            assert set(store.scopes()) == {SCOPE, *OTHERS}

    def test_verdicts_of_two_programs_add_up_and_bring_nothing_back(self, path: Path) -> None:
        passage, delta = passage_of(1), Delta()
        with closing(Store.open(path)) as store, closing(Store.open(path)) as other:
            store.merge(SCOPE, delta_of(passage), text_of)
            (learned,) = store.learned()
            assert (learned.before, learned.text, learned.scope) == (b"", b"x" * 20, SCOPE)
            assert learned.worth == pytest.approx(1.0)
            delta.judged("unique 1", Match(1, 1, 1, 1.0, learned.entry, 0), False)
            for each in (store, other):
                each.merge(SCOPE, delta, text_of)
            snapshot = store.read(SCOPE)
            assert (snapshot.entries[0].wrong[0], snapshot.clock) == (2, 20)
            assert snapshot.tallies["unique 1"].judged == pytest.approx(2.0, rel=0.01)
            store.remove([learned])
            other.merge(SCOPE, delta, text_of)
            assert store.read(SCOPE).entries == []

    def test_a_scope_is_bounded_and_keeps_what_is_used(self, path: Path) -> None:
        with closing(Store.open(path, max_tokens=400)) as store:
            for number in range(100):
                store.merge(SCOPE, delta_of(passage_of(number), passage_of(777)), text_of)
                assert sum(store.scopes().values()) <= 400
            assert passage_of(777) in {entry.passage for entry in store.read(SCOPE).entries}

    @pytest.mark.parametrize(("fails", "kept"), [("_keep", []), ("_vacuum", [1.0])])
    def test_a_delta_is_stored_or_an_error_where_there_is_no_room(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, kept: list[float]
    ) -> None:
        """None is where room cannot be made; where only tidying up fails, it is."""
        full = Mock(side_effect=sqlite3.OperationalError("database or disk is full"))
        with closing(Store.open(path, max_bytes=1 << 20 if kept else 4096)) as store:
            monkeypatch.setattr(store, fails, full)
            with nullcontext() if kept else pytest.raises(sqlite3.OperationalError, match="full"):
                store.merge(SCOPE, delta_of(passage_of(1)), text_of)
        assert [entry.uses for entry in stored(path).entries] == kept

    def test_the_file_is_bounded_and_gives_up_other_scopes_first(self, tmp_path: Path, path: Path) -> None:
        limit, most = 200_000, [passage_of(n) for n in range(3000)]
        with (
            closing(Store.open(path, max_bytes=limit)) as store,
            closing(Store.open(tmp_path / "elsewhere.history")) as elsewhere,
        ):
            store.merge(OTHERS[0], delta_of(*most[:200]), text_of)
            for start in range(0, 3000, 100):
                store.merge(SCOPE, delta_of(*most[start : start + 100]), text_of)
                store._overwrite()
                assert path.stat().st_size <= limit + 4096
            assert set(store.scopes()) == {SCOPE} and store.scopes()[SCOPE] > 1000
            elsewhere.merge(OTHERS[0], delta_of(*most), text_of)
            kept = store.put(elsewhere.learned())  # an import is bounded too
            store._overwrite()
            assert path.stat().st_size <= limit + 4096
            assert set(store.scopes()) == {OTHERS[0]} and store.scopes()[OTHERS[0]] > 1000
            assert kept == len(list(store.learned())) < 3000

    def test_an_import_of_several_scopes_is_bounded(self, tmp_path: Path, path: Path) -> None:
        with (
            closing(Store.open(path, max_bytes=60_000)) as store,
            closing(Store.open(tmp_path / "elsewhere.history")) as elsewhere,
        ):
            for scope in OTHERS:
                elsewhere.merge(scope, delta_of(*(passage_of(n) for n in range(200))), text_of)
            kept = store.put(elsewhere.learned())
            store._overwrite()
            assert path.stat().st_size <= 60_000 + 4096
            assert 0 < kept == len(list(store.learned())) < 200

    def test_deleted_text_is_gone_from_the_file(self, path: Path) -> None:
        passages = delta_of(*(passage_of(n) for n in range(50)))
        with closing(Store.open(path)) as store:
            store.merge(SCOPE, passages, lambda tokens: b"s3cret" * len(tokens))
            store._overwrite()
            assert b"s3cret" in path.read_bytes()
            store.remove(list(store.learned()))
            assert not [file for file in path.parent.iterdir() if b"s3cret" in file.read_bytes()]

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


def test_killed_at_any_moment_nothing_is_lost(path: Path) -> None:
    path.parent.mkdir()
    promised, lost = kill_writers(path, 20, seed=int(time.time()))
    assert lost == 0 and promised > 50
    assert database.set_aside(path) is None and path.is_file()  # it is sound


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
