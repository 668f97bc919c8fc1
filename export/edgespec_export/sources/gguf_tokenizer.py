"""From the tokenizer keys of a GGUF file to a ``tokenizer.json``.

Keys and token types: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Behaviour follows llama.cpp's
``llama-vocab.cpp`` (names of pre-tokenizers, defaults of missing keys). Three differences are intended:

- control tokens are never the result of a merge, so ordinary text cannot spell one;
- SentencePiece takes the leftmost of equal-scored merges, the BPE of ``tokenizers`` the better ranked one:
  this matters only where scores are not unique;
- ``add_eos_token`` is ignored in prompts, because a prompt that ends with EOS cannot be continued.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from edgespec_export.sources.pre_tokenizers import ADD_BOS, CUTS, SAMPLES, WHOLE_PIECES
from edgespec_models.errors import ModelFileError, TokenizerError, UnsupportedModelError
from edgespec_models.families import of_gguf
from edgespec_models.files.facts import Facts
from edgespec_models.schema import shown
from edgespec_models.text.template_files import DEFAULT, NAMED, templates
from edgespec_models.text.tokenizer import MARK, SPACE_SIGN, SpecialTokens
from edgespec_models.text.tokenizer_files import added_token, control_texts, ends_of_generation

Json = dict[str, object]
_KEYS = "tokenizer.ggml."
_LOG = logging.getLogger("edgespec")


class TokenType(IntEnum):
    """The numbers in ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_UNUSED = (TokenType.UNUSED, TokenType.UNDEFINED)
_KINDS = ("gpt2", "llama", "gemma4")
_ENDS = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")
_TO_BYTES: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
# Tokens behind which Phi-3's published tokenizer takes the whitespace, too.
_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def tokenizer_json(metadata: Mapping[str, object], rows: int | None = None) -> str:
    """The text of a ``tokenizer.json`` with the behaviour of the GGUF file.

    Unused and empty tokens are left out: their ids are padding. Text is not normalised, so it is read
    back exactly. Raises ModelFileError if keys are missing, malformed or contradict one another,
    TokenizerError for more tokens than ``rows`` of the embedding, and UnsupportedModelError for unknown kinds
    of tokenizers and pre-tokenizers.
    """
    kind = _kind(metadata)
    vocabulary = _read_vocabulary(metadata)
    if rows is not None and len(vocabulary.texts) > rows:
        raise TokenizerError(
            f"The tokenizer has {len(vocabulary.texts):,} tokens, but the embedding {rows:,} rows. "
            "Download or convert the file again."
        )
    if vocabulary.repeated:
        _warn_of_repeats([vocabulary.texts[id_] for id_ in vocabulary.repeated], "token")
    spec = _byte_level(metadata, vocabulary) if kind == "gpt2" else _sentencepiece(metadata, vocabulary)
    frame: Json = {"version": "1.0", "truncation": None, "padding": None}
    family = of_gguf(metadata.get("general.architecture"))
    strip = kind == "llama" and family is not None and family.takes_space
    body = {"added_tokens": vocabulary.added_tokens(strip_right=strip), "post_processor": None}
    return json.dumps(frame | body | spec, ensure_ascii=False, separators=(",", ":"))


def special_tokens(metadata: Mapping[str, object]) -> SpecialTokens:
    """BOS, and every token that ends generation: by key, and control tokens by well-known text.

    Ids without a token are left out with a warning. Raises as :func:`tokenizer_json` does.
    """
    kind = _kind(metadata)
    vocabulary = _read_vocabulary(metadata)
    sentencepiece = kind == "llama"
    prefixed = kind != "gpt2" or metadata.get("tokenizer.ggml.pre") in ADD_BOS
    size = len(vocabulary.texts)
    for key in _ENDS:
        value = metadata.get(f"{_KEYS}{key}")
        if value is not None and _token_id(metadata, key, size) is None:
            _LOG.warning("no token has the %s%s %s", _KEYS, key, value)
    eos = [_token_id(metadata, "eos_token_id", size, default=2 if sentencepiece else None)]
    eos += [_token_id(metadata, key, size) for key in _ENDS[2:]]
    eos += _ids(metadata, "eos_token_ids", size)
    eos += ends_of_generation(vocabulary.control_id)
    return SpecialTokens(
        bos=_token_id(metadata, "bos_token_id", size, default=1 if sentencepiece else None),
        eos=tuple(dict.fromkeys(token for token in eos if token is not None)),
        add_bos=kind == "gemma4" or _facts(metadata).boolean("add_bos_token", default=prefixed),
        suppressed=_ids(metadata, "suppress_tokens", size),
    )


def chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """The file's chat templates (Jinja source) by name. Raises ModelFileError if a template is no text."""
    key = "tokenizer.chat_template"
    named = {name: metadata.get(f"{key}.{name}") for name in NAMED}
    return templates({DEFAULT: metadata.get(key), **named}, key)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    texts: Sequence[str]
    types: npt.NDArray[np.int64]  # (n_tokens,)
    repeated: Sequence[int]  # ids, unused now, whose text an earlier token has

    def used(self) -> dict[str, int]:
        """Text to id of all tokens that can occur."""
        keep = ~np.isin(self.types, _UNUSED)
        return {text: id_ for id_, text in enumerate(self.texts) if keep[id_] and text}

    def of_type(self, *kinds: TokenType) -> list[int]:
        return [int(id_) for id_ in np.flatnonzero(np.isin(self.types, kinds)) if self.texts[int(id_)]]

    def control_id(self, text: str) -> int | None:
        matches = (id_ for id_ in self.of_type(TokenType.CONTROL) if self.texts[id_] == text)
        return next(matches, None)

    def added_tokens(self, *, strip_right: bool) -> list[Json]:
        """Tokens that are searched in the text first."""
        ids = self.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        typed = set(self.of_type(TokenType.USER_DEFINED))
        tokens = [added_token(id_, self.texts[id_]) | {"special": id_ not in typed} for id_ in ids]
        for token in tokens if strip_right else ():
            token["rstrip"] = token["content"] not in _KEEPS_SPACE
        return tokens


def byte_level_cuts(name: str) -> Json:
    """The part of a ``tokenizer.json`` for the pre-tokenizer ``name``."""
    if name not in CUTS:
        raise UnsupportedModelError(
            f"The pre-tokenizer {name!r} is not known, and another would cut text differently from the "
            f"model's training. Known are {len(CUTS)}, such as {', '.join(SAMPLES)}. Export from the "
            "model's Hugging Face directory, whose tokenizer.json says how to cut."
        )
    cuts: list[Json] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in CUTS[name]
    ]
    return {"type": "Sequence", "pretokenizers": [*cuts, _TO_BYTES]}


def _byte_level(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> Json:
    if metadata.get(f"{_KEYS}pre") is None:
        _LOG.warning(
            "The file lacks tokenizer.ggml.pre, which says how texts are cut: some may become other tokens "
            "than in training. Take a newer conversion, or the model's Hugging Face directory."
        )
    name, tokens = _facts(metadata).text("pre", "default"), vocabulary.used()
    family = of_gguf(metadata.get("general.architecture"))
    if name == "default" and family is not None:
        name = family.cut
    cuts = byte_level_cuts(name)
    model = _bpe(tokens, _merges(metadata, tokens)) | {"ignore_merges": name in WHOLE_PIECES}
    return {"normalizer": None, "pre_tokenizer": cuts, "decoder": _TO_BYTES, "model": model}


def _sentencepiece(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> Json:
    """The model of SentencePiece's kind, which ranks merges by score, or Gemma 4's, which lists them."""
    ranked = _kind(metadata) == "gemma4"
    prefix = not ranked and _facts(metadata).boolean("add_space_prefix", default=True)
    to_sign: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_SIGN}
    to_space: Json = {"type": "Replace", "pattern": {"String": SPACE_SIGN}, "content": " "}
    normalizers = [{"type": "Prepend", "prepend": SPACE_SIGN}] * prefix + [to_sign]
    decoders = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    tokens = vocabulary.used()
    unknown = vocabulary.texts[_token_id(metadata, "unknown_token_id", len(vocabulary.texts), default=0) or 0]
    merges = _merges(metadata, tokens) if ranked else _merges_by_score(metadata, vocabulary)
    model = _bpe(tokens, merges)
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": unknown if unknown in tokens else None}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _bpe(tokens: Mapping[str, int], merges: list[tuple[str, str]]) -> Json:
    return {"type": "BPE", "dropout": None, "unk_token": None, "vocab": tokens, "merges": merges}


def _merges(metadata: Mapping[str, object], tokens: Mapping[str, int]) -> list[tuple[str, str]]:
    """The file's merges, checked: ``tokens`` holds both parts and the whole."""
    merges: list[tuple[str, str]] = []
    listed = _texts(metadata, "tokenizer.ggml.merges")
    texts = list(dict.fromkeys(listed))
    if len(texts) < len(listed):
        _warn_of_repeats([text for text, count in Counter(listed).items() if count > 1], "merge")
    for rank, merge in enumerate(texts):
        # The first character may itself be a space in malformed files, never the separator.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in tokens or right not in tokens or left + right not in tokens:
            raise ModelFileError(f"Merge {rank} of the tokenizer, {merge!r}, is not made of its tokens.")
        merges.append((left, right))
    return merges


def _merges_by_score(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two ordinary tokens into a third, the third with the highest score first.

    SentencePiece merges the adjacent pair whose whole has the highest score. Among the ways to make one
    token, a longer left part goes first, as in the published conversions.
    """
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(vocabulary.texts), kinds="fiu")
    if len(scores) > 1 and np.array_equal(scores, np.arange(len(scores))):
        raise UnsupportedModelError(
            "tokenizer.ggml.scores has the tokens' numbers in place of scores, so texts would become other "
            "tokens than in training. Take llama.cpp's conversion, or the model's Hugging Face directory."
        )
    ordinary = vocabulary.of_type(TokenType.NORMAL)
    texts = {vocabulary.texts[id_] for id_ in ordinary}
    order = np.argsort(-scores[ordinary], kind="stable")
    merges: list[tuple[str, str]] = []
    for position in order:
        whole = vocabulary.texts[ordinary[position]]
        for cut in range(len(whole) - 1, 0, -1):
            left, right = whole[:cut], whole[cut:]
            if left in texts and right in texts:
                merges.append((left, right))
    return merges


def _read_vocabulary(metadata: Mapping[str, object]) -> _Vocabulary:
    texts = _texts(metadata, "tokenizer.ggml.tokens")
    if not texts:
        raise ModelFileError("tokenizer.ggml.tokens is empty.")
    key = "tokenizer.ggml.token_type"
    types = np.full(len(texts), TokenType.NORMAL)
    if key in metadata:
        types = _numbers(metadata, key, len(texts), kinds="iu").astype(types.dtype)
    named = {_token_id(metadata, key, len(texts)) for key in _ENDS}
    control = control_texts(chat_templates(metadata))
    # In some files users may type these, or they are read in pieces.
    for id_ in [id_ for id_, text in enumerate(texts) if id_ in named or text in control]:
        is_mark = MARK.search(texts[id_]) and types[id_] != TokenType.BYTE
        if is_mark or types[id_] == TokenType.USER_DEFINED:
            types[id_] = TokenType.CONTROL
    ids, first = np.flatnonzero(~np.isin(types, _UNUSED)).tolist(), dict[str, int]()
    repeated = [id_ for id_ in ids if texts[id_] and first.setdefault(texts[id_], id_) != id_]
    types[repeated] = TokenType.UNUSED
    return _Vocabulary(texts, types, repeated)


def _warn_of_repeats(texts: Sequence[str], what: str) -> None:
    _LOG.warning("tokenizer.ggml.%ss repeats %s; the first %s of a text counts", what, shown(texts), what)


def _facts(metadata: Mapping[str, object]) -> Facts:
    """The tokenizer's keys."""
    templates_by_key = {key: value for key, value in metadata.items() if key.startswith(_KEYS)}
    return Facts(
        {key.removeprefix(_KEYS): value for key, value in templates_by_key.items()}, "tokenizer.ggml"
    )


def _kind(metadata: Mapping[str, object]) -> str:
    kind = _facts(metadata).text("model")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"The tokenizer is of the kind {kind!r}. Known are those of decoders: 'gpt2' (byte-level BPE), "
            "'llama' (SentencePiece BPE) and 'gemma4' (the same with a list of merges). Use another model."
        )
    return "gemma4" if metadata.get(f"{_KEYS}pre") == "gemma4" else kind  # ollama's files say 'llama'


def _texts(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    values = metadata.get(key)
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise ModelFileError(f"{key} must be a list of texts, but is missing or holds something else.")
    try:
        "\n".join(values).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ModelFileError(f"{key} holds a text that is not valid UTF-8.") from error
    return values


def _numbers(metadata: Mapping[str, object], key: str, count: int, *, kinds: str) -> npt.NDArray[np.float64]:
    """An array of shape ``(count,)`` whose dtype is of one of numpy's ``kinds``."""
    try:
        values = np.asarray(metadata.get(key))
    except ValueError:
        values = np.empty(())
    if values.shape != (count,) or values.dtype.kind not in kinds or np.isnan(values).any():
        raise ModelFileError(f"{key} must hold {count:,} numbers, one per token.")
    return values.astype(np.float64)


def _ids(metadata: Mapping[str, object], name: str, size: int) -> tuple[int, ...]:
    """The ids in a list, without those that no token has, which llama.cpp ignores, too."""
    key = f"{_KEYS}{name}"
    ids = np.asarray(metadata.get(key, np.empty(0, np.int32)))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ModelFileError(f"{key} is {shown(ids)}, but must be a list of ids.")
    return tuple(dict.fromkeys(id_ for id_ in ids.tolist() if 0 <= id_ < size))


def _token_id(
    metadata: Mapping[str, object], name: str, size: int, *, default: int | None = None
) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ModelFileError(f"tokenizer.ggml.{name} is {value!r}, but must be an id in 0 .. {size - 1}.")
    return next((int(id_) for id_ in (value, default) if id_ is not None and 0 <= id_ < size), None)
