"""What passes over n rows cost here and in builds of llama.cpp, in turn: T(n), and the speed of a prompt.

A peer is a folder with ``llama-batched-bench`` and ``llama-bench``: llama.cpp's own, or any that speaks its
options, named as ``NAME=FOLDER`` or ``NAME=FOLDER:OPTION,OPTION`` (``ik=ik_llama.cpp/build/bin:-rtr``). It
decodes n sequences at once, whose n rows all have logits, as a verification's have. Models with states, which
that program cannot run, read n tokens of one sequence. edgespec runs passes of n random tokens, and says how
many different experts a pass used, and how much it read from the disk. Medians over rounds; a round takes
every program once. ``--behind TOKENS`` measures edgespec alone behind a longer text. ``--neighbour CORE``
keeps that core busy meanwhile, ``--stream CORE`` has it read memory. Weights are loaded as ``edgespec.load``
does. With ``--forgotten`` the system forgets the bundle's file before, so that reading it fills the memory of
the control group of this process.

Usage, from the repository's root: ``python -m tools.peers.passes --gguf FILE --bundle DIR
[--peer llama.cpp=peers/llama.cpp/bin ...] [--instructions avx512 --instructions avx2 ...] [--rounds 3]
[--threads 2] [--rows 1,2,4] [--prompt 64] [--behind 16] [--neighbour 1] [--stream 1] [--forgotten]``
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.loading.footprint import room_for
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from tools.arguments import arguments

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
_BEHIND, _STEPS, _REPEATED = 16, 12, 5
_EXPERTS, _DISK = "different experts", "MB from the disk"
_BUSY = "while True: pass"
_STREAM = "import numpy; numbers = numpy.ones(2**26, 'float32')\nwhile True: numbers.max()"
Times = Mapping[str, float]


def peer(
    folder: Path, options: list[str], gguf: Path, threads: int, prompt: int, counts: Sequence[int]
) -> Times:
    """One run of a peer: milliseconds by rows, and tokens a second of a prompt."""
    model = ["-m", str(gguf), "-t", str(threads)]
    rows = ",".join(map(str, counts))
    shape = ["-c", "2048", "-b", "512", "-ub", "512", "-npp", str(_BEHIND), "-ntg", str(_STEPS), "-npl", rows]
    printed = _run([str(folder / "llama-batched-bench"), *model, "-tb", str(threads), *shape, *options])
    times = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 9 and cells[1].isdigit():  # | PP | TG | B | N_KV | T_PP | S_PP | T_TG | ...
            times[cells[3]] = 1000 * float(cells[7]) / int(cells[2])
    valued = [word for option in options for word in (option, "1")]  # llama-bench's switches have values
    bench = [str(folder / "llama-bench"), *model, *["-n", "0", "-o", "json"], *valued]
    sequence = [*bench, "-p", rows, "-d", str(_BEHIND), "-r", str(_STEPS)]
    for run in [] if len(times) == len(counts) else json.loads(_run(sequence, log=False)):
        times[str(run["n_prompt"])] = median(run["samples_ns"]) / 1e6
    (read,) = json.loads(_run([*bench, "-p", str(prompt), "-r", "3"], log=False))
    return times | {"prompt": median(read["samples_ts"])}


def _run(command: list[str], *, log: bool = True) -> str:
    """What a program prints; ik_llama.cpp prints its table where others print their log."""
    done = subprocess.run(command, capture_output=True, text=True, check=not log)
    return done.stdout + (done.stderr if log else "")


def ours(
    bundle: Path, instructions: str, threads: int, prompt: int, counts: Sequence[int], behind: int
) -> Times:
    """The same of edgespec, in a session of its own."""
    opened = Bundle(bundle)
    options = room_for(opened, None, CpuOptions(threads=threads, instructions=instructions))
    session, rng = open_cpu(opened, options), np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, session.model.vocab_size, count)]

    start, times = tokens(behind), dict[str, float]()
    session.reserve(behind + prompt)
    for rows in counts:
        passes = []
        for _ in range(1 + _REPEATED):
            session.prefill(start)  # states lead back over a few rows only
            read, text, began = _bytes_read(), tokens(rows), perf_counter()
            session.predict(text).best(rows - 1)
            ms = 1000 * (perf_counter() - began)
            passes.append((ms, session.model.experts_read, (_bytes_read() - read) / 1e6))
        names = (str(rows), f"{_EXPERTS} {rows}", f"{_DISK} {rows}")
        times |= {
            name: median(column) for name, column in zip(names, zip(*passes[1:], strict=True), strict=True)
        }
    seconds = []
    for _ in range(4):
        session.rewind(0)
        text, began = tokens(prompt), perf_counter()
        session.predict_next(text).best(0)
        seconds.append(perf_counter() - began)
    session.close()
    return times | {"prompt": prompt / median(seconds[1:])}


def _bytes_read() -> int:
    """Bytes that the disk gave this process (Linux), pages of mapped files too."""
    status = Path("/proc/self/io")
    _, _, rest = (status.read_text("ascii") if status.exists() else "").partition("\nread_bytes: ")
    return int(rest.split()[0]) if rest else 0


def forget(path: Path) -> None:
    """Have the system drop what it holds of a file in memory (POSIX)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def programs(options: argparse.Namespace) -> dict[str, Callable[[], Times]]:
    """What is measured, by name."""
    runs: dict[str, Callable[[], Times]] = {}
    common = options.threads, options.prompt, [int(n) for n in options.rows.split(",")]
    for name in options.instructions or [""]:
        label = f"edgespec {name}".strip()
        runs[label] = partial(ours, options.bundle, name, *common, options.behind)
    for text in options.peer:
        name, _, where = text.partition("=")
        folder, _, words = where.partition(":")
        extra = words.split(",") if words else []
        runs[name] = partial(peer, Path(folder), extra, options.gguf, *common)
    return runs


@contextmanager
def neighbour(core: int, program: str) -> Iterator[None]:
    """A program in Python that runs on ``core`` (Linux) without end; none if that is negative."""
    if core < 0:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", program]) as busy:
        try:
            os.sched_setaffinity(busy.pid, {core})
            yield
        finally:
            busy.kill()


def main() -> None:
    """Read the command line, print a table."""
    options = arguments(
        __doc__,
        gguf=Path,
        bundle=Path,
        peer=[str],
        instructions=[str],
        threads=2,
        rounds=3,
        rows=",".join(map(str, ROWS)),
        prompt=64,
        behind=_BEHIND,
        neighbour=-1,
        stream=-1,
        forgotten=False,
    )
    if options.peer and options.behind != _BEHIND:
        sys.exit(
            f"--behind is {options.behind} and there are peers, which are measured behind {_BEHIND} tokens"
        )
    if options.forgotten:
        forget(options.bundle / "model.onnx.data")
    every: dict[str, list[Times]] = {}
    with neighbour(options.neighbour, _BUSY), neighbour(options.stream, _STREAM):
        for _ in range(options.rounds):
            for name, run in programs(options).items():
                every.setdefault(name, []).append(run())
    columns = [*options.rows.split(","), "prompt"]
    print(f"| ms by rows; prompt of {options.prompt}, tokens/s | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, runs in every.items():
        for kind in ("", _EXPERTS, _DISK):
            values = [[run.get(f"{kind} {column}".strip(), 0.0) for run in runs] for column in columns]
            if any(map(any, values)):
                cells = [f"{median(found):.1f}" if any(found) else "" for found in values]
                print(f"| {name}{kind and ': '}{kind} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
