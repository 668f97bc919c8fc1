"""Where a text ends that is written into a hole."""

import re

from edgespec.requests.request import Hole

_BLANKS = 16  # of a suffix, before its first line: each is looked for at each of the fill
_NEAR = 5_000  # characters around a hole in which brackets have their partners
_REST = 80  # characters behind the cursor on its line: each may be where the fill ends too late


class FillReader:
    """Shows a fill up to its end.

    That is before the first line that the suffix goes on with, blank ones not counted, and behind
    ``max_lines`` lines. Where text stands on both sides of the cursor on its line, it is the end of the line,
    or before what that goes on with, if brackets and quotes have partners only so: of ``x)`` in ``f(|)`` it
    is ``x``. What may become one or the other is held back until it is clear what it is.
    """

    def __init__(self, hole: Hole, max_lines: int | None) -> None:
        self.skip, self.ended = len(hole.held), False  # bytes that are written before the fill
        self._text = hole.line
        self._begin = self._shown = len(hole.line)  # in the text, which begins with the cursor's line
        self._is_within = bool(hole.line.strip())
        self._most = 1 if hole.ends_line else max_lines
        behind = hole.suffix.partition("\n")[0]
        self._keeps_newline = not hole.line and bool(behind.strip())
        self._rest = behind.strip()[:_REST] if hole.ends_line else ""
        before = hole.prefix[: len(hole.prefix) - len(hole.line)]
        self._around = ("", behind), (before[-_NEAR:], hole.suffix[:_NEAR])
        line = next((line.rstrip() for line in hole.suffix.split("\n") if line.strip()), "")
        self._next = "" if hole.ends_line else line
        blanks = hole.suffix.partition(line)[0].count("\n") if line else 0
        blank = rf"(?:\r?\n){{0,{min(blanks, _BLANKS)}}}"
        self._pattern = re.compile(rf"{blank}^{re.escape(line)}[ \t\r]*$", re.MULTILINE)

    def push(self, text: str, *, final: bool = False) -> str:
        """Take text, with the ``final`` one what was held back; returns what can be shown now."""
        if self.ended:
            return ""
        self._text += text
        breaks = [match.start() for match in re.finditer("\n", self._text)][: self._most]
        last = breaks[-1] if len(breaks) == self._most else None
        end = self._next_line(final) if last is None else self._next_line(False, last + 1)
        if end is None and last is not None:
            end = last + self._keeps_newline
        elif end is None and final:
            end = len(self._text)
        self.ended = end is not None
        keep = self._certain() if end is None else min(self._ends(end), key=self._without_partner)
        begin, self._shown = self._shown, max(self._shown, keep)
        return self._text[begin : self._shown]

    def _next_line(self, final: bool, end: int | None = None) -> int | None:
        """Where before ``end`` the suffix's line begins, or line breaks before it that are the suffix's."""
        text = self._text[:end]
        line = self._pattern.search(text, self._begin if self._is_within else 0)
        return line.start() if self._next and line and (final or line.end() < len(text)) else None

    def _certain(self) -> int:
        """How much of the text can be no part of the end."""
        start = self._text.rfind("\n") + 1
        line = self._text[start:]
        may_be_next = self._next.startswith(line) or line.rstrip() == self._next
        if not self._next or (start == 0 and self._is_within) or not may_be_next:
            return min(self._ends(len(self._text)))
        return len(self._text[:start].rstrip("\r\n"))

    def _ends(self, end: int) -> list[int]:
        """Where the text may end: there, or before what the cursor's line goes on with."""
        last = len(self._text[:end].rstrip())
        lengths = range(min(len(self._rest), last - self._begin), 0, -1)
        return [end, *(last - n for n in lengths if self._text.endswith(self._rest[:n], 0, last))]

    def _without_partner(self, end: int) -> int:
        """How many brackets and quotes have none if the text ends there: on its line, and near it."""
        return sum(map(_alone, (f"{before}{self._text[:end]}{behind}" for before, behind in self._around)))


def _alone(text: str) -> int:
    """How many brackets and quotes have no partner; those of quotes are on the same line."""
    begun, quote, alone = list[str](), "", 0
    for mark in re.findall(r"\\.|[()\[\]{}\"'`]|\n", text):
        if mark[0] == "\\":
            continue
        if mark == "\n":
            alone, quote = alone + bool(quote), ""
        elif quote or mark in "\"'`":
            quote = "" if mark == quote else quote or mark
        elif mark in "([{":
            begun.append(mark)
        elif begun and begun[-1] + mark in ("()", "[]", "{}"):
            begun.pop()
        else:
            alone += 1
    return alone + len(begun) + bool(quote)
