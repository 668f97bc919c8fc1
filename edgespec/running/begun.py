"""Answers in which a mark begins a part that has a form, such as a call of a tool. The rest is free."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.decoding.grammar import Allowed, Constraint, GrammarConstraint
from edgespec_models.errors import RequestError
from edgespec_models.text.tokenizer import Tokenizer

_LONGEST: Final = 64  # tokens of a mark


class _At(NamedTuple):
    """The state of an answer: the part's grammar, if one has begun, and its tokens; else the last tokens."""

    grammar: GrammarConstraint | None = None
    tokens: tuple[int, ...] = ()


class BegunParts(Constraint):
    """Holds the parts of an answer that marks begin to their grammars. Elsewhere ``other`` applies.

    ``marks`` matches the bytes of a mark, and ``grammar_of`` gives the grammar for the match's group
    ``name``; None if there is none. The grammar's text begins with the mark, or behind the group ``head``. A
    part that does not begin as its grammar wants is free, and so is the rest of one that llguidance cannot
    follow to its end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: re.Pattern[bytes],
        grammar_of: Callable[[str], GrammarConstraint | None],
        other: Constraint | None = None,
    ) -> None:
        self._tokenizer, self._marks, self._grammar_of, self._other = tokenizer, marks, grammar_of, other
        self.schemas = {} if other is None else other.schemas
        self._anything = Allowed.where(np.ones(tokenizer.vocab_size, np.bool_))
        self._at, self._read = _At(), -1

    def begin(self, tokens: Sequence[int]) -> None:
        if self._read >= 0:
            self._at = self._behind(tokens[self._read :])
        self._read = len(tokens)
        if self._other is not None:
            self._other.begin(tokens)

    def ends(self, tokens: Sequence[int]) -> bool:
        self.begin(tokens)
        return self._other is not None and self._other.ends(tokens)

    def completes(self, drafted: Sequence[int]) -> bool:
        return self._other is not None and self._other.completes(drafted)

    def allowed(self, drafted: Sequence[int]) -> Allowed:
        holder, tokens = self._holder(drafted)
        return self._anything if holder is None else holder.allowed(tokens)

    def apply(self, row: npt.NDArray[np.float32], drafted: Sequence[int]) -> None:
        """Forbid what may not follow ``drafted``; see :class:`~edgespec.decoding.sampling.RowStep`."""
        holder, tokens = self._holder(drafted)
        if holder is not None:
            holder.apply(row, tokens)

    def _holder(self, drafted: Sequence[int]) -> tuple[Constraint | None, Sequence[int]]:
        """What constrains the text behind ``drafted``, and the tokens that it wants."""
        at = self._behind(drafted)
        return (self._other, drafted) if at.grammar is None else (at.grammar, at.tokens)

    def _behind(self, tokens: Sequence[int]) -> _At:
        return reduce(self._next, tokens, self._at)

    def _next(self, at: _At, token: int) -> _At:
        tokens = (*at.tokens, token)
        if at.grammar is not None:
            return _within(at.grammar, tokens)
        tokens = tokens[-_LONGEST:]
        texts = [self._tokenizer.token_bytes(token) for token in tokens]
        match = self._marks.search(b"".join(texts))
        if match is None:
            return _At(None, tokens)
        groups = match.groupdict()
        start = match.end("head") if groups.get("head") else match.start()
        ends = accumulate(map(len, texts))
        begun = tuple(token for token, end in zip(tokens, ends, strict=True) if end > start)
        grammar = self._grammar_of((groups.get("name") or b"").decode())
        return _within(grammar, begun) if grammar is not None and grammar.begins_with(begun) else _At()


def _within(grammar: GrammarConstraint, tokens: tuple[int, ...]) -> _At:
    """The state behind a part's tokens."""
    with suppress(RequestError):
        if not grammar.completes(tokens):
            grammar.allowed(tokens)
            return _At(grammar, tokens)
    return _At()
