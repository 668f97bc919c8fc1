"""Run a bundle of fixed shapes on the device it was made for: an NPU, a GPU, or Qualcomm's emulator.

Prints what compiling and passes take, how near they come to the CPU's run of the same graphs, and a few
tokens. --device takes what ``edgespec devices`` lists. For qnn:htp on Linux for x86-64 the package
onnxruntime-qnn brings an emulator (glibc 2.35 or newer); times from it say nothing of a chip's.

With --context FOLDER each graph of the smallest cache is also compiled ahead for a Qualcomm chip, to a
context binary of which the size is printed, and loaded again. The default chip is Snapdragon X Elite.

Usage, from the repository's root: ``python -m tools.device_check BUNDLE --device qnn:htp [--rows 32]
[--new-tokens 4] [--context FOLDER] [--soc 60] [--arch 73]``
"""

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from edgespec_models.bundle import Bundle
from edgespec_runtimes.cpu import CpuOptions, session_settings
from edgespec_runtimes.discovery import Device
from edgespec_runtimes.placement import place
from edgespec_runtimes.static_session import open_on
from tools.static_check import check


def write_context(device: Device, graph: Path, out: Path) -> float:
    """Compile ``graph`` ahead to ``out`` and a binary beside it; seconds."""
    settings = session_settings(CpuOptions())
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    settings.add_session_config_entry("ep.context_enable", "1")
    settings.add_session_config_entry("ep.context_embed_mode", "0")
    settings.add_session_config_entry("ep.context_file_path", str(out))
    settings.add_provider_for_devices([device.handle], dict(device.options))
    started = perf_counter()
    ort.InferenceSession(str(graph), settings, enable_fallback=0)
    return perf_counter() - started


def run_zeros(session: ort.InferenceSession) -> list[npt.NDArray[Any]]:
    """What a graph makes of zeros."""
    types = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(uint8)": np.uint8}
    feeds = {value.name: np.zeros(value.shape, types[value.type]) for value in session.get_inputs()}
    return list(session.run(None, feeds))


def contexts(bundle: Bundle, device: Device, folder: Path, chip: dict[str, str]) -> None:
    """Compile each graph of the smallest cache for ``chip``, load it again and compare."""
    folder.mkdir(parents=True)
    static = bundle.manifest.static
    assert static is not None
    words = ", ".join(f"{name} {value}" for name, value in chip.items())
    aimed = replace(device, options={**device.options, **chip})
    for rows in static.widths:
        graph = bundle.path / static.file(static.buckets[0], rows)
        out = folder / f"{graph.stem}_ctx.onnx"
        seconds = write_context(aimed, graph, out)
        size = sum(file.stat().st_size for file in folder.glob(f"{graph.stem}_ctx*"))
        started = perf_counter()
        again = open_on(aimed, out, CpuOptions())  # the emulator runs nothing compiled for another chip
        loaded = perf_counter() - started
        direct = run_zeros(open_on(aimed, graph, CpuOptions()))
        same = all(np.array_equal(a, b) for a, b in zip(direct, run_zeros(again), strict=True))
        print(
            f"{graph.name}: compiled for {words} in {seconds:.1f} s, {size / 1e6:.1f} MB, loaded in "
            f"{loaded:.1f} s, {'same bits' if same else 'other bits'} as compiled at load"
        )


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--context", type=Path, metavar="FOLDER", help="must not exist")
    parser.add_argument("--soc", default="60")
    parser.add_argument("--arch", default="73")
    options = parser.parse_args()
    bundle = Bundle(options.bundle)
    device = place(bundle, options.device).device
    if options.context is not None and device.name != "qnn:htp":
        parser.error(f"--context is of --device qnn:htp, not {device.name}")
    check(bundle, device, options.rows, options.new_tokens)
    if options.context is not None:
        chip = {"soc_model": options.soc, "htp_arch": options.arch}
        contexts(bundle, device, options.context, chip)


if __name__ == "__main__":
    main()
