"""Tiny rerankers: of Qwen3-Reranker's kind, which answers yes or no, and with a head of one row.

Needs what ``tests/kit/hf.py`` needs, for ``tools/make_hf_golden.py``.
"""

import json
from pathlib import Path
from typing import Any

from tests.kit.hf import config_of, weights, write_directory
from tests.kit.tokenizers import byte_level_json

QUERY = "Where does the fox jump?"
DOCUMENTS = (
    "the quick brown fox jumps over the lazy dog",
    "def add(a, b):\n    return a + b\n",
    "café, 日本語",
)
KINDS = {"words": "Tiny-Qwen3-Reranker", "head": "ranks"}
"""Names of their directories, by which the first kind is known."""
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PAIR = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"


def tokenizer_json() -> str:
    """A tokenizer with the words yes and no, which puts control tokens around two texts."""
    spec: dict[str, Any] = json.loads(byte_level_json(size=290))
    merges = [["y", "e"], ["ye", "s"], ["n", "o"]]
    spec["model"]["merges"] = [*merges, *(pair for pair in spec["model"]["merges"] if pair not in merges)]
    taken = {token["id"] for token in spec["added_tokens"]}
    for pair in merges:
        vocabulary = spec["model"]["vocab"]
        vocabulary.setdefault("".join(pair), max({*vocabulary.values()} | taken) + 1)
    mark = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first],
        "pair": [first, mark, second, mark],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}},
    }
    return json.dumps(spec)


def write_reranker(folder: Path, kind: str) -> Path:
    """A directory of one of KINDS in ``folder``."""
    config = config_of("qwen3") | {"max_position_embeddings": 1024, "tie_word_embeddings": kind == "head"}
    tensors = weights(config)
    if kind == "head":
        config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
        tensors.pop("lm_head.weight", None)
        tensors["score.weight"] = tensors["model.layers.1.mlp.down_proj.weight"][:1, :64]
    path = write_directory(folder / KINDS[kind], config, tensors)
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return path
