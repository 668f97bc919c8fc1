"""Progress on a terminal: one line of the SDK's, which goes when a stage is over, and nothing elsewhere."""

import io
import sys

import pytest

from edgespec_models.progress import Progress, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for done in (0, 1, 2):
        show_progress(Progress("Exporting", done, 2))
    show_progress(Progress("Pulling " + "x" * 100, 3, 0, "parts"))
    lines = terminal.getvalue().split("\r")
    assert [line.strip() for line in lines[1:4]] == ["Exporting   0%", "Exporting  50%", ""]
    assert lines[-1].endswith("3 parts") and max(map(len, lines)) == 78
    assert "\n" not in terminal.getvalue()


def test_without_a_terminal_or_a_console_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_progress(Progress("Exporting", 1, 2))
    monkeypatch.setattr(sys, "stderr", None)  # as in apps without a console on Windows
    show_progress(Progress("Exporting", 1, 2))
    assert capsys.readouterr().err == ""
