"""Files and facts that every bundle has, whatever device it is for."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec_export.checkpoint import Checkpoint
from edgespec_models.bundle import TEMPLATE, TOKENIZER
from edgespec_models.progress import Progress, ProgressCallback

__all__ = ["hash_files", "parameters_by_class", "write_json", "write_texts"]

_HASH_CHUNK = 1 << 24


def write_texts(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer, and the chat template where there is one."""
    (folder / TOKENIZER).write_text(checkpoint.tokenizer_json(), encoding="utf-8", newline="\n")
    template = checkpoint.chat_template()
    if template is not None:
        (folder / TEMPLATE).write_text(template, encoding="utf-8", newline="\n")


def parameters_by_class(checkpoint: Checkpoint, head: int) -> dict[str, int]:
    """Weights of ``embedding``, ``attention``, ``mlp``, ``lm_head`` (``head`` of them), ``other``."""
    counts = dict.fromkeys(("embedding", "attention", "mlp", "lm_head", "other"), 0)
    classes = {"embed": "embedding", "lm_head": "lm_head"}
    classes |= dict.fromkeys("qkvo", "attention") | dict.fromkeys(("gate", "up", "down"), "mlp")
    for name in checkpoint.tensors:
        size = 1
        for dim in checkpoint.tensor(name).shape:
            size *= dim
        counts[classes.get(name.rpartition(".")[2], "other")] += size
    return counts | {"lm_head": head}


def hash_files(files: Sequence[Path], progress: ProgressCallback) -> str:
    """SHA-256 (hex) of the files' bytes, one file after the other."""
    digest, done, total = hashlib.sha256(), 0, sum(file.stat().st_size for file in files)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress(Progress("Reading", done, total))
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write ``value``, indented. Question marks stand for what no UTF-8 holds, such as in files' names."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
