"""From SentencePiece's ``tokenizer.model`` to a ``tokenizer.json``.

The file is a protocol buffer (github.com/google/sentencepiece, ``sentencepiece_model.proto``) whose pieces
have the types and scores that GGUF files repeat, so BPE models go the way of those
(:mod:`edgespec_export.sources.gguf_tokenizer`). Unigram models keep their scores (Kudo 2018). A normalization
that the model was trained with is kept.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec_export.sources.gguf_tokenizer import TokenType, tokenizer_json
from edgespec_models.errors import EdgespecError, ModelFileError, UnsupportedModelError

__all__ = ["to_tokenizer_json"]

_UNIGRAM, _BPE = 1, 2
_NEVER = -1e9  # the score of a piece that no text contains


def to_tokenizer_json(path: Path, added: Mapping[int, tuple[str, bool]]) -> str:
    """Convert the model ``path``.

    Args:
        path: the ``tokenizer.model``.
        added: tokens beside it: id to text and whether it is a control token. Ids the model has already
            keep what it says of them.

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
    _add_tokens(spec, {id_: entry for id_, entry in added.items() if id_ >= len(pieces)})
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":"))


def _read(path: Path) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise EdgespecError(
            f"reading {path.name} needs {error.name}, which is not installed: pip install 'edgespec[export]'"
        ) from error
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
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
    """What the model does to a text before the spaces become signs."""
    steps: list[dict[str, Any]] = []
    if normalizer.precompiled_charsmap:
        charsmap = base64.b64encode(normalizer.precompiled_charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normalizer.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    spec["normalizer"]["normalizers"][:0] = steps


def _add_tokens(spec: dict[str, Any], added: Mapping[int, tuple[str, bool]]) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] += [
        {"id": id_, "content": text, **flags, "special": special}
        for id_, (text, special) in sorted(added.items())
    ]
