"""Markdown on a terminal as it is written: headings, lists, code, strong text; little is held back.

Text is printed once and as it is, so long lines of code can be copied; rich's own Markdown wraps them.
"""

import re
from collections.abc import Iterator
from typing import Final

Pieces = list[tuple[str, str]]

CODE: Final = "cyan"
FENCE: Final = "dim"
HEADING: Final = "bold underline"
STRONG: Final = "bold"

_FENCE: Final = re.compile(r" {0,8}```")
_HEADING: Final = re.compile(r" {0,3}#{1,6} ")
_BULLET: Final = re.compile(r"( {0,8})[-*+] ")
_PARTS: Final = re.compile(r"`|\*\*|\*|[^`*]+")
# How lines begin, within a block of code and elsewhere, of which it is not known yet what they are.
_OPEN_CODE: Final = re.compile(r" {0,8}(?:`{0,2}|```.*)")
_OPEN: Final = re.compile(r" {0,8}(?:`{0,2}|```.*|#{0,6}|[-*+]|\d{1,3}[.)]?)")


class MarkdownStream:
    """Takes text in any pieces; returns what can be shown, in pieces of one style.

    Signs that only mark (``**``, backquotes, a heading's ``#``) are left out, bullets become dots. What
    begins on a line and does not end there ends with the line. Nothing is held back but such signs.
    """

    def __init__(self) -> None:
        self._line, self._shown, self._in_fence = "", 0, False

    def push(self, text: str) -> Pieces:
        """Pieces of text and their styles, as rich calls them; "" is plain."""
        *ended, rest = text.split("\n")
        pieces = Pieces()
        for part in ended:
            pieces += [*self._more(part, ended=True), ("\n", "")]
        return pieces + self._more(rest, ended=False)

    def finish(self) -> Pieces:
        """What is held back yet: no more text comes."""
        return self._more("", ended=True)

    def _more(self, text: str, *, ended: bool) -> Pieces:
        """What of the current line was not shown yet, now that ``text`` is part of it."""
        self._line += text
        pieces, shown = Pieces(), 0
        for piece, style in _looks(self._line, self._in_fence, ended):
            new = piece[max(0, self._shown - shown) :]
            pieces += [(new, style)] if new else []
            shown += len(piece)
        self._shown = shown
        if ended:
            self._in_fence ^= bool(_FENCE.match(self._line))
            self._line, self._shown = "", 0
        return pieces


def _looks(line: str, in_fence: bool, ended: bool) -> Iterator[tuple[str, str]]:
    """A line, as far as it is known how it looks."""
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
