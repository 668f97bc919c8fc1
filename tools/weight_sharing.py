"""One context binary for all graphs of a bucket, with their weights once: its size, and whether it opens.

Qualcomm's compiler makes such binaries (ONNX Runtime's options ``ep.share_ep_contexts`` and
``ep.stop_share_ep_contexts``, https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html).
Exports do not: the emulator refuses them, and no chip was at hand. On one, this tells whether they could.

Usage, from the repository's root: ``python -m tools.weight_sharing BUNDLE OUT [--chip snapdragon-x-elite]``,
with a bundle exported with ``--device npu-qnn`` and a folder OUT that does not exist.
"""

import argparse
from pathlib import Path

from edgespec_export.contexts import compiler_for
from edgespec_models.bundle import Bundle
from edgespec_models.chips import find_chip
from edgespec_models.errors import DeviceError
from edgespec_runtimes.cpu import CpuOptions, session_settings
from edgespec_runtimes.discovery import Device, resolve
from edgespec_runtimes.ort import ort


def compile_shared(graphs: list[Path], out: Path, compiler: Device) -> None:
    """Compile ``graphs`` one after the other into one context, which the last of them writes."""
    for graph in graphs:
        settings = session_settings(CpuOptions())
        entries = {"session.disable_cpu_ep_fallback": "1", "ep.share_ep_contexts": "1"}
        entries |= {"ep.context_enable": "1", "ep.context_embed_mode": "0"}
        entries |= {"ep.context_file_path": str(out / graph.name)}
        if graph is graphs[-1]:
            entries["ep.stop_share_ep_contexts"] = "1"
        for key, value in entries.items():
            settings.add_session_config_entry(key, value)
        settings.add_provider_for_devices([compiler.handle], dict(compiler.options))
        ort.InferenceSession(str(graph), settings, enable_fallback=0)


def open_shared(graphs: list[Path], device: Device) -> str:
    """Open what was compiled; what came of that."""
    sessions = []
    for graph in graphs:
        settings = session_settings(CpuOptions())
        settings.add_session_config_entry("ep.share_ep_contexts", "1")
        settings.add_provider_for_devices([device.handle], dict(device.options))
        try:
            sessions.append(ort.InferenceSession(str(graph), settings, enable_fallback=0))
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's own exceptions share no base class
            return f"{graph.name} is refused: {error}"
    return f"all {len(sessions)} are opened"


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--chip", default="snapdragon-x-elite")
    options = parser.parse_args()
    bundle = Bundle(options.bundle)
    static = bundle.manifest.static
    if static is None or static.device != "npu-qnn":
        raise DeviceError(f"{bundle.path} was not exported with --device npu-qnn")
    device, compiler = resolve("qnn:htp"), compiler_for(find_chip(options.chip))
    options.out.mkdir(parents=True)
    names = [static.file(static.buckets[0], rows) for rows in static.widths]
    compile_shared([bundle.path / name for name in names], options.out, compiler)
    size = sum(file.stat().st_size for file in options.out.glob("*.bin"))
    print(f"{len(names)} graphs in one context binary: {size / 1e6:.2f} MB")
    print(open_shared([options.out / name for name in names], device))


if __name__ == "__main__":
    main()
