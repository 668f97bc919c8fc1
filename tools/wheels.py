"""Wheels for all platforms from this machine, each checked: what library it has, and what that needs.

Usage, from the repository's root: ``python -m tools.wheels [--out DIR] [--target NAME ...]``, for instance
``python -m tools.wheels --target aarch64-linux x86_64-windows``. Wheels go to ``dist``. Needs the packages
``setuptools>=77``, ``ziglang>=0.17``, ``lief>=1.0``, ``cyclonedx-python-lib>=11`` and ``wheel`` in the
environment it runs in. Loads each wheel's library, and runs the kernels last as ``tools/kernel_check.py``
does: those for other processors in emulators, where they are there.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import lief

from tools.kernel_check import KernelError, check_targets, emulator
from tools.wheel_parts import add_parts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtimes" / "kernels"))

from compiling import BuildError, set_objects, target_flags
from targets import TARGETS, Target

ROOT = Path(__file__).resolve().parent.parent

SYSTEM = re.compile(
    r"lib(c|m|pthread|dl)\.so\.[0-9]|ld-linux-(x86-64|aarch64)\.so\.[0-9]"
    r"|(kernel32|ntdll|api-ms-win-crt-[a-z0-9-]+)\.dll|/usr/lib/libSystem\.B\.dylib",
    re.IGNORECASE,
)
"""Libraries that every system has."""

KINDS = {"linux": "ELF", "windows": "PE", "macos": "MACHO"}
MACHINES = {"x86_64": "X86_64", "aarch64": "ARM64"}

LOADER = """
#include <stdio.h>
#ifdef _WIN32
#include <windows.h>
#define FIND(library, name) GetProcAddress(LoadLibraryA(library), name)
#else
#include <dlfcn.h>
#define FIND(library, name) dlsym(dlopen(library, RTLD_NOW), name)
#endif
int main(int n, char** words) { puts(((const char* (*)(void))FIND(words[1], "edgespec_instructions"))()); }
"""
"""Prints which instructions a library's kernels take, which it asks the processor."""


class WheelError(Exception):
    """A wheel that is not made, or is not what it should be."""


def build(target: Target, out: Path) -> Path:
    """Make the wheel of ``target`` in ``out``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--config-settings", f"target={target.name}", "--wheel-dir", folder, str(ROOT)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        made = next(Path(folder).glob("*.whl"), None)
        if run.returncode or made is None:
            raise WheelError(f"pip made no wheel for {target.name}:\n{run.stdout}{run.stderr}")
        out.mkdir(parents=True, exist_ok=True)
        wheel = out / made.name
        wheel.write_bytes(made.read_bytes())
    return wheel


def inspect(wheel: Path, target: Target) -> str:
    """What the library in ``wheel`` is and needs, which have to be what ``target`` takes."""
    with ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if "edgespec_kernels" in name]
        if libraries != [f"edgespec_runtimes/{target.library}"]:
            raise WheelError(f"{wheel.name} has {libraries or 'no library'}, not {target.library} alone")
        data = archive.read(libraries[0])
    if not wheel.name.endswith(f"-py3-none-{target.tag}.whl"):
        raise WheelError(f"{wheel.name} is not tagged py3-none-{target.tag}")
    library = parsed(data)
    machine, _, system = target.name.partition("-")
    expected = f"{KINDS[system]} {MACHINES[machine]}"
    kind = f"{library.format.name} {library.abstract.header.architecture.name}"
    if kind != expected:
        raise WheelError(f"the library in {wheel.name} is {kind}, not {expected}")
    exported = {function.name.removeprefix("_") for function in library.exported_functions}
    for name in ("RegisterCustomOps", "edgespec_instructions"):
        if name not in exported:
            raise WheelError(f"the library in {wheel.name} does not export {name}")
    every = [getattr(entry, "name", entry) for entry in library.libraries]
    needed = [name for name in every if not name.endswith(target.library)]  # macOS' libraries name themselves
    foreign = [name for name in needed if not SYSTEM.fullmatch(name)]
    if foreign:
        raise WheelError(f"the library in {wheel.name} needs what systems may lack: {', '.join(foreign)}")
    return f"{kind:14}  {len(data) / 1024:5,.0f} KB  needs {needs(needed)}"


def load(wheel: Path, target: Target) -> str:
    """What the library in ``wheel`` says when it is loaded and called, where that can be."""
    emulated = emulator(target)
    if emulated is None:
        return "not loaded"
    with tempfile.TemporaryDirectory() as folder, ZipFile(wheel) as archive:
        library = archive.extract(f"edgespec_runtimes/{target.library}", folder)
        program = f"{folder}/load.exe"
        flags = (*target_flags(target.zig), *(["-ldl"] if target.suffix == ".so" else []))
        zig = (sys.executable, "-m", "ziglang", "cc", "-x", "c", "-", *flags, "-o", program)
        subprocess.run(zig, input=LOADER, text=True, check=True)
        run = subprocess.run((*emulated, program, library), capture_output=True, text=True, check=False)
    if run.returncode or not run.stdout.strip():
        missing = "; for ARM's, qemu needs libc6-arm64-cross" if "ld-linux" in run.stderr else ""
        raise WheelError(f"the library in {wheel.name} does not load: {run.stderr.strip()}{missing}")
    return f"loaded: {run.stdout.strip()}"


def parsed(data: bytes) -> Any:
    """What a library or object file says of itself."""
    binary = lief.parse(data)
    if binary is None:
        raise WheelError(f"not a library or object file: it begins with {data[:4].hex()}")
    return binary


def needs(names: Sequence[str]) -> str:
    """Names of libraries for the table, those of Windows' C runtime as one."""
    runtime = "api-ms-win-crt-*.dll"
    return " ".join(dict.fromkeys(runtime if name.startswith("api-ms-win-crt-") else name for name in names))


def check_objects(target: Target) -> None:
    """See that code for more than the baseline is reached by its table alone.

    A function that the linker could take for another file's of the same name would run everywhere, and stop
    processors without the instructions. Sources are the same everywhere, so Linux' objects tell for all.
    """
    for path in set_objects(target) if target.name.endswith("-linux") else ():
        made = parsed(path.read_bytes())  # lives as long as its symbols are read: lief does not see to that
        names = {symbol.name for symbol in made.exported_symbols}
        exported = {name for name in names if not name.endswith("6kTableE")}
        if exported:
            raise WheelError(
                f"{path.name} exports {', '.join(sorted(exported))} besides its table of kernels"
            )


def main() -> None:
    """Read the command line, build and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = {target.name: target for target in TARGETS}
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where wheels go (default: dist)")
    parser.add_argument("--target", nargs="+", choices=known, help="instead of all")
    options = parser.parse_args()
    targets = [known[name] for name in options.target or known]
    try:
        for target in targets:
            wheel = build(target, options.out)
            add_parts(wheel)
            row = inspect(wheel, target)
            check_objects(target)
            print(f"{wheel.name:52}  {row}; {load(wheel, target)}", flush=True)
        check_targets(targets)
    except (BuildError, KernelError, WheelError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
