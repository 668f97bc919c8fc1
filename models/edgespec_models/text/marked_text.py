"""Text of a conversation that spells control tokens, as a chat template sees it.

Stand-ins replace the characters of such a token, one for one, so that they are found again in the prompt
after any operation of the template. The template sees the text itself: comparing, searching, splitting and
stripping work on the original characters.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from edgespec_models.errors import RequestError

_FIRST: Final = 0x18A00
STAND_INS: Final = "\U00018a21-\U00018a7e"
"""The stand-ins, for a regular expression.

They are parts of Tangut characters, which no text holds alone. They are printable, so Python shows them
unchanged when a template prints a whole list.
"""
_TO: Final = {code: _FIRST + code for code in range(0x21, 0x7F)}
_FROM: Final = {stand_in: code for code, stand_in in _TO.items()}
_STAND_INS: Final = frozenset(map(chr, _FROM))
_ANY: Final = re.compile(f"[{STAND_INS}]")
_STRETCH: Final = 1 << 16  # characters that are searched at once: other threads wait meanwhile


def mark(text: str, spans: Iterable[tuple[int, int, int]]) -> str:
    """``text`` with stand-ins in spans of (start, stop, id); RequestError if it holds some already."""
    if has_marks(text):
        raise RequestError(
            "A message holds a character from U+18A21 to U+18A7E, which edgespec uses for marks. Remove it."
        )
    parts, end = list[str](), 0
    for start, stop, _ in spans:
        parts += text[end:start], text[start:stop].translate(_TO)
        end = stop
    return marked("".join([*parts, text[end:]]))


def unmark(text: str) -> tuple[str, frozenset[int]]:
    """The original text of a template's output, and the places of stand-ins in it."""
    if not has_marks(text):
        return text, frozenset()
    return text.translate(_FROM), frozenset(match.start() for match in _ANY.finditer(text))


def has_marks(text: str) -> bool:
    """Whether a text holds stand-ins."""
    begins = range(0, 0 if text.isascii() else len(text), _STRETCH)
    return any(_ANY.search(text, at, at + _STRETCH) for at in begins)


def marked(text: str) -> str:
    """``text`` for templates: a :class:`MarkedText` if it holds stand-ins."""
    return MarkedText(text) if has_marks(text) else text


def plain(value: Any) -> Any:
    """The original text; other values unchanged."""
    return value.translate(_FROM) if isinstance(value, MarkedText) else value


def _plainly(name: str) -> Any:
    """The method ``name`` of the original text."""
    method = getattr(str, name)
    return lambda self, *args: method(plain(self), *map(plain, args))


def _cutting(name: str) -> Any:
    """A method that returns a part of the text, or several in order."""
    method = getattr(str, name)

    def cut(self: "MarkedText", *args: Any, **kwargs: Any) -> Any:
        text, end, pieces = plain(self), 0, list[str]()
        parts = method(text, *map(plain, args), **kwargs)
        for part in [parts] if isinstance(parts, str) else parts:
            start = text.index(part, end)
            end = start + len(part)
            pieces.append(self[start:end])
        return pieces[0] if isinstance(parts, str) else type(parts)(pieces)

    return cut


def _cased(name: str) -> Any:
    """A method that changes the case of letters; stand-ins stay, for the new letters."""
    method = getattr(str, name)

    def change(self: "MarkedText") -> str:
        text = method(plain(self))
        if len(text) != len(self):  # as of U+00DF, which two letters follow: then stand-ins keep their case
            return marked(method(self))
        pairs = zip(text, str.__iter__(self), strict=True)
        return marked("".join(new.translate(_TO) if old in _STAND_INS else new for new, old in pairs))

    return change


class MarkedText(str):
    """A text with stand-ins that behaves like the original text."""

    __slots__ = ()

    __eq__, __ne__, __hash__ = map(_plainly, ("__eq__", "__ne__", "__hash__"))
    __contains__, startswith, endswith = map(_plainly, ("__contains__", "startswith", "endswith"))
    find, rfind, index = map(_plainly, ("find", "rfind", "index"))
    rindex, count = map(_plainly, ("rindex", "count"))
    strip, lstrip, rstrip = map(_cutting, ("strip", "lstrip", "rstrip"))
    split, rsplit, splitlines = map(_cutting, ("split", "rsplit", "splitlines"))
    partition, rpartition = map(_cutting, ("partition", "rpartition"))
    removeprefix, removesuffix = map(_cutting, ("removeprefix", "removesuffix"))
    upper, lower, capitalize = map(_cased, ("upper", "lower", "capitalize"))

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> str:
        return marked(str.__getitem__(self, key))

    def __iter__(self) -> Iterator[str]:
        return map(marked, str.__iter__(self))

    def replace(self, old: Any, new: Any, count: Any = -1) -> str:
        """As in other texts; the rest keeps its stand-ins."""
        return marked(str.join(new, self.split(old, count)) if old else str.replace(self, old, new, count))
