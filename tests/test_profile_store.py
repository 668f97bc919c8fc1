"""The profile's file: nothing lost, nothing shared between scopes, and no way to break an application."""

import logging
import os
import sqlite3
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.profile import schema
from edgespec.profile.entries import Entry
from edgespec.profile.index import Found
from edgespec.profile.memory import Delta, Memory, Snapshot
from edgespec.profile.passages import Passage, cut
from edgespec.profile.store import Store
from edgespec.profile.writer import Writer
from edgespec_models.errors import StorageError
from tests.profiles_for_tests import OTHERS, SCOPE, delta_of, passage_of, stored, text_of
from tools.profile_kills import kill_writers

POSIX = pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profiles" / f"me{schema.SUFFIX}"


class TestStore:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=90), min_size=1, max_size=5),
        st.integers(1, 4),
    )
    def test_what_is_stored_is_what_was_in_memory(
        self, tmp_path: Path, answers: list[list[int]], splits: int
    ) -> None:
        path = tmp_path / f"{time.monotonic_ns()}{schema.SUFFIX}"
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
        delta.judged("unique 1", _found(store.read(SCOPE), passage), True)
        store.remove(list(store.learned()))
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

    def test_the_file_is_bounded_and_gives_up_other_scopes_first(self, path: Path) -> None:
        limit = 200_000
        store = Store.open(path, max_bytes=limit)
        store.merge(OTHERS[0], delta_of(*(passage_of(n) for n in range(200))), text_of)
        for start in range(0, 3000, 100):
            store.merge(SCOPE, delta_of(*(passage_of(start + n) for n in range(100))), text_of)
            store.overwrite()
            assert path.stat().st_size <= limit + 4096
        assert OTHERS[0] not in store.scopes()
        assert store.scopes()[SCOPE] > 1000
        store.close()

    def test_deleted_text_is_gone_from_the_file(self, path: Path) -> None:
        store = Store.open(path)
        store.merge(
            SCOPE, delta_of(*(passage_of(n) for n in range(50))), lambda tokens: b"s3cret" * len(tokens)
        )
        store.overwrite()
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

    def test_a_later_format_and_foreign_databases_are_left_alone(self, path: Path) -> None:
        Store.open(path).close()
        for statement, says in (
            ("PRAGMA user_version = 99", "Update edgespec"),
            ("PRAGMA application_id = 5", "another program"),
        ):
            connection = sqlite3.connect(path)
            connection.execute(statement)
            connection.close()
            with pytest.raises(StorageError, match=says):
                Store.open(path)
        assert [file for file in path.parent.iterdir() if "damaged" in file.name] == []


def _found(snapshot: Snapshot, passage: Passage) -> Found:
    entry = next(entry for entry in snapshot.entries if entry.passage == passage)
    return Found(passage.body[0], 1, 1, 1.0, entry, 0)


class TestProcesses:
    def test_killed_at_any_moment_nothing_is_lost(self, path: Path) -> None:
        path.parent.mkdir()
        promised, lost = kill_writers(path, 20, seed=int(time.time()))
        assert lost == 0
        assert promised > 50

    def test_threads_that_open_and_write_at_once_lose_nothing(self, path: Path) -> None:
        """Each with a connection of its own, as processes have."""

        def work(worker: int) -> None:
            store = Store.open(path)
            for number in range(10):
                store.merge(SCOPE, delta_of(passage_of(100 * worker + number), passage_of(9999)), text_of)
            store.close()

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        snapshot = stored(path)
        assert len(snapshot.entries) == 41
        shared = next(entry for entry in snapshot.entries if entry.passage == passage_of(9999))
        assert shared.uses == pytest.approx(40.0, rel=0.01)


class TestWriter:
    def test_it_writes_within_the_interval_by_itself(self, path: Path) -> None:
        writer = Writer(Store.open(path), path, scope=SCOPE, text_of=text_of, flush_s=0.02)
        writer.tell(lambda delta: delta.wrote(passage_of(1)))
        end = time.monotonic() + 20
        while not stored(path).entries and time.monotonic() < end:
            time.sleep(0.01)
        assert len(stored(path).entries) == 1
        writer.close()
        writer.close()

    def test_closing_writes_what_is_left(self, path: Path) -> None:
        writer = Writer(Store.open(path), path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
        writer.tell(lambda delta: delta.wrote(passage_of(1)))
        writer.close()
        assert len(stored(path).entries) == 1

    @pytest.mark.parametrize("fault", ["full", "readonly"])
    def test_a_disk_that_takes_nothing_is_reported_once_and_tried_again(
        self, path: Path, fault: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = Store.open(path)
        connection = store._connection
        break_it, mend_it, says = {
            "full": (
                f"PRAGMA max_page_count = {_pages(connection)}",
                "PRAGMA max_page_count = 100000",
                "full",
            ),
            "readonly": ("PRAGMA query_only = ON", "PRAGMA query_only = OFF", "readonly"),
        }[fault]
        writer = Writer(store, path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
        connection.execute(break_it)
        with caplog.at_level(logging.WARNING, logger="edgespec"):
            for start in range(3):
                for number in range(100):
                    writer.tell(lambda delta, n=100 * start + number: delta.wrote(passage_of(n)))  # type: ignore[misc]
                writer.flush()
        assert writer.problem is not None and says in writer.problem and "decoding goes on" in writer.problem
        assert len(caplog.records) == 1
        connection.execute(mend_it)
        writer.close()
        assert writer.problem is None
        assert len(stored(path).entries) == 300

    def test_what_waits_for_room_is_bounded(self, path: Path) -> None:
        store = Store.open(path)
        writer = Writer(store, path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
        store._connection.execute("PRAGMA query_only = ON")
        for start in range(0, 12_000, 1500):
            for number in range(1500):
                writer.tell(lambda delta, n=start + number: delta.wrote(passage_of(n, 2)))  # type: ignore[misc]
            writer.flush()
        assert len(writer._pending.changes) <= 4096
        writer.close()

    def test_damage_while_in_use_is_set_aside(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        class Damaged(Store):
            def merge(self, *arguments: object) -> None:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                path.write_bytes(b"no database at all" * 1000)
                error = sqlite3.DatabaseError("database disk image is malformed")
                error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise error

        if sys.platform == "win32":
            pytest.skip("an open file cannot be renamed")
        writer = Writer(Damaged.open(path), path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
        writer.tell(lambda delta: delta.wrote(passage_of(1)))
        with caplog.at_level(logging.WARNING, logger="edgespec"):
            writer.flush()
        assert writer.problem is not None and "was damaged" in writer.problem
        assert len(caplog.records) == 1
        writer.close()
        assert len(stored(path).entries) == 1
        assert [file for file in path.parent.iterdir() if ".damaged-" in file.name]


def _pages(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA page_count").fetchone()[0])


def test_a_sound_file_is_not_set_aside(path: Path) -> None:
    Store.open(path).close()
    assert schema.set_aside(path) is None
    assert path.is_file()


def test_entries_of_the_file_carry_their_verdicts(path: Path) -> None:
    store, passage = Store.open(path), passage_of(1)
    store.merge(SCOPE, delta_of(passage), text_of)
    learned = next(iter(store.learned()))
    assert isinstance(learned.entry, Entry)
    assert (learned.before, learned.text, learned.scope) == (b"", b"x" * 20, SCOPE)
    assert learned.worth == pytest.approx(1.0)
    store.close()
