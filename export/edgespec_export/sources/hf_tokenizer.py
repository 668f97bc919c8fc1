"""The tokenizer, special tokens and chat template of a Hugging Face directory.

Without a ``tokenizer.json`` SentencePiece's ``tokenizer.model`` is converted: a protocol buffer
(github.com/google/sentencepiece, ``sentencepiece_model.proto``) whose pieces have the types and scores that
GGUF files repeat, so BPE models are converted like those (:mod:`edgespec_export.sources.gguf_tokenizer`).
Unigram models keep their scores (Kudo 2018), and every model the normalization that it was trained with.
Added and special tokens and the chat template are read by :mod:`edgespec_models.text.tokenizer_files`.
"""

import base64
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec_export.sources.gguf_tokenizer import TokenType, tokenizer_json
from edgespec_models.errors import ModelFileError, TokenizerError, UnsupportedModelError, require
from edgespec_models.files.facts import Facts
from edgespec_models.files.impostors import refuse_impostor
from edgespec_models.schema import read_text
from edgespec_models.storage import read_bytes
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_models.text.tokenizer_files import TokenizerFiles

_TOKENIZER, _SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_UNIGRAM, _BPE = 1, 2
_WAYS_OUT = {
    "tekken.json": ", only tekken.json, which edgespec does not read. Use a repository of the model with "
    f"{_TOKENIZER}, or a GGUF file.",
    "merges.txt": ", only vocab.json and merges.txt. Convert them: transformers' AutoTokenizer"
    f".from_pretrained(DIR).save_pretrained(DIR) writes {_TOKENIZER}.",
}
"""Other files of a directory, and the remedy."""
_NEVER = -1e9  # a score for pieces that no text contains


class HFTokenizer:
    """The tokenizer of a directory.

    The tokenizer may have fewer tokens than ``vocab_size``, the rows of the LM head.
    """

    def __init__(self, folder: Path, model: Facts, vocab_size: int) -> None:
        self._folder = folder
        self._beside = TokenizerFiles(folder, model, vocab_size)
        self.chat_templates, self.generation = self._beside.chat_templates, self._beside.generation

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that may be there."""
        names = (_TOKENIZER, _SENTENCEPIECE)
        return (*(self._folder / name for name in names), *self._beside.paths)

    def json(self) -> str:
        """The text of a ``tokenizer.json`` that edgespec can read.

        Raises:
            ModelFileError: there is no tokenizer, or it is damaged.
            TokenizerError: it is of an unknown kind, or has more tokens than the model has rows.
        """
        return self._read[0]

    def added(self) -> dict[str, int]:
        """The ids of added tokens, special ones among them; raises as :meth:`json` does."""
        return {token["content"]: token["id"] for token in json.loads(self.json()).get("added_tokens", [])}

    @cached_property
    def _read(self) -> tuple[str, Tokenizer]:
        where = self._folder / _TOKENIZER
        if where.is_file():
            text = read_text(where, ModelFileError, "Download or copy it again")
        elif (self._folder / _SENTENCEPIECE).is_file():
            text = to_tokenizer_json(self._folder / _SENTENCEPIECE)
        else:
            others = (name for name in _WAYS_OUT if (self._folder / name).is_file())
            raise ModelFileError(
                f"{self._folder} has neither {_TOKENIZER} nor {_SENTENCEPIECE}"
                f"{_WAYS_OUT.get(next(others, ''), '. Download one of them too.')}"
            )
        try:
            return self._beside.complete(text)
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}") from error

    def special_tokens(self) -> SpecialTokens:
        """The special tokens.

        Raises as :meth:`json` does, and ModelFileError if ids are malformed or out of range.
        """
        return self._beside.special_tokens(self._read[1])

    def ending(self) -> int | None:
        """The token behind a text that becomes a vector, or None. Raises as :attr:`json` does."""
        end = self._read[1].ending()
        if end is None and self._beside.config.boolean("add_eos_token", default=False):
            end = next(iter(self.special_tokens().eos), None)
        return end


def to_tokenizer_json(path: Path) -> str:
    """Convert the SentencePiece model ``path``.

    Raises:
        ModelFileError: damaged.
        UnsupportedModelError: neither BPE nor Unigram, or without byte fallback.
        EdgespecError: the ``export`` extra is not installed.
    """
    model = _read(path)
    kind, pieces = model.trainer_spec.model_type, model.pieces
    if kind not in (_UNIGRAM, _BPE) or model.trainer_spec.treat_whitespace_as_suffix:
        raise UnsupportedModelError(
            f"{path} is a SentencePiece model of the type {kind}, or with spaces behind words; edgespec "
            "converts BPE and Unigram with spaces before words. Use the model's tokenizer.json."
        )
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in pieces],
        "tokenizer.ggml.scores": [float(piece.score) for piece in pieces],
        "tokenizer.ggml.add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "tokenizer.ggml.unknown_token_id": model.trainer_spec.unk_id,
    }
    spec: dict[str, Any] = json.loads(tokenizer_json(metadata))
    if kind == _UNIGRAM:
        spec["model"] = _unigram(pieces, model.trainer_spec.unk_id)
    _add_normalization(spec, model.normalizer_spec)
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":"))


def _read(path: Path) -> Any:
    require(f"reading {path.name}", "export", "google.protobuf", "sentencepiece")
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    refuse_impostor(path)
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(read_bytes(path))
    except (OSError, DecodeError) as error:
        raise ModelFileError(f"cannot read {path}: {error}. Download or copy it again.") from error
    if not model.pieces:
        raise ModelFileError(f"{path} has no tokens. Download or copy it again.")
    return model


def _unigram(pieces: Any, unknown: int) -> dict[str, object]:
    ordinary = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE)
    vocabulary = [[piece.piece, piece.score if piece.type in ordinary else _NEVER] for piece in pieces]
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": True}


def _add_normalization(spec: dict[str, Any], normalizer: Any) -> None:
    """Add the model's changes of a text before spaces become signs."""
    steps: list[dict[str, Any]] = []
    if normalizer.precompiled_charsmap:
        charsmap = base64.b64encode(normalizer.precompiled_charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normalizer.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    spec["normalizer"]["normalizers"][:0] = steps
