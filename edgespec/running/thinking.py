"""Thoughts before an answer's text. Only their closing tag is forced, when the budget is spent."""

from collections.abc import Collection, Sequence
from functools import reduce
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.decoding.grammar import Allowed, Constraint
from edgespec_models.text.thoughts import ThoughtState, tag_tokens
from edgespec_models.text.tokenizer import Tokenizer, begun_at_end

_BUDGETS: Final = {"minimal": 256, "low": 1024, "medium": 4096}  # where the template knows no efforts


class _At(NamedTuple):
    """The state of an answer: its thoughts, the number of tokens of the tag or the thoughts, and its text."""

    state: ThoughtState
    length: int = 0
    text: tuple[int, ...] = ()


class ThoughtsFirst(Constraint):
    """Constrains an answer that may start with thoughts, at ``state``.

    After ``budget`` tokens of thoughts the closing tag is forced; None is no limit. ``grammar`` constrains
    the text behind the thoughts, or the whole answer if it does not begin with their tag. With a grammar
    thoughts cannot end the answer, and no token closes them and begins the text at once. The tokens ``ends``
    end a text. In an answer of channels, thoughts come first where a grammar constrains the text, which then
    begins with the name of its channel.
    """

    def __init__(
        self,
        state: ThoughtState,
        tokenizer: Tokenizer,
        ends: Collection[int],
        *,
        budget: int | None = None,
        grammar: Constraint | None = None,
    ) -> None:
        self._tokenizer, self._ends, self._budget, self._grammar = tokenizer, ends, budget, grammar
        self._opening = tag_tokens(tokenizer, state.tags.begin)
        self._closing = tag_tokens(tokenizer, state.tags.end)
        begun = range(len(self._closing) if state.tags.channels else 1)
        self._begun = [tokenizer.bytes_of(self._closing[:count]) for count in begun]
        self._at, self._read = _At(state), -1
        self._anything = self._all_but(())
        self._thoughts = self._all_but(ends)  # thoughts before a grammar's text
        self._no_thoughts = self._all_but(tokenizer.encode_bytes(b"analysis")[:1])
        self._begin, self._opens = self._anything, self._opening[0]
        if grammar is not None:
            self.schemas = grammar.schemas
            grammar.begin(())
            self._begin = grammar.allowed(())
            if state.tags.channels:
                self._begin = self._only(self._opens)
            elif self._opens in self._begin:  # a token that may begin both belongs to the grammar
                self._opens = -1
            else:
                self._begin = self._only(self._opens, *self._begin.tokens)

    @property
    def broken(self) -> str:
        return "" if self._grammar is None else self._grammar.broken

    def begin(self, tokens: Sequence[int]) -> None:
        if self._read >= 0:
            self._at = self._behind(tokens[self._read :])
        self._read = len(tokens)
        if self._grammar is not None:
            self._grammar.begin(self._at.text)

    def ends(self, tokens: Sequence[int]) -> bool:
        self.begin(tokens)
        return self._grammar is not None and self._at.state.has_text and self._grammar.ends(self._at.text)

    def completes(self, drafted: Sequence[int]) -> bool:
        at = self._behind(drafted)
        return self._grammar is not None and at.state.has_text and self._grammar.completes(self._drafted(at))

    def allowed(self, drafted: Sequence[int]) -> Allowed:
        at, grammar = self._behind(drafted), self._grammar
        if at.state.has_text:
            if grammar is None and at.state.tags.channels and not at.text:
                return self._no_thoughts
            return self._anything if grammar is None else grammar.allowed(self._drafted(at))
        if not at.state.thinks:
            return self._only(self._opening[at.length]) if grammar is not None and at.length else self._begin
        end, closed = at.state.tags.end.encode(), self._closed(at.state.held)
        if self._budget is not None and at.length >= self._budget:
            return self._only(self._closing[closed or at.length - self._budget])
        if grammar is not None and closed:
            return self._only(self._closing[closed])
        if grammar is not None and begun_at_end(at.state.held, end) == len(end) - 1:
            return self._only(self._tokenizer.encode_bytes(end[-1:])[0])
        return self._anything if grammar is None else self._thoughts

    def apply(self, row: npt.NDArray[np.float32], drafted: Sequence[int]) -> None:
        """Forbid what may not follow ``drafted``; see :class:`~edgespec.decoding.sampling.RowStep`."""
        if not (drafted and drafted[-1] in self._ends):
            allowed = self.allowed(drafted)
            if allowed is not self._anything:
                allowed.forbid_others(row)

    def _behind(self, tokens: Sequence[int]) -> _At:
        return reduce(self._next, tokens, self._at)

    def _closed(self, held: bytes) -> int:
        """How many tokens of a tag that ends one message and begins another stand at the thoughts' end."""
        return max(count for count, begun in enumerate(self._begun) if held.endswith(begun))

    def _drafted(self, at: _At) -> Sequence[int]:
        return at.text[len(self._at.text) :]

    def _next(self, at: _At, token: int) -> _At:
        state, count, text = at
        may_open = self._grammar is None or count or token == self._opens
        if state.has_text or not (state.thinks or may_open):
            return _At(ThoughtState(state.tags, "text"), 0, (*text, token))
        following, _, _ = state.read_token(token, self._tokenizer)
        return _At(following, 0 if following.thinks and not state.thinks else count + 1, text)

    def _only(self, *tokens: int) -> Allowed:
        return Allowed.where(np.isin(np.arange(self._tokenizer.vocab_size), tokens))

    def _all_but(self, tokens: Collection[int]) -> Allowed:
        return Allowed.where(~np.isin(np.arange(self._tokenizer.vocab_size), list(tokens)))


def with_thoughts(
    state: ThoughtState,
    tokenizer: Tokenizer,
    ends: Collection[int],
    thinking: bool | int | str | None,
    grammar: Constraint | None,
) -> Constraint | None:
    """The constraint of an answer that begins at ``state``; None if it may be anything.

    ``thinking`` is the request's option. ``grammar`` constrains the text, if there is one.
    """
    if isinstance(thinking, str):
        budget = None if state.tags.levels else _BUDGETS.get(thinking)
    else:
        budget = None if thinking is None or thinking is True else int(thinking)
    if state.stage == "text" or (grammar is None and budget is None):
        return grammar
    return ThoughtsFirst(state, tokenizer, ends, budget=budget, grammar=grammar)
