"""Files and facts that every bundle has, whatever device it is for."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from edgespec_export.report import ExportReport
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.bundle import MANIFEST, REPORT, TEMPLATE, TOKENIZER, FileRecord, Manifest
from edgespec_models.errors import ModelFileError
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_runtimes.memory import peak_memory_bytes

if TYPE_CHECKING:
    from edgespec_export.export import ExportOptions

__all__ = ["Conversion", "describe", "hash_files", "parameters_by_class", "write_json", "write_texts"]

_HASH_CHUNK = 1 << 24


def write_texts(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer, and the chat template where there is one.

    Raises:
        ModelFileError: a text is not valid UTF-8.
    """
    texts = {TOKENIZER: checkpoint.tokenizer_json(), TEMPLATE: checkpoint.chat_template()}
    for name, text in texts.items():
        try:
            if text is not None:
                (folder / name).write_text(text, encoding="utf-8", newline="\n")
        except UnicodeEncodeError as error:
            raise ModelFileError(f"what {name} is made of is not valid UTF-8. Download it again.") from error


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
    """SHA-256 (hex) of the files' bytes, one file after the other.

    Raises:
        ModelFileError: a file's digest lies beside it, as after a pull, and is another: the file is damaged.
    """
    digest, done, total = hashlib.sha256(), 0, sum(file.stat().st_size for file in files)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress(Progress("Reading", done, total))
    for path in files[:1] if len(files) == 1 else ():
        if _recorded(path) not in (None, digest.hexdigest()):
            raise ModelFileError(
                f"{path} is damaged or has been replaced: its SHA-256 is not the one in {path.name}.sha256. "
                "'edgespec pull --check' replaces damaged models of the catalogue; of other files, delete "
                "the record if it is out of date"
            )
    return digest.hexdigest()


def _recorded(path: Path) -> str | None:
    """The digest that lies beside a file, as sha256sum writes it; None without."""
    try:
        words = path.with_name(f"{path.name}.sha256").read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return None
    return words[0] if words[1:] == [path.name] and len(words[0]) == 64 else None


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
            **checkpoint.changes,
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
