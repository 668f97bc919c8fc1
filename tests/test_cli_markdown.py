"""Markdown on the terminal, and marks of sources."""

import io
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from time import sleep

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from edgespec.cli import answers, chat
from edgespec.cli import console as cli_console
from edgespec.cli.line_breaks import LineBreaks, Piece
from edgespec.cli.markdown import CODE, FENCE, HEADING, STRONG, MarkdownStream
from tests.kit.models import toy_model, toy_tokenizer
from tests.kit.serving import Clocked, drafting_model
from tests.kit.toy import F32

MARK = "\x1b[4;34m"
"""Underlined and blue: of the drafter."""
Pieces = list[tuple[str, str]]


def shown(*pieces: str) -> Pieces:
    """What a stream of ``pieces`` looks like, neighbours of one style joined."""
    stream, joined = MarkdownStream(), Pieces()
    for text, style, _ in [p for piece in pieces for p in stream.push(piece)] + stream.finish():
        if joined and joined[-1][1] == style:
            joined[-1] = (joined[-1][0] + text, style)
        else:
            joined.append((text, style))
    return joined


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text", [("plain text", "")]),
        ("# Title\nbody", [("Title", HEADING), ("\nbody", "")]),
        ("a **b c** d", [("a ", ""), ("b c", STRONG), (" d", "")]),
        ("**b**", [("b", STRONG)]),
        ("use `x = 1` here", [("use ", ""), ("x = 1", CODE), (" here", "")]),
        ("- one\n  * two\n1. three", [("• one\n  • two\n1. three", "")]),
        ("```py\nx **= 2\n# no\n```\nend", [
            ("```py", FENCE), ("\n", ""), ("x **= 2", CODE), ("\n", ""), ("# no", CODE), ("\n", ""),
            ("```", FENCE), ("\nend", ""),
        ]),
        ("2 * 3 ** 4", [("2 * 3 ** 4", "")]),
        ("snake_case #5 -3 --- a-b", [("snake_case #5 -3 --- a-b", "")]),
        ("`open\nnext", [("open", CODE), ("\nnext", "")]),
        ("**open\nnext", [("open", STRONG), ("\nnext", "")]),
        ("-", [("-", "")]),
        ("a *", [("a *", "")]),
        ("", []),
    ],
)  # fmt: skip
def test_markdown_looks_as_it_should(text: str, expected: Pieces) -> None:
    assert shown(text) == expected


signs = st.text(alphabet="ab `*#-1.\n~", max_size=60)


@given(signs, st.lists(st.integers(1, 9), max_size=60))
def test_how_text_is_cut_makes_no_difference_and_only_signs_are_lost(text: str, sizes: list[int]) -> None:
    ends = [0, *accumulate(sizes), len(text) + 600]
    assert shown(*(text[start:end] for start, end in pairwise(ends))) == shown(text)
    kept = "".join(piece for piece, _ in shown(text))
    assert re.sub("[^ab1.\n~]", "", kept) == re.sub("[^ab1.\n~]", "", text)


@given(st.text(alphabet="abc, 日\n", max_size=60))
def test_text_without_signs_is_shown_at_once(text: str) -> None:
    stream = MarkdownStream()
    for char in text:
        held = not char.strip(" ")  # spaces at a line's beginning may belong to a list
        assert "".join(piece.text for piece in stream.push(char)).endswith(char) or held


def printed(lines: LineBreaks, *pieces: str | Piece) -> str:
    """What these pieces print before the end of the last word is known."""
    whole = [piece if isinstance(piece, Piece) else Piece(piece) for piece in pieces]
    return "".join(part.text for piece in whole for part in lines.push(piece))


def unbroken(text: str) -> str:
    return "".join(text.split())


def test_lines_are_broken_between_words_and_code_is_not() -> None:
    width = [12]
    lines = LineBreaks(lambda: width[0])
    assert printed(lines, "write it in lowerc") == "write it in"  # the word may go on
    assert printed(lines, "ase now ") == "\nlowercase\nnow"
    width[0] = 20  # the window is wider now
    assert printed(lines, "and then once again\n") == " and then once\nagain\n"
    code = Piece("x = [1, 2, 3, 4, 5, 6, 7, 8]", breaks=False)
    assert printed(lines, code, "\n") == code.text + "\n"
    width[0] = 10  # and narrower
    assert printed(lines, "a " + "b" * 25, "ccc d e") == "a\n" + "b" * 25 + "ccc d"
    assert printed(lines, "\n日本語の文字です") == "\ne\n日本語の文\n字です"


@given(st.text(alphabet="ab 日é", max_size=80), st.lists(st.integers(1, 9), max_size=80), st.integers(8, 30))
def test_how_text_is_cut_changes_no_line_break(text: str, sizes: list[int], width: int) -> None:
    def whole(parts: Sequence[str]) -> str:
        lines = LineBreaks(lambda: width)
        return printed(lines, *parts) + "".join(piece.text for piece in lines.finish())

    ends = [0, *accumulate(sizes), len(text) + 900]
    shown_at_once = whole([text])
    assert whole([text[start:end] for start, end in pairwise(ends)]) == shown_at_once
    assert unbroken(shown_at_once) == unbroken(text)
    for line in shown_at_once.split("\n"):  # a terminal breaks no word that is shorter than its rows
        for word in re.finditer(r"\S+", line):
            start, cells = cell_len(line[: word.start()]), cell_len(word[0])
            assert cells > width or start // width == (start + cells - 1) // width


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=80, highlight=False)
    for module in (answers, chat, cli_console):
        for name in ("output", "errors"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: console)
    return file


def test_a_chat_marks_sources_when_it_is_told_to(terminal: io.StringIO) -> None:
    lines = iter(["hi", "/sources on", "hi again", "/sources off", "once more", "/sources maybe"])
    with drafting_model() as model:
        talk = chat._Chat(lambda: model.conversation(max_new_tokens=200), toy_tokenizer())
        seen = []

        def read() -> str | None:
            seen.append(terminal.getvalue())
            terminal.truncate(0)
            terminal.seek(0)
            return next(lines, None)

        chat._talk(talk, read)
        texts = [message["content"] for message in talk.conversation.messages[1::2]]
    plain, marked, off = seen[1], seen[3], seen[5]
    assert unbroken(texts[0]) in unbroken(plain) and MARK not in plain
    assert unbroken(texts[1]) in unbroken(re.sub(r"\x1b\[[0-9;]*m", "", marked)) and MARK in marked
    assert unbroken(texts[2]) in unbroken(off) and MARK not in off


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
