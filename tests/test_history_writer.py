"""Writing to the history's file in the background: soon, once, and whatever happens to the file."""

import logging
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from edgespec.history import database
from edgespec.history.store import Store
from edgespec.history.use import Writer
from tests.histories_for_tests import SCOPE, passage_of, stored, text_of

RENAMES = pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be renamed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "histories" / f"me{database.SUFFIX}"


def test_it_writes_within_the_interval_by_itself(path: Path) -> None:
    writer = Writer(Store.open(path), path, scope=SCOPE, text_of=text_of, flush_s=0.02)
    writer.tell(lambda delta: delta.wrote(passage_of(1)))
    end = time.monotonic() + 20
    while not stored(path).entries and time.monotonic() < end:
        time.sleep(0.01)
    assert len(stored(path).entries) == 1
    writer.close()
    writer.close()


def test_unless_told_otherwise_it_writes_as_soon_as_the_guide_says(path: Path) -> None:
    guide = Path(__file__).parents[1] / "docs" / "history.md"
    assert "two seconds after something was learned" in guide.read_text("utf-8")
    writer = Writer(Store.open(path), path, scope=SCOPE, text_of=text_of)
    writer.close()
    assert writer._wait_s() == 2.0


def test_closing_writes_what_is_left(path: Path) -> None:
    writer = Writer(Store.open(path), path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
    writer.tell(lambda delta: delta.wrote(passage_of(1)))
    writer.close()
    assert len(stored(path).entries) == 1


def test_an_interrupted_close_can_be_repeated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    writer = Writer(Store.open(path), path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
    writer.tell(lambda delta: delta.wrote(passage_of(1)))
    monkeypatch.setattr(Store, "merge", interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert not stored(path).entries
    writer.close()
    assert len(stored(path).entries) == 1


@pytest.mark.parametrize("fault", ["full", "readonly"])
def test_a_disk_that_takes_nothing_is_reported_once_and_tried_again(
    path: Path, fault: str, caplog: pytest.LogCaptureFixture
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


def test_what_waits_for_room_is_bounded(path: Path) -> None:
    store = Store.open(path)
    writer = Writer(store, path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
    store._connection.execute("PRAGMA query_only = ON")
    for start in range(0, 12_000, 1500):
        for number in range(1500):
            writer.tell(lambda delta, n=start + number: delta.wrote(passage_of(n, 2)))  # type: ignore[misc]
        writer.flush()
    assert sum(len(delta.changes) for delta in writer._late) <= 4096
    writer.close()


@RENAMES
def test_damage_while_in_use_is_set_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer(_damaging(path), path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
    writer.tell(lambda delta: delta.wrote(passage_of(1)))
    with caplog.at_level(logging.WARNING, logger="edgespec"):
        writer.flush()
    assert writer.problem is not None and "was damaged" in writer.problem
    assert len(caplog.records) == 1
    writer.close()
    assert len(stored(path).entries) == 1
    assert [file for file in path.parent.iterdir() if ".damaged-" in file.name]


def test_what_is_not_ours_any_more_while_in_use_is_left_alone(path: Path) -> None:
    writer = Writer(_damaging(path, kept=0), path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
    writer.tell(lambda delta: delta.wrote(passage_of(1)))
    writer.flush()
    assert writer.problem is not None and "cannot be replaced" in writer.problem
    assert path.read_bytes().startswith(b"no database at all")
    assert not [file for file in path.parent.iterdir() if ".damaged-" in file.name]
    path.unlink()  # as the problem says
    writer.close()
    assert len(stored(path).entries) == 1


@RENAMES
def test_a_damaged_file_that_cannot_be_renamed_now_is_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Path:
        raise PermissionError("another program has it open")

    writer = Writer(_damaging(path), path, scope=SCOPE, text_of=text_of, flush_s=1000.0)
    writer.tell(lambda delta: delta.wrote(passage_of(1)))
    with monkeypatch.context() as patched:
        patched.setattr("edgespec.history.use.set_aside", refuse)
        writer.flush()
        writer.flush()
    assert writer.problem is not None and "cannot be replaced" in writer.problem
    writer.tell(lambda delta: delta.wrote(passage_of(2)))
    writer.flush()
    assert writer.problem is not None and "was damaged" in writer.problem
    writer.close()
    assert {entry.passage for entry in stored(path).entries} == {passage_of(1), passage_of(2)}


def _damaging(path: Path, *, kept: int = 100) -> Store:
    """A store whose first merge finds the file damaged, but for the bytes ``kept`` at its beginning."""

    class Damaged(Store):
        def merge(self, *arguments: object) -> None:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            path.write_bytes(path.read_bytes()[:kept] + b"no database at all" * 1000)
            error = sqlite3.DatabaseError("database disk image is malformed")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error

    return Damaged.open(path)


def _pages(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA page_count").fetchone()[0])
