"""The only module that calls the tokenizers library.

The library raises bare exceptions. When its Rust code panics, for example over a regular expression that
backtracks too long, a template that names no token, or a list too large for memory, it raises an object that
is not even an ``Exception``. All of them leave this module as :class:`TokenizerError`. A failed allocation
within the Rust code aborts the process; nothing can be done about that.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from time import sleep
from typing import Any

import tokenizers

from edgespec_models.errors import EdgespecError, RequestError, TokenizerError
from edgespec_models.schema import lone_surrogate, shown

AFFIX = re.compile(r'"(continuing_subword_prefix|end_of_word_suffix)"\s*:\s*"[^"]')
_PANIC = "PanicException"  # pyo3's; its module cannot be imported
_TEXT = "The tokenizers library cannot encode the text"
_TRY = (
    "Try a shorter text; if that fails too, the tokenizer.json has a fault: export or download the model "
    "again, or use another model"
)
_VOCABULARY = "The tokenizers library cannot show the vocabulary"
_AGAIN = "Export or download the model again"
_MANY = 2000  # tokens; a list of fewer takes less time than giving way, which takes 60 µs or more


@contextmanager
def _guarded(failure: str, remedy: str) -> Iterator[None]:
    """Turn the library's exceptions into errors of edgespec's: ``failure``, the reason, and the remedy."""
    try:
        yield
    except BaseException as error:
        foreign = isinstance(error, Exception) or type(error).__name__ == _PANIC
        if isinstance(error, EdgespecError) or not foreign:  # Ctrl-C, and exits
            raise
        if isinstance(error, MemoryError):
            raise TokenizerError(f"{failure}: not enough memory. Free memory and try again.") from error
        raise TokenizerError(f"{failure}: {error}. {remedy}.") from error


class Encoder:
    """The text of a ``tokenizer.json``, in the library. Safe to share between threads.

    Every method raises TokenizerError if the library fails.
    """

    def __init__(self, text: str) -> None:
        # Neither kind of vocabulary has affixes, and a merge shorter than its affix aborts the process.
        affix = AFFIX.search(text)
        if affix:
            raise TokenizerError(f"The tokenizer.json has a {affix[1]}, which edgespec does not read.")
        with _guarded("Not a readable tokenizer.json", "Export it again"):
            self._core = tokenizers.Tokenizer.from_str(text)
            self._core.no_truncation()
            self._core.no_padding()
            self._plain = _twin(self._core) or tokenizers.Tokenizer.from_str(text)
            self._plain.no_truncation()
            self._plain.no_padding()
            self._plain.encode_special_tokens = True  # as text

    @property
    @_guarded(_VOCABULARY, _AGAIN)
    def model(self) -> str:
        """Kind of the model: ``BPE``, ``Unigram`` and others."""
        return type(self._core.model).__name__

    @_guarded(_VOCABULARY, _AGAIN)
    def decoder(self) -> dict[str, Any] | None:
        """The decoder in the file."""
        decoder = self._core.decoder
        stated: dict[str, Any] | None = json.loads(decoder.__getstate__()) if decoder else None
        return stated

    @_guarded(_VOCABULARY, _AGAIN)
    def spec(self) -> dict[str, Any]:
        """The whole file."""
        stated: dict[str, Any] = json.loads(self._core.to_str())
        return stated

    @_guarded(_VOCABULARY, _AGAIN)
    def json(self, special: Collection[str] = ()) -> str:
        """The text of a ``tokenizer.json`` in which tokens with the texts ``special`` are special."""
        core = tokenizers.Tokenizer.from_str(self._core.to_str())
        core.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in special])
        return core.to_str()

    @_guarded(_VOCABULARY, _AGAIN)
    def unknown_token(self) -> str | None:
        """Text of the unknown token."""
        if self.model != "Unigram":
            unknown: str | None = self._core.model.unk_token
            return unknown
        model = self.spec()["model"]  # the library shows it nowhere else
        return None if model["unk_id"] is None else str(model["vocab"][model["unk_id"]][0])

    @_guarded(_VOCABULARY, _AGAIN)
    def vocabulary(self) -> dict[str, int]:
        """Ids of the model's own tokens by text."""
        ids: dict[str, int] = self._core.get_vocab(with_added_tokens=False)
        return ids

    @_guarded(_VOCABULARY, _AGAIN)
    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """By id: text, and whether it is special."""
        added = self._core.get_added_tokens_decoder()
        return {id_: (token.content, token.special) for id_, token in added.items()}

    @_guarded(_VOCABULARY, _AGAIN)
    def id_of(self, text: str, *, added: bool = True) -> int | None:
        """The token with this text, among the model's own tokens, or also among added ones."""
        id_: int | None = (self._core if added else self._core.model).token_to_id(text)
        return id_

    @_guarded(_TEXT, _TRY)
    def ids(self, text: str, *, special: bool) -> list[int]:
        """Encode ``text``, with ``special`` control tokens too; RequestError for a lone surrogate."""
        core = self._core if special else self._plain
        return _ids(core.encode_batch_fast, text)[0]

    @_guarded(_TEXT, _TRY)
    def spans(self, text: str, of: frozenset[int]) -> list[tuple[int, int, int]]:
        """Begin, end and id of the tokens in ``text`` that have these ids; special tokens count."""
        if of.isdisjoint(self.ids(text, special=True)):  # this takes half the time
            return []
        ids, encoding = _ids(self._core.encode_batch, text)
        return [(*(encoding.token_to_chars(at) or (0, 0)), id_) for at, id_ in enumerate(ids) if id_ in of]

    @_guarded("The tokenizers library cannot apply the tokenizer.json's own template", _AGAIN)
    def framed(self, text: str) -> list[int]:
        """Encode ``text`` within the file's own template, with BOS and the like."""
        ids: list[int] = self._core.encode(text, add_special_tokens=True).ids
        return ids


def _ids(
    encode: Callable[..., Sequence[tokenizers.Encoding]], text: str
) -> tuple[list[int], tokenizers.Encoding]:
    """The ids of a text, encoded as a batch of one text, so other threads of Python run meanwhile."""
    try:
        (encoding,) = encode([text], add_special_tokens=False)
    except (UnicodeEncodeError, TypeError) as error:
        wrong = lone_surrogate(text) if isinstance(text, str) else f" is {shown(text)}, not a str"
        raise RequestError(f"the text to encode{wrong or f' is refused: {error}'}") from error
    ids: list[int] = encoding.ids
    if len(ids) > _MANY:
        sleep(0)  # making a long list and freeing its encoding takes a while: other threads run in between
    return ids, encoding


def _twin(core: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
    """A second encoder over the same vocabulary, without memory of its own; None if ids would differ.

    Reading control tokens is a switch of the whole encoder, which threads cannot share.
    """
    twin, added = tokenizers.Tokenizer(core.model), core.get_added_tokens_decoder()
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(core, part) is not None:
            setattr(twin, part, getattr(core, part))
    tokens = [token for _, token in sorted(added.items())]
    for special, run in groupby(tokens, lambda token: token.special):  # each call takes time with all so far
        (twin.add_special_tokens if special else twin.add_tokens)([*run])
    return twin if twin.get_added_tokens_decoder() == added else None
