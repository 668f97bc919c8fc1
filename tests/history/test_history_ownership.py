"""What edgespec did not make is not touched, whoever names it as a history, and by whatever command."""

import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import edgespec
from edgespec.cli import app
from edgespec.history import History, database
from edgespec.history.database import APPLICATION, look
from edgespec.history.store import Store
from edgespec_models.errors import EdgespecError, RequestError, StorageError
from tests.kit.histories import SCOPE, delta_of, learn, merge, passage_of, stored, text_of, used
from tests.kit.machines import POSIX

pytestmark = pytest.mark.usefixtures("consoles")
Seen = dict[str, tuple[bytes, int, int, int]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine" / "thesis.txt"


def _seen(folder: Path) -> Seen:
    """All that a change to a file of ``folder``, or a file more or less, would show in."""
    files = {file.name: (file, file.stat()) for file in folder.iterdir()}
    return {n: (f.read_bytes(), s.st_mode, s.st_mtime_ns, s.st_ino) for n, (f, s) in files.items()}


def _database(path: Path, *statements: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    return connection


def _program(path: Path, *statements: str) -> None:
    _database(path, "CREATE TABLE notes (text)", "INSERT INTO notes VALUES ('mine')", *statements).close()


def _as_killed(connection: sqlite3.Connection, path: Path, content: bytes | None = None) -> None:
    """Close, but leave file and log as they are now; or ``content`` beside the log."""
    log = path.with_name(path.name + "-wal")
    kept = {path: path.read_bytes() if content is None else content, log: log.read_bytes()}
    connection.close()
    for file, data in kept.items():
        file.write_bytes(data)


def _logged(path: Path, content: bytes | None = None) -> None:
    """All another program wrote is in the log yet; the program was killed."""
    connection = _database(path, "PRAGMA journal_mode = WAL", "CREATE TABLE notes (text)")
    _as_killed(connection, path, content)


def _cut(path: Path) -> None:
    _program(path, "CREATE TABLE more (x)")
    path.write_bytes(path.read_bytes()[:5000])


def _linked(path: Path) -> None:
    path.with_name("elsewhere").write_text("my thesis")
    path.symlink_to(path.with_name("elsewhere"))


OTHERS: dict[str, Callable[[Path], object]] = {
    "a letter": lambda path: path.write_text("x"),
    "a text": lambda path: path.write_text("my thesis, long enough to be read as a database " * 500),
    "zeros": lambda path: path.write_bytes(bytes(8192)),
    "a header alone": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(40)),
    "a database": _program,
    "one in WAL mode": lambda path: _program(path, "PRAGMA journal_mode = WAL"),
    "one with an id": lambda path: _program(path, "PRAGMA application_id = 5"),
    "one without tables": lambda path: _database(path, "PRAGMA user_version = 0", "VACUUM").close(),
    "one that is logged": _logged,
    "a log": lambda path: _logged(path, b""),
    "a text by our log": lambda path: _as_killed(database.connect(path), path, b"my thesis"),
    "a damaged one": _cut,
}
if os.name == "posix":
    OTHERS["a link"] = _linked


@pytest.fixture(params=OTHERS)
def other(request: pytest.FixtureRequest, path: Path) -> Iterator[Path]:
    """Something that is not edgespec's, in a folder that must stay as it is."""
    OTHERS[request.param](path)
    for file in path.parent.iterdir():
        file.chmod(0o644)
    before = _seen(path.parent)
    yield path
    assert _seen(path.parent) == before


EXPORTED = '{"format": "edgespec history 1", "passages": []}'


OF_A_HISTORY: list[Callable[[History], object]] = [
    *(History.check, History.namespaces, History.show, History.delete),
    *(lambda history: history.forget("text"), lambda history: history.delete("mail")),
]


def test_it_is_refused_and_left_alone(other: Path, tmp_path: Path, own_home: Path) -> None:
    refuses = pytest.raises(StorageError, match=r"cannot be used as a history: .* Name another file")
    for use in (Store.open, database.connect_read_only, database.set_aside):
        with refuses:
            use(other)
    (tmp_path / "in.json").write_text(EXPORTED)
    asks: list[Callable[[History], object]] = [
        *OF_A_HISTORY,
        lambda history: history.load(tmp_path / "in.json"),
        lambda history: history.export(tmp_path / "out.json"),
    ]
    for ask in asks:
        with refuses:
            ask(History(other))
    with refuses:
        edgespec.load("no-such-model", "ngram", history=other)
    assert not (tmp_path / "out.json").exists() and not own_home.exists()


def test_it_is_listed_with_the_reason(other: Path, own_home: Path) -> None:
    """What lies in the folder of histories needs not be one."""
    folder = own_home / "histories"
    folder.mkdir(parents=True)
    for file in other.parent.iterdir():
        shutil.copy2(file, folder / file.name.replace(".txt", ".history"))
    before = _seen(folder)
    result = CliRunner().invoke(app, ["history", "list", "--json"])
    assert result.exit_code == 0 and "cannot be used as a history" in result.stdout
    assert _seen(folder) == before


def test_a_model_that_is_loaded_goes_on_without_it(other: Path) -> None:
    """It may have come to be there since the model was asked for."""
    with used(other) as use:
        assert use.problem is not None and "The history is not used" in use.problem
        learn(use, [1, 2, 3])


@POSIX
@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "folder"])
def test_what_is_no_file_is_neither_opened_nor_changed(kind: str, path: Path, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(EXPORTED)
    with socket.socket(socket.AF_UNIX) as server:
        where = {"device": Path("/dev/null")}.get(kind, path)
        if kind == "pipe":
            os.mkfifo(path, 0o644)  # to open it would wait for somebody to write
        elif kind == "folder":
            path.mkdir(0o755)
        elif kind == "socket":
            short = Path(os.path.relpath(path))  # an address has 107 characters at most
            server.bind(str(short if len(str(short)) < len(str(path)) else path))
        before = where.stat()
        for use in (Store.open, database.set_aside, database.connect_read_only):
            with pytest.raises(StorageError, match="it is not a regular file"):
                use(where)
        with used(where) as opened:
            assert opened.problem is not None
        for ask in OF_A_HISTORY[1:]:
            with pytest.raises(EdgespecError):
                ask(History(where))
        with pytest.raises(EdgespecError):
            History(where).load(tmp_path / "in.json")
        with pytest.raises((StorageError, RequestError), match=r"is (not a regular file|a folder)"):
            edgespec.load("no-such-model", "ngram", history=where)
        after = where.stat()
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert [file.name for file in path.parent.iterdir()] == ([] if kind == "device" else ["thesis.txt"])


@POSIX
def test_a_lock_that_the_application_holds_on_its_own_database_stays(path: Path) -> None:
    """Closing any descriptor of a file drops all locks that the process has on it."""
    connection = _database(path, "CREATE TABLE notes (text)", "BEGIN IMMEDIATE")
    with pytest.raises(StorageError):
        edgespec.load("no-such-model", "ngram", history=path)
    code = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('BEGIN IMMEDIATE')"
    from_outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "database is locked" in from_outside.stderr
    connection.close()


def _made(path: Path) -> Path:
    merge(path, delta_of(*(passage_of(n) for n in range(200))))
    return path


def test_an_empty_file_may_be_used_and_becomes_private(path: Path) -> None:
    path.touch(0o644)
    assert len(stored(_made(path)).entries) == 200
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_all_that_is_kept_beside_a_file_in_use_is_known(path: Path) -> None:
    with closing(Store.open(path)) as store:
        assert path.read_bytes()[68:72] == APPLICATION.to_bytes(4, "big") and look(path) is not None
        store.merge(SCOPE, delta_of(passage_of(1)), text_of)
        beside = {file.name for file in path.parent.iterdir()} - {path.name}
        assert beside == {f"{path.name}-wal", f"{path.name}-shm"}
        assert beside <= {file.name for file in database.companions(path)}


@pytest.mark.parametrize("use", [database.connect, database.connect_read_only])
def test_what_cannot_be_read_is_not_kept_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], sqlite3.Connection]
) -> None:
    opened, connect = list[sqlite3.Connection](), sqlite3.connect
    _database(_made(path), "PRAGMA user_version = 99").close()

    def noted(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    with pytest.raises(StorageError, match="version 99"):
        use(path)
    assert opened
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


@pytest.mark.parametrize("damage", [lambda data: data[:100] + b"?" * 5000, lambda data: data[:4096]])
def test_what_was_ours_is_set_aside_with_its_companions_or_deleted(
    path: Path, damage: Callable[[bytes], bytes]
) -> None:
    bad = damage(_made(path).read_bytes())
    path.write_bytes(bad)
    aside = database.set_aside(path)
    assert aside is not None and aside.read_bytes() == bad
    for companion in database.companions(aside):
        companion.write_bytes(b"of a program that was killed")
    History(aside).delete()
    assert [file.name for file in path.parent.iterdir() if file.suffix != ".lock"] == []
    _database(_made(path), "PRAGMA user_version = 99").close()
    History(path).delete()  # what a later edgespec made
    assert not path.exists()


@pytest.mark.parametrize("version", [0, 1])
def test_our_mark_without_our_tables_is_not_ours(path: Path, version: int) -> None:
    _program(path, f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {version}")
    with pytest.raises(StorageError, match="another program"):
        Store.open(path)


@POSIX
class TestLinks:
    @pytest.fixture
    def link(self, path: Path, tmp_path: Path) -> Path:
        """In a folder of its own, to ``path``."""
        (tmp_path / "links").mkdir()
        link = tmp_path / "links" / "me.history"
        link.symlink_to(path)
        return link

    def test_to_nothing_makes_nothing(self, link: Path, path: Path) -> None:
        with used(link) as use:
            assert use.problem is not None and "cannot be written" in use.problem
        assert list(path.parent.iterdir()) == []

    def test_to_a_history_is_used_and_deleted_with_it(self, link: Path, path: Path) -> None:
        path.touch()
        assert len(stored(_made(link)).entries) == 200
        assert History(link).size_bytes == path.stat().st_size > 0
        History(link).delete()
        assert list(path.parent.iterdir()) == [] and not link.is_symlink()

    def test_to_a_damaged_history_is_set_aside_alone(
        self, link: Path, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _made(path)
        beside_link, beside_file = (file.with_name(f"{file.name}-wal") for file in (link, path))
        beside_link.write_text("SQLite keeps the log beside the file, not beside the link")
        beside_file.touch()
        monkeypatch.setattr(database, "_is_damaged", lambda path: True)
        aside = database.set_aside(link)
        assert aside is not None and aside.is_symlink() and aside.resolve() == path
        assert path.exists() and beside_link.exists() and beside_file.exists()


@POSIX
@pytest.mark.parametrize(("was_ours", "mode"), [(False, 0o644), (True, 0o644), (True, 0o600)])
def test_what_comes_to_be_while_it_is_opened_is_left_alone(
    path: Path, was_ours: bool, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing was, or in the place of a history."""
    if was_ours:
        _made(path).chmod(0o644)

    thesis = path.with_name("new")
    thesis.write_text("my thesis " * 1000)
    thesis.chmod(mode)

    def replaced(looked: Path) -> os.stat_result | None:
        status = look(looked)
        if thesis.exists():
            thesis.replace(path)
        return status

    monkeypatch.setattr(database, "look", replaced)
    with used(path) as use:
        assert use.problem is not None
    assert path.read_text() == "my thesis " * 1000 and stat.S_IMODE(path.stat().st_mode) == mode
    assert [file.name for file in path.parent.iterdir()] == ["thesis.txt"]


@POSIX
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may read anything")
def test_what_cannot_be_read_is_not_made_readable(path: Path) -> None:
    path.write_text("my thesis")
    path.chmod(0)
    with used(path) as use:
        assert use.problem is not None
    with pytest.raises(StorageError):
        History(path).delete()
    assert stat.S_IMODE(path.stat().st_mode) == 0
