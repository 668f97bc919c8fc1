"""The rows of compare.py's table: every mode of every runtime, and the command that runs it.

A new mode is a new entry here. Rows whose commands are the same share a process.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

EDGESPEC = "edgespec"

_LLAMA_NGRAMS = ("ngram-mod", "ngram-cache", "ngram-simple", "ngram-map-k", "ngram-map-k4v")
_DRAFT_LENGTHS = (2, 4)
_GENAI_NGRAMS = {
    "ngram": {"ngram_size": 2, "max_draft_tokens": 4},
    "ngram-chained": {"ngram_size": 2, "max_draft_tokens": 4, "ngram_chained_lookup": True},
}
_GENAI_NGRAMS["ngram-adaptive"] = {**_GENAI_NGRAMS["ngram-chained"], "min_adaptive_k": 2, "cooldown": True}
_OPENVINO_LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}  # the values of OpenVINO's own sample


@dataclass(frozen=True, slots=True)
class Row:
    """One mode of one runtime.

    Attributes:
        name: in the table.
        group: rows of one group run the same weights in the same runtime.
        command: starts the worker.
        options: what the worker's requests say.
    """

    name: str
    group: str
    command: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> str:
        """The name of the group's row of plain decoding."""
        return f"{self.group} plain"


def build(args: argparse.Namespace) -> list[Row]:
    """All rows that ``args`` ask for, in the order they take turns."""
    made = [*_edgespec(args), *_openvino(args), *_genai(args), *_llama(args)]
    patterns = args.rows or ["*"]
    return [row for row in made if any(fnmatch(row.name, pattern) for pattern in patterns)]


def named(text: str, default: str) -> tuple[str, str]:
    """``NAME=VALUE`` as a pair; a value alone gets the default name."""
    name, mark, value = text.partition("=")
    return (name, value) if mark else (default, text)


def _edgespec(args: argparse.Namespace) -> Iterator[Row]:
    drafters = [named(text, "drafter") for text in args.drafter]
    for text in args.edgespec:
        name, target = named(text, "")
        group = f"{EDGESPEC} {name}".strip()
        command = (sys.executable, "-m", "tools.peers.edgespec_worker", target, *_threads(args))
        yield Row(f"{group} plain", group, command)
        yield Row(f"{group} ngram", group, (*command, "--drafter", "ngram"))
        for drafter, folder in drafters:
            yield Row(f"{group} {drafter}", group, (*command, "--drafter", folder))


def _openvino(args: argparse.Namespace) -> Iterator[Row]:
    group = "openvino"
    python = _python(args.peers / "openvino")
    command = (python, "-m", "tools.peers.openvino_worker", str(args.gguf), *_threads(args))
    yield Row(f"{group} plain", group, command)
    yield Row(f"{group} prompt-lookup", group, (*command, "--prompt-lookup"), _OPENVINO_LOOKUP)


def _genai(args: argparse.Namespace) -> Iterator[Row]:
    group = "genai"
    folder = args.genai_model or args.peers / "onnx" / args.gguf.stem
    python = _python(args.peers / "genai")
    command = (python, "-m", "tools.peers.genai_worker", str(folder), *_threads(args))
    yield Row(f"{group} plain", group, command)
    for name, options in _GENAI_NGRAMS.items():
        yield Row(f"{group} {name}", group, command, options)
    if args.draft_gguf:
        drafting = (*command, "--draft", str(args.peers / "onnx" / args.draft_gguf.stem))
        for length in _DRAFT_LENGTHS:
            yield Row(f"{group} draft-{length}", group, drafting, {"max_draft_tokens": length})


def _llama(args: argparse.Namespace) -> Iterator[Row]:
    group = "llama.cpp"
    server = str(args.peers / "llama.cpp" / "bin" / "llama-server")
    worker = (sys.executable, "-m", "tools.peers.llama_worker", str(args.gguf), "--server", server)
    command = (*worker, *_threads(args))
    yield Row(f"{group} plain", group, command)
    if args.draft_gguf:
        drafting = (*command, "--spec-type", "draft-simple", "-md", str(args.draft_gguf))
        for length in _DRAFT_LENGTHS:
            yield Row(f"{group} draft-{length}", group, (*drafting, "--spec-draft-n-max", str(length)))
    for kind in _LLAMA_NGRAMS:
        yield Row(f"{group} {kind}", group, (*command, "--spec-type", kind))


def _threads(args: argparse.Namespace) -> tuple[str, str]:
    return "--threads", str(args.threads)


def _python(folder: Path) -> str:
    return str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
