"""Graphs compiled ahead, for one chip, to context binaries: a device opens those without its compiler.

Qualcomm's provider compiles, without the chip: through ONNX Runtime's API for compiling, to an ONNX file with
one ``EPContext`` operator and a binary beside it
(https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html).
"""

from dataclasses import replace
from pathlib import Path

from edgespec_models.bundles.static_graphs import Chip, Contexts, StaticGraphs
from edgespec_models.errors import DeviceError
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_runtimes.cpu import CpuOptions, session_settings
from edgespec_runtimes.devices.discovery import Device, Runtime, resolve
from edgespec_runtimes.ort import ort

__all__ = ["compile_contexts", "compile_graph", "compiler_for"]


def compiler_for(chip: Chip, runtime: Runtime | None = None) -> Device:
    """Qualcomm's provider, told to compile for ``chip`` and to run nothing.

    Args:
        chip: what to compile for; this machine need not have it.
        runtime: None for this machine's.

    Raises:
        DeviceError: this machine lacks the compiler; says what adds it.
    """
    try:
        device = resolve("qnn:htp", runtime)
    except DeviceError as error:
        raise DeviceError(
            f"compiling for {chip.name} takes Qualcomm's compiler, which is for Windows, and for Linux with "
            f"glibc 2.35 or newer: {error} (without a chip, the device compiles graphs as it loads them)"
        ) from error
    return replace(device, options={**device.options, **chip.options, "enable_htp_prepare_only": "1"})


def compile_contexts(
    folder: Path, graphs: StaticGraphs, chip: Chip, compiler: Device, progress: ProgressCallback
) -> StaticGraphs:
    """Compile every graph in ``folder``; returns ``graphs`` with what compiled them.

    Args:
        folder: the bundle's.
        graphs: which graphs there are.
        chip: what ``compiler`` was made for.
        compiler: of :func:`compiler_for`.
        progress: told of graphs.

    Raises:
        DeviceError: the compiler refuses a graph.
    """
    for number, graph in enumerate(graphs.graphs):
        progress(Progress("Compiling", number, len(graphs.graphs), "graphs"))
        compiled, binary = (folder / name for name in graphs.context_files(graph))
        compile_graph(folder / graph, compiled, compiler)
        if not binary.is_file():
            raise DeviceError(f"compiling {graph} for {chip.name} left no {binary.name}; nothing was kept")
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
            # As a session has it, so that both compile the same; left out, a compiler optimizes nothing.
            graph_optimization_level=settings.graph_optimization_level,
        )
        model.compile_to_file(str(out))
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise DeviceError(f"Qualcomm's compiler refuses {graph.name}: {error}") from error
