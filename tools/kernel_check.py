"""The kernels of all instruction sets against each other, bit for bit, in a program without ONNX Runtime.

Usage, from the repository's root: ``python -m tools.kernel_check [--target NAME ...]``, for instance
``--target x86_64-linux aarch64-linux``. Another platform's program runs in an emulator if it is there: ARM's
for Linux in qemu-aarch64, x86-64's for Windows in wine. The digests it prints must be the same everywhere.
With ``--sanitize`` it is compiled by this machine's C++ compiler instead, with checks of addresses and of
undefined behaviour.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtimes" / "kernels"))

from compiling import SOURCES, BuildError, check_program
from targets import CHECK, TARGETS, Target, native_target

__all__ = ["KernelError", "check_targets"]

SANITIZE = ("-std=c++20", "-O1", "-g", "-w", "-Wno-psabi", "-ffp-contract=off", "-fno-math-errno")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "set_avx2.cpp": ("-march=x86-64-v3",),
        "set_avxvnni.cpp": ("-march=x86-64-v3", "-mavxvnni"),
        "set_avx512.cpp": ("-march=x86-64-v4", "-mavx512vnni"),
    },
    "aarch64": {
        "set_neon_dot.cpp": ("-march=armv8.2-a+dotprod",),
        "set_neon_i8mm.cpp": ("-march=armv8.2-a+dotprod+i8mm",),
    },
}
"""Flags of GCC and clang for the instruction sets beyond the baseline."""


class KernelError(Exception):
    """The check does not run, or finds kernels that differ."""


def emulator(target: Target) -> tuple[str, ...] | None:
    """What runs a program of ``target`` here: nothing for one of this machine's own; None if nothing can."""
    if target.name == native_target().name:
        return ()
    wine = next((found for name in ("wine64", "wine") if (found := shutil.which(name))), None)
    qemu = shutil.which("qemu-aarch64")
    if target.name == "aarch64-linux" and qemu:
        return (qemu, "-cpu", "max")
    if target.name == "x86_64-windows" and wine and platform.machine() == "x86_64":
        return (wine,)
    return None


def check(program: Path, emulated: Sequence[str] = ()) -> str:
    """Run the program: the sets of instructions that it found, and the digest of what they computed."""
    environment = os.environ | {"WINEDEBUG": "-all"}
    run = subprocess.run(
        (*emulated, str(program)), capture_output=True, text=True, check=False, env=environment
    )
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines or "digest" not in lines[-1]:
        raise KernelError(f"{program.name} left with {run.returncode}:\n{run.stdout}{run.stderr}")
    return lines[-1]


def sanitized(folder: Path) -> Path:
    """The program, compiled with checks."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise KernelError("no C++ compiler for --sanitize: install g++ or clang, or name one in CXX")
    machine = "aarch64" if platform.machine() in {"aarch64", "arm64"} else platform.machine()
    sources = dict.fromkeys(CHECK, tuple[str, ...]()) | SETS.get(machine, {})
    objects = []
    for name, flags in sources.items():
        objects.append(str(folder / name) + ".o")
        command = (compiler, *SANITIZE, *SANITIZERS, *flags, "-c", name, "-o", objects[-1])
        if subprocess.run(command, cwd=SOURCES, check=False).returncode:
            raise KernelError(f"{compiler} does not compile {name}; CXX may name another compiler")
    program = folder / "check"
    if subprocess.run((compiler, *SANITIZERS, *objects, "-o", str(program)), check=False).returncode:
        raise KernelError(f"{compiler} does not link with {SANITIZERS[0]}; install its sanitizers' libraries")
    return program


def check_targets(targets: Sequence[Target]) -> None:
    """Build and run the programs of all that can run here; their digests have to be the same."""
    digests = set[str]()
    for target in targets:
        emulated = emulator(target)
        if emulated is None:
            print(f"{target.name:16}  nothing here runs its programs")
            continue
        line = check(check_program(target), emulated)
        print(f"{target.name:16}  {line}", flush=True)
        digests.add(line.split()[-1])
    if len(digests) > 1:
        raise KernelError("the digests differ: the platforms compute different bits")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = {target.name: target for target in TARGETS}
    parser.add_argument("--target", nargs="+", choices=known, help="instead of all that can run here")
    parser.add_argument("--sanitize", action="store_true", help="this machine's, with checks of memory")
    options = parser.parse_args()
    try:
        if options.sanitize:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{'sanitized':16}  {check(sanitized(Path(folder)))}")
        else:
            check_targets([known[name] for name in options.target or known])
    except (BuildError, KernelError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
