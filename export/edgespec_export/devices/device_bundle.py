"""Bundles for devices that compile fixed shapes: built, run on the CPU, described, and perhaps compiled.

For one chip, graphs are compiled ahead to context binaries, which a device opens without its compiler.
Qualcomm's provider compiles without the chip, through ONNX Runtime's API for compiling, to an ONNX file with
one ``EPContext`` operator and a binary beside it
(https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec_export.bundle_files import describe, finish, parameters_by_class, write_json, write_texts
from edgespec_export.devices.static_export import ROWS, export_static, format_name, planned
from edgespec_export.graphs.calibration import calibration_tokens
from edgespec_export.graphs.parity import find_golden
from edgespec_export.options import ExportOptions
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import MANIFEST, TOKENIZER, Bundle
from edgespec_models.bundles.static_graphs import Chip, Contexts, StaticGraphs, buckets_for, find_chip
from edgespec_models.errors import DeviceError, RequestError
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.cpu import CpuOptions, session_settings
from edgespec_runtimes.devices import CPU, Device
from edgespec_runtimes.discovery import resolve
from edgespec_runtimes.memory import peak_memory_bytes
from edgespec_runtimes.ort import ort
from edgespec_runtimes.static import open_static

_TEXTS = 32
_SHORTEST = 16


def build_for_device(
    source: Path, folder: Path, options: ExportOptions, progress: ProgressCallback, started: float
) -> dict[str, Any]:
    """Build a bundle for ``options.device`` in ``folder``. Raises as ``export_model`` does."""
    assert options.device is not None and options.device != "cuda"
    with open_checkpoint(source, adapters=options.adapters) as checkpoint:
        checkpoint.warn_of_left_out_tower()
        checkpoint.shorten_context()
        config = checkpoint.config
        graphs = planned(options.device, buckets_for(config.context_length, options.buckets))
        write_texts(checkpoint, folder, options.chat_template)
        digest = checkpoint.digest(progress)
        tokenizer = Tokenizer.from_file(folder / TOKENIZER, vocab_size=config.vocab_size)
        texts = _texts(tokenizer, checkpoint.special_tokens(), options.calibration)
        golden = None if options.adapters else find_golden(digest)
        made, kept, by_class, report, parity = export_static(
            checkpoint, folder, graphs, texts, golden=golden, progress=progress
        )
        if options.chip is not None:
            made = compile_contexts(folder, made, find_chip(options.chip), progress)
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
            kept=kept,
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
        weights=[],
        static=report,
        source_bytes=size,
        conversion_peak=peak,
    )


def _texts(tokenizer: Tokenizer, special: SpecialTokens, files: Sequence[Path]) -> list[list[int]]:
    texts = calibration_tokens(tokenizer, special, files, count=_TEXTS, longest=ROWS)
    long_texts = [tokens for tokens in texts if len(tokens) >= _SHORTEST]
    if len(long_texts) < 2:
        raise RequestError(f"calibration needs two texts of {_SHORTEST} tokens or more; give longer ones")
    return long_texts


def _rolls_back(folder: Path) -> bool:
    """Whether passes of any width give a row the same bits; BundleError if graphs cannot roll back."""
    options = CpuOptions(keep_memory=False)
    session = open_static(Bundle(folder), Device(CPU, "ready"), options)
    session.close()
    return session.model.row_exact


def compiler_for(chip: Chip) -> Device:
    """Qualcomm's provider with options to compile for ``chip`` and to run nothing; DeviceError without it."""
    try:
        device = resolve("qnn:htp")
    except DeviceError as error:
        raise DeviceError(
            f"compiling for {chip.name} takes Qualcomm's compiler, which is for Windows, and for Linux with "
            f"glibc 2.35 or newer: {error} (without a chip, the device compiles graphs as it loads them)"
        ) from error
    return replace(device, options={**device.options, **chip.options, "enable_htp_prepare_only": "1"})


def compile_contexts(
    folder: Path, graphs: StaticGraphs, chip: Chip, progress: ProgressCallback
) -> StaticGraphs:
    """Compile every graph for ``chip``, and return ``graphs`` with the compiler's facts.

    DeviceError if a graph is refused.
    """
    compiler = compiler_for(chip)
    for number, graph in enumerate(graphs.graphs):
        progress(Progress("Compiling", number, len(graphs.graphs), "graphs"))
        compiled, binary = (folder / name for name in graphs.context_files(graph))
        compile_graph(folder / graph, compiled, compiler)
        if not binary.is_file():
            raise DeviceError(f"compiling {graph} for {chip.name} made no {binary.name}; nothing was kept")
    progress(Progress("Compiling", len(graphs.graphs), len(graphs.graphs), "graphs"))
    return replace(graphs, contexts=Contexts(chip=chip, version=compiler.version))


def compile_graph(graph: Path, out: Path, compiler: Device) -> None:
    """Compile ``graph`` to ``out``, and a binary beside it; raises DeviceError if any operator is refused."""
    settings = session_settings(CpuOptions())
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    settings.add_provider_for_devices([compiler.handle], dict(compiler.options))
    try:
        model = ort.ModelCompiler(
            settings,
            str(graph),
            # The same as for sessions, so that both compile alike; without it a compiler optimizes nothing.
            graph_optimization_level=settings.graph_optimization_level,
        )
        model.compile_to_file(str(out))
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise DeviceError(f"Qualcomm's compiler refuses {graph.name}: {error}") from error
