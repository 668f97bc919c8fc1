"""Proposals from a text that the app expects the answer to repeat, such as the file that is being edited.

The answer is followed through the predicted text from its beginning. Where it leaves that text, its place is
found again by the last tokens; until then it is taken to replace token for token.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from edgespec_runtimes.kv_cache import shared_length

_LONGEST: Final = 32  # longer matches tell no more about acceptance
_SURE: Final = 8  # tokens of a match, from which on no other place is looked for
_NEAREST: Final = 64  # places of the same two tokens that are compared
_MOST_LOST: Final = 3  # replaced tokens, behind which nothing is proposed
_FIRST_PRIOR: Final = 0.6


@dataclass(frozen=True, slots=True)
class Place:
    """A proposal: the predicted ``token``, and why it is expected.

    Attributes:
        length: tokens before it that the answer and the predicted text share, at most 32.
        replaced: tokens of the answer since it last followed the predicted text.
    """

    token: int
    length: int
    replaced: int = 0

    @property
    def kind(self) -> Hashable:
        """The class of the proposal, whose share of right ones is learned."""
        return self.length.bit_length(), self.replaced

    @property
    def prior(self) -> float:
        """The probability that the proposal is right, before anything was learned."""
        if self.replaced:
            return 0.5 / self.replaced
        return (self.length + 1) / (self.length + 2) if self.length else _FIRST_PRIOR


class PredictedText:
    """The predicted text, and the place in it that the answer has reached.

    Args:
        tokens: the text's ids in the target's vocabulary.
        start: tokens of the prompt, behind which the answer begins.
    """

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self._predicted, self._start = tokens, start
        self._text: list[int] = []  # prompt and answer
        self._next = self._replaced = 0  # place of the token to come, tokens since the last match
        self._ahead = 0  # the same place behind the draft
        self._places: dict[tuple[int, int], list[int]] = {}  # behind each two tokens, ascending
        for place, pair in enumerate(pairwise(tokens), start=2):
            self._places.setdefault(pair, []).append(place)

    def follow(self, tokens: Sequence[int]) -> int:
        """Follow the answer in ``tokens``, and return how many first tokens were known already."""
        shared = shared_length(self._text, tokens)
        if shared < len(self._text):  # never behind the loop's own rounds
            self._text, self._next, self._replaced, shared = [], 0, 0, 0
        new = max(len(self._text), self._start)
        self._text = [*tokens]
        for end in range(new + 1, len(tokens) + 1):
            self._commit(tokens[max(0, end - _LONGEST) : end])
        self._ahead = self._next + self._replaced
        return shared

    def find(self, context: Sequence[int]) -> Place | None:
        """The proposal behind ``context``, the answer's end and a draft; None without one."""
        begins = len(self._text) == self._start and not self._ahead
        place, length = (0, 0) if begins else self._locate(context, self._ahead)
        is_lost = not length and not begins
        if place >= len(self._predicted) or (is_lost and not 0 < self._replaced <= _MOST_LOST):
            return None
        self._ahead = place + 1
        return Place(self._predicted[place], length, self._replaced if is_lost else 0)

    def _commit(self, context: Sequence[int]) -> None:
        """Move on by the last token of ``context``."""
        place, length = self._locate(context, self._next + self._replaced + 1)
        if length:
            self._next, self._replaced = place, 0
        else:
            self._replaced += 1

    def _locate(self, context: Sequence[int], expected: int) -> tuple[int, int]:
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
        if place > len(self._predicted):
            return 0
        most = min(place, len(context), _LONGEST)
        for length in range(most):
            if self._predicted[place - 1 - length] != context[-1 - length]:
                return length
        return most
