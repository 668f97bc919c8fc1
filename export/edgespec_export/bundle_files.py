"""Files and facts that every bundle has, whatever device it is for."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from edgespec_export.checkpoint import Checkpoint
from edgespec_export.report import ExportReport
from edgespec_models.bundle import MANIFEST, REPORT, TEMPLATE, TOKENIZER, FileRecord, Manifest
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_runtimes.memory import peak_memory_bytes

if TYPE_CHECKING:
    from edgespec_export.export import ExportOptions

__all__ = ["Conversion", "describe", "hash_files", "parameters_by_class", "write_json", "write_texts"]

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


def describe(
    checkpoint: Checkpoint, folder: Path, options: "ExportOptions", digest: str, **facts: Any
) -> Manifest:
    """The manifest of what lies in ``folder``; ``facts`` are those of its graphs."""
    return Manifest(
        name=options.name or checkpoint.model_name,
        role=options.role,
        config=checkpoint.config,
        special_tokens=checkpoint.special_tokens(),
        provenance={
            "source": checkpoint.path.resolve().name,
            "sha256": digest,
            "edgespec": version("edgespec"),
        },
        files={file.name: FileRecord.of(file) for file in sorted(folder.iterdir())},
        **facts,
    )


@dataclass(frozen=True, slots=True)
class Conversion:
    """What an export took before its checks: bytes of the source, when it began, its peak memory."""

    source_bytes: int
    started: float
    peak_memory_bytes: int

    @classmethod
    def of(cls, files: Sequence[Path], started: float) -> Self:
        """An export of ``files`` that has come to its checks."""
        return cls(sum(file.stat().st_size for file in files), started, peak_memory_bytes())

    def finish(self, folder: Path, manifest: Manifest, **found: Any) -> ExportReport:
        """Write the report of what checks ``found``, and the manifest with it."""
        report = ExportReport(
            source_bytes=self.source_bytes,
            bundle_bytes=sum(file.stat().st_size for file in folder.iterdir()),
            bytes_by_class=dict(manifest.bytes_by_class),
            seconds=perf_counter() - self.started,
            peak_memory_bytes=peak_memory_bytes(),
            conversion_peak_memory_bytes=self.peak_memory_bytes,
            **found,
        )
        write_json(folder / REPORT, report.to_json())
        files = {**manifest.files, REPORT: FileRecord.of(folder / REPORT)}
        write_json(folder / MANIFEST, replace(manifest, files=files).to_json())
        return report
