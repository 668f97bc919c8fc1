"""Files that a user adds to a history: which are taken in, what they propose, how they are forgotten."""

import json
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from edgespec import History, LoadOptions
from edgespec.cli import app
from edgespec.decoding.draft import NO_DRAFT, Draft, Remarks, Source
from edgespec.decoding.loop import decode
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.verification import make_verifier
from edgespec.drafting.guard import Guard
from edgespec.drafting.ngram import Acceptance, NgramDrafter
from edgespec.drafting.pricing import Pricing
from edgespec.history import AddedFile, added_files, file_drafter, file_index, manage
from edgespec.history.drafter import BestOf
from edgespec.history.file_drafter import FileDrafter
from edgespec.history.file_index import FileIndex
from edgespec.model import Model
from edgespec_models.errors import RequestError, StorageError
from edgespec_models.progress import Progress
from edgespec_runtimes.cost import CostCurve
from tests.models_for_tests import toy_model, toy_session, toy_tokenizer
from tests.test_file_index import TEXTS, index_of
from tests.toy import Silent, ToySession, round_of

pytestmark = pytest.mark.usefixtures("consoles")
CODE = (
    "def area(width, height):\n    return width * height\n\n\n"
    "def volume(width, height, depth):\n    return area(width, height) * depth\n\n\n"
)
PROMPT = "# shapes.py\n"
GREEDY = SamplingParams()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "histories"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in ("shapes.py", "lib/deep/notes.md", ".git/config", ".env", "node_modules/a.js", "made/b.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}, of mine")
    (folder / "made" / "CACHEDIR.TAG").write_text("")
    return folder


def names(files: Sequence[AddedFile]) -> dict[str, str | None]:
    """Why each is skipped."""
    return {Path(file.path).name: file.skipped for file in files}


class TestAdding:
    def test_hidden_files_and_junk_stay_out_unless_they_are_named(self, project: Path) -> None:
        assert names(History("me").add([project])) == {"shapes.py": None, "notes.md": None}
        added = History("me").add([project / ".env", str(project / "made")])
        assert names(added) == dict.fromkeys(("shapes.py", "notes.md", ".env", "CACHEDIR.TAG", "b.txt"))

    def test_what_is_no_text_or_too_much_is_skipped_and_says_why(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(file_index, "_LARGEST", 1000)
        monkeypatch.setattr(file_index, "_MOST", 1600)
        for age, (name, data) in enumerate(
            {"a": b"\0", "b": b"\xff", "c": b"c" * 1001, "d": b"d" * 700, "e": b"e" * 900}.items()
        ):
            (project / name).write_bytes(data)
            os.utime(project / name, (age, age))
        found = names(History("me").add([project]))
        assert found.pop("a") == "binary" and found.pop("b") == "no UTF-8 text"
        assert str(found.pop("c")).startswith("larger than") and str(found.pop("d")).startswith("no room")
        assert set(found.values()) == {None} and "e" in found

    @pytest.mark.skipif(os.name != "posix", reason="links and pipes are a matter of POSIX")
    def test_no_link_is_followed_and_no_pipe_opened(self, project: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "plan.txt").write_text("nobody is to know")
        (project / "way").symlink_to(tmp_path / "secret")
        (project / "link.txt").symlink_to(tmp_path / "secret" / "plan.txt")
        os.mkfifo(project / "pipe")
        found = names(History("me").add([project]))
        assert (found["link.txt"], found["pipe"]) == ("a link", "no regular file")
        assert "plan.txt" not in found
        (index,) = History("me").path.parent.glob("*-files")
        assert b"nobody" not in index.read_bytes()
        assert names(History("you").add([project / "way"])) == {"plan.txt": None}  # named by the user

    def test_changed_files_are_read_anew_and_removed_ones_forgotten(self, project: Path) -> None:
        history = History("me")
        history.add([project])
        index = added_files.index_path(history.path, "")
        first = index.stat()
        history.add()
        assert index.stat().st_ino == first.st_ino and index.stat().st_mtime_ns == first.st_mtime_ns
        (project / "shapes.py").write_text("other words")
        (project / "new.py").write_text("new words")
        (project / "lib" / "deep" / "notes.md").unlink()
        assert set(names(history.add())) == {"shapes.py", "new.py"}
        data = index.read_bytes()
        assert b"other words" in data and b"new words" in data and b"notes.md, of mine" not in data

    def test_parts_are_removed_and_come_back_when_added_again(self, project: Path) -> None:
        history = History("me")
        history.add([project])
        assert set(names(history.remove([project / "lib"]))) == {"shapes.py"}
        assert set(names(history.add())) == {"shapes.py"}
        assert set(names(history.add([project / "lib" / "deep"]))) == {"shapes.py", "notes.md"}
        assert set(names(history.remove([project / "shapes.py"]))) == {"notes.md"}
        assert set(names(history.add([project]))) == {"notes.md"}
        assert set(names(history.add([project, project / "shapes.py"]))) == {"shapes.py", "notes.md"}
        assert history.remove([project]) == [] == history.files()
        with pytest.raises(RequestError, match="was not added"):
            history.remove([project])
        with pytest.raises(RequestError, match="no files were added"):
            history.add()

    def test_what_was_removed_stays_out_until_it_is_named(self, project: Path, tmp_path: Path) -> None:
        (project / "lib" / "other.md").write_text("also of mine")
        history = History("me")
        history.add([project])
        history.remove([project / "lib"])
        for around in (project, tmp_path):  # the second has the history too, which is no text
            assert not {"notes.md", "other.md"} & set(names(history.add([around])))
        found = names(history.add([project / "lib" / "other.md"]))
        assert "other.md" in found and "notes.md" not in found
        found = names(history.add([project / "lib"]))
        assert "other.md" in found and "notes.md" in found
        history.remove([project / "lib"])
        history.remove([tmp_path])
        assert "notes.md" in names(history.add([project]))  # nothing is left that it was removed from

    def test_what_was_named_stays_when_the_folder_around_it_is_added(self, project: Path) -> None:
        history = History("me")
        history.add([project / ".env"])
        assert set(names(history.add([project]))) == {".env", "shapes.py", "notes.md"}

    def test_what_is_not_there_is_not_added_and_nothing_is_made(self, project: Path, home: Path) -> None:
        with pytest.raises(RequestError, match="not there"):
            History("me").add([project, project / "nowhere"])
        with pytest.raises(RequestError, match="no history"):
            History("me").add()
        assert not home.exists()
        with pytest.raises(RequestError, match="a list"):
            History("me").add(str(project))
        with pytest.raises(RequestError, match="no history"):
            History("you").files()

    def test_one_program_adds_at_a_time(self, project: Path) -> None:
        history = History("me")
        history.add([project])
        with (
            FileLock(f"{added_files.index_path(history.path, '')}.lock"),
            pytest.raises(StorageError, match="another program"),
        ):
            history.add([project])

    @pytest.mark.parametrize("damage", [slice(-1), slice(200)])
    def test_a_damaged_index_is_made_again_from_the_files(self, project: Path, damage: slice) -> None:
        history = History("me")
        files = history.add([project])
        index = added_files.index_path(history.path, "")
        index.write_bytes(index.read_bytes()[damage])
        with pytest.raises(StorageError, match="'edgespec history add' makes it again"):
            history.files()
        assert history.add() == files == history.files()

    def test_what_something_else_made_is_left_alone(self, project: Path) -> None:
        history = History("me")
        history.load(_empty_export(project))
        index = added_files.index_path(history.path, "")
        index.write_text("my notes")
        for command in (["add", "me", project], ["remove", "me"], ["remove", "me", project]):
            assert "did not make" in run(*command).stderr
        assert history.files() == []
        history.delete()
        assert index.read_text() == "my notes"


def _empty_export(folder: Path) -> Path:
    file = folder / "in.json"
    file.write_text('{"format": "edgespec history 1", "passages": []}')
    return file


class TestForgetting:
    def test_namespaces_have_files_of_their_own(self, project: Path) -> None:
        history = History("me")
        history.add([project / "shapes.py"])
        history.add([project / "lib"], "mail")
        assert [(file.namespace, Path(file.path).name) for file in history.files()] == [
            ("", "shapes.py"),
            ("mail", "notes.md"),
        ]
        assert names(history.files("mail")) == {"notes.md": None}
        history.delete("mail")
        assert names(history.files()) == {"shapes.py": None}
        with pytest.raises(RequestError, match="no namespace"):
            history.delete("mail")

    def test_a_history_is_deleted_with_all_that_was_added(self, project: Path, home: Path) -> None:
        history = History("me")
        history.add([project])
        before = history.size_bytes
        history.add([project], "mail")
        assert history.size_bytes > before > history.path.stat().st_size
        history.delete()
        assert list(home.iterdir()) == []
        assert (project / "shapes.py").is_file()

    @pytest.mark.parametrize("namespace", ["", "mail"])
    def test_what_a_program_that_was_killed_has_left_goes_too(
        self, project: Path, home: Path, namespace: str
    ) -> None:
        history = History("me")
        index = added_files.index_path(history.path, namespace)
        left = index.with_name(f"{index.name}.new")

        def kill() -> None:
            history.load(_empty_export(project))
            left.write_bytes(bytes(100) + b"this is shapes.py, of mine")
            (home / "me.history-files.lock").touch()
            assert history.size_bytes >= 126 + history.path.stat().st_size

        for forget in (
            history.delete,
            partial(history.delete, namespace),
            partial(history.remove, (), namespace),
        ):
            kill()
            forget()
            assert not list(home.glob("*-files*"))
        history.delete()
        assert list(home.iterdir()) == []

    def test_nothing_is_deleted_while_files_are_added(self, project: Path, home: Path) -> None:
        history, refused = History("me"), []

        def meanwhile(report: Progress) -> None:
            for forget in (history.delete, partial(history.delete, ""), history.remove):
                with pytest.raises(StorageError, match="another program"):
                    forget()
                refused.append(report)

        assert history.add([project], progress=meanwhile) == history.files() and refused
        assert {file.name for file in home.glob("*-files*")} == {"me.history-files"}

    def test_nothing_is_added_to_what_another_program_deletes_first(
        self, project: Path, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(path: Path) -> AbstractContextManager[None]:
            path.unlink()
            return added_files.locked(path)

        monkeypatch.setattr(manage, "locked", late)
        with pytest.raises(RequestError, match="no history"):
            History("me").add([project])
        assert not list(home.glob("*-files*"))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["history", *map(str, arguments)])


def test_the_commands(project: Path) -> None:
    (project / "picture.png").write_bytes(b"\0" * 100)
    added = run("add", "me", project)
    assert "skipped: 1 (binary)" in added.stderr and "me drafts from 2 files, 60 bytes" in added.stderr
    described = json.loads(run("list", "--json").stdout)[0]
    assert (described["files"], described["files_bytes"]) == (2, 60)
    assert "drafted from: 2 files, 60 bytes" in run("show", "me").stdout
    assert json.loads(run("show", "me", "--json").stdout) == []
    assert "picture.png  skipped: binary" in run("show", "me", "--files").stdout
    listed = json.loads(run("show", "me", "--files", "--json").stdout)
    assert names([AddedFile(**each) for each in listed])["picture.png"] == "binary"
    forgotten = json.loads(run("forget", "me", "NOTES.md, OF", "--json").stdout)
    assert [Path(path).name for path in forgotten["files"]] == ["notes.md"]
    assert "1 files that were added" in run("forget", "me", "notes.md, of").stderr
    assert "still drafts from 1 files" in run("remove", "me", project / "lib").stderr
    assert json.loads(run("remove", "me", "--json").stdout) == []
    assert run("add", "me").exit_code == 1


def test_what_was_forgotten_is_said_where_the_files_cannot_be_searched(project: Path) -> None:
    history = History("me")
    history.add([project])
    index = added_files.index_path(history.path, "")
    index.write_bytes(index.read_bytes()[:-1])
    said = run("forget", "me", "shapes")
    assert said.exit_code == 0 and "0 passages, 0 corrections forgotten" in said.stderr
    assert "is not known" in said.stderr and "'edgespec history add' makes it again" in said.stderr
    assert json.loads(run("forget", "me", "shapes", "--json").stdout)["files"] is None


class _Free(Guard):
    """Has nothing against anything."""

    def __init__(self) -> None:
        super().__init__(Pricing(CostCurve({1: 1.0, 8: 1.0001})))


def _drafter(index: FileIndex, guard: Guard | None = None, remarks: Remarks | None = None) -> FileDrafter:
    own = guard or _Free()
    return FileDrafter(index, toy_tokenizer(), Acceptance(), own, remarks or Remarks(), stop_below=0.0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXTS, min_size=1, max_size=3), st.data())
def test_every_proposal_goes_on_as_a_file_does(tmp_path: Path, texts: list[str], data: st.DataObject) -> None:
    """Behind committed tokens, and behind a draft of another source."""
    tokenizer, limit = toy_tokenizer(), data.draw(st.integers(0, 8))
    stored = [text.encode().replace(b"\r\n", b"\n") for text in texts]
    index = FileIndex(index_of(tmp_path, [text.encode() for text in texts]))
    tokens = tokenizer.encode_bytes(data.draw(st.sampled_from(stored)))
    end = data.draw(st.integers(0, len(tokens)))
    cut = data.draw(st.integers(max(0, end - limit), end))
    before = Draft(tuple(tokens[cut:end]), None, ("model",) * (end - cut), (0.5,) * (end - cut))
    drafter = _drafter(index)
    for draft in (drafter.propose(tokens[:end], limit), drafter.extend(tokens[:cut], before, limit)):
        assert len(draft.tokens) == len(draft.sources) == len(draft.confidence) <= limit
        added = [
            token for token, source in zip(draft.tokens, draft.sources, strict=True) if source == "files"
        ]
        context = tokenizer.bytes_of(tokens[:end])[-8:]
        if added:
            assert any(context + tokenizer.bytes_of(added) in text for text in stored)
    index.close()


def _answer(source: Source, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], int]:
    tokens, session = list(prompt), toy_session(1)
    rounds = sum(
        1 for _ in decode(session, source, make_verifier(params), tokens, max_new_tokens=40, max_draft=6)
    )
    source.close()
    return tokens, rounds


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=3)])
def test_whatever_is_in_the_files_every_token_is_that_of_plain_decoding(
    tmp_path: Path, params: SamplingParams
) -> None:
    """The files: what the model writes; half of it, and something else; something else."""
    tokenizer = toy_tokenizer()
    prompt = tokenizer.encode("Some words, and ")
    plain, passes = _answer(Silent(), prompt, params)
    text = tokenizer.bytes_of(plain)
    for stored, least in (
        (text, 20),
        (text[: len(text) // 2] + b" and others", 8),
        (b"Some words, and OTHERS", 0),
    ):
        index = FileIndex(index_of(tmp_path, [stored]))
        source = BestOf(NgramDrafter(stop_below=0.0), _drafter(index))
        tokens, rounds = _answer(source, prompt, params)
        assert tokens == plain and passes - rounds >= least
        index.close()


@pytest.fixture
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted does not depend on this machine."""
    monkeypatch.setattr("edgespec.drafting.pricing.Pricing.pass_seconds", lambda self, rows: 1e-9)
    monkeypatch.setattr("edgespec.drafting.guard.Guard.allows", True)


def _model(namespace: str = "") -> Model:
    """One that writes CODE behind PROMPT."""
    start = len(toy_tokenizer().encode(PROMPT))
    session = ToySession.writing(toy_tokenizer(), CODE.encode(), start)
    return toy_model(session, options=LoadOptions(namespace=namespace))


@pytest.mark.usefixtures("free_rows")
def test_a_model_drafts_from_files_and_writes_the_same(project: Path) -> None:
    history = History("me")
    (project / "shapes.py").write_text(CODE)
    history.add([project])
    for warmth in (0.0, 0.9):
        with _model() as model:
            plain = model.generate(PROMPT, max_new_tokens=60, temperature=warmth, seed=5, speculate=False)
            model.use_history(history.path)
            result = model.generate(PROMPT, max_new_tokens=60, temperature=warmth, seed=5)
        assert result.tokens == plain.tokens and result.stats.history_problem is None
        assert result.stats.by_source["files"].accepted > 25
        history.delete()  # of the answer
        history.add([project])
    with _model("mail") as model:
        model.use_history(history.path)
        assert "files" not in model.generate(PROMPT, max_new_tokens=60).stats.by_source


@pytest.mark.usefixtures("free_rows")
def test_a_damaged_index_is_no_reason_to_stop(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = History("me")
    history.add([project])
    index = added_files.index_path(history.path, "")
    index.write_bytes(index.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, logger="edgespec"), _model() as model:
        model.use_history(history.path)
        result = model.generate(PROMPT, max_new_tokens=10)
    assert result.stats.new_tokens == 10
    assert "'edgespec history add' makes it again" in str(result.stats.history_problem)
    assert len(caplog.records) == 1


def test_each_namespace_has_an_index_of_its_own(tmp_path: Path) -> None:
    paths = {added_files.index_path(tmp_path / "me.history", namespace) for namespace in ("", "mail", "code")}
    assert len(paths) == 3 and {path.parent for path in paths} == {tmp_path.resolve()}


def test_a_single_token_is_drafted_too(tmp_path: Path) -> None:
    index = FileIndex(index_of(tmp_path, [CODE.encode()]))
    tokens = toy_tokenizer().encode(CODE[:60])
    drafts = [_drafter(index).propose(tokens[:30], limit).tokens for limit in range(3)]
    assert drafts == [(), tuple(tokens[30:31]), tuple(tokens[30:32])]
    index.close()


def test_proposals_that_cost_more_than_they_bring_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = FileIndex(index_of(tmp_path, [CODE.encode()]))
    guard, remarks = Guard(Pricing(CostCurve({1: 1.0, 8: 8.0}))), Remarks()
    drafter = _drafter(index, guard, remarks)
    tokens = toy_tokenizer().encode(CODE[:30])
    with caplog.at_level(logging.WARNING, logger="edgespec"):
        for _ in range(2):  # five tokens are a stake
            drafter.observe(round_of(0, draft=drafter.propose(tokens, 6)))
    assert drafter.propose(tokens, 6) == NO_DRAFT
    assert drafter.extend(tokens, NO_DRAFT, 6) == NO_DRAFT
    assert remarks.rolled_back[0].startswith("files of the history: ") and "they pause" in caplog.text
    assert [record.name for record in caplog.records] == ["edgespec"]
    for _ in range(16):
        drafter.observe(round_of(0))
    assert drafter.propose(tokens, 6) != NO_DRAFT
    index.close()


def test_confidence_grows_with_the_match(tmp_path: Path) -> None:
    index = FileIndex(index_of(tmp_path, [CODE.encode()]))
    confidence = _drafter(index).propose(toy_tokenizer().encode(CODE[:30]), 6).confidence
    assert list(confidence) == sorted(set(confidence)) and len(confidence) == 6
    index.close()


def test_a_word_that_was_read_in_part_is_not_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_drafter, "_TOKEN_BYTES", 1)
    index = FileIndex(index_of(tmp_path, [b"first second alpha beta  gamma_delta"]))
    tokenizer, drafter = toy_tokenizer(), _drafter(index)
    context = tokenizer.encode("first second")
    assert tokenizer.bytes_of(drafter.propose(context, 18).tokens) == b" alpha beta"
    assert tokenizer.bytes_of(drafter.propose(context, 40).tokens) == b" alpha beta  gamma_delta"
    index.close()


def test_what_files_say_is_believed_as_far_as_it_was_right(tmp_path: Path) -> None:
    index = FileIndex(index_of(tmp_path, [CODE.encode()]))
    drafter = _drafter(index)
    tokens = toy_tokenizer().encode(CODE[:30])
    first = drafter.propose(tokens, 6)
    for _ in range(20):
        drafter.observe(round_of(0))
        drafter.propose(tokens, 6)
    assert drafter.propose(tokens, 6).confidence[0] < 0.5 * first.confidence[0]
    index.close()
