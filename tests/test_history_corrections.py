"""What a history keeps of drafters: what they learned.

It adds up, stays apart, travels, and can be forgotten.
"""

import base64
import json
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from edgespec.cli import app
from edgespec.history import database
from edgespec.history.database import APPLICATION
from edgespec.history.manage import History
from edgespec.history.memory import Delta, DrafterKey
from edgespec.history.store import MOST_DRAFTERS, Scope, Store
from edgespec.history.use import HistoryUse
from edgespec.learning.decoder import NumpyDecoder, Reading
from edgespec.learning.gains import ROWS, Example, Gains, Lesson
from edgespec.learning.trainer import Trainer
from edgespec.learning.tuning import Tuning
from edgespec_models.errors import RequestError, StorageError
from tests.kit.histories import OTHERS, SCOPE, delta_of, merge, passage_of, stored, text_of, used

SMALL = DrafterKey("d", "small")
WIDTH, SHAPE = 4, (ROWS, 4)
pytestmark = pytest.mark.usefixtures("consoles", "learning_at_once")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"me{database.SUFFIX}"


class _Decoder:
    """All texts of token 1 teach it to lower its gains, those of others to raise them."""

    def __init__(self) -> None:
        self.gains = Gains({"gain": np.ones(WIDTH, np.float32)})

    def read(self, tokens: Sequence[int], start: int, *_: object, **__: object) -> Reading:
        gradient = np.full(WIDTH, 1.0 if tokens[0] == 1 else -1.0, np.float32)
        return Reading(1.0, np.ones(len(tokens) - start, np.bool_), gradient)


def _trainer(use: HistoryUse, drafter: DrafterKey = SMALL) -> Trainer:
    return use.trainer(drafter, lambda table: Tuning(cast(NumpyDecoder, _Decoder()), table), share=1.0)


def _teach(use: HistoryUse, token: int) -> None:
    """Two texts of ten tokens to learn from."""
    trainer = _trainer(use)
    for _ in range(2):
        trainer.offer(Example((token,) * 11, 1))


def _gain(path: Path, scope: Scope, drafter: DrafterKey = SMALL) -> int:
    """Whether what is known raises gains or lowers them; 0 if nothing is."""
    with used(path, scope) as use:
        gains = _trainer(use, drafter).take()
        return 0 if gains is None else int(np.sign(gains["gain"][0] - 1.0))


def _lesson(value: float, *, anew: bool = False, tokens: int = 10, name: str = "d", width: int = 4) -> Delta:
    delta, table = Delta(), np.full((ROWS, width), value, np.float32)
    delta.learned(DrafterKey(name, "small"), Lesson(table, anew, tokens))
    return delta


def _stored(path: Path, scope: Scope = SCOPE) -> dict[str, float]:
    return {digest: float(table[0, 0]) for digest, table in stored(path, scope).corrections.items()}


def _tokens(path: Path) -> list[int]:
    return [correction.tokens for correction in History(path).corrections()]


def test_a_restart_keeps_it_apart_from_other_scopes_and_drafters(path: Path) -> None:
    with used(path) as use, used(path, OTHERS[0]) as other:  # that one is taught the opposite
        _teach(use, 1)
        _teach(other, 2)
    assert [_gain(path, scope) for scope in (SCOPE, *OTHERS)] == [-1, 1, 0, 0]
    assert _gain(path, SCOPE, DrafterKey("another", "small")) == 0


def test_what_several_programs_learn_adds_up(path: Path) -> None:
    merge(path, _lesson(1.0), _lesson(0.5, tokens=5))
    assert (_stored(path), _tokens(path)) == ({"d": 1.5}, [15])
    merge(path, _lesson(0.25, anew=True, tokens=2))
    assert (_stored(path), _tokens(path)) == ({"d": 0.25}, [2])
    merge(path, _lesson(2.0, tokens=3, width=9))  # of another bundle of the same name
    assert (_stored(path), _tokens(path)) == ({"d": 2.0}, [3])


def test_the_drafters_used_last_are_kept(path: Path) -> None:
    for number in range(MOST_DRAFTERS + 2):
        merge(path, _lesson(1.0, name=f"d{number}"))
    assert sorted(_stored(path)) == ["d2", "d3", "d4", "d5"]


def _file_of_version(path: Path, version: int) -> None:
    gone = "CREATE TABLE beginning (scope INTEGER, drafter TEXT, digest BLOB, gain REAL)"
    statements = [
        *database._TABLES,
        *(["DROP TABLE correction"] if version < 3 else []),
        *([gone, "INSERT INTO beginning VALUES (1, 'd', x'01', 0.5)"] if version > 1 else []),
        f"PRAGMA application_id = {APPLICATION}",
        f"PRAGMA user_version = {version}",
        "INSERT INTO scope VALUES (1, 'target', 'digest', 'mail', 7, 0, 0.0)",
        "INSERT INTO tally VALUES (1, 'unique 3', 4.0, 5.0)",
    ]
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_of_an_earlier_format_is_brought_up_to_date(path: Path, version: int) -> None:
    _file_of_version(path, version)
    merge(path, _lesson(1.0))
    snapshot = stored(path)
    assert (_stored(path), snapshot.clock, snapshot.tallies["unique 3"].right) == ({"d": 1.0}, 7, 4.0)
    with closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert "beginning" not in tables  # hashes of how prompts began


def test_a_file_of_version_3_that_cannot_be_written_is_read(path: Path) -> None:
    _file_of_version(path, 3)
    with closing(database.connect_read_only(path)) as connection:
        assert connection.execute("SELECT accepted FROM tally").fetchall() == [(4.0,)]
    path.unlink()
    _file_of_version(path, 2)
    with pytest.raises(StorageError, match="another format version"):
        database.connect_read_only(path)


def _packed(shape: tuple[int, ...], value: float = 0.0, kind: str = "<f4") -> bytes:
    file = BytesIO()
    np.save(file, np.full(shape, value, kind))
    return zlib.compress(file.getvalue())


def _headed(header: str) -> bytes:
    return zlib.compress(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(12)
    )


SPOILT = {
    "nonsense": b"\0",
    "cut": _packed(SHAPE)[:-20],
    "smaller": _packed((2, 8)),
    "larger": _packed((ROWS, 1 << 19)),
    "no numbers": _packed(SHAPE, np.nan),
    "of another type": _packed(SHAPE, kind="<f8"),
    **{header[:9]: _headed(header) for header in ("{'descr': '<f4',", "{[]: 1}", "9", "(" * 5000)},
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_table_of_another_shape_is_ignored_and_replaced(path: Path, kind: str) -> None:
    merge(path, _lesson(1.0), delta_of(passage_of(1)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE correction SET data = ?", (SPOILT[kind],))
    with used(path) as use:
        assert use.problem is None and len(use.memory) > 0
        assert _trainer(use).take() is None
    merge(path, _lesson(3.0, tokens=4))
    assert (_stored(path), _tokens(path)) == ({"d": 3.0}, [4])


@pytest.mark.parametrize("text", ["xxx", "no such text"])
def test_forgetting_a_text_forgets_all_that_drafters_learned(path: Path, text: str) -> None:
    """Whether it is found or not: the passage may have been dropped, and the weights have seen it."""
    merge(path, _lesson(1.0), delta_of(passage_of(1)))
    merge(path, _lesson(1.0), scope=OTHERS[2])
    result = _learned("forget", str(path), text)
    assert f"{int(text == 'xxx')} passages, 2 corrections forgotten" in result.stderr
    assert "nobody can tell" in " ".join(result.stderr.split())
    assert _stored(path) == _stored(path, OTHERS[2]) == {}
    assert "nobody" not in _learned("forget", str(path), text).stderr


def test_a_program_that_still_trains_brings_nothing_back(path: Path) -> None:
    """Its lesson is a difference from what is gone."""
    merge(path, _lesson(1.0))
    with used(path) as use:
        _trainer(use)
        History(path).forget("text")
        _teach(use, 1)
    assert not stored(path).corrections


def test_deleting_a_namespace_deletes_its_corrections(path: Path) -> None:
    merge(path, _lesson(1.0))
    merge(path, _lesson(2.0), scope=OTHERS[2])
    History(path).delete("mail")
    assert (_stored(path), _stored(path, OTHERS[2])) == ({}, {"d": 2.0})


def _learned(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["history", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_it_is_shown_in_words() -> None:
    merge(History("me").path, _lesson(1.0, tokens=12_345), delta_of(passage_of(1)))
    shown = _learned("show", "me").stdout
    assert "[target, mail] a correction of the guesses of small: learned from 12,345 tokens" in shown
    assert "correction" not in _learned("show", "me", "--namespace", "code").stdout
    (listed,) = json.loads(_learned("list", "--json").stdout)
    assert [(c["drafter"], c["tokens"]) for c in listed["corrections"]] == [("small", 12_345)]
    assert "small" in _learned("list").stdout


class TestExchange:
    @pytest.fixture
    def file(self, path: Path, tmp_path: Path) -> Path:
        """An export."""
        merge(path, _lesson(0.5, tokens=100), delta_of(passage_of(1)))
        file = tmp_path / "out.json"
        assert "1 passages, 1 corrections" in _learned("export", str(path), str(file)).stderr
        return file

    @pytest.fixture
    def other(self, tmp_path: Path) -> Path:
        return tmp_path / "other.history"

    def test_it_travels(self, file: Path, other: Path) -> None:
        assert file.stat().st_size < 20_000
        for _ in range(2):  # it is not added to itself
            assert History(other).load(file) == (1, 1)
            assert (_stored(other), _tokens(other)) == ({"d": 0.5}, [100])

    @pytest.mark.parametrize(("tokens", "kept"), [(99, 0.5), (101, 7.0)])
    def test_of_two_the_one_that_learned_from_more_stays(
        self, file: Path, other: Path, tokens: int, kept: float
    ) -> None:
        merge(other, _lesson(7.0, tokens=tokens))
        History(other).load(file)
        assert _stored(other) == {"d": kept}

    @pytest.mark.parametrize("kept", [None, base64.b64encode(_packed((2, 3))).decode()])
    def test_an_export_of_before_has_none_and_one_of_another_shape_is_left_out(
        self, file: Path, other: Path, kept: str | None
    ) -> None:
        value = json.loads(file.read_text(encoding="utf-8"))
        value["corrections"][0]["table"] = kept
        if kept is None:
            del value["corrections"]
        file.write_text(json.dumps(value), encoding="utf-8")
        assert (History(other).load(file), _stored(other)) == ((1, 0), {})

    @pytest.mark.parametrize(
        ("key", "wrong"),
        [
            *(("table", wrong) for wrong in ("no base64", base64.b64encode(b"nonsense").decode(), 5)),
            *(("tokens", wrong) for wrong in (-1, 1.5)),
            *(("used_on", float("nan")), ("name", "\ud800"), ("scope", {})),
        ],
    )
    def test_what_is_no_correction_is_not_imported(
        self, file: Path, other: Path, key: str, wrong: object
    ) -> None:
        value = json.loads(file.read_text(encoding="utf-8"))
        value["corrections"][0][key] = wrong
        file.write_text(json.dumps(value), encoding="utf-8")
        with pytest.raises(RequestError, match=r"corrections\[0\]"):
            History(other).load(file)
        assert not other.exists()


def test_what_was_forgotten_does_not_come_back_with_a_program_that_still_runs(path: Path) -> None:
    def learned(change: float) -> Delta:
        delta = Delta()
        delta.learned(SMALL, Lesson(np.full(SHAPE, change, np.float32), anew=False, tokens=10))
        return delta

    merge(path, learned(1.0))
    with closing(Store.open(path)) as running:
        assert running.read(SCOPE).corrections
        History(path).forget("whatever")
        running.merge(SCOPE, learned(0.1), text_of)
        assert not stored(path).corrections
        anew = Delta()
        anew.learned(SMALL, Lesson(np.ones(SHAPE, np.float32), anew=True, tokens=10))
        running.merge(SCOPE, anew, text_of)
        running.merge(SCOPE, learned(1.0), text_of)
    np.testing.assert_array_equal(stored(path).corrections[SMALL.digest], np.full(SHAPE, 2.0))
