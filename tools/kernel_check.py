"""The kernels of all instruction sets against each other, bit for bit, in a program without ONNX Runtime.

Usage, from the repository's root: ``python -m tools.kernel_check [--target NAME ...]``, for instance
``--target x86_64-linux aarch64-linux``. Another platform's program runs in an emulator if it is there: ARM's
for Linux in qemu-aarch64, x86-64's for Windows in wine. The digests it prints must be the same everywhere.
With ``--sanitize`` it is compiled by this machine's C++ compiler instead, with checks of addresses and of
undefined behaviour. With ``--fuzz SECONDS`` so are the operators, and clang's libFuzzer feeds them graphs and
passes of random bytes (``fuzz.cpp``). What it found worth keeping stays in ``build/kernels/fuzz``, where the
next run goes on. With ``--speed`` it prints billions of multiplications a second of one core whose operands
lie in its caches, by set, format and number of rows.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtimes" / "kernels"))

from compiling import CACHE, SOURCES, BuildError, check_program
from targets import CHECK, KERNELS, TARGETS, Target, native_target

# Each buffer is allocated, so that reads beyond its end are seen.
SANITIZE = (
    "-DEDGESPEC_SMALL_BUFFER=0",
    "-std=c++20",
    "-O1",
    "-g",
    "-w",
    "-Wno-psabi",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
)
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
    wine = next((place for name in ("wine64", "wine") if (place := shutil.which(name))), None)
    qemu = shutil.which("qemu-aarch64")
    if target.name == "aarch64-linux" and qemu:
        return (qemu, "-cpu", "max", "-L", os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu"))
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
    return compiled(compiler, dict.fromkeys(CHECK, ()), SANITIZERS, folder / "check")


def compiled(
    compiler: str, sources: Mapping[str, tuple[str, ...]], link: Sequence[str], program: Path
) -> Path:
    """``program`` made of the sets and ``sources``, each with flags of its own, with checks."""
    machine = "aarch64" if platform.machine() in {"aarch64", "arm64"} else platform.machine()

    def one(item: tuple[str, tuple[str, ...]]) -> str:
        name, flags = item
        made = f"{program}-{name}.o"
        command = (compiler, *SANITIZE, *SANITIZERS, *flags, "-c", name, "-o", made)
        if subprocess.run(command, cwd=SOURCES, check=False).returncode:
            raise KernelError(f"{compiler} does not compile {name}; CXX may name another compiler")
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(one, (dict(sources) | SETS.get(machine, {})).items()))
    if subprocess.run((compiler, "-pthread", *link, *objects, "-o", str(program)), check=False).returncode:
        raise KernelError(f"{compiler} does not link with {link[0]}; install its sanitizers' libraries")
    return program


def fuzz(seconds: int, folder: Path) -> str:
    """What libFuzzer's program printed: how many graphs it tried, and how often each refusal was given."""
    compiler = os.environ.get("CXX") or shutil.which("clang++")
    if compiler is None:
        raise KernelError("no clang++ for --fuzz: install LLVM's clang, or name one in CXX")
    sources = dict.fromkeys(KERNELS, tuple[str, ...]())
    sources |= dict.fromkeys(("operators.cpp", "fuzz.cpp"), ("-fsanitize=fuzzer-no-link",))
    program = compiled(compiler, sources, ("-fsanitize=fuzzer,address,undefined",), folder / "fuzz")
    kept = CACHE / "fuzz"
    kept.mkdir(parents=True, exist_ok=True)
    for number in range(5280):  # graphs of every operator with one error, whose place is the second byte
        places = bytes((0, 1 + number % 110, number // 110))
        (kept / f"error-{number}").write_bytes(places + Random(number).randbytes(150))
    options = (f"-max_total_time={seconds}", "-len_control=0", "-max_len=400", f"-artifact_prefix={folder}/")
    command = (str(program), *options, str(kept))
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise KernelError(f"the operators fail over a graph:\n{run.stderr[-6000:]}")
    never = [message for message in refusals() if message not in run.stdout]
    if never:
        raise KernelError(f"{run.stdout}never given, so run longer: {'; '.join(never)}")
    return run.stdout


def refusals() -> list[str]:
    """The words of every refusal in the operators' sources."""
    texts = [path.read_text(encoding="utf-8") for path in SOURCES.glob("*.h") if path.name != "stand_in.h"]
    return [words.strip() for text in texts for words in re.findall(r'"([a-z\']+(?: [^" ]+){3,} ?)"', text)]


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
    parser.add_argument("--speed", action="store_true", help="how fast products are on this machine")
    parser.add_argument("--fuzz", type=int, metavar="SECONDS", help="the operators, over random graphs")
    options = parser.parse_args()
    try:
        if options.speed:
            sys.exit(subprocess.run((check_program(native_target()), "speed"), check=False).returncode)
        if options.sanitize or options.fuzz:
            with tempfile.TemporaryDirectory() as folder:
                if options.sanitize:
                    print(f"{'sanitized':16}  {check(sanitized(Path(folder)))}", flush=True)
                if options.fuzz:
                    print(fuzz(options.fuzz, Path(folder)), end="")
        else:
            check_targets([known[name] for name in options.target or known])
    except (BuildError, KernelError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
