"""Run a bundle made with ``edgespec export --device npu-openvino`` through OpenVINO, on the CPU.

Intel's plugin passes over processors of other vendors, and its NPU is in few machines; the older package
onnxruntime-openvino runs the same graphs on any x86-64 processor. It brings an ONNX Runtime of its own, so
this makes an environment of its own: DIR, about 1 GB, kept for the next time. Every operator must run in
OpenVINO: falling back is an error.

Usage, from the repository's root: ``python -m tools.openvino_check BUNDLE --environment DIR [--rows 32]
[--new-tokens 4]``
"""

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

PACKAGES = [
    "onnxruntime-openvino==1.24.1",
    "numpy",
    "tokenizers",
    "jinja2",
    "psutil",
    "huggingface_hub",
    "filelock",
    "platformdirs",
]
FOLDERS = (".", "models", "runtimes")


def run_here(options: argparse.Namespace) -> None:
    """Compare, in the environment."""
    from edgespec_models.bundle import Bundle
    from edgespec_runtimes.devices import KINDS
    from edgespec_runtimes.discovery import Device
    from tools.static_check import check

    kind = replace(KINDS["openvino:cpu"], module=None)
    device = Device(kind, "ready", options={"device_type": "CPU"})
    check(Bundle(options.bundle), device, options.rows, options.new_tokens)


def run_there(environment: Path) -> None:
    """Make the environment if need be, and run this again in it."""
    from tools.peers.install import make_venv, python_of

    make_venv(environment, PACKAGES)
    paths = os.pathsep.join(str(Path(folder).absolute()) for folder in FOLDERS)
    command = [str(python_of(environment)), "-m", "tools.openvino_check", *sys.argv[1:], "--here"]
    sys.exit(subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=False).returncode)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--environment", type=Path, required=True, metavar="DIR")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_here(options)
    else:
        run_there(options.environment)


if __name__ == "__main__":
    main()
