"""Tiny tokenizers, trained on the spot, and the GGUF metadata that describes them."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: TID251 - trains some

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "the drafter proposes, the target verifies: the output stays the same",
    "def add(a, b):\n    return a + b\n",
    "naïve café, 日本語 and 😀 emoji; 1234 5678",
    "  two  spaces   three    four",
)
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
SPACE_SIGN = "\u2581"
CUT = "¦"


def cut_by(pre_tokenizer: object, texts: Sequence[str]) -> list[str]:
    """The texts with a mark at every cut of that part of a ``tokenizer.json``."""
    stated = json.loads(Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": pre_tokenizer}
    cutter = Tokenizer.from_str(json.dumps(stated)).pre_tokenizer
    spans = [[span for _, span in cutter.pre_tokenize_str(text)] for text in texts]
    return [CUT.join(text[slice(*span)] for span in found) for text, found in zip(texts, spans, strict=True)]


def byte_level_json(
    *, size: int = 400, specials: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
) -> str:
    """A byte-level BPE tokenizer.json; ``<tool>`` is an added token that is not special."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(specials), show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens([AddedToken("<tool>", normalized=False)])
    return str(core.to_str())


def sentencepiece_json(*, size: int = 500, prefix: bool = False) -> str:
    """A SentencePiece-like BPE tokenizer.json with byte fallback; two spaces are an added token."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    to_sign = normalizers.Replace(" ", SPACE_SIGN)
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE_SIGN), to_sign] if prefix else [to_sign]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_SIGN, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<bos>", "<eos>", *BYTE_TOKENS], show_progress=False
    )
    words = [word for text in CORPUS for word in f" {text}".replace(" ", f"\n{SPACE_SIGN}").split("\n")]
    core.train_from_iterator(words, trainer)
    core.add_tokens([AddedToken("  ", normalized=False)])
    spec: dict[str, Any] = json.loads(core.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in BYTE_TOKENS]
    return json.dumps(spec)


def gguf_metadata(tokenizer_json: str) -> dict[str, object]:
    """The ``tokenizer.ggml`` keys a converter would write for one of the tokenizers above."""
    spec: dict[str, Any] = json.loads(tokenizer_json)
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    ids = {**vocabulary, **{token["content"]: token["id"] for token in spec["added_tokens"]}}
    texts = sorted(ids, key=ids.__getitem__)
    special = {token["content"]: token["special"] for token in spec["added_tokens"]}
    types = [6 if text in BYTE_TOKENS else {None: 1, True: 3, False: 4}[special.get(text)] for text in texts]
    metadata: dict[str, object] = {
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if not spec["model"]["byte_fallback"]:
        merges = [" ".join(merge) for merge in spec["model"]["merges"]]
        return metadata | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.merges": merges,
        }
    ranks = {"".join(merge): rank for rank, merge in enumerate(spec["model"]["merges"])}
    scores = [-float(ranks.get(text, len(ranks) + id_)) for id_, text in enumerate(texts)]
    return metadata | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.add_space_prefix": len(spec["normalizer"]["normalizers"]) > 1,
    }


def gemma4_metadata(*, size: int = 500) -> dict[str, object]:
    """Those of a SentencePiece-like tokenizer that lists its merges."""
    text = sentencepiece_json(size=size)
    merges = [" ".join(merge) for merge in json.loads(text)["model"]["merges"]]
    metadata = gguf_metadata(text) | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    return {key: value for key, value in metadata.items() if key != "tokenizer.ggml.scores"}
