"""Proposals from a text that the app expects the answer to repeat, such as the file that is being edited.

The answer is followed through the predicted text from its beginning. Where it leaves that text, its place is
found again by the last tokens; until then it is taken to replace token for token.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from edgespec.drafting.copies import LONGEST, Copy, Finder, shared_end

_SURE: Final = 8  # tokens of a match, from which on no other place is looked for
_NEAREST: Final = 64  # places of the same two tokens that are compared
_MOST_LOST: Final = 3  # replaced tokens, behind which nothing is proposed
_FIRST_PRIOR: Final = 0.6


class PredictedText:
    """A predicted text, and the places in it. Threads may share it.

    Args:
        tokens: the text's ids in the target's vocabulary.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._places: dict[tuple[int, int], list[int]] = {}  # behind each two tokens, ascending
        for place, pair in enumerate(pairwise(tokens), start=2):
            self._places.setdefault(pair, []).append(place)

    def locate(self, context: Sequence[int], expected: int) -> tuple[int, int]:
        """The place of the token behind ``context``, and the length of the match before it.

        It is the one with the longest match, of several the nearest to the ``expected`` one.
        """
        best, longest = expected, self._shared(expected, context)
        if longest >= min(_SURE, expected):
            return best, longest
        places = self._places.get((context[-2], context[-1]), []) if len(context) > 1 else []
        at = bisect_left(places, expected)
        near = places[max(0, at - _NEAREST // 2) : at + _NEAREST // 2]
        for place in sorted(near, key=lambda place: (abs(place - expected), -place)):
            length = self._shared(place, context)
            if length > longest:
                best, longest = place, length
        return best, longest

    def _shared(self, place: int, context: Sequence[int]) -> int:
        return 0 if place > len(self.tokens) else shared_end(self.tokens, place, context)


class PredictionFinder(Finder):
    """Follows an answer, behind a prompt of ``start`` tokens, through a predicted text."""

    source = "prediction"

    def __init__(self, text: PredictedText, start: int) -> None:
        super().__init__()
        self._text, self._start = text, start
        self._read = start  # tokens of prompt and answer that were followed
        self._next = self._replaced = 0  # place of the token to come, tokens since the last match

    def follow(self, tokens: Sequence[int]) -> None:
        """Follow the answer in ``tokens``, of which earlier calls had the beginning."""
        for end in range(self._read + 1, len(tokens) + 1):
            context = tokens[max(0, end - LONGEST) : end]
            place, length = self._text.locate(context, self._next + self._replaced + 1)
            if length:
                self._next, self._replaced = place, 0
            else:
                self._replaced += 1
        self._read = max(self._read, len(tokens))

    def find(self, context: Sequence[int], ahead: int) -> Copy | None:
        """The proposal behind ``context``, which ends with ``ahead`` tokens of a draft; None without one."""
        begins = self._read == self._start and not ahead
        expected = self._next + self._replaced + ahead
        place, length = (0, 0) if begins else self._text.locate(context, expected)
        is_lost = not length and not begins
        if is_lost and (ahead or not 0 < self._replaced <= _MOST_LOST):
            return None
        if place >= len(self._text.tokens):
            return None
        replaced = self._replaced if is_lost else 0  # tokens of the answer since the last match
        prior = (length + 1) / (length + 2) if length else _FIRST_PRIOR
        return Copy(
            self._text.tokens[place],
            (length.bit_length(), replaced),
            0.5 / replaced if replaced else prior,
        )
