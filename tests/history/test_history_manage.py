"""Looking at a history from outside, by SDK and command line."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from edgespec.cli import app
from edgespec.history import History, histories
from edgespec.history.manage import containing
from edgespec.history.passages import LEAD, Entry, Passage
from edgespec.history.store import Learned, Scope
from edgespec_models.errors import RequestError
from tests.kit.histories import SCOPE, cut, learn, tokenizer, used

SENTENCES = [
    f"Sentence number {n} says that {n} times two is {2 * n}, as everybody knows. " for n in range(40)
]
pytestmark = pytest.mark.usefixtures("consoles")
LETTER = "Dear Mrs. Müller, thank you for your letter of the fifth of May. Yours, Ferdinand Mustermann"


def _learn(texts: Sequence[str], *, name: str = "me", namespace: str = "") -> History:
    history = History(name)
    with used(history.path, Scope("tiny", tokenizer().digest, namespace)) as use:
        for text in texts:
            learn(use, tokenizer().encode(text))
    return history


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["history", *arguments], input=stdin)


def _everything(history: History) -> str:
    return "|".join(text.text for text in history.show())


def test_what_was_learned_can_be_read() -> None:
    history = _learn([LETTER, LETTER, "short"])
    texts = history.show()
    assert {text.text for text in texts} >= {"short"}
    assert texts[0].worth > texts[-1].worth == pytest.approx(1.0, abs=0.01)
    passages = [passage for text in (LETTER, "short") for passage in cut(tokenizer().encode(text))]
    assert history.namespaces() == {("tiny", ""): sum(map(len, passages))}
    assert history.show("elsewhere") == []


@pytest.mark.parametrize("text", ["mrs. MÜLLER", "fifth of May", "Ferdinand Mustermann", LETTER, "ü"])
def test_forgotten_text_is_nowhere_whatever_it_runs_through(text: str) -> None:
    assert len(cut(tokenizer().encode(LETTER))) > 1
    history = _learn([SENTENCES[0], LETTER, SENTENCES[1]])
    kept = len(history.show())
    count = history.forget(text)
    assert 0 < count < kept
    assert len(history.show()) == kept - count
    assert history.forget(text) == 0
    for file in history.path.parent.iterdir():
        assert text.encode() not in file.read_bytes()


def test_a_passage_that_only_seems_to_begin_the_text_stays() -> None:
    pieces = [b"bread, wax", b"candles, wine, wax", b" and honey"]
    passages, lead = list[Learned](), b""
    for piece in pieces:
        entry = Entry(Passage(tuple(lead), tuple(piece)), 1.0)
        passages.append(Learned(SCOPE, entry, lead, piece, 0.0, 1.0))
        lead = (lead + piece)[-LEAD:]
    assert containing("wax and honey", passages) == passages[1:]


def test_texts_that_run_on_are_found_at_every_place() -> None:
    """Any ten characters of an answer of many passages."""
    answer = "".join(SENTENCES[:6])
    history = _learn([answer])
    exported = history.path.with_name("all.json")
    history.export(exported)
    for start in range(0, len(answer) - 10, 23):
        other = History(f"copy{start}")
        other.load(exported)
        assert other.forget(answer[start : start + 10]) >= 1


def test_what_is_exported_can_be_imported(tmp_path: Path) -> None:
    history = _learn([LETTER, *SENTENCES], namespace="mail")
    file = tmp_path / "out.json"
    count = history.export(file)
    other = History("other")
    assert other.load(file) == count == len(other.show())
    assert _everything(other) == _everything(history)
    assert other.namespaces() == history.namespaces()
    before = other.show()[0].worth
    other.load(file)
    assert other.show()[0].worth == pytest.approx(2 * before)
    if os.name == "posix":
        assert file.stat().st_mode & 0o777 == 0o600


def _passage(**changes: object) -> str:
    """An export of one passage."""
    scope = {"target": "t", "tokenizer": "", "namespace": ""}
    sound = {"scope": scope, "before": "", "text": "a", "lead": [], "body": [1], "worth": 1}
    sound |= {"right": [0], "wrong": [0], "learned_on": 0}
    return json.dumps({"format": "edgespec history 1", "passages": [sound | changes]})


def test_a_passage_that_was_written_by_hand_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "in.json"
    file.write_text(_passage(), encoding="utf-8")
    assert History("new").load(file) == 1
    assert run("show", "new").exit_code == 0


FORMAT = '{"format": "edgespec history 1"'
WRONG: list[tuple[str, Any]] = [
    *(("body", wrong) for wrong in ([-1], [2**31 - 1], [])),
    *(("learned_on", wrong) for wrong in (float("nan"), 1e300, -1e12)),
    *(("right", 10**15), ("worth", float("nan"))),
    ("scope", {"target": "\ud800", "tokenizer": "", "namespace": ""}),
]


@pytest.mark.parametrize(
    "text",
    [
        *("nonsense", "[]", "{}", FORMAT + "}", FORMAT + ', "passages": [{"lead": []}]}'),
        *(_passage(**{key: wrong}) for key, wrong in WRONG),
    ],
)
def test_other_files_are_not_imported_and_nothing_is_made(text: str, tmp_path: Path) -> None:
    file = tmp_path / "in.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=r"cannot import|is not JSON"):
        History("new").load(file)
    assert not History("new").path.exists()


def test_a_history_or_a_namespace_is_deleted() -> None:
    history = _learn([LETTER], namespace="mail")
    _learn(SENTENCES, namespace="code")
    history.delete("mail")
    assert {namespace for _, namespace in history.namespaces()} == {"code"}
    assert b"Dear" not in history.path.read_bytes()
    with pytest.raises(RequestError, match="no namespace"):
        history.delete("mail")
    history.delete()
    assert list(history.path.parent.iterdir()) == []
    with pytest.raises(RequestError, match="no history"):
        history.delete()


@pytest.mark.parametrize("name", ["", ".", "a b", "ü", "x" * 65, "-x"])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(RequestError, match=r"no name of a history|history is"):
        History(name)


def test_the_commands(tmp_path: Path, own_home: Path) -> None:
    def told(*arguments: str) -> Any:
        return json.loads(run(*arguments, "--json").stdout)

    assert run("list").exit_code == 0 and histories() == []
    (own_home / "histories" / "folder.history").mkdir(parents=True)
    assert run("list").exit_code == 0 and histories() == []
    _learn([LETTER, *SENTENCES[:3]], namespace="mail")
    assert {"me", "mail", "tiny"} <= set(run("list").stdout.split())
    assert told("list")[0]["name"] == "me" and told("list")[0]["kept"][0]["tokens"] > 0
    shown = run("show", "me", "--limit", "3")
    assert "worth" in shown.stdout and "3 of" in shown.stderr
    texts, file = told("show", "me", "--namespace", "mail"), str(tmp_path / "out.json")
    assert any("Sentence" in text["text"] for text in texts)
    assert told("export", "me", file)["passages"] == len(texts)
    assert "added to you" in run("import", "you", file).stderr
    assert told("forget", "you", "Mustermann")["passages"] >= 1
    for flags in ((), ("--json",)):
        assert run("delete", "you", *flags, stdin="n\n").exit_code == 1 and History("you").path.is_file()
    assert run("delete", "you", stdin="y\n").exit_code == 0 and not History("you").path.exists()
    refused = run("show", "you")
    assert refused.exit_code == 1 and "there is no history" in refused.stderr
    assert run("forget", "me", " ").exit_code == 1
    assert run("delete", "me", "--namespace", "mail", "--yes").exit_code == 0
    assert told("list")[0]["kept"] == []
