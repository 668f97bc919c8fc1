"""Compiles changed sources of the library and its check with zig.

Results stay in ``build/kernels/TARGET``. Their names have a digest of the inputs: sources, headers, flags,
zig's version. So an existing name need not be compiled again. Files appear at once and complete, so two
builds may run side by side.
"""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from targets import CHECK, COMPILE, LIBRARY, Target

SOURCES = Path(__file__).resolve().parent
CACHE = SOURCES.parent.parent / "build" / "kernels"
DAY = 24 * 3600


class BuildError(Exception):
    """The library cannot be built; the message has the reason and the remedy."""


def library(target: Target) -> Path:
    """The library for ``target``."""
    folder = cache_folder(target.name)
    objects = compiled(target.zig, target.processors(LIBRARY), folder)
    return linked(target.zig, objects, target.link, folder / target.library)


def check_program(target: Target) -> Path:
    """The program made of ``check.cpp`` and the kernels."""
    folder = cache_folder(f"{target.name}-check")
    zig = target.static or target.zig
    objects = compiled(zig, target.processors(CHECK), folder)
    name = "check.exe" if target.suffix == ".dll" else "check"
    return linked(zig, objects, ("-static",) if target.static else (), folder / name)


def set_objects(target: Target) -> list[Path]:
    """The object files of instruction sets beyond the baseline."""
    return compiled(target.zig, target.sets, cache_folder(target.name))


def compiled(zig: str, processors: Mapping[str, str], folder: Path) -> list[Path]:
    """The object files of sources, each for its processor.

    They are compiled from a copy, because sources may change meanwhile.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="making-") as copy:
        texts = {path.name: path.read_text(encoding="utf-8") for path in sources()}
        for name, text in texts.items():
            Path(copy, name).write_text(text, encoding="utf-8")
        headers = [
            part for name in sorted(texts) if not name.endswith(".cpp") for part in (name, texts[name])
        ]

        def compile_source(name: str) -> Path:
            flags = (*target_flags(zig), *COMPILE, f"-mcpu={processors[name]}", "-c", name)
            return made(flags, folder / f"{Path(name).stem}.o", digest((*flags, texts[name], *headers)), copy)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compile_source, processors))


def linked(zig: str, objects: Sequence[Path], flags: Sequence[str], to: Path) -> Path:
    """The file linked from ``objects``. Results of earlier sources are deleted when they are a day old."""
    arguments = (*target_flags(zig), *flags)
    key = digest((*arguments, *(path.name for path in objects)))
    result = made((*arguments, *map(str, objects)), to, key)
    for path in to.parent.iterdir():
        if path not in (result, *objects) and path.is_file() and time.time() - path.stat().st_mtime > DAY:
            path.unlink(missing_ok=True)
    return result


def target_flags(zig: str) -> tuple[str, ...]:
    """The flags that choose a platform; none for this machine's own."""
    return ("-target", zig) if zig else ()


def made(arguments: Iterable[str], to: Path, key: str, cwd: str | Path = SOURCES) -> Path:
    """``to`` with ``key`` in its name. Zig makes it by ``arguments``, unless it exists."""
    result = to.with_stem(f"{to.stem}-{key}")
    if result.exists():
        return result
    with tempfile.TemporaryDirectory(dir=to.parent, prefix="making-") as folder:
        output = Path(folder) / to.name
        command = (sys.executable, "-m", "ziglang", "c++", *arguments, "-o", str(output))
        run = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
        if run.returncode or not output.exists():
            raise BuildError(f"zig could not make {to.name}:\n{run.stdout}{run.stderr}")
        try:
            output.replace(result)
        except PermissionError:  # on Windows, if another build has just made it and reads it
            if not result.exists():
                raise
    return result


def sources() -> list[Path]:
    """The files of C++."""
    return [path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".h", ".inl"}]


def cache_folder(name: str) -> Path:
    """Make the folder of results; BuildError without a compiler."""
    zig_version()
    folder = CACHE / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"the library is compiled in {folder}, which cannot be written: {error.strerror}"
        raise BuildError(f"{reason}. Install from a copy of the checkout in a folder of yours") from error
    return folder


def zig_version() -> str:
    """The version of the compiler."""
    try:
        return importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError as error:
        install = f'"{sys.executable}" -m pip install "setuptools>=77" "ziglang>=0.17"'
        raise BuildError(f"no C++ compiler: the package ziglang is not installed. Run: {install}") from error


def digest(parts: Iterable[str]) -> str:
    """The digest of ``parts`` and the compiler, which names the object file."""
    return hashlib.sha256("\0".join((zig_version(), *parts)).encode()).hexdigest()[:16]
