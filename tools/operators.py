"""Where a pass's time goes, by kind of operator: ``python -m tools.operators BUNDLE [--rows N] [--past P]``.

ONNX Runtime's own profiler, over 100 passes behind ``P`` tokens.
The profiler costs a few microseconds an operator.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from edgespec_models.foreign import open_bundle
from edgespec_runtimes import cpu
from edgespec_runtimes.cpu import CpuOptions, CpuSession

_PASSES = 100


def events(bundle: Path, rows: int, past: int) -> list[dict[str, Any]]:
    """What the profiler wrote about the passes."""
    with tempfile.TemporaryDirectory() as folder:
        plain = cpu._open

        def profiled(graph: Path, settings: Any) -> Any:
            settings.enable_profiling = True
            settings.profile_file_prefix = str(Path(folder) / "passes")
            return plain(graph, settings)

        with mock.patch.object(cpu, "_open", profiled):
            session = CpuSession(open_bundle(bundle), CpuOptions(exact_rows=False), row_exact=False)
        tokens = [index * 7919 % session.vocab_size for index in range(past + rows)]
        session.reserve(past + rows)
        session.prefill(tokens[:past])
        for _ in range(_PASSES + 5):  # some to warm up
            session.predict(tokens[past:])
            session.truncate(past)
        assert session._io is not None
        file = session._io._session.end_profiling()
        found: list[dict[str, Any]] = json.loads(Path(file).read_text(encoding="utf-8"))
        session.close()
    return found


def by_kind(found: Iterable[dict[str, Any]], since: int) -> dict[str, list[int]]:
    """Microseconds of every run of every operator from ``since`` on."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for event in found:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= since:
            kinds[event["args"]["op_name"]].append(event["dur"])
    return kinds


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--past", type=int, default=256)
    args = parser.parse_args()
    found = events(args.bundle, args.rows, args.past)
    passes = [event for event in found if event.get("name") == "model_run"][-_PASSES:]
    kinds = by_kind(found, passes[0]["ts"])
    print(f"a pass {median(event['dur'] for event in passes) / 1e3:.2f} ms; in operators:")
    print("operator | nodes | microseconds each | ms a pass")
    for kind, times in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        each = sum(times) / len(times)
        print(f"{kind} | {len(times) / _PASSES:.0f} | {each:.1f} | {sum(times) / _PASSES / 1e3:.2f}")


if __name__ == "__main__":
    main()
