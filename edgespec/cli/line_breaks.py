"""Line breaks between words, at the width of the terminal, in text that is still being written."""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from rich.cells import cell_len


class Piece(NamedTuple):
    """Text in one style, as rich calls styles; "" is plain. Lines of code are not broken."""

    text: str
    style: str = ""
    breaks: bool = True


_PARTS: Final = re.compile(r"\n|[^\S\n]+|[\u1100-\U0010ffff]|[^\s\u1100-\U0010ffff]+")
"""A line's end, spaces, one character of a script that has no spaces, or a part of a word."""


class LineBreaks:
    """Takes pieces of text and returns the printable part: a word is held back until it has ended.

    ``width`` is asked at every word, so text that comes after the window changed has the new width. A word
    that is longer than a line is left to the terminal, so that it can be copied.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width, self._column = width, 0
        self._spaces, self._word = list[Piece](), list[Piece]()
        self._may_break = False

    def push(self, piece: Piece) -> list[Piece]:
        """The part of the text so far that can be printed now."""
        if not piece.breaks:
            return [*self.finish(), self._printed(piece)]
        printed = list[Piece]()
        for part in _PARTS.findall(piece.text):
            new = Piece(part, piece.style)
            if part == "\n":
                printed += [*self.finish(), self._printed(new)]
            elif part.isspace():
                printed += self._ended()
                self._spaces.append(new)
                self._may_break = True
            elif cell_len(part) == 2 and len(part) == 1:  # such as a Chinese character, a word by itself
                printed += self._ended()
                self._may_break = self._may_break or self._column > 0
                self._word.append(new)
                printed += self._ended()
                self._may_break = True
            else:
                self._word.append(new)
                if _cells(self._word) >= self._width():
                    printed += self._ended()
        return printed

    def finish(self) -> list[Piece]:
        """The word that is held back, because it has ended or no more text comes."""
        printed = self._ended()
        printed += [self._printed(piece) for piece in self._spaces]
        self._spaces = []
        return printed

    def _ended(self) -> list[Piece]:
        """The word that is held, on this line or on the next."""
        if not self._word:
            return []
        width = self._width()
        if self._column > width:  # the window is narrower now, and the terminal has broken the line
            self._column %= width
        fits = self._column + _cells(self._spaces) + _cells(self._word) <= width
        between = self._spaces if fits or not (self._may_break and self._column) else [Piece("\n")]
        printed = [self._printed(piece) for piece in (*between, *self._word)]
        self._spaces, self._word, self._may_break = [], [], False
        return printed

    def _printed(self, piece: Piece) -> Piece:
        *before, last = piece.text.split("\n")
        self._column = cell_len(last) + (0 if before else self._column)
        return piece


def _cells(pieces: list[Piece]) -> int:
    return sum(cell_len(piece.text) for piece in pieces)
