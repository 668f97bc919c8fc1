"""A history in use: across restarts, over damaged files and full disks, written in the background."""

import os
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from edgespec.drafting.copies import CopyDrafter
from edgespec.history.manage import History
from edgespec.history.passages import Passage
from edgespec.history.store import Store
from edgespec.history.use import HistoryUse, Writer
from edgespec_models.errors import StorageError
from tests.kit import histories
from tests.kit.histories import OTHERS, SCOPE, delta_of, learn, merge, passage_of, stored, text_of, used
from tests.kit.toy import until

TEXT = "the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on. " * 3
RENAMES = pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be renamed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "histories" / "me.history"


@pytest.fixture
def tokens() -> list[int]:
    return histories.tokenizer().encode(TEXT)


def _proposes(use: HistoryUse, tokens: list[int]) -> bool:
    return CopyDrafter(use.begin()).propose(tokens[:12], 6).tokens == tuple(tokens[12:18])


def _aside(path: Path) -> list[Path]:
    return [file for file in path.parent.iterdir() if ".damaged-" in file.name]


def test_what_was_learned_is_there_after_a_restart(path: Path, tokens: list[int]) -> None:
    with used(path) as use:
        assert use.problem is None and len(use.memory) == 0
        learn(use, tokens)
    with used(path) as again, used(path, OTHERS[0]) as other:
        assert _proposes(again, tokens) and not _proposes(other, tokens)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "text": lambda data: data[:100] + b"not a database, but long enough to be read as one" * 100,
    "cut": lambda data: data[:5000],
    "zeros": lambda data: data[:100] + bytes(len(data) - 100),
    "noise": lambda data: data[: len(data) // 2] + os.urandom(len(data) - len(data) // 2),
    "names": lambda data: data.replace(b"CREATE TABLE passage", b"CREATE\x80TABLE passage"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_set_aside_and_reported(
    path: Path, tokens: list[int], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    merge(path, delta_of(*(passage_of(number, 60) for number in range(300))))
    bad = DAMAGES[damage](path.read_bytes())
    path.write_bytes(bad)
    with used(path) as use:
        assert use.problem is not None and "was damaged" in use.problem
        assert caplog.messages == [use.problem]
        assert [len(file.read_bytes()) for file in _aside(path)] == [len(bad)]
        learn(use, tokens)
    assert stored(path).entries


def _change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(statement).rowcount


WRONG = ["passage SET body = 'text'", "passage SET uses = 'x'", "scope SET clock = 'x'"]


@pytest.mark.parametrize("change", [*WRONG, "scope SET target = x'00'"])
def test_values_of_wrong_types_are_damage(path: Path, change: str) -> None:
    merge(path, *(delta_of(passage_of(number)) for number in range(3)))
    _change(path, f"UPDATE OR IGNORE {change}")
    with pytest.raises(StorageError, match="wrong type"):
        History(path).show()
    with used(path) as use:
        assert use.problem is not None and "was damaged" in use.problem
    assert History(path).show() == []


def test_rows_that_make_no_sense_are_not_used(path: Path, tokens: list[int]) -> None:
    merge(path, delta_of(passage_of(1)))
    _change(path, "UPDATE passage SET verdicts = x'00'")
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
    with used(tmp_path / "file" / "me.history") as use:
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

    refuse = Mock(side_effect=sqlite3.OperationalError("attempt to write a readonly database"))
    monkeypatch.setattr("edgespec.history.store.connect", refuse)
    with used(path) as use:
        assert use.problem is not None and "readonly" in use.problem
        assert _proposes(use, tokens)
        learn(use, tokens)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [4, 99])
def test_another_format_is_not_used_and_not_touched(path: Path, version: int) -> None:
    merge(path)
    _change(path, f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with used(path) as use:
        assert use.problem is not None and f"format version {version}" in use.problem
    assert path.read_bytes() == before


def _writer(path: Path, store: Store | None = None, flush_s: float = 1000.0) -> Writer:
    return Writer(store or Store.open(path), path, scope=SCOPE, text_of=text_of, flush_s=flush_s)


def _tell(writer: Writer, *numbers: int) -> None:
    for number in numbers:
        writer.tell(lambda delta, number=number: delta.wrote(passage_of(number, 20)))  # type: ignore[misc]


class TestWriter:
    def test_it_writes_within_the_interval_by_itself(self, path: Path) -> None:
        writer = _writer(path, flush_s=0.02)
        _tell(writer, 1)
        until(lambda: stored(path).entries)
        assert len(stored(path).entries) == 1
        writer.close()
        writer.close()

    def test_closing_writes_what_is_left_also_after_an_interrupt(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer = _writer(path)
        _tell(writer, 1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Store, "merge", Mock(side_effect=KeyboardInterrupt))
            writer.close()
        assert not stored(path).entries
        writer.close()
        assert len(stored(path).entries) == 1

    @pytest.mark.parametrize(
        ("setting", "broken", "sound", "says"),
        [("max_page_count", 1, 100_000, "full"), ("query_only", 1, 0, "readonly")],  # 1 page is what it has
    )
    def test_a_disk_that_takes_nothing_is_reported_once_and_tried_again(
        self, path: Path, setting: str, broken: int, sound: int, says: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = Store.open(path)
        writer = _writer(path, store)
        store._connection.execute(f"PRAGMA {setting} = {broken}")
        for start in range(0, 300, 100):
            _tell(writer, *range(start, start + 100))
            writer.flush()
        assert writer.problem is not None and says in writer.problem
        assert "decoding goes on" in writer.problem and len(caplog.records) == 1
        store._connection.execute(f"PRAGMA {setting} = {sound}")
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
    @pytest.mark.parametrize("others", [[], [passage_of(2)]])
    def test_a_history_that_is_deleted_or_replaced_in_use_is_reported_and_left_alone(
        self, path: Path, others: list[Passage]
    ) -> None:
        writer = _writer(path)
        History(path).delete()
        if others:
            merge(path, delta_of(*others))
        _tell(writer, 1)
        writer.flush()
        assert writer.problem is not None and "was deleted or replaced" in writer.problem
        writer.close()
        assert path.exists() == bool(others)
        assert [entry.passage for entry in stored(path).entries] == others

    @RENAMES
    def test_a_damaged_file_that_cannot_be_renamed_now_is_later(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer, refuse = _writer(path, _damaging(path)), Mock(side_effect=PermissionError("it is open"))
        _tell(writer, 1)
        with monkeypatch.context() as patched:
            patched.setattr("edgespec.history.use.set_aside", refuse)
            writer.flush()
            writer.flush()
        assert writer.problem is not None and "cannot be replaced" in writer.problem
        _tell(writer, 2)
        writer.flush()
        [aside] = _aside(path)
        assert writer.problem is not None and aside.name in writer.problem
        _tell(writer, 3)
        writer.flush()
        assert writer.problem is None
        writer.close()
        assert {entry.passage for entry in stored(path).entries} == {passage_of(n) for n in (1, 2, 3)}


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


@pytest.mark.parametrize(("error", "again"), [(MemoryError(), True), (ValueError("no such token"), False)])
def test_the_writer_goes_on_after_any_error_and_drops_only_what_would_fail_again(
    path: Path, error: Exception, again: bool
) -> None:
    failures = [error]

    def text(tokens: Sequence[int]) -> bytes:
        if failures:
            raise failures.pop()
        return text_of(tokens)

    with closing(Writer(Store.open(path), path, scope=SCOPE, text_of=text, flush_s=0.001)) as writer:
        writer.tell(lambda delta: delta.wrote(passage_of(1)))
        until(lambda: writer.problem)
        assert (str(error) or "MemoryError") in str(writer.problem) and "decoding goes on" in str(
            writer.problem
        )
        writer.flush()
        writer.tell(lambda delta: delta.wrote(passage_of(2)))
        writer.flush()
        assert writer.problem is None
    assert {entry.passage.body[0] for entry in stored(path).entries} == ({1, 2} if again else {2})
