"""A bundle for a device that compiles fixed shapes: built, run on the CPU, and described."""

from collections.abc import Sequence
from pathlib import Path

from edgespec_export.bundle_files import (
    describe,
    finish,
    parameters_by_class,
    write_json,
    write_texts,
)
from edgespec_export.devices.contexts import compile_contexts, compiler_for
from edgespec_export.devices.static_export import ROWS, export_static, format_name, planned
from edgespec_export.graphs.calibration import calibration_texts, prompt_start
from edgespec_export.graphs.parity import find_golden
from edgespec_export.options import ExportOptions
from edgespec_export.report import ExportReport
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import MANIFEST, TOKENIZER, Bundle
from edgespec_models.bundles.static_graphs import buckets_for, find_chip
from edgespec_models.errors import RequestError
from edgespec_models.progress import ProgressCallback
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.devices.discovery import Device
from edgespec_runtimes.devices.kinds import CPU
from edgespec_runtimes.memory import peak_memory_bytes
from edgespec_runtimes.static.session import StaticSession

__all__ = ["build_for_device"]

_TEXTS = 32
_SHORTEST = 16


def build_for_device(
    source: Path, folder: Path, options: ExportOptions, progress: ProgressCallback, started: float
) -> ExportReport:
    """Everything of a bundle for ``options.device``, in ``folder``; raises as ``export_model`` does."""
    assert options.device is not None and options.device != "cuda"
    with open_checkpoint(source) as checkpoint:
        config = checkpoint.config
        graphs = planned(options.device, buckets_for(config.context_length, options.buckets))
        write_texts(checkpoint, folder)
        digest = checkpoint.digest(progress)
        tokenizer = Tokenizer.from_file(folder / TOKENIZER, vocab_size=config.vocab_size)
        texts = _texts(tokenizer, checkpoint.special_tokens(), options.trim.texts)
        golden = find_golden(digest)
        made, by_class, report, parity = export_static(
            checkpoint, folder, graphs, texts, golden=golden, progress=progress
        )
        if options.chip is not None:
            chip = find_chip(options.chip)
            made = compile_contexts(folder, made, chip, compiler_for(chip), progress)
        name = format_name(options.device)
        counts = parameters_by_class(checkpoint, config.hidden_size * config.vocab_size)
        manifest = describe(
            checkpoint,
            folder,
            options,
            digest,
            weights=name,
            formats={name: sum(counts.values())},
            bytes_by_class=by_class,
            parameters_by_class=counts,
            kv="float32" if made.activations == "float32" else "uint8",
            static=made,
        )
        size, peak = checkpoint.n_bytes, peak_memory_bytes()
    write_json(folder / MANIFEST, manifest.to_json())
    return finish(
        folder,
        manifest,
        started,
        parity=parity,
        row_exact=_rolls_back(folder),
        weights=(),
        static=report,
        source_bytes=size,
        conversion_peak_memory_bytes=peak,
    )


def _texts(tokenizer: Tokenizer, special: SpecialTokens, files: Sequence[Path]) -> list[list[int]]:
    """Token ids of some of the texts in ``files``, or of the shipped ones, begun as prompts are."""
    texts = calibration_texts(files)
    start = prompt_start(special)
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
