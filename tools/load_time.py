"""What a load takes: `python -m tools.load_time TARGET [--drafter DRAFTER] [--rounds 3]`.

Seconds to load target and drafter, memory afterwards and at most, with weights mapped and in huge pages, in
turn, each load in a process of its own. Files are in the system's cache, and what passes cost is known from
an earlier load. Memory is physical and counts mapped files, which processes share.
"""

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter

import psutil

from edgespec.loading.opening import open_model, open_pair
from edgespec_models.bundles.foreign import open_bundle
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.memory import peak_memory_bytes
from tools.arguments import arguments

WAYS = {"mapped": False, "huge pages": True}
PASS = [0] * 8


def load(paths: list[Path], huge_pages: bool) -> dict[str, float]:
    """What loading the bundles and a pass of each take of this process."""
    target, *drafters = map(open_bundle, paths)
    options = CpuOptions(huge_pages=huge_pages)
    started = perf_counter()
    pair = open_pair(target, drafters[0] if drafters else None, options)
    taken = perf_counter() - started
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


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, "target", drafter=(str,), rounds=3)
    models = [open_model(options.target, "target")]
    if options.drafter is not None:
        models.append(open_model(options.drafter, "drafter"))
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGESPEC_HOME"] = home  # keeps what passes cost, of these loads alone
        results = loads([bundle.path for bundle in models], options.rounds)
    print("| weights | load, s | memory then, MB | peak, MB |\n|---|---|---|---|")
    for way, rounds in results.items():
        columns = zip(*(figures.values() for figures in rounds), strict=True)
        taken, *memory = map(median, columns)
        print(f"| {way} | {taken:.2f} | {' | '.join(f'{n_bytes / 1e6:,.0f}' for n_bytes in memory)} |")


if __name__ == "__main__":
    main()
