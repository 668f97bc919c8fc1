"""Run a bundle of fixed shapes on the device it was made for: an NPU, a GPU, or Qualcomm's emulator.

Prints what opening and passes take, how near they come to the CPU's run of the same graphs, and a few tokens.
--device takes what ``edgespec devices`` lists. For qnn:htp on Linux for x86-64 the package onnxruntime-qnn
brings an emulator (glibc 2.35 or newer); times from it say nothing of a chip's.

A bundle exported with --chip runs from its context binaries, and is then compared with its graphs compiled
at load.

Usage, from the repository's root: ``python -m tools.device_check BUNDLE --device qnn:htp [--rows 32]
[--new-tokens 4]``
"""

import argparse
from dataclasses import replace
from pathlib import Path

from edgespec_models.bundle import Bundle
from edgespec_runtimes.discovery import Device
from edgespec_runtimes.placement import place
from tools.static_check import TEXT, check, compare, timed_session


def binaries(bundle: Bundle, device: Device, rows: int) -> None:
    """Compare the bundle's context binaries with its graphs, which the device compiles at load."""
    static = bundle.manifest.static
    if static is None or static.contexts is None:
        return
    sizes = [bundle.manifest.files[static.context_files(graph)[1]].size_bytes for graph in static.graphs]
    print(f"context binaries: {', '.join(f'{size / 1e6:.2f}' for size in sizes)} MB")
    plain = Bundle(bundle.path)
    plain.manifest = replace(plain.manifest, static=replace(static, contexts=None))
    chip = static.contexts.chip.options if device.state == "emulated" else {}  # it emulates one at a time
    aimed = replace(device, options={**device.options, **chip})
    compiled, opened = timed_session(plain, aimed), timed_session(bundle, aimed)
    result = compare(opened, compiled, bundle.tokenizer.encode(TEXT)[:rows])
    print(
        f"from binaries against compiled at load, {result.rows} rows: {result.top1_agreement:.1%} same most "
        f"likely token, largest difference {result.largest_difference:.2%} of the largest logit"
    )


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=4)
    options = parser.parse_args()
    bundle = Bundle(options.bundle)
    device = place(bundle, options.device).device
    check(bundle, device, options.rows, options.new_tokens)
    binaries(bundle, device, options.rows)


if __name__ == "__main__":
    main()
