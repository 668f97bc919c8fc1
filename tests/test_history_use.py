"""A history in use: across restarts, over damaged files and full disks, written in the background."""

import logging
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from edgespec.history.manage import History
from edgespec.history.memory import Snapshot
from edgespec.history.passages import Passage
from edgespec.history.store import Store
from edgespec.history.use import HistoryUse, Writer
from edgespec_models.errors import StorageError
from tests.histories_for_tests import (
    OTHERS,
    SCOPE,
    delta_of,
    learn,
    merge,
    passage_of,
    stored,
    text_of,
    tokenizer,
    used,
)

TEXT = "the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on. " * 3
POSIX = pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")
RENAMES = pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be renamed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "histories" / "me.history"


@pytest.fixture
def tokens() -> list[int]:
    return tokenizer().encode(TEXT)


def _proposes(use: HistoryUse, tokens: list[int]) -> bool:
    return use.begin().propose(tokens[:12], 6).tokens == tuple(tokens[12:18])


def _aside(path: Path) -> list[Path]:
    return [file for file in path.parent.iterdir() if ".damaged-" in file.name]


def test_what_was_learned_is_there_after_a_restart(path: Path, tokens: list[int]) -> None:
    with used(path) as use:
        assert use.problem is None and len(use.memory) == 0
        learn(use, tokens)
    with used(path) as again, used(path, OTHERS[0]) as other:
        assert _proposes(again, tokens) and not other.begin().propose(tokens[:12], 6).tokens


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:100] + b"not a database, but long enough to be read as one" * 100,
        lambda data: data[:5000],
        lambda data: data[:100] + bytes(len(data) - 100),
        lambda data: data[: len(data) // 2] + os.urandom(len(data) - len(data) // 2),
        lambda data: data.replace(b"CREATE TABLE passage", b"CREATE\x80TABLE passage"),
    ],
    ids=["text", "cut", "zeros", "noise", "names"],
)
def test_a_damaged_file_is_set_aside_and_reported(
    path: Path, tokens: list[int], damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with used(path) as use:
        for start in range(300):
            learn(use, [(start + n) % 400 for n in range(60)])
    bad = damage(path.read_bytes())
    path.write_bytes(bad)
    with caplog.at_level(logging.WARNING, logger="edgespec"), used(path) as use:
        assert use.problem is not None and "was damaged" in use.problem
        assert caplog.messages == [use.problem]
        assert [len(file.read_bytes()) for file in _aside(path)] == [len(bad)]
        learn(use, tokens)
    assert stored(path).entries


@pytest.mark.parametrize(
    "change",
    [
        "passage SET body = 'text'",
        "passage SET uses = 'x'",
        "scope SET clock = 'x'",
        "scope SET target = x'00'",
    ],
)
def test_values_of_wrong_types_are_damage(path: Path, change: str) -> None:
    merge(path, *(delta_of(passage_of(number)) for number in range(3)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(f"UPDATE OR IGNORE {change}").rowcount
    with pytest.raises(StorageError, match="wrong type"):
        History(path).show()
    with used(path) as use:
        assert use.problem is not None and "was damaged" in use.problem
    assert History(path).show() == []


def test_rows_that_make_no_sense_are_not_used(path: Path, tokens: list[int]) -> None:
    merge(path, delta_of(passage_of(1)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE passage SET verdicts = x'00'")
    with used(path) as use:
        assert use.problem is not None and "cannot be read" in use.problem and len(use.memory) == 0
        learn(use, tokens)


def test_tokens_that_the_model_lacks_are_never_proposed(path: Path) -> None:
    merge(path, delta_of(Passage((), (1, 2, 404)), Passage((), (1, 2, 403))))
    with used(path) as use:
        assert [entry.passage.body for entry in use.memory.entries] == [(1, 2, 403)]


def test_where_no_file_can_be_made_it_learns_until_it_is_closed(
    tmp_path: Path, tokens: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="edgespec"), used(tmp_path / "file" / "me.history") as use:
        assert use.problem is not None and "cannot be written" in use.problem
        assert caplog.messages == [use.problem]
        learn(use, tokens)
        assert _proposes(use, tokens)
        use.flush()


def test_a_file_that_cannot_be_written_is_read(
    path: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with used(path) as use:
        learn(use, tokens)
    before = path.read_bytes()

    def refuse(path: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr("edgespec.history.store.connect", refuse)
    with used(path) as use:
        assert use.problem is not None and "readonly" in use.problem
        assert _proposes(use, tokens)
        learn(use, tokens)
    assert path.read_bytes() == before


@POSIX
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    with used(tmp_path / "shut" / "me.history") as use:
        assert use.problem is not None and "cannot be written" in use.problem


def test_a_later_format_is_not_used_and_not_touched(path: Path) -> None:
    merge(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with used(path) as use:
        assert use.problem is not None and "Update edgespec" in use.problem
    assert path.read_bytes() == before


def test_what_keeps_the_writer_from_writing_is_told() -> None:
    writer = cast(Writer, SimpleNamespace(problem="the disk is full", tell=lambda note: None))
    assert HistoryUse(Snapshot(), writer, None).problem == "the disk is full"


def _writer(path: Path, store: Store | None = None, flush_s: float = 1000.0) -> Writer:
    return Writer(store or Store.open(path), path, scope=SCOPE, text_of=text_of, flush_s=flush_s)


def _tell(writer: Writer, *numbers: int) -> None:
    for number in numbers:
        writer.tell(lambda delta, number=number: delta.wrote(passage_of(number, 20)))  # type: ignore[misc]


class TestWriter:
    def test_it_writes_within_the_interval_by_itself(self, path: Path) -> None:
        writer = _writer(path, flush_s=0.02)
        _tell(writer, 1)
        end = time.monotonic() + 20
        while not stored(path).entries and time.monotonic() < end:
            time.sleep(0.01)
        assert len(stored(path).entries) == 1
        writer.close()
        writer.close()

    def test_unless_told_otherwise_it_writes_as_soon_as_the_guide_says(self, path: Path) -> None:
        guide = Path(__file__).parents[1] / "docs" / "history.md"
        assert "two seconds after something was learned" in guide.read_text("utf-8")
        with closing(Writer(Store.open(path), path, scope=SCOPE, text_of=text_of)) as writer:
            assert writer._wait_s() == 2.0

    def test_closing_writes_what_is_left_also_after_an_interrupt(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*args: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        writer = _writer(path)
        _tell(writer, 1)
        monkeypatch.setattr(Store, "merge", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
        assert not stored(path).entries
        writer.close()
        assert len(stored(path).entries) == 1

    @pytest.mark.parametrize(
        ("break_it", "mend_it", "says"),
        [
            ("PRAGMA max_page_count = 1", "PRAGMA max_page_count = 100000", "full"),  # 1 is what it has now
            ("PRAGMA query_only = ON", "PRAGMA query_only = OFF", "readonly"),
        ],
    )
    def test_a_disk_that_takes_nothing_is_reported_once_and_tried_again(
        self, path: Path, break_it: str, mend_it: str, says: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = Store.open(path)
        writer = _writer(path, store)
        store._connection.execute(break_it)
        with caplog.at_level(logging.WARNING, logger="edgespec"):
            for start in range(0, 300, 100):
                _tell(writer, *range(start, start + 100))
                writer.flush()
        assert writer.problem is not None and says in writer.problem
        assert "decoding goes on" in writer.problem and len(caplog.records) == 1
        store._connection.execute(mend_it)
        writer.close()
        assert writer.problem is None
        assert len(stored(path).entries) == 300

    def test_what_waits_for_room_is_bounded(self, path: Path) -> None:
        store = Store.open(path)
        writer = _writer(path, store)
        store._connection.execute("PRAGMA query_only = ON")
        for start in range(0, 12_000, 1500):
            _tell(writer, *range(start, start + 1500))
            writer.flush()
        assert 0 < sum(len(delta.changes) for delta in writer._late) <= 4096
        writer.close()

    @RENAMES
    def test_damage_while_in_use_is_set_aside(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        writer = _writer(path, _damaging(path))
        _tell(writer, 1)
        with caplog.at_level(logging.WARNING, logger="edgespec"):
            writer.flush()
        assert writer.problem is not None and "was damaged" in writer.problem
        assert len(caplog.records) == 1
        writer.close()
        assert len(stored(path).entries) == 1 and _aside(path)

    def test_what_is_not_ours_any_more_while_in_use_is_left_alone(self, path: Path) -> None:
        writer = _writer(path, _damaging(path, kept=0))
        _tell(writer, 1)
        writer.flush()
        assert writer.problem is not None and "cannot be replaced" in writer.problem
        assert path.read_bytes().startswith(b"no database at all") and not _aside(path)
        path.unlink()  # as the problem says
        writer.close()
        assert len(stored(path).entries) == 1

    @RENAMES
    def test_a_damaged_file_that_cannot_be_renamed_now_is_later(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path) -> Path:
            raise PermissionError("another program has it open")

        writer = _writer(path, _damaging(path))
        _tell(writer, 1)
        with monkeypatch.context() as patched:
            patched.setattr("edgespec.history.use.set_aside", refuse)
            writer.flush()
            writer.flush()
        assert writer.problem is not None and "cannot be replaced" in writer.problem
        _tell(writer, 2)
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
