"""Everything the README promises, from a bare Python 3.11: `python tools/run.py demo`, `test` or `fuzz`.

Uses the standard library alone: makes a virtual environment in `.venv`, installs edgespec from this
checkout into it, and runs there. Further arguments go to the command it runs.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
SCRIPTS = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = SCRIPTS / ("python.exe" if os.name == "nt" else "python")

GATE: tuple[tuple[str, ...], ...] = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("lint-imports",),
    ("pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"),
)
"""What has to pass before a change lands, in order."""
_STEPS = ("Collecting", "  Downloading", "Building", "  Building", "Installing", "Successfully")
_LONGEST = 100
"""Of pip's lines, those that say what it does, cut at so many characters."""


def set_up(extra: str) -> None:
    """Make the environment and install this checkout, with ``extra`` if it is not empty."""
    if not PYTHON.exists():
        print(f"Making a virtual environment in {VENV}", flush=True)
        venv.create(VENV, with_pip=True)
    wanted = f"[{extra}]" if extra else ""
    print(f"Installing edgespec{wanted}: pip fetches packages and compiles the kernels", flush=True)
    command = (str(PYTHON), "-m", "pip", "install", "--editable", f".{wanted}")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace") as pip:
        for line in pip.stdout or ():
            if line.startswith(_STEPS):
                print(f"  {line.strip()[:_LONGEST]}", flush=True)
    if pip.returncode:
        sys.exit(pip.returncode)


def run(command: Sequence[str]) -> None:
    """Run a command of the environment in the checkout; leave with its code if it fails."""
    path = SCRIPTS / command[0]
    program = next((p for p in (path, path.with_suffix(".exe")) if p.exists()), Path(command[0]))
    code = subprocess.run((str(program), *command[1:]), cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


def demo(arguments: Sequence[str]) -> None:
    """Pull two models, export them, and show the speedup."""
    set_up("")
    run(("edgespec", "demo", *arguments))


def emulates_qnn() -> bool:
    """Whether Qualcomm's package has an emulator for this machine: x86-64 Linux, glibc 2.35 or newer."""
    name, version = platform.libc_ver()
    new_enough = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
    return platform.machine() == "x86_64" and new_enough


def test(arguments: Sequence[str]) -> None:
    """Run the whole gate; with arguments, only pytest with these."""
    extras = {"dev": True, "npu-qnn": emulates_qnn(), "browser": shutil.which("chromium") is not None}
    set_up(",".join(extra for extra, usable in extras.items() if usable))
    for command in (("pytest", *arguments),) if arguments else GATE:
        print(f"\n$ {' '.join(command)}", flush=True)
        run(command)


def fuzz(arguments: Sequence[str]) -> None:
    """Try a hundred times as many damaged inputs as the gate does; arguments are pytest's."""
    test(("-m", "fuzz", "--hypothesis-profile=fuzz", "--timeout=0", *arguments))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("demo", "test", "fuzz"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this may have an older Python
        sys.exit(f"edgespec needs Python 3.11 or newer, this is {sys.version.split()[0]}")
    {"demo": demo, "test": test, "fuzz": fuzz}[options.command](options.arguments)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
