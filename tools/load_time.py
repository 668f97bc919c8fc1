"""What a load takes: `python tools/load_time.py TARGET [--drafter DRAFTER] [--rounds 3] [--json]`.

Seconds to load target and drafter, memory afterwards and at most, with weights mapped and in huge pages, in
turn, each load in a process of its own. Files are in the system's cache, and what passes cost is known from
an earlier load. Memory is physical and counts mapped files, which processes share. `--stages` prints where
the time of a load goes instead, in milliseconds.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil

from edgespec.loading import open_model
from edgespec.sessions import open_pair
from edgespec_models.bundle import Bundle, Role
from edgespec_models.foreign import open_bundle
from edgespec_runtimes.cost import measure_cost, recheck_cost
from edgespec_runtimes.cpu import CpuOptions, CpuSession, open_graph
from edgespec_runtimes.memory import peak_memory_bytes

WAYS = {"mapped": False, "huge pages": True}
PASS = [0] * 8


def load(paths: list[Path], huge_pages: bool) -> dict[str, float]:
    """What loading the bundles and a pass of each take of this process."""
    target, *drafters = map(open_bundle, paths)
    options = CpuOptions(huge_pages=huge_pages)
    taken, pair = seconds(lambda: open_pair(target, drafters[0] if drafters else None, options))
    for running in (pair.target, pair.drafter):
        if running is not None:
            running.session.predict(PASS)
    resident = psutil.Process().memory_info().rss
    return {"seconds": taken, "resident_bytes": resident, "peak_bytes": peak_memory_bytes()}


def loads(paths: list[Path], rounds: int) -> dict[str, list[dict[str, float]]]:
    """What ``rounds`` loads of each way took, in turn; one before them fills caches."""
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for number in range(rounds + 1):
            for way, huge_pages in WAYS.items():
                taken = pool.submit(load, paths, huge_pages).result()
                if number:
                    results[way].append(taken)
    return results


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """How long ``work`` takes, and what it returns."""
    started = perf_counter()
    result = work()
    return perf_counter() - started, result


def stages(path: Bundle, role: Role) -> dict[str, float]:
    """Seconds of each stage of one load."""
    bundle = open_bundle(path.path)  # without what the last round has cached
    options = CpuOptions(exact_rows=role == "target")
    times = {"tokenizer": seconds(lambda: bundle.tokenizer)[0]}
    native = bundle.manifest.operators == "edgespec"
    times["graph"] = seconds(lambda: open_graph(bundle.graph, options, native=native))[0]
    times["graph and self-test"], session = seconds(lambda: CpuSession(bundle, options))
    times["timing passes"], curve = seconds(lambda: measure_cost(session))
    times["checking a stored curve"] = seconds(lambda: recheck_cost(session, curve, 8))[0]
    session.close()
    return times


def show_stages(models: list[tuple[Bundle, Role]], rounds: int) -> None:
    """Print a Markdown table of stages: medians and all."""
    print("| stage | median, ms | all |\n|---|---|---|")
    for bundle, role in models:
        measured = [stages(bundle, role) for _ in range(rounds)]
        for stage in measured[0]:
            values = [times[stage] for times in measured]
            every = ", ".join(f"{value * 1e3:.0f}" for value in values)
            print(f"| {role}: {stage} | {median(values) * 1e3:.0f} | {every} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--drafter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="all rounds, as JSON")
    parser.add_argument("--stages", action="store_true", help="where the time of a load goes")
    options = parser.parse_args()
    models: list[tuple[Bundle, Role]] = [(open_model(options.target, "target"), "target")]
    if options.drafter is not None:
        models.append((open_model(options.drafter, "drafter"), "drafter"))
    if options.stages:
        show_stages(models, options.rounds)
        return
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGESPEC_HOME"] = home  # keeps what passes cost, of these loads alone
        results = loads([bundle.path for bundle, _ in models], options.rounds)
    if options.json:
        print(json.dumps(results))
        return
    print("| weights | load, s | memory then, MB | peak, MB |\n|---|---|---|---|")
    for way, rounds in results.items():
        taken, *memory = (median(column) for column in zip(*(each.values() for each in rounds), strict=True))
        print(f"| {way} | {taken:.2f} | {' | '.join(f'{each / 1e6:,.0f}' for each in memory)} |")


if __name__ == "__main__":
    main()
