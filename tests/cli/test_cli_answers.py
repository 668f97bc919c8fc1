"""Answers on the terminal, and marks of sources."""

import io
import re
from collections.abc import Sequence
from time import sleep

import pytest
from rich.console import Console

from edgespec.cli import answers, chat
from edgespec.cli import console as cli_console
from tests.kit.models import toy_model, toy_tokenizer
from tests.kit.serving import Clocked, drafting_model
from tests.kit.toy import F32

MARK = "\x1b[4;34m"
"""Underlined and blue: of the drafter."""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=80, highlight=False)
    for module in (answers, chat, cli_console):
        for name in ("output", "errors"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: console)
    return file


def test_a_chat_marks_sources_when_it_is_told_to(
    terminal: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["hi", "/sources on", "hi again", "/sources off", "once more", "/sources maybe"])
    with drafting_model() as model:
        talk = chat._Chat(lambda: model.conversation(max_new_tokens=200), toy_tokenizer())
        seen = []

        def read() -> str | None:
            seen.append(capsys.readouterr().out + terminal.getvalue())
            terminal.truncate(0)
            terminal.seek(0)
            return next(lines, None)

        chat._talk(talk, read)
        texts = [message["content"] for message in talk.conversation.messages[1::2]]
    plain, marked, off = seen[1], seen[3], seen[5]
    assert texts[0] in plain and MARK not in plain
    assert texts[1] in re.sub(r"\x1b\[[0-9;]*m", "", marked) and MARK in marked
    assert texts[2] in off and MARK not in off


def test_a_bar_shows_a_long_reading_and_goes_with_the_first_token(
    terminal: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, stages, clock = "a long prompt " * 9, list[tuple[float, str]](), [0.0]

    class Watched(Clocked):
        def forward(self, tokens: Sequence[int]) -> F32:
            sleep(0.02)  # for whoever draws
            stages.append((clock[0], terminal.getvalue()))
            return super().forward(tokens)

    with toy_model(Watched(clock, 0.2), clock=lambda: clock[0]) as model:
        answer = answers.stream_to_terminal(model.stream(prompt, max_new_tokens=9))
    assert all("Reading" not in shown for now, shown in stages if now < 0.5)
    drawn = terminal.getvalue()
    assert re.search(r"Reading the prompt.* of [0-9]+ tokens", drawn)
    assert drawn.rstrip().endswith("\x1b[2K")  # wiped
    assert capsys.readouterr().out == answer.text + "\n"
