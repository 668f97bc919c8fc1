"""Tiny SentencePiece models, trained on the spot."""

import io
from functools import lru_cache

import sentencepiece

from tests.kit.tokenizers import CORPUS


@lru_cache
def trained(kind: str, rule: str = "identity", *, prefix: bool = True, extra: bool = False) -> bytes:
    """A SentencePiece model; ``extra`` removes superfluous spaces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((*CORPUS, "a < b > c / d") * 4),  # what control tokens are spelled with
        model_writer=model,
        model_type=kind,
        vocab_size=318,
        byte_fallback=True,
        normalization_rule_name=rule,
        remove_extra_whitespaces=extra,
        add_dummy_prefix=prefix,
        user_defined_symbols=["<sep>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()
