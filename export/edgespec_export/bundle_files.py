"""Files and facts of every bundle, for any device."""

import json
from dataclasses import replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec_export.graphs.writer import class_of
from edgespec_export.journal import JOURNAL
from edgespec_export.options import ExportOptions
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.bundle import MANIFEST, REPORT, TOKENIZER, FileRecord, Manifest
from edgespec_models.decoders.record import record
from edgespec_models.errors import ModelFileError
from edgespec_models.storage import source_name
from edgespec_models.text.chat_template import ChatTemplate, read_template
from edgespec_models.text.template_files import DEFAULT, file_of
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_models.text.tokenizer_files import written_marks
from edgespec_runtimes.memory import peak_memory_bytes

_FOUND = ("parity", "row_exact", "trim", "rounding", "static", "activations", "weights")
"""The first keys of a report.

They are null without a reference for the source file, without a trimmed LM head, for weights that were not
rounded again, and for graphs of any shape that compute in float32.
"""


def write_texts(checkpoint: Checkpoint, folder: Path, template: Path | None) -> None:
    """Write the tokenizer and chat templates: the file ``template``, or the checkpoint's own.

    Raises ModelFileError for text that is no UTF-8, RequestError for a file without a template,
    TokenizerError for a template that is not valid.
    """
    sources, tokenizer = checkpoint.chat_templates(), checkpoint.tokenizer_json()
    if template is not None:
        sources = {DEFAULT: read_template(template)}
        tokenizer = Tokenizer.from_json(tokenizer).with_special(written_marks(sources)).json()
    for text in sources.values():
        ChatTemplate(text)  # refused before minutes of writing
    texts = {TOKENIZER: tokenizer} | {file_of(name): text for name, text in sources.items()}
    for name, text in texts.items():
        try:
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        except UnicodeEncodeError as error:
            raise ModelFileError(f"the source of {name} is not valid UTF-8. Download it again.") from error


def parameters_by_class(checkpoint: Checkpoint, lm_head: int) -> dict[str, int]:
    """Weights of ``embedding``, ``attention`` or another mixer, ``mlp``, ``lm_head``, ``other``.

    Models with experts also have ``experts``.
    """
    counts = dict.fromkeys(("embedding", "attention", "mlp", "lm_head", "other"), 0)
    products = record(checkpoint.config).products.values()
    classes = {name: class_of(product.path) for product in products for name in product.matrices}
    classes["embed"] = "embedding"
    for name in checkpoint.tensors:
        kind = classes.get(name, "other")
        counts[kind] = counts.get(kind, 0) + prod(checkpoint.tensor(name).shape)
    return counts | {"lm_head": lm_head}


def write_json(path: Path, value: Any) -> None:
    """Write ``value``, indented.

    Question marks replace characters without UTF-8, for example in files' names.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="replace", newline="\n")


def describe(
    checkpoint: Checkpoint, folder: Path, options: ExportOptions, digest: str, **facts: Any
) -> Manifest:
    """The manifest of the bundle in ``folder``; ``facts`` are facts of its graphs."""
    return Manifest(
        name=options.name or checkpoint.model_name,
        role=options.role,
        config=checkpoint.config,
        special_tokens=checkpoint.special_tokens(),
        embedding=checkpoint.embedding(),
        sampling=checkpoint.sampling,
        provenance={
            "source": source_name(checkpoint.path),
            "sha256": digest,
            "edgespec": version("edgespec"),
            **checkpoint.changes,
        },
        files={file.name: FileRecord.of(file) for file in _files(folder)},
        **facts,
    )


def _files(folder: Path) -> list[Path]:
    """The files of the bundle, which move to its place."""
    return sorted(file for file in folder.iterdir() if file.name != JOURNAL)


def finish(
    folder: Path,
    manifest: Manifest,
    started: float,
    *,
    source_bytes: int,
    conversion_peak: int,
    **facts: Any,
) -> dict[str, Any]:
    """Write the report of an export, and the manifest with it; docs/json.md has the report's keys.

    ``facts`` are results of checks, of :data:`_FOUND`. ``conversion_peak`` are bytes of memory before the
    checks, which run the model and need its memory.
    """
    report = {
        **dict.fromkeys(_FOUND),
        **facts,
        "bytes": {
            "source": source_bytes,
            "bundle": sum(file.stat().st_size for file in _files(folder)),
            "by_class": dict(manifest.bytes_by_class),
        },
        "seconds": perf_counter() - started,
        "peak_memory_bytes": peak_memory_bytes(),
        "conversion_peak_memory_bytes": conversion_peak,
    }
    write_json(folder / REPORT, report)
    files = {**manifest.files, REPORT: FileRecord.of(folder / REPORT)}
    write_json(folder / MANIFEST, replace(manifest, files=files).to_json())
    return report
