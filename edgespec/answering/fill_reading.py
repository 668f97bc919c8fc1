"""Finds the end of a text that fills a hole."""

import re

from edgespec.asking.request import Hole

_BLANKS = 16  # blank lines of a suffix before its first line that are looked for
_NEAR = 5_000  # characters around a hole in which brackets are paired
_REST = 80  # characters behind the cursor on its line that a fill may repeat


class FillReader:
    """Shows a fill up to its end.

    A fill ends before the first line with which the suffix goes on, blank lines not counted, and after
    ``max_lines`` lines. If text stands on both sides of the cursor on its line, the fill ends with the line,
    or before the text behind the cursor, if only then brackets and quotes have partners: of ``x)`` in
    ``f(|)`` the fill is ``x``. Text that may belong to either is held back until that is clear.
    """

    def __init__(self, hole: Hole, max_lines: int | None) -> None:
        self.skip, self.ended = len(hole.held), False  # bytes of the prompt that are written again
        self._text = hole.line
        self._begin = self._shown = len(hole.line)  # in the text from the cursor's line on
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
        """Take text and return what can be shown now; with ``final`` also what was held back."""
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
        """Where the suffix's first line begins before ``end``, or the suffix's line breaks before it."""
        text = self._text[:end]
        line = self._pattern.search(text, self._begin if self._is_within else 0)
        return line.start() if self._next and line and (final or line.end() < len(text)) else None

    def _certain(self) -> int:
        """The length of the text that is certainly part of the fill."""
        start = self._text.rfind("\n") + 1
        line = self._text[start:]
        may_be_next = self._next.startswith(line) or line.rstrip() == self._next
        if not self._next or (start == 0 and self._is_within) or not may_be_next:
            return min(self._ends(len(self._text)))
        return len(self._text[:start].rstrip("\r\n"))

    def _ends(self, end: int) -> list[int]:
        """The places where the text may end: there, or before the text behind the cursor."""
        last = len(self._text[:end].rstrip())
        lengths = range(min(len(self._rest), last - self._begin), 0, -1)
        return [end, *(last - n for n in lengths if self._text.endswith(self._rest[:n], 0, last))]

    def _without_partner(self, end: int) -> int:
        """The number of unpaired brackets and quotes if the text ends there: on its line, and near it."""
        return sum(map(_alone, (f"{before}{self._text[:end]}{behind}" for before, behind in self._around)))


def _alone(text: str) -> int:
    """The number of unpaired brackets and quotes. A quote's partner is on the same line."""
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
