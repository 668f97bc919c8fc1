"""Where the time of a load goes: `python tools/load_time.py TARGET [--drafter DRAFTER] [--rounds 3]`.

Stages one by one, in milliseconds: reading the tokenizer; ONNX Runtime's session; the self-test; timing
passes; checking a stored curve. Then whole loads of both models: as the first one is, and as later ones are.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

from edgespec.loading import open_model
from edgespec.sessions import open_pair
from edgespec_models.bundle import Bundle, Role
from edgespec_models.foreign import open_bundle
from edgespec_runtimes.cost import measure_cost, recheck_cost
from edgespec_runtimes.cpu import CpuOptions, CpuSession, open_graph


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
    with_test, session = seconds(lambda: CpuSession(bundle, options))
    times["graph and self-test"] = with_test
    times["timing passes"], curve = seconds(lambda: measure_cost(session))
    times["checking a stored curve"] = seconds(lambda: recheck_cost(session, curve, 8))[0]
    session.close()
    return times


def load(target: Bundle, drafter: Bundle | None) -> float:
    """Seconds of loading both."""
    fresh = open_bundle(target.path), None if drafter is None else open_bundle(drafter.path)
    taken, pair = seconds(lambda: open_pair(*fresh, CpuOptions()))
    for running in (pair.target, pair.drafter):
        if running is not None:
            running.session.close()
    return taken


def show(name: str, values: list[float]) -> None:
    """Print the median and all values."""
    print(f"| {name} | {median(values) * 1e3:.0f} | {', '.join(f'{v * 1e3:.0f}' for v in values)} |")


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--drafter")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    target = open_model(options.target, "target")
    drafter = None if options.drafter is None else open_model(options.drafter, "drafter")
    print("| stage | median, ms | all |\n|---|---|---|")
    models: list[tuple[Bundle | None, Role]] = [(target, "target"), (drafter, "drafter")]
    for bundle, role in models:
        if bundle is not None:
            rounds = [stages(bundle, role) for _ in range(options.rounds)]
            for stage in rounds[0]:
                show(f"{role}: {stage}", [times[stage] for times in rounds])
    first, later = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as home:
            os.environ["EDGESPEC_HOME"] = home  # where nothing is stored yet
            first.append(load(target, drafter))
            later.append(load(target, drafter))
    show("whole, the first load", first)
    show("whole, a later load", later)


if __name__ == "__main__":
    main()
