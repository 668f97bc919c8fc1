"""Run a bundle of fixed shapes on the device it was made for: an NPU, a GPU, or Qualcomm's emulator.

Prints what opening and passes take, how near they come to the CPU's run of the same graphs, and a few tokens.
--device takes what ``edgespec devices`` lists. For qnn:htp on Linux for x86-64 the package onnxruntime-qnn
brings an emulator (glibc 2.35 or newer); times from it say nothing of a chip's. A bundle exported with --chip
runs from its context binaries, and is then compared with its graphs compiled at load.

With ``--openvino DIR`` instead of a device, OpenVINO runs a bundle for npu-openvino on the CPU. Intel's
plugin passes over processors of other vendors; the older package onnxruntime-openvino does not, and brings an
ONNX Runtime of its own, so it goes into an environment of its own: DIR, about 1 GB, kept for the next time.
Every operator must run in OpenVINO: falling back is an error.

Usage, from the repository's root: ``python -m tools.device_check BUNDLE --device qnn:htp [--rows 32]
[--new-tokens 4]``
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NoReturn

import numpy as np

from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.devices import CPU, KINDS, Device
from edgespec_runtimes.discovery import place
from edgespec_runtimes.predictions import Logits
from edgespec_runtimes.session import Session
from edgespec_runtimes.static import StaticModel, open_static
from tools.arguments import arguments

TEXT = (
    "The lighthouse stood at the end of a long gravel path. Every evening the keeper climbed 214 steps, "
    "trimmed the wick and wrote the weather into a grey book: wind from the north, 12 knots, fog by nine."
)
PACKAGES = (
    *("onnxruntime-openvino==1.24.1", "numpy", "tokenizers", "jinja2"),
    *("psutil", "huggingface_hub", "filelock", "platformdirs"),
)
FOLDERS = (".", "models", "runtimes")


def compare(session: Session, reference: Session, tokens: Sequence[int], against: str) -> None:
    """Run ``tokens`` through both in passes of eight, the third of them after a roll-back."""
    logits, expected = list[Logits](), list[Logits]()
    for run, rows in ((session, logits), (reference, expected)):
        run.prefill([])
        for start in range(0, len(tokens), 8):
            if start == 16:
                run.predict(tokens[:4])
                run.keep(0)
            rows.append(run.predict(tokens[start : start + 8]).logits.copy())
    ours, theirs = np.concatenate(logits), np.concatenate(expected)
    same, far = (
        (ours.argmax(1) == theirs.argmax(1)).mean(),
        np.abs(ours - theirs).max() / np.abs(theirs).max(),
    )
    print(
        f"{against}, {len(ours)} rows: {same:.1%} same most likely token, largest difference {far:.2%} of "
        "the largest logit"
    )


def timed_session(bundle: Bundle, device: Device) -> Session:
    """Open a session, and print how long that and its passes take."""
    started = perf_counter()
    session = open_static(bundle, device)
    print(f"{device.name} ({device.state}): opened and tested in {perf_counter() - started:.1f} s")
    if session.model.compiled:
        print(f"  {session.model.compiled}")
    assert isinstance(session.model, StaticModel)
    for rows, seconds in session.model.seconds.items():
        print(f"  a pass over {rows:2} rows: {seconds * 1e3:,.0f} ms")
    print(f"  same bits for any rows: {'yes' if session.model.row_exact else 'no'}")
    return session


def check(bundle: Bundle, device: Device, rows: int, new_tokens: int) -> None:
    """Print how near ``device`` comes to the CPU, and a few tokens that it writes."""
    session, reference = timed_session(bundle, device), timed_session(bundle, Device(CPU, "ready"))
    tokens = bundle.tokenizer.encode(TEXT)[:rows]
    compare(session, reference, tokens, "against the CPU's run of the same graphs")
    written = list(tokens)
    for _ in range(new_tokens):
        written.append(session.predict_next(written).best(0))
    print(f"{new_tokens} tokens it writes: {bundle.tokenizer.decode(written[len(tokens) :])!r}")
    session.close()
    reference.close()


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
    tokens = bundle.tokenizer.encode(TEXT)[:rows]
    compare(opened, compiled, tokens, "from binaries against compiled at load")


def run_in(environment: Path) -> NoReturn:
    """Make the environment if need be, and run this again in it."""
    from tools.peers.install import make_venv, python_of

    make_venv(environment, list(PACKAGES))
    paths = os.pathsep.join(str(Path(folder).absolute()) for folder in FOLDERS)
    command = [str(python_of(environment)), "-m", "tools.device_check", *sys.argv[1:], "--here"]
    sys.exit(subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=False).returncode)


def main() -> None:
    """Read the command line and run."""
    options = arguments(__doc__, "bundle", device=(str,), openvino=(Path,), rows=32, new_tokens=4, here=False)
    bundle = Bundle(Path(options.bundle))
    if options.here:
        kind = replace(KINDS["openvino:cpu"], module=None)
        device = Device(kind, "ready", options={"device_type": "CPU"})
    elif options.openvino is not None:
        run_in(options.openvino)
    else:
        device = place(bundle, options.device or "auto").device
    check(bundle, device, options.rows, options.new_tokens)
    binaries(bundle, device, options.rows)


if __name__ == "__main__":
    main()
