"""Targets: the files of a checkpoint that an export reads."""

import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgespec_export.bundle_files import write_texts
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.errors import ModelFileError, TokenizerError, UnsupportedModelError, naming
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.tokenizer import Tokenizer
from tools.fuzz.forms import GGUF, JSON
from tools.fuzz.rules import Rule, Target, only, table, untouched, write_files, write_with_hole
from tools.fuzz.vocabularies import few_tokens, use_tokenizer

__all__ = ["TARGETS"]

_ERRORS = (ModelFileError, UnsupportedModelError, TokenizerError)
_TEXTS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "added_tokens.json",
)
_WEIGHTS = ("model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_INDEX = "model.safetensors.index.json"
_FILES = (*_TEXTS, *_WEIGHTS, _INDEX, "chat_template.jinja")
_TOKENS = 40  # of the vocabulary in GGUF files


def _read_all(checkpoint: Checkpoint, out: Path) -> None:
    """All that an export reads of facts and tokenizer, and a row of every tensor."""
    special, template = checkpoint.special_tokens(), checkpoint.chat_template()
    write_texts(checkpoint, out)
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json(), vocab_size=checkpoint.config.vocab_size)
    assert all(id_ < tokenizer.vocab_size for id_ in (*special.eos, special.bos or 0))
    use_tokenizer(tokenizer, "a b")
    if template is not None:
        ChatTemplate(template)
    for name in checkpoint.tensors:
        checkpoint.values(name, 0, 1)
    assert checkpoint.model_name
    assert checkpoint.files


def _gguf(folder: Path) -> Rule:
    path = folder / "in" / "m.gguf"
    path.parent.mkdir()

    def rule(data: bytes) -> None:
        write_with_hole(path, data)
        with (
            untouched(path.parent),
            only(*_ERRORS, names=path.name),
            naming(path),
            GGUFCheckpoint(path) as checkpoint,
        ):
            _read_all(checkpoint, folder)

    return rule


def _gguf_seeds() -> list[bytes]:
    from tests.gguf_for_tests import ARCHITECTURES, tiny_gguf

    seeds = []
    for architecture in ARCHITECTURES:
        for kind in ("sentencepiece", "bytes"):
            model = tiny_gguf(architecture, "Q8_0", layers=1)
            model.metadata |= _few_tokens(kind) | {"tokenizer.chat_template": "{{ messages[0].content }}"}
            model.tensors = {
                n: (k, raw if "embd" not in n and n != "output.weight" else raw[:_TOKENS])
                for n, (k, raw) in model.tensors.items()
            }
            seeds.append(_written(model))
    return seeds


def _few_tokens(kind: str) -> dict[str, object]:
    """The keys of a tokenizer of forty tokens."""
    letters = ["<unk>", "<bos>", "<|im_end|>", *(chr(97 + i) for i in range(24))]
    words = ["ab", "abc", "ca", "cab", "de", "\u2581", "\u2581a", "<tool>", "fg", "gh", "", "hi", "ij"]
    facts: dict[str, object] = {
        "tokenizer.ggml.tokens": [*letters, *words],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 24, *[1] * 7, 4, 1, 1, 5, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    if kind == "bytes":
        merges = ["a b", "ab c", "c a", "c ab", "d e", "f g", "g h", "h i", "i j"]
        return facts | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.merges": merges,
        }
    scores = [-float(i) for i in range(_TOKENS)]
    return facts | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.add_space_prefix": True,
    }


def _written(model: Any) -> bytes:
    """The header of a GGUF file."""
    with tempfile.TemporaryDirectory() as folder:
        data = model.write(Path(folder) / "m.gguf").read_bytes()
    return GGUF.write(GGUF.read(data))


def _safetensors(folder: Path) -> Rule:
    """The input is a folder: what its files are."""
    path = folder / "in" / "fuzzed-model"
    path.mkdir(parents=True)

    def rule(data: bytes) -> None:
        write_files(path, table(data), _FILES)
        with (
            untouched(path.parent),
            only(*_ERRORS, names=path.name),
            naming(path),
            HFCheckpoint(path) as checkpoint,
        ):
            _read_all(checkpoint, folder)

    return rule


def _safetensors_seeds() -> list[bytes]:
    from tests.hf_for_tests import CASES, config_of, shapes
    from tests.tokenizers_for_tests import byte_level_json

    tokenizer = few_tokens(byte_level_json(size=310))
    seeds = []
    for number, case in enumerate(CASES):
        config = config_of(case) | {"num_hidden_layers": 2}
        files: dict[str, Any] = {"config.json": config, "tokenizer.json": tokenizer}
        files["tokenizer_config.json"] = {
            "bos_token": "<|endoftext|>",
            "eos_token": {"content": "<|im_end|>"},
            "chat_template": "{{ messages }}",
        }
        files["generation_config.json"] = {"eos_token_id": [2, 3]}
        names = shapes(config)
        if number % 3:
            files[_WEIGHTS[0]] = _header(names)
        else:
            halves = [dict(list(names.items())[part::2]) for part in range(2)]
            files |= {file: _header(half) for file, half in zip(_WEIGHTS[1:], halves, strict=True)}
            files[_INDEX] = {
                "weight_map": {
                    name: file for half, file in zip(halves, _WEIGHTS[1:], strict=True) for name in half
                }
            }
        seeds.append(JSON.write(files))
    return seeds


def _header(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    header, at = dict[str, Any](), 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header


TARGETS: Final = {
    "gguf": Target(
        form=GGUF, seeds=_gguf_seeds, rule=_gguf, words=("tokenizer.ggml.", "llama.", "blk.0.", "<0x41>")
    ),
    "safetensors": Target(form=JSON, seeds=_safetensors_seeds, rule=_safetensors),
}
