"""A history in use: across restarts, over damaged files, where nothing can be written."""

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from edgespec.history import database
from edgespec.history.manage import History
from edgespec.history.memory import Snapshot
from edgespec.history.passages import Passage
from edgespec.history.store import Store
from edgespec.history.use import HistoryUse, Writer, open_use
from edgespec_models.errors import StorageError
from edgespec_models.text.tokenizer import Tokenizer
from tests.histories_for_tests import OTHERS, SCOPE, delta_of, learn, stored, text_of
from tests.tokenizers_for_tests import byte_level_json

TEXT = "the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on. " * 3
POSIX = pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(byte_level_json(), vocab_size=404)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "histories" / f"me{database.SUFFIX}"


def test_what_was_learned_is_there_after_a_restart(path: Path, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    use = open_use(path, SCOPE, tokenizer)
    assert use.problem is None and len(use.memory) == 0
    learn(use, tokens)
    use.close()
    again = open_use(path, SCOPE, tokenizer)
    assert again.begin().propose(tokens[:12], 6).tokens == tuple(tokens[12:18])
    again.close()
    other = open_use(path, OTHERS[0], tokenizer)
    assert other.begin().propose(tokens[:12], 6).tokens == ()
    other.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:100] + b"not a database, but long enough to be read as one" * 100,
        lambda data: data[:5000],
        lambda data: data[:100] + bytes(len(data) - 100),
        lambda data: data[: len(data) // 2] + os.urandom(len(data) - len(data) // 2),
    ],
    ids=["text", "cut", "zeros", "noise"],
)
def test_a_damaged_file_is_set_aside_and_reported(
    path: Path,
    tokenizer: Tokenizer,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    use = open_use(path, SCOPE, tokenizer)
    for start in range(300):
        learn(use, [(start + n) % 400 for n in range(60)])
    use.close()
    bad = damage(path.read_bytes())
    path.write_bytes(bad)
    with caplog.at_level(logging.WARNING, logger="edgespec"):
        use = open_use(path, SCOPE, tokenizer)
    assert use.problem is not None and "was damaged" in use.problem
    assert caplog.messages == [use.problem]
    aside = [file for file in path.parent.iterdir() if ".damaged-" in file.name]
    assert [len(file.read_bytes()) for file in aside] == [len(bad)]
    learn(use, tokenizer.encode(TEXT))
    use.close()
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
def test_values_of_wrong_types_are_damage(path: Path, tokenizer: Tokenizer, change: str) -> None:
    use = open_use(path, SCOPE, tokenizer)
    for _ in range(3):
        learn(use, tokenizer.encode(TEXT))
    use.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(f"UPDATE OR IGNORE {change}").rowcount
    with pytest.raises(StorageError, match="wrong type"):
        History(path).show()
    use = open_use(path, SCOPE, tokenizer)
    assert use.problem is not None and "was damaged" in use.problem
    use.close()
    assert History(path).show() == []


def test_rows_that_make_no_sense_are_not_used(path: Path, tokenizer: Tokenizer) -> None:
    use = open_use(path, SCOPE, tokenizer)
    learn(use, tokenizer.encode(TEXT))
    use.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE passage SET verdicts = x'00'")
    connection.commit()
    connection.close()
    use = open_use(path, SCOPE, tokenizer)
    assert use.problem is not None and "cannot be read" in use.problem and len(use.memory) == 0
    learn(use, tokenizer.encode(TEXT))
    use.close()


def test_tokens_that_the_model_lacks_are_never_proposed(path: Path, tokenizer: Tokenizer) -> None:
    store = Store.open(path)
    store.merge(SCOPE, delta_of(Passage((), (1, 2, 404)), Passage((), (1, 2, 403))), text_of)
    store.close()
    use = open_use(path, SCOPE, tokenizer)
    assert [entry.passage.body for entry in use.memory.entries] == [(1, 2, 403)]
    use.close()


def test_where_no_file_can_be_made_it_learns_until_it_is_closed(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="edgespec"):
        use = open_use(tmp_path / "file" / "me.history", SCOPE, tokenizer)
    assert use.problem is not None and "cannot be written" in use.problem
    assert caplog.messages == [use.problem]
    tokens = tokenizer.encode(TEXT)
    learn(use, tokens)
    assert use.begin().propose(tokens[:12], 6).tokens == tuple(tokens[12:18])
    use.flush()
    use.close()


def test_a_file_that_cannot_be_written_is_read(
    path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokenizer.encode(TEXT)
    use = open_use(path, SCOPE, tokenizer)
    learn(use, tokens)
    use.close()
    before = path.read_bytes()

    def refuse(path: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr("edgespec.history.store.connect", refuse)
    use = open_use(path, SCOPE, tokenizer)
    assert use.problem is not None and "readonly" in use.problem
    assert use.begin().propose(tokens[:12], 6).tokens == tuple(tokens[12:18])
    learn(use, tokens)
    use.close()
    assert path.read_bytes() == before


@POSIX
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "shut"
    folder.mkdir(mode=0o500)
    use = open_use(folder / "me.history", SCOPE, tokenizer)
    assert use.problem is not None and "cannot be written" in use.problem
    use.close()


def test_a_later_format_is_not_used_and_not_touched(path: Path, tokenizer: Tokenizer) -> None:
    Store.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    use = open_use(path, SCOPE, tokenizer)
    assert use.problem is not None and "Update edgespec" in use.problem
    use.close()
    assert path.read_bytes() == before


def test_what_keeps_the_writer_from_writing_is_told() -> None:
    writer = cast(Writer, SimpleNamespace(problem="the disk is full", tell=lambda note: None))
    assert HistoryUse(Snapshot(), writer, None).problem == "the disk is full"
