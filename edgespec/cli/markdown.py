"""Markdown on a terminal as it is written: headings, lists, code, strong text; little is held back."""

import re
from typing import Final

__all__ = ["CODE", "FENCE", "HEADING", "STRONG", "MarkdownStream"]

CODE: Final = "cyan"
FENCE: Final = "dim"
HEADING: Final = "bold underline"
STRONG: Final = "bold"

_OPEN: Final = re.compile(r" {0,8}(?:`{0,2}|```.*|#{0,6}|[-*+]|\d{1,3}[.)]?)")
"""How lines begin of which it is not known yet what they are."""
_BULLET: Final = re.compile(r"( {0,8})[-*+] ")
_HEADING: Final = re.compile(r" {0,3}#{1,6} ")


class MarkdownStream:
    """Takes text in any pieces; returns what can be shown, in pieces of one style.

    Signs that only mark (``**``, backquotes, a heading's ``#``) are left out, bullets become dots. What
    begins on a line and does not end there ends with the line. Nothing is held back but such signs.
    """

    def __init__(self) -> None:
        self._held = ""  # the beginning of a line, or stars within one
        self._begins = True
        self._in_code = self._in_fence = self._is_strong = self._is_heading = False
        self._shown: list[tuple[str, str]] = []

    def push(self, text: str) -> list[tuple[str, str]]:
        """Pieces of text and their styles, as rich calls them; "" is plain."""
        for char in text:
            if char == "\n":
                self._end_line()
                self._show("\n", "")
            elif self._begins:
                self._begin_line(char)
            else:
                self._within_line(char)
        shown, self._shown = self._shown, []
        return shown

    def finish(self) -> list[tuple[str, str]]:
        """What is held back yet: no more text comes."""
        self._end_line()
        shown, self._shown = self._shown, []
        return shown

    def _begin_line(self, char: str) -> None:
        held = self._held + char
        if self._in_fence:
            if "```".startswith(held.strip()[:3]):
                self._held = held
            else:
                self._leave_beginning(held)
        elif _OPEN.fullmatch(held):
            self._held = held
        elif bullet := _BULLET.fullmatch(held):
            self._leave_beginning("")
            self._show(f"{bullet[1]}• ", "")
        elif _HEADING.fullmatch(held):
            self._leave_beginning("")
            self._is_heading = True
        else:
            self._leave_beginning(held)

    def _leave_beginning(self, rest: str) -> None:
        self._begins, self._held = False, ""
        for char in rest:
            self._within_line(char)

    def _within_line(self, char: str) -> None:
        if self._in_fence:
            self._show(char, CODE)
        elif self._held == "*" and char == "*":
            self._held = "**"
        elif self._held == "**" and (self._is_strong or not char.isspace()):
            self._held, self._is_strong = "", not self._is_strong
            self._within_line(char)
        elif self._held:  # stars that mark nothing
            held, self._held = self._held, ""
            self._show(held, self._style())
            self._within_line(char)
        elif char == "`":
            self._in_code = not self._in_code
        elif char == "*" and not self._in_code:
            self._held = "*"
        else:
            self._show(char, self._style())

    def _end_line(self) -> None:
        if self._begins and self._held.strip().startswith("```"):
            self._in_fence = not self._in_fence
            self._show(self._held, FENCE)
        else:
            if self._begins:
                self._leave_beginning(self._held)
            if not (self._is_strong and self._held == "**"):  # which ends what is strong
                self._show(self._held, self._style())
        self._held, self._begins = "", True
        self._in_code = self._is_strong = self._is_heading = False

    def _style(self) -> str:
        if self._in_code:
            return CODE
        if self._is_heading:
            return HEADING
        return STRONG if self._is_strong else ""

    def _show(self, text: str, style: str) -> None:
        if self._shown and self._shown[-1][1] == style:
            self._shown[-1] = (self._shown[-1][0] + text, style)
        elif text:
            self._shown.append((text, style))
