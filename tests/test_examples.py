"""The programs of docs/examples run as they are, over made-up models."""

import asyncio
import csv
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any
from unittest import mock

import pytest

import edgespec
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.models import Gated, filling_tokenizer, toy_bundle, toy_model, toy_session, toy_tokenizer
from tests.kit.toy import ToySession

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
FACTS = (
    "The boiler was serviced in March by the Hansen brothers.\n\nThe roof has 214 slates.\n\n"
    "The key of the shed hangs behind the clock."
)
Run = Callable[..., ToySession]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(command_line: Callable[..., None], loads: Callable[[Any], None]) -> Run:
    """``python docs/examples/NAME ARGUMENTS``; returns the session that its model ran on."""

    def run(name: str, *arguments: str, tokenizer: Tokenizer | None = None) -> ToySession:
        session = toy_session()
        session.close = lambda: None  # type: ignore[method-assign]  # a test looks at what it has read
        bundle = partial(toy_bundle, tokenizer=tokenizer)
        loads(lambda name: toy_model(session, toy_session(), bundle=bundle))
        command_line(name, *arguments)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return session

    return run


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a text where programs read what a person types."""
    return lambda text: monkeypatch.setattr(sys, "stdin", StringIO(text))


@pytest.fixture
def house(tmp_path: Path, typing: Callable[[str], None]) -> Path:
    """A folder with a text and a picture; somebody who asks about it."""
    (tmp_path / "house.txt").write_text(FACTS, encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG the key of the shed")
    typing("Where is the key of the shed?\n\n")
    return tmp_path


def test_the_files_assistant_reads_what_tells(house: Path, run: Run, capsys: Captured) -> None:
    session = run("files_assistant.py", str(house))
    read = toy_tokenizer().decode(session.cache)
    assert "[house.txt]\nThe key of the shed hangs" in read and "slates" not in read and "PNG" not in read
    assert re.search(r"3 paragraphs in .*\n> [A-Z]{50,}\n> $", capsys.readouterr().out)


def test_the_files_assistant_stops_at_ctrl_c(house: Path, run: Run, capsys: Captured) -> None:
    shown = print

    def interrupted(*text: str, **how: Any) -> None:
        shown(*text, **how)
        if text and re.fullmatch("[A-Z]+", text[0]):
            raise KeyboardInterrupt

    with mock.patch("builtins.print", interrupted):
        run("files_assistant.py", str(house))
    assert re.search(r"> [A-Z]{1,30} ... stopped\n> $", capsys.readouterr().out)


def test_an_editors_lines_are_filled_or_told_why_not(
    run: Run, capsys: Captured, typing: Callable[[str], None]
) -> None:
    fills = [
        {"id": 7, "prefix": "a = ", "suffix": "\n"},
        {"id": 8, "prefix": "", "suffix": "", "max_lines": 0},
    ]
    for has_marks in (True, False):
        typing("".join(f"{json.dumps(fill)}\n" for fill in fills))
        run("fill_for_editor.py", tokenizer=filling_tokenizer() if has_marks else None)
        first, second = map(json.loads, capsys.readouterr().out.splitlines())
        assert (first["id"], second["id"]) == (7, 8) and "max_lines is 0" in second["error"]
        assert first["text"] if has_marks else "toy has no tokens for fills" in first["error"]


def test_extraction_writes_a_row_for_each_file(tmp_path: Path, run: Run, capsys: Captured) -> None:
    files = [tmp_path / f"{number}.txt" for number in (1, 2)]
    for file in files:
        file.write_text("Invoice of Hansen Ltd, 2026-03-02: EUR 120.50", encoding="utf-8")
    run("extract_to_csv.py", *map(str, files))
    rows = list(csv.DictReader(StringIO(capsys.readouterr().out)))
    assert [row["file"] for row in rows] == [str(file) for file in files]
    for row in rows:
        assert len(row["vendor"]) <= 60 and row["currency"] in {"EUR", "USD", "GBP"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) and 0 <= float(row["total"]) <= 1e6


def test_two_chats_answer_in_turn(run: Run, capsys: Captured) -> None:
    session = run("two_chats_asyncio.py")
    out = capsys.readouterr().out
    assert out.count("The cook is asked") == out.count("The gardener is asked") == 2
    read = toy_tokenizer().decode(session.cache)
    assert "You are a cook" in read and "And what does not?" in read and "gardener" not in read


def test_an_answer_ends_when_its_time_is_up(capsys: Captured) -> None:
    write = runpy.run_path(str(EXAMPLES / "two_chats_asyncio.py"))["write"]
    session = Gated()  # never lets a pass through until the end
    with toy_model(session) as model:

        async def main() -> None:
            await write(model.conversation(), "Hello", seconds=0.05)
            session.open()

        asyncio.run(main())
    assert capsys.readouterr().out == " ... time is up\n"


# The window


@pytest.fixture
def desktop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's module, with an application on no screen."""
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    widgets = pytest.importorskip("PySide6.QtWidgets", reason="Qt does not start here", exc_type=ImportError)
    app = widgets.QApplication.instance() or widgets.QApplication([])
    from docs.examples.desktop import main

    yield main
    app.processEvents()


def until(true: Callable[[], object]) -> None:
    """Let windows live until ``true()``."""
    from PySide6.QtTest import QTest

    give_up = monotonic() + 60
    while not true():
        assert monotonic() < give_up
        QTest.qWait(5)


def ask(chat: Any, question: str) -> None:
    chat.entry.setText(question)
    chat.entry.returnPressed.emit()


def said(chat: Any) -> list[str]:
    """What the messages of a conversation show."""
    from PySide6.QtGui import QTextDocumentFragment

    labels = (chat.said.itemAt(i).widget() for i in range(chat.said.count() - 1))
    return [QTextDocumentFragment.fromHtml(label.text()).toPlainText() for label in labels]


def opened(desktop: Any, session: ToySession) -> Any:
    window = desktop.Window(lambda report: toy_model(session, toy_session()))
    window.show()
    until(lambda: window.chats)
    return window


def test_the_window_holds_two_conversations(desktop: Any) -> None:
    session = toy_session()
    window = opened(desktop, session)
    for chat, question in zip(window.chats, ("What is <b>this</b>?", "And that?"), strict=True):
        ask(chat, question)
    until(lambda: all(chat.button.text() == "Send" for chat in window.chats))
    for chat in window.chats:
        assert len(said(chat)) == 2 and re.fullmatch("[A-Z]{500,}", said(chat)[1])
        assert re.fullmatch(r"[\d.]+ tokens/s, [\d.]+ times plain decoding", chat.status.text())
    assert not window.grab().isNull()
    ask(window.chats[0], "Why?")
    until(lambda: window.chats[0].button.text() == "Send")
    assert len(said(window.chats[0])) == 4
    read = toy_tokenizer().decode(session.cache)
    assert "What is <b>this</b>?" in read and "And that?" not in read
    window.close()
    assert session.closed


def test_an_answer_ends_though_its_task_is_deleted_at_once(desktop: Any) -> None:
    from shiboken6 import delete

    window = opened(desktop, toy_session())
    ask(window.chats[0], "What is this?")
    (task,) = window.chats[0].findChildren(desktop.Task)
    assert task.wait(60_000)
    delete(task)  # as Qt may, before it tells who waits for the end
    until(lambda: window.chats[0].button.text() == "Send")
    assert len(said(window.chats[0])[1]) >= 500
    window.close()


def test_the_button_stops_an_answer(desktop: Any) -> None:
    session = Gated()
    window = opened(desktop, session)
    chat, other = window.chats
    ask(chat, "Hello")
    session.do(6)
    until(lambda: chat.status.text() == "Writes ...")
    assert chat.button.text() == "Stop"
    ask(other, "And you?")
    until(lambda: other.button.text() == "Stop")
    assert other.status.text() == "Waits for its turn, reads ..."
    other.button.click()  # before its turn
    until(lambda: other.button.text() == "Send")
    assert said(other) == ["And you?", ""]
    chat.button.click()
    session.open()
    until(lambda: chat.button.text() == "Send")
    assert chat.status.text().startswith("Stopped. ") and 0 < len(said(chat)[1]) < 20
    window.close()


def test_closing_the_window_ends_what_runs(desktop: Any) -> None:
    session = Gated()
    window = opened(desktop, session)
    ask(window.chats[0], "Hello")
    session.let(6)
    until(lambda: window.chats[0].status.text() == "Writes ...")
    Timer(0.2, session.open).start()  # the pass that runs
    window.close()
    assert session.closed and all(task.isFinished() for task in window.findChildren(desktop.Task))


def test_what_goes_wrong_is_shown(desktop: Any) -> None:
    window = opened(desktop, toy_session(context=64))
    ask(window.chats[0], "long " * 200)
    until(lambda: window.chats[0].button.text() == "Send")
    assert "too long" in said(window.chats[0])[-1]
    window.close()

    def fails(report: Any) -> edgespec.Model:
        raise edgespec.DownloadError("there is no network")

    window = desktop.Window(fails)
    until(lambda: window.centralWidget().text() == "there is no network")
    window.close()
