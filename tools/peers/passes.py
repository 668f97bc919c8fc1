"""What passes over n rows cost here and in builds of llama.cpp, in turn: T(n), and the speed of a prompt.

A peer is a folder with ``llama-batched-bench`` and ``llama-bench``: llama.cpp's own, or any that speaks its
options, named as ``NAME=FOLDER`` or ``NAME=FOLDER:OPTION,OPTION`` (``ik=ik_llama.cpp/build/bin:-rtr``). It
decodes n sequences at once, whose n rows all have logits, as a verification's have. edgespec runs passes of n
tokens. Medians over rounds; a round takes every program once. ``--behind TOKENS`` measures edgespec alone
behind a longer text. ``--neighbour CORE`` keeps that core busy meanwhile.

Usage, from the repository's root: ``python -m tools.peers.passes --gguf FILE --bundle DIR
[--peer llama.cpp=peers/llama.cpp/bin ...] [--instructions avx512 --instructions avx2 ...] [--rounds 3]
[--prompt 64] [--behind 16] [--neighbour 1]``
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.session import Session
from tools.arguments import arguments

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
_BEHIND, _STEPS, _REPEATED = 16, 12, 5
Times = Mapping[str, float]


def peer(folder: Path, options: list[str], gguf: Path, threads: int, prompt: int) -> Times:
    """One run of a peer: milliseconds by rows, and tokens a second of a prompt."""
    model = ["-m", str(gguf), "-t", str(threads)]
    rows = ",".join(map(str, ROWS))
    shape = ["-c", "2048", "-b", "512", "-ub", "512", "-npp", str(_BEHIND), "-ntg", str(_STEPS), "-npl", rows]
    printed = _run([str(folder / "llama-batched-bench"), *model, "-tb", str(threads), *shape, *options])
    times = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 9 and cells[1].isdigit():  # | PP | TG | B | N_KV | T_PP | S_PP | T_TG | ...
            times[cells[3]] = 1000 * float(cells[7]) / int(cells[2])
    valued = [word for option in options for word in (option, "1")]  # llama-bench's switches have values
    bench = [str(folder / "llama-bench"), *model, *f"-p {prompt} -n 0 -r 3 -o json".split(), *valued]
    match = re.search(r'"avg_ts": ([0-9.]+)', _run(bench))
    return times | ({} if match is None else {"prompt": float(match[1])})


def _run(command: list[str]) -> str:
    """What a program prints; ik_llama.cpp prints its table where others print their log."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def ours(bundle: Path, instructions: str, threads: int, prompt: int, behind: int) -> Times:
    """The same of edgespec, in a session of its own."""
    session = open_cpu(Bundle(bundle), CpuOptions(threads=threads, instructions=instructions))
    start = [100 + token for token in range(behind)]
    times: dict[str, float] = {}
    session.reserve(behind + prompt)
    for rows in ROWS:
        session.prefill(start)
        times[str(rows)] = 1000 * median(_timed(session, start, rows) for _ in range(_REPEATED))
    seconds = []
    for number in range(4):
        session.rewind(0)
        began = perf_counter()
        session.predict_next([200 + number + token for token in range(prompt)]).best(0)
        seconds.append(perf_counter() - began)
    session.close()
    return times | {"prompt": prompt / median(seconds[1:])}


def _timed(session: Session, start: list[int], rows: int) -> float:
    session.prefill(start)  # states lead back over a few rows only
    began = perf_counter()
    session.predict([300 + token for token in range(rows)]).best(rows - 1)
    return perf_counter() - began


def programs(options: argparse.Namespace) -> dict[str, Callable[[], Times]]:
    """What is measured, by name."""
    runs: dict[str, Callable[[], Times]] = {}
    for name in options.instructions or [""]:
        label = f"edgespec {name}".strip()
        runs[label] = partial(ours, options.bundle, name, options.threads, options.prompt, options.behind)
    for text in options.peer:
        name, _, where = text.partition("=")
        folder, _, words = where.partition(":")
        extra = words.split(",") if words else []
        runs[name] = partial(peer, Path(folder), extra, options.gguf, options.threads, options.prompt)
    return runs


@contextmanager
def neighbour(core: int) -> Iterator[None]:
    """A program that wants ``core`` (Linux) without end; none if that is negative."""
    if core < 0:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
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
        prompt=64,
        behind=_BEHIND,
        neighbour=-1,
    )
    if options.peer and options.behind != _BEHIND:
        sys.exit(
            f"--behind is {options.behind} and there are peers, which are measured behind {_BEHIND} tokens"
        )
    every: dict[str, list[Times]] = {}
    with neighbour(options.neighbour):
        for _ in range(options.rounds):
            for name, run in programs(options).items():
                every.setdefault(name, []).append(run())
    columns = [*map(str, ROWS), "prompt"]
    print(f"| ms by rows; prompt of {options.prompt}, tokens/s | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, runs in every.items():
        cells = [f"{median(run.get(column, float('nan')) for run in runs):.1f}" for column in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
