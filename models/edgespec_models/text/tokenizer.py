"""A model's tokenizer: text to token ids, and the exact bytes behind every id.

Two kinds of vocabulary are read; the decoder of a ``tokenizer.json`` tells which:

- byte-level BPE, whose token strings spell bytes in GPT-2's alphabet (Radford et al. 2019, ``encoder.py``);
- SentencePiece-style BPE or Unigram with byte fallback, whose strings spell spaces as U+2581 and single
  bytes as ``<0xNN>`` (Kudo and Richardson 2018).

Work between vocabularies goes by bytes, never by decoded strings: a token may hold a part of a UTF-8
character, and only its bytes are the same to every tokenizer.
"""

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from codecs import charmap_encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Annotated, Any, AnyStr

from edgespec_models.errors import TokenizerError
from edgespec_models.schema import within
from edgespec_models.storage import read_bytes
from edgespec_models.text.encoder import Encoder

SPACE_SIGN = "\u2581"
INVALID_BYTES = "\udc80-\udcff"
_MOST_TOKENS = 1 << 24
_WORD, _WORDS = 24, 4096  # bytes of a text that is kept with its tokens, and the most of them
_Id = Annotated[int, within(0)]
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_FIM = re.compile(r"<[|｜]?fim.\w+[|｜]?>|\[(PREFIX|SUFFIX|MIDDLE)\]|<\|?(repo|file)_?(name|sep\w*)\|?>")
"""Control tokens to fill in the middle, which are not special in some files."""
MARK = re.compile(r"[<\[]\S+[>\]]")
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = (byte for byte in range(256) if byte not in _VISIBLE)
_ALPHABET = {byte: byte for byte in _VISIBLE} | {256 + i: byte for i, byte in enumerate(_HIDDEN)}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of the tokens that a model's runtime needs.

    ``eos`` holds every token that ends generation. ``add_bos`` says whether a prompt starts with ``bos``.
    ``suppressed`` are never written, ``suppressed_first`` never first in an answer, and the sequences in
    ``bad_words`` are never completed.
    """

    bos: _Id | None
    eos: tuple[_Id, ...]
    add_bos: bool
    suppressed: tuple[_Id, ...] = ()
    suppressed_first: tuple[_Id, ...] = ()
    bad_words: tuple[tuple[_Id, ...], ...] = ()


class Tokenizer:
    """A vocabulary with its encoder. Safe to share between threads.

    ``vocab_size``, the rows of the LM head, may exceed the tokenizer's ids; padding ids contribute no bytes.
    Every id lies below it.
    """

    def __init__(self, encoder: Encoder, *, vocab_size: int | None = None) -> None:
        self._encoder = encoder
        self._byte_level = _is_byte_level(encoder)
        own, added = encoder.vocabulary(), encoder.added_tokens()
        self._specials = {t: id_ for id_, (t, special) in added.items() if special or _FIM.fullmatch(t)}
        ordinary = {t: id_ for id_, (t, _) in added.items() if t not in self._specials}
        self._marks = {text: id_ for text, id_ in ordinary.items() if MARK.fullmatch(text)}
        unknown = encoder.unknown_token()
        self._unknown = encoder.id_of(unknown, added=False) if unknown else None
        if unknown and self._unknown is None:
            raise TokenizerError(f"The tokenizer.json names an unknown token {unknown!r} that it lacks.")
        if unknown and self._unknown is not None:
            self._specials[unknown] = self._unknown
        self._special_ids = frozenset(self._specials.values())
        ids = 1 + max((*own.values(), *added), default=-1)
        if ids == 0:
            raise TokenizerError("The tokenizer has no tokens. Export or download the model again.")
        if vocab_size is not None and ids > vocab_size:
            raise TokenizerError(
                f"The tokenizer has ids up to {ids - 1}, but the model's LM head has {vocab_size} rows. "
                "Use the tokenizer that belongs to the model."
            )
        self.vocab_size = ids if vocab_size is None else vocab_size
        if self.vocab_size > _MOST_TOKENS:  # there are tables with an entry for each
            raise TokenizerError(
                f"The vocabulary has {self.vocab_size:,} tokens; edgespec reads up to {_MOST_TOKENS:,}. "
                "Use the tokenizer that belongs to the model."
            )
        self._bytes = self._table(own, added)

    @classmethod
    def from_file(cls, path: Path, *, vocab_size: int | None = None) -> "Tokenizer":
        """Read a ``tokenizer.json``.

        Raises TokenizerError if the file is missing, damaged, of an unknown kind, or has ids of
        ``vocab_size`` and more.
        """
        try:
            text = read_bytes(path).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"Cannot read the tokenizer {path}: {error}") from error
        try:
            return cls.from_json(text, vocab_size=vocab_size)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, text: str, *, vocab_size: int | None = None) -> "Tokenizer":
        """Read the text of a ``tokenizer.json``; raises as :meth:`from_file` does."""
        return cls(Encoder(text), vocab_size=vocab_size)

    def with_special(self, texts: Collection[str]) -> "Tokenizer":
        """The tokenizer in which the tokens with these texts are special; it may be this one."""
        lacking = [t for t in texts if t not in self._specials and self._encoder.id_of(t) is not None]
        size = self.vocab_size
        return Tokenizer.from_json(self._encoder.json(lacking), vocab_size=size) if lacking else self

    def json(self) -> str:
        """The text of a ``tokenizer.json``."""
        return self._encoder.json()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of ``text``, without a BOS token.

        With ``special`` the text of a special token becomes that token, as in the output of a chat template.
        Without it, the text becomes ordinary tokens, so a user's text cannot forge control tokens. Added
        tokens that are not special (Gemma's runs of spaces, for one) match either way. Characters that the
        vocabulary cannot spell become its unknown token or, where it has none, are dropped, as in the model's
        own tokenizer. Raises RequestError if ``text`` holds a lone surrogate, and TokenizerError if the
        vocabulary lacks a byte of a special token's text, or the tokenizers library fails.
        """
        ids = self._encoder.ids(text, special=special)
        return ids if special else self._without_specials(ids)

    def encode_marked(self, text: str, spelled: frozenset[int], marks: frozenset[int]) -> list[int]:
        """Encode with special tokens, except where their text has a character at one of ``spelled``.

        Such text becomes ordinary tokens, and so does the text of added tokens with the ids ``marks``. Raises
        as :meth:`encode` does.
        """
        # Text before ``begin`` is encoded; ``end`` is the end of the last special token that stays special.
        ids, begin, end = list[int](), 0, 0
        cuts: list[int] | None = None  # behind ``end``: within marks that are spelled; None if nothing is
        spans = [*self.special_spans(text, marks), (len(text), len(text), None)] if spelled else []
        for start, stop, id_ in spans:
            if not spelled.isdisjoint(range(start, stop)):
                cuts = [*(cuts or ()), *(() if id_ in self._special_ids else ((start + stop) // 2,))]
            elif id_ is None or id_ in self._special_ids:
                if cuts is not None:
                    ids += self.encode(text[begin:end], special=True)
                    ids += self._ordinary([text[a:b] for a, b in pairwise((end, *cuts, start))], end > 0)
                    begin, cuts = start, None
                end = stop
        return ids + self.encode(text[begin:], special=True)

    def _ordinary(self, parts: Sequence[str], is_behind: bool) -> list[int]:
        """Ordinary tokens of a text, perhaps behind a special token; no token spans two parts."""
        begun = self.encode(parts[0]) if not is_behind or self._begins_anew else self._exactly(parts[0])
        return [*begun, *chain.from_iterable(map(self._exactly, parts[1:]))]

    def _exactly(self, text: str) -> list[int]:
        return self.encode_bytes(text.encode("utf-8"))

    @cached_property
    def _begins_anew(self) -> bool:
        """Whether a text behind a special token begins like any text, perhaps with a space."""
        mark = next((text for text, id_ in self._specials.items() if id_ != self._unknown), "")
        return self._encoder.ids(f"{mark}a", special=True)[1:] == self._encoder.ids("a", special=False)

    def begins_with(self, token: int) -> bool:
        """Whether the file's own template puts ``token`` before a text. Raises TokenizerError if it fails."""
        return self._encoder.framed("a")[:1] == [token]

    def ending(self) -> int | None:
        """The control token that the file's own template puts behind a text.

        Raises as :meth:`begins_with` does.
        """
        last = self._encoder.framed("a")[-1:]
        return next((id_ for id_ in last if id_ in self._special_ids), None)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids whose bytes are exactly ``data``: any bytes, also invalid or incomplete UTF-8.

        Valid stretches are encoded as text with nothing added, dropped or normalised; the rest becomes
        byte tokens. ``bytes_of(encode_bytes(data)) == data``, always. Raises TokenizerError if the vocabulary
        lacks a byte of ``data``, or the tokenizers library fails.
        """
        return list(self._encoded_word(data)) if len(data) <= _WORD else self._encoded(data)

    @cached_property
    def _encoded_word(self) -> Callable[[bytes], tuple[int, ...]]:
        # Drafts are encoded word by word, and most words come again.
        return lru_cache(_WORDS)(lambda data: tuple(self._encoded(data)))

    def _encoded(self, data: bytes) -> list[int]:
        ids = self._encode_stretches(self._encoder, data)
        if self.bytes_of(ids) != data:
            ids = self._encode_stretches(self._exact_encoder, data)
        if self.bytes_of(ids) != data:
            ids = self._spell(data)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of ``token``: empty for padding ids, the token's text for special ones.

        Raises TokenizerError if the id is not in 0 .. vocab_size - 1.
        """
        self._check_ids((token,))
        return self._bytes[token]

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        """The bytes of several tokens, joined; raises as :meth:`token_bytes` does."""
        tokens = list(tokens)
        self._check_ids(tokens)
        return b"".join([self._bytes[token] for token in tokens])

    def ends(self, tokens: Sequence[int]) -> list[int]:
        """The number of bytes up to the end of each token; raises as :meth:`token_bytes` does."""
        self._check_ids(tokens)
        return list(accumulate(len(self._bytes[token]) for token in tokens))

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ``tokens``; invalid UTF-8 becomes U+FFFD.

        Nothing is stripped: a space that the vocabulary puts before a text stays, because ``tokens`` may
        continue another text.
        """
        if skip_special:
            tokens = [token for token in tokens if token not in self._special_ids]
        return self.bytes_of(tokens).decode("utf-8", errors="replace")

    def is_special(self, token: int) -> bool:
        """Whether ``token`` is a control token, which contributes no text."""
        return token in self._special_ids

    def special_id(self, text: str) -> int | None:
        """The special token written ``text``, such as ``<|im_end|>``."""
        return self._specials.get(text)

    @property
    def fim_ids(self) -> dict[str, int]:
        """The special tokens to fill in the middle, and the ones around files, by their texts."""
        return {text: id_ for text, id_ in self._specials.items() if _FIM.fullmatch(text)}

    def special_spans(self, text: str, marks: frozenset[int] = frozenset()) -> list[tuple[int, int, int]]:
        """Start, stop (characters) and id of special tokens and the added ``marks`` in ``text``."""
        return [span for span in self._encoder.spans(text, self._special_ids | marks) if span[0] < span[1]]

    def marks_in(self, template: str) -> frozenset[int]:
        """Added tokens that are not special and whose text a chat template holds, such as ``<think>``."""
        return frozenset(id_ for text, id_ in self._marks.items() if text in template)

    def id_of_bytes(self, data: bytes) -> int | None:
        """The ordinary token with exactly these bytes; a byte token only if there is no other."""
        return self._ids_by_bytes.get(data)

    def spelling(self, data: bytes) -> list[int]:
        """Ordinary tokens that may begin a text which begins with ``data``, of one byte or more."""
        ids, known, begin = self._ids_by_bytes, self._sorted_bytes, bisect_left(self._sorted_bytes, data)
        end = bisect_right(known, data, begin, key=lambda known_part: known_part[: len(data)])
        parts = (data[:length] for length in range(1, len(data)))
        return [ids[part] for part in (*parts, *known[begin:end]) if part in ids]

    def matches(self, other: "Tokenizer") -> bool:
        """Whether both give every id the same bytes and the same role.

        A drafter that matches its target needs no bridge between vocabularies. Padding rows at the end
        may differ in number; an id beyond the smaller vocabulary must not be proposed.
        """
        return self._special_ids == other._special_ids and self._used() == other._used()

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of bytes and roles of all ids without padding, which :meth:`matches` compares."""
        table = self._used()
        hasher = hashlib.sha256(b"edgespec vocabulary 1\0")
        hasher.update(",".join(str(len(data)) for data in table).encode("ascii") + b"\0")
        hasher.update(b"".join(table))
        hasher.update(",".join(str(id_) for id_ in sorted(self._special_ids)).encode("ascii"))
        return hasher.hexdigest()

    def _used(self) -> list[bytes]:
        """The bytes of all ids but padding at the end."""
        end = self.vocab_size
        while end and not self._bytes[end - 1]:
            end -= 1
        return self._bytes[:end]

    def _table(self, own: Mapping[str, int], added: Mapping[int, tuple[str, bool]]) -> list[bytes]:
        """The bytes of every id, of the model's ``own`` tokens and of ``added`` ones."""
        spell = _byte_level_bytes if self._byte_level else _sentencepiece_bytes
        table = [b""] * self.vocab_size
        for text, id_ in own.items():
            table[id_] = spell(text)
        for id_, (text, special) in added.items():
            spaced = text if special or self._byte_level else text.replace(SPACE_SIGN, " ")
            table[id_] = spaced.encode("utf-8")
        return table

    @cached_property
    def _byte_tokens(self) -> frozenset[int]:
        """The ``<0xNN>`` tokens."""
        if self._byte_level:
            return frozenset()
        ids = (self._encoder.id_of(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(id_ for id_ in ids if id_ is not None)

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        # The last assignment wins: byte tokens first, then ordinary tokens from the highest id down.
        last = len(self._bytes) - 1
        ids = {self._bytes[id_]: id_ for id_ in self._byte_tokens}
        skip = self._special_ids | self._byte_tokens
        ids.update((data, last - i) for i, data in enumerate(reversed(self._bytes)) if last - i not in skip)
        ids.pop(b"", None)
        return ids

    @cached_property
    def _sorted_bytes(self) -> list[bytes]:
        return sorted(self._ids_by_bytes)

    @cached_property
    def _ids_of_single_bytes(self) -> list[int | None]:
        ids = [self.id_of_bytes(bytes([byte])) for byte in range(256)]
        for id_ in self._byte_tokens:
            ids[self._bytes[id_][0]] = id_
        return ids

    @cached_property
    def _exact_encoder(self) -> Encoder:
        """The encoder without steps that change a text: prefix spaces and normalisation."""
        spec = self._encoder.spec()
        spec["normalizer"] = _space_sign_only(spec.get("normalizer"))
        _remove_prefix_space(spec.get("pre_tokenizer"))
        return Encoder(json.dumps(spec))

    def _without_specials(self, ids: list[int]) -> list[int]:
        """Spell out special tokens that merges can reach: some vocabularies have such merges."""
        spelled = self._special_ids - {self._unknown}
        if spelled.isdisjoint(ids):
            return ids
        parts = (self._spell(self._bytes[id_]) if id_ in spelled else (id_,) for id_ in ids)
        return [id_ for part in parts for id_ in part]

    def _encode_stretches(self, encoder: Encoder, data: bytes) -> list[int]:
        ids: list[int] = []
        for stretch in self._stretches(data):
            if isinstance(stretch, str):
                ids += self._without_specials(encoder.ids(stretch, special=False))
            else:
                ids += self._spell(stretch)
        return ids

    def _stretches(self, data: bytes) -> Iterator[str | bytes]:
        """Cut ``data`` into text the encoder reads back exactly, and bytes to be spelled."""
        # Decoding turns each byte that is not UTF-8 into a lone surrogate and back.
        # A literal U+2581 would come back as a space.
        spelled = INVALID_BYTES if self._byte_level else f"{INVALID_BYTES}{SPACE_SIGN}"
        parts = re.split(f"([{spelled}]+)", data.decode("utf-8", errors="surrogateescape"))
        for number, part in enumerate(parts):
            if part:
                yield part.encode("utf-8", errors="surrogateescape") if number % 2 else part

    def _spell(self, data: bytes) -> list[int]:
        """One token for each byte."""
        ids: list[int] = []
        for byte in data:
            id_ = self._ids_of_single_bytes[byte]
            if id_ is None:
                raise TokenizerError(
                    f"The vocabulary has no token for the byte 0x{byte:02X}, so it cannot spell this text."
                )
            ids.append(id_)
        return ids

    def _check_ids(self, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            bad = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise TokenizerError(f"Token id {bad} is not in 0 .. {self.vocab_size - 1}.")


def _is_byte_level(encoder: Encoder) -> bool:
    """Tell byte-level BPE (true) from SentencePiece-style models (false); refuse anything else."""
    model, steps = encoder.model, list(_steps(encoder.decoder(), "decoders"))
    kinds = [step["type"] for step in steps]
    if model == "BPE" and "ByteLevel" in kinds:
        return True
    unescape = {"type": "Replace", "pattern": {"String": SPACE_SIGN}, "content": " "}
    spaces = unescape in steps or "Metaspace" in kinds
    if model in ("BPE", "Unigram") and "ByteFallback" in kinds and spaces:
        return False
    raise TokenizerError(
        f"The tokenizer is a {model} model with the decoder {' + '.join(kinds) or 'none'}. "
        "Readable are byte-level BPE (decoder ByteLevel) and SentencePiece-style BPE or Unigram with byte "
        "fallback (decoders Replace or Metaspace, and ByteFallback)."
    )


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """The parts of a possibly nested Sequence of decoders, normalizers or pre-tokenizers."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in part[name]:
            yield from _steps(inner, name)
    else:
        yield dict(part)


def _space_sign_only(normalizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keep only the replacement of spaces by U+2581, which decoding undoes."""
    kept = [
        step
        for step in _steps(normalizer, "normalizers")
        if step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == SPACE_SIGN
    ]
    return {"type": "Sequence", "normalizers": kept}


def _remove_prefix_space(pre_tokenizer: dict[str, Any] | None) -> None:
    """Switch off, in place, every step that puts a space before the text."""
    if pre_tokenizer is None:
        return
    for inner in pre_tokenizer.get("pretokenizers", ()):
        _remove_prefix_space(inner)
    if pre_tokenizer["type"] == "ByteLevel":
        pre_tokenizer["add_prefix_space"] = False
    if pre_tokenizer["type"] == "Metaspace":
        pre_tokenizer["prepend_scheme"] = "never"


def _byte_level_bytes(text: str) -> bytes:
    """The bytes of a text in GPT-2's alphabet; the UTF-8 bytes of any other text."""
    try:
        return charmap_encode(text, "strict", _ALPHABET)[0]
    except UnicodeEncodeError:
        return text.encode("utf-8")


def _sentencepiece_bytes(text: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(text) if text.startswith("<0x") else None
    if byte:
        return bytes([int(byte[1], 16)])
    return text.replace(SPACE_SIGN, " ").encode("utf-8")


def begun_at_end(data: AnyStr, tag: AnyStr) -> int:
    """The length of the longest end of ``data`` that is a proper beginning of ``tag``."""
    lengths = range(min(len(tag) - 1, len(data)), 0, -1)
    return next((length for length in lengths if data.endswith(tag[:length])), 0)
