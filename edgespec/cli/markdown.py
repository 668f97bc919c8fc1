"""Markdown on a terminal while it is written: headings, lists, code, strong text.

Text is printed once. Lines of code are not broken, so they can be copied; rich's own Markdown breaks them.
"""

import re
from collections.abc import Iterator
from typing import Final

from edgespec.cli.line_breaks import Piece

CODE: Final = "cyan"
FENCE: Final = "dim"
HEADING: Final = "bold underline"
STRONG: Final = "bold"

_FENCE: Final = re.compile(r" {0,8}```")
_HEADING: Final = re.compile(r" {0,3}#{1,6} ")
_BULLET: Final = re.compile(r"( {0,8})[-*+] ")
_PARTS: Final = re.compile(r"`|\*\*|\*|[^`*]+")
# Beginnings of lines that may still become something else, within a block of code and outside of one.
_OPEN_CODE: Final = re.compile(r" {0,8}(?:`{0,2}|```.*)")
_OPEN: Final = re.compile(r" {0,8}(?:`{0,2}|```.*|#{0,6}|[-*+]|\d{1,3}[.)]?)")


class MarkdownStream:
    """Takes text in parts of any length and returns the text that can be shown, in pieces of one style.

    Marks (``**``, backquotes, a heading's ``#``) are left out, and bullets become dots. A mark that is not
    closed ends with its line. Only marks that are not complete yet are held back.
    """

    def __init__(self) -> None:
        self._line, self._shown, self._in_fence = "", 0, False

    def push(self, text: str) -> list[Piece]:
        """The pieces that can be shown after ``text``."""
        *ended, rest = text.split("\n")
        pieces = list[Piece]()
        for part in ended:
            pieces += [*self._more(part, ended=True), Piece("\n")]
        return pieces + self._more(rest, ended=False)

    def finish(self) -> list[Piece]:
        """The pieces that are still held back, because no more text comes."""
        return self._more("", ended=True)

    def _more(self, text: str, *, ended: bool) -> list[Piece]:
        """Append ``text`` to the current line and return the part of the line that is new to the reader."""
        self._line += text
        pieces, shown = list[Piece](), 0
        breaks = not (self._in_fence or _FENCE.match(self._line))
        for piece, style in _looks(self._line, self._in_fence, ended):
            new = piece[max(0, self._shown - shown) :]
            pieces += [Piece(new, style, breaks)] if new else []
            shown += len(piece)
        self._shown = shown
        if ended:
            self._in_fence ^= bool(_FENCE.match(self._line))
            self._line, self._shown = "", 0
        return pieces


def _looks(line: str, in_fence: bool, ended: bool) -> Iterator[tuple[str, str]]:
    """Text and style of the line's parts, up to the first that may still become something else."""
    if not ended and (_OPEN_CODE if in_fence else _OPEN).fullmatch(line):
        return
    if _FENCE.match(line):
        yield line, FENCE
    elif in_fence:
        yield line, CODE
    elif heading := _HEADING.match(line):
        yield from _inline(line[heading.end() :], HEADING, ended)
    elif bullet := _BULLET.match(line):
        yield f"{bullet[1]}• ", ""
        yield from _inline(line[bullet.end() :], "", ended)
    else:
        yield from _inline(line, "", ended)


def _inline(text: str, plain: str, ended: bool) -> Iterator[tuple[str, str]]:
    in_code = is_strong = False
    for match in _PARTS.finditer(text):
        part, behind = match[0], text[match.end() :][:1]
        if part[0] == "*" and not behind and not in_code and not ended:
            return  # more stars may follow
        if part == "`":
            in_code = not in_code
        elif part == "**" and not in_code and (is_strong or behind.strip()):
            is_strong = not is_strong
        else:
            yield part, CODE if in_code else plain or (STRONG if is_strong else "")
