"""One text in two vocabularies: target and drafter meet in its bytes.

The drafter's tokens of the committed bytes are kept up to date: only the text around the end is encoded
again, with left context. Proposals go back the same way. All tokens with the right bytes are legal. So if a
seam splits what one call would have joined, drafts get worse, but no answer gets wrong.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import takewhile

from edgespec_models.errors import TokenizerError
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.kv_cache import shared_length

_MAX_CONTEXT_BYTES = 96


class IdentityBridge:
    """The bridge of a drafter with the target's own vocabulary.

    A drafter with more ids than the target's ``vocab_size`` may draft ids that the target lacks. With a
    ``drafter_size`` below ``vocab_size`` the target may write ids that the drafter lacks.
    """

    def __init__(self, vocab_size: int, drafter_size: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._drafter_size = vocab_size if drafter_size is None else drafter_size

    def to_drafter(self, tokens: Sequence[int]) -> list[int]:
        """The drafter's tokens for ``tokens``, all committed target tokens.

        Raises:
            TokenizerError: the drafter has no such token.
        """
        if self._drafter_size < self._vocab_size and max(tokens, default=0) >= self._drafter_size:
            raise TokenizerError(
                f"the drafter has no token {max(tokens)}; allowed: below {self._drafter_size}"
            )
        return list(tokens)

    def to_target(self, drafted: Sequence[int]) -> list[tuple[int, int]]:
        known = takewhile(lambda token: token < self._vocab_size, drafted)
        return [(token, count) for count, token in enumerate(known, start=1)]


class _Text:
    """Bytes and their tokens of one tokenizer, edited at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.ends: list[int] = []  # byte offset behind each token

    def cut(self, index: int) -> None:
        del self.ids[index:], self.ends[index:]

    def append(self, ids: Sequence[int]) -> None:
        start = self.ends[-1] if self.ends else 0
        self.ids += ids
        self.ends += [start + end for end in self.tokenizer.ends(ids)]


class ByteBridge:
    """The bridge between any two vocabularies that can spell every byte.

    ``drafter_prompt`` is the prompt in the drafter's tokens and chat template; the target's prompt has
    ``prompt_length`` tokens.
    """

    def __init__(
        self, target: Tokenizer, drafter: Tokenizer, *, prompt_length: int, drafter_prompt: Sequence[int]
    ) -> None:
        self._prompt_length = prompt_length
        self._drafter_prompt = list(drafter_prompt)
        self._target, self._drafter = _Text(target), _Text(drafter)
        self._bytes = bytearray()
        self._draft: _DraftText | None = None  # behind the present text

    def to_drafter(self, tokens: Sequence[int]) -> list[int]:
        """The drafter's tokens for the text of all committed target tokens, prompt included.

        Raises:
            TokenizerError: the drafter's vocabulary lacks a byte of the text.
        """
        generated = list(tokens[self._prompt_length :])
        target = self._target
        shared = shared_length(target.ids, generated)
        end = self._drafter.ends[-1] if self._drafter.ends else 0
        if shared == len(target.ids) == len(generated) and end == len(self._bytes):
            return self._drafter_prompt + self._drafter.ids
        self._draft = None
        target.cut(shared)
        kept = target.ends[-1] if target.ends else 0
        target.append(generated[shared:])
        self._bytes[kept:] = target.tokenizer.bytes_of(generated[shared:])
        self._retokenize(kept)
        return self._drafter_prompt + self._drafter.ids

    def _retokenize(self, changed: int) -> None:
        """Encode again, from a safe place before byte ``changed``."""
        drafter = self._drafter
        drafter.cut(bisect_right(drafter.ends, changed))
        start = safe_start(self._bytes, drafter.ends, min(changed, drafter.ends[-1] if drafter.ends else 0))
        kept = bisect_left(drafter.ends, start) + 1 if start else 0
        fresh = drafter.tokenizer.encode_bytes(bytes(self._bytes[start:]))
        drafter.cut(kept)
        drafter.append(fresh)

    def to_target(self, drafted: Sequence[int]) -> list[tuple[int, int]]:
        """Target tokens for the drafter tokens that follow the text, each with a count.

        The count is the number of tokens of ``drafted``, from its start, that spell this target token and
        those before it.

        Raises:
            TokenizerError: the target's vocabulary lacks a byte of the draft.
        """
        draft = self._draft
        if draft is None or not draft.is_continued_by(drafted):
            start = safe_start(self._bytes, self._target.ends, len(self._bytes))
            context = bytes(self._bytes[start:])
            draft = self._draft = _DraftText(self._target.tokenizer, self._drafter.tokenizer, context)
        return draft.translated(drafted)


class _DraftText:
    """The text of a draft in both vocabularies, from its first token to its last.

    A draft grows by a token at a time, so only its last word is encoded again: the ``done`` bytes before it
    have the target tokens ``ids``. ``context`` is the end of the text before the draft.
    """

    def __init__(self, target: Tokenizer, drafter: Tokenizer, context: bytes) -> None:
        self._target, self._drafter, self._context = target, drafter, context
        self._drafted: list[int] = []
        self._data, self._ends = bytearray(), list[int]()  # the draft's bytes, up to the end of each token
        self._done, self._ids = 0, list[int]()
        self._last: tuple[bytes, list[int]] = b"", []  # the last word, and its tokens

    def is_continued_by(self, drafted: Sequence[int]) -> bool:
        """Whether ``drafted`` begins with this draft."""
        return shared_length(self._drafted, drafted) == len(self._drafted)

    def translated(self, drafted: Sequence[int]) -> list[tuple[int, int]]:
        """See :meth:`ByteBridge.to_target`."""
        for token in drafted[len(self._drafted) :]:
            self._drafted.append(token)
            self._data += self._drafter.token_bytes(token)
            self._ends.append(len(self._data))
        if self._begins_word(0):
            self._context = b""
        word = self._word()
        if word > self._done:
            self._ids += self._encoded(word)
            self._done = word
        ids = [*self._ids, *self._encoded(len(self._data))]
        return [
            (token, bisect_left(self._ends, end) + 1)
            for token, end in zip(ids, self._target.ends(ids), strict=True)
        ]

    def _word(self) -> int:
        """Where the last word begins; ``done`` if nowhere behind that."""
        at = self._data.rfind(b" ", self._done)
        return at if at > 0 and self._begins_word(at) else self._done

    def _begins_word(self, at: int) -> bool:
        """Whether a word begins with the byte at ``at``, a space: its encoding needs no context."""
        before = self._data[at - 1 : at] if at else self._context[-1:]
        word = self._data[at : at + 1] == b" " and self._data[at + 1 : at + 2].isalpha()
        return word and not before.isspace()

    def _encoded(self, end: int) -> list[int]:
        """The tokens of the bytes from ``done`` to ``end``."""
        data = bytes(self._data[self._done : end])
        if data != self._last[0]:
            context = b"" if self._done else self._context
            self._last = data, encode_after(self._target, context, data)
        return self._last[1]


Bridge = IdentityBridge | ByteBridge
"""Translates between a target's tokens and a drafter's."""


def encode_after(tokenizer: Tokenizer, context: bytes, data: bytes) -> list[int]:
    """The tokens of ``data`` behind ``context``, which begins at a word.

    Raises:
        TokenizerError: the vocabulary lacks a byte of it.
    """
    ids = tokenizer.encode_bytes(context + data)
    ends = tokenizer.ends(ids)
    index = bisect_left(ends, len(context)) if context else -1
    if context and (index == len(ends) or ends[index] != len(context)):
        # One token would span the seam. The target has ended its token there already, and will not
        # write it that way.
        return tokenizer.encode_bytes(data)
    return ids[index + 1 :]


def safe_start(text: bytes | bytearray, ends: Sequence[int], before: int) -> int:
    """The last token border before ``before`` at which a word begins; 0 if there is none near.

    Encoding from there gives the tokens of the whole text, but for rare merges.
    """
    low = max(0, before - _MAX_CONTEXT_BYTES)
    for index in range(bisect_left(ends, before) - 1, -1, -1):
        end = ends[index]
        if end < low:
            return end
        if text[end : end + 1] in (b" ", b"\n") and text[end - 1 : end] not in (b" ", b"\n", b"\t"):
            return end
    return 0
