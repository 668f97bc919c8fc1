"""A bundle for a device that compiles fixed shapes: built, run on the CPU, and described."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from edgespec_export.bundle_files import hash_files, parameters_by_class, write_json, write_texts
from edgespec_export.calibration import calibration_texts
from edgespec_export.checkpoint import Checkpoint
from edgespec_export.contexts import compile_contexts, compiler_for
from edgespec_export.parity import find_golden
from edgespec_export.report import ExportReport
from edgespec_export.sources import open_checkpoint
from edgespec_export.static_export import ROWS, StaticExport, export_static, format_for, planned
from edgespec_models.bundle import MANIFEST, REPORT, TOKENIZER, Bundle, FileRecord, Manifest
from edgespec_models.chips import find_chip
from edgespec_models.errors import RequestError
from edgespec_models.progress import ProgressCallback
from edgespec_models.static_graphs import buckets_for
from edgespec_models.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.devices import CPU
from edgespec_runtimes.discovery import Device
from edgespec_runtimes.memory import peak_memory_bytes
from edgespec_runtimes.static_session import StaticSession

if TYPE_CHECKING:
    from edgespec_export.export import ExportOptions

__all__ = ["build_for_device"]

_TEXTS = 32
_SHORTEST = 16


def build_for_device(
    source: Path, folder: Path, options: "ExportOptions", progress: ProgressCallback, started: float
) -> ExportReport:
    """Everything of a bundle for ``options.device``, in ``folder``; raises as ``export_model`` does."""
    assert options.device is not None and options.device != "cuda"
    with open_checkpoint(source) as checkpoint:
        config = checkpoint.config
        graphs = planned(options.device, buckets_for(config.context_length, options.buckets))
        write_texts(checkpoint, folder)
        digest = hash_files(checkpoint.files, progress)
        tokenizer = Tokenizer.from_file(folder / TOKENIZER, vocab_size=config.vocab_size)
        texts = _texts(tokenizer, checkpoint.special_tokens(), options.trim.texts)
        golden = find_golden(digest)
        made = export_static(checkpoint, folder, graphs, texts, golden=golden, progress=progress)
        if options.chip is not None:
            chip = find_chip(options.chip)
            compiled = compile_contexts(folder, made.graphs, chip, compiler_for(chip), progress)
            made = replace(made, graphs=compiled)
        manifest = _manifest(checkpoint, folder, made, options, (source.resolve().name, digest))
        source_bytes = sum(file.stat().st_size for file in checkpoint.files)
    write_json(folder / MANIFEST, manifest.to_json())
    converted = peak_memory_bytes()
    report = ExportReport(
        parity=made.parity,
        row_exact=_rolls_back(folder),
        weights=(),
        source_bytes=source_bytes,
        bundle_bytes=sum(file.stat().st_size for file in folder.iterdir()),
        bytes_by_class=dict(manifest.bytes_by_class),
        seconds=perf_counter() - started,
        peak_memory_bytes=peak_memory_bytes(),
        conversion_peak_memory_bytes=converted,
        static=made.report,
    )
    write_json(folder / REPORT, report.to_json())
    files = {**manifest.files, REPORT: FileRecord.of(folder / REPORT)}
    write_json(folder / MANIFEST, replace(manifest, files=files).to_json())
    return report


def _manifest(
    checkpoint: Checkpoint,
    folder: Path,
    made: StaticExport,
    options: "ExportOptions",
    source: tuple[str, str],
) -> Manifest:
    config, device = checkpoint.config, made.graphs.device
    counts = parameters_by_class(checkpoint, config.hidden_size * config.vocab_size)
    name = format_for(device).name
    return Manifest(
        name=options.name or checkpoint.model_name,
        role=options.role,
        config=config,
        weights=name,
        formats={name: sum(counts.values())},
        bytes_by_class=made.bytes_by_class,
        parameters_by_class=counts,
        special_tokens=checkpoint.special_tokens(),
        provenance={"source": source[0], "sha256": source[1], "edgespec": version("edgespec")},
        files={file.name: FileRecord.of(file) for file in sorted(folder.iterdir())},
        kv="uint8" if format_for(device).quantized else "float32",
        static=made.graphs,
    )


def _texts(tokenizer: Tokenizer, special: SpecialTokens, files: Sequence[Path]) -> list[list[int]]:
    """Token ids of some of the texts in ``files``, or of the shipped ones, begun as prompts are."""
    texts = calibration_texts(files)
    start = [special.bos] if special.add_bos and special.bos is not None else []
    chosen = texts[:: max(1, len(texts) // _TEXTS)][:_TEXTS]
    found = [tokens for text in chosen if len(tokens := (start + tokenizer.encode(text))[:ROWS]) >= _SHORTEST]
    if len(found) < 2:
        raise RequestError(f"calibration needs two texts of {_SHORTEST} tokens or more; give longer ones")
    return found


def _rolls_back(folder: Path) -> bool:
    """Run the graphs on the CPU; whether passes of any width give a row the same bits.

    Raises:
        BundleError: they cannot roll back.
    """
    options = CpuOptions(keep_memory=False)
    session = StaticSession(Bundle(folder), Device(CPU, "ready"), options)
    session.close()
    return session.row_exact
