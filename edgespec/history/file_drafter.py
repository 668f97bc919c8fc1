"""Proposals from the user's own files: what stands there behind the words that the text ends with."""

import logging
import re
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Final

from edgespec.decoding.draft import NO_DRAFT, Draft, Remarks, Step
from edgespec.drafting.bridge import encode_after, safe_start
from edgespec.drafting.guard import Guard
from edgespec.drafting.ngram import LONGEST, Acceptance, Match
from edgespec.drafting.watch import Finding
from edgespec.history.file_index import FileIndex
from edgespec_models.errors import TokenizerError
from edgespec_models.text.tokenizer import Tokenizer

__all__ = ["FileDrafter"]

_SOURCE: Final = "files"
_CONTEXT: Final = 40  # tokens that are looked up and encoded behind
_TOKEN_BYTES: Final = 8  # that are read for a token to draft: twice what one has on average
_LAST_WORD: Final = re.compile(rb"\s*\S*\Z")
_LOG = logging.getLogger("edgespec")


class FileDrafter:
    """Goes on as a file does in which the longest end of the text stands. It serves one request.

    The bytes of a passage are read as tokens of the target, and passages that agree with it so far count as
    occurrences of an n-gram do. Where proposals cost more than they bring the guard pauses them.

    Args:
        index: the files.
        tokenizer: the target's.
        acceptance: how such proposals fare; shared between requests, as is the guard.
        guard: watches what they bring.
        remarks: where it is written why they paused.
        stop_below: a draft ends before the token that would be reached and accepted with less than this
            probability.
    """

    def __init__(
        self,
        index: FileIndex,
        tokenizer: Tokenizer,
        acceptance: Acceptance,
        guard: Guard,
        remarks: Remarks,
        *,
        stop_below: float = 0.15,
    ) -> None:
        self._index, self._tokenizer, self._acceptance = index, tokenizer, acceptance
        self._guard, self._remarks, self._stop_below = guard, remarks, stop_below
        self._considered: list[Match] = []

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`~edgespec.decoding.draft.Source`."""
        self._considered = self._matches(tokens, NO_DRAFT, limit)
        return self._draft(self._considered, NO_DRAFT)

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        """See :class:`~edgespec.decoding.draft.Extending`. What is added is not learned from."""
        return draft.then(self._draft(self._matches(tokens, draft, limit), draft))

    def observe(self, step: Step) -> None:
        """See :class:`~edgespec.decoding.draft.Observer`: what was considered is judged, whoever drafted."""
        considered, self._considered = self._considered, []
        self._acceptance.judge(considered, step)
        if self._guard.observe_source(_SOURCE, step) is Finding.FAILED:
            reason = f"files of the history: {self._guard.reason}"
            self._remarks.rolled_back = (*self._remarks.rolled_back, reason)
            _LOG.warning("%s; they pause", reason)

    def close(self) -> None:
        """See :class:`~edgespec.decoding.draft.Observer`."""

    def _draft(self, matches: Sequence[Match], before: Draft) -> Draft:
        """The first of them, as many as are likely enough to be reached."""
        estimates = [self._acceptance.estimate(match) for match in matches]
        reached = list(accumulate(estimates, lambda a, b: a * b, initial=prod(before.confidence)))[1:]
        count = sum(each >= self._stop_below for each in reached) if self._guard.allows else 0
        drafted = tuple(match.token for match in matches[:count])
        return Draft(drafted, None, (_SOURCE,) * count, tuple(estimates[:count]))

    def _matches(self, tokens: Sequence[int], before: Draft, limit: int) -> list[Match]:
        """What may follow ``tokens`` and ``before``, each behind the one before it."""
        tokenizer, room = self._tokenizer, limit - len(before.tokens)
        context = [*tokens[-_CONTEXT:], *before.tokens]
        data = tokenizer.bytes_of(context)
        most = _TOKEN_BYTES * (room + 2)
        found = self._index.find(data, most) if room > 0 else None
        if found is None:
            return []
        ends = list(accumulate(len(tokenizer.token_bytes(token)) for token in context))
        length = sum(end > len(data) - found.length for end in ends)
        text = found.text
        if len(text) == most:  # the last word may be a part of one, which has other tokens
            text = _LAST_WORD.sub(b"", text, count=1) or text
        try:
            ids = encode_after(tokenizer, data[safe_start(data, ends, len(data)) :], text)[:room]
        except TokenizerError:  # a byte that the vocabulary lacks
            return []
        follow = list(accumulate((len(tokenizer.token_bytes(token)) for token in ids), initial=0))
        agree = [sum(other.startswith(text[:end]) for other in found.texts) for end in follow]
        return [
            Match(token, min(length + at, LONGEST), agree[at], agree[at + 1]) for at, token in enumerate(ids)
        ]
