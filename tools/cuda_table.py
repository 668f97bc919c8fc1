"""What a GPU does for a target and its drafter: one command, a table in Markdown, everything in JSON.

Exports what is missing, compares speculative with plain greedy answers, and measures T(n), behind 64 tokens
and more, and tokens a second, with the drafter on the same device and on the CPU, each beside plain decoding
of the same load.

Usage, from the repository's root: ``python -m tools.cuda_table --target TARGET.gguf --drafter DRAFTER.gguf
--work DIR [--behind 2000] [--prompts FILE.jsonl] [--limit 12] [--max-new-tokens 128] [--json OUT.json]``.
Sources may be Hugging Face directories too; DIR keeps the bundles for the next time. ``--device cpu`` runs
the same float16 bundles on the CPU: slow, and of use to check this script only.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from edgespec import load
from edgespec.loading.measurements import describe_machine
from edgespec.measuring.bench import BenchOptions, measure, summarize
from edgespec.measuring.prompts import Prompt, builtin_prompts, load_prompts, select
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.recipe import RECIPES
from edgespec_models.bundles.bundle import MANIFEST, Bundle
from edgespec_models.errors import EdgespecError
from edgespec_runtimes.cuda import open_cuda
from edgespec_runtimes.devices import Device
from edgespec_runtimes.discovery import resolve
from edgespec_runtimes.ort import ort
from edgespec_runtimes.session import Session
from tools.arguments import arguments

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
REPEATS = 12
COLUMNS = (
    *("drafter on", "plain tokens/s", "speculative tokens/s", "speedup", "tokens a pass"),
    *("accepted of drafted", "MBSU", "answers the same"),
)


def bundles(target: Path, drafter: Path, work: Path) -> tuple[Bundle, Bundle, Bundle]:
    """The target and the drafter for the GPU, and the drafter for the CPU; its LM head is whole too."""

    def made(source: Path, kind: str, options: ExportOptions) -> Bundle:
        name = source.stem if source.is_file() else source.name
        folder = work / f"{name}-{kind}-r{RECIPES[options.device]}"
        if not (folder / MANIFEST).is_file():
            print(f"Exporting {source.name} to {folder}", file=sys.stderr, flush=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            export_model(source, folder, options=options)
        return Bundle(folder)

    return (
        made(target, "target", ExportOptions(device="cuda")),
        made(drafter, "drafter", ExportOptions(role="drafter", device="cuda", trim="full")),
        made(drafter, "drafter-cpu", ExportOptions(role="drafter", trim="full")),
    )


def pass_times(opened: Bundle, device: Device, places: Sequence[int]) -> dict[str, Any]:
    """T(n) in milliseconds behind these numbers of tokens, and whether the self-test found equal bits."""
    session = open_cuda(opened, device)
    try:
        return {
            "ms": {behind: times_behind(session, behind) for behind in places},
            "row_exact": session.model.row_exact,
        }
    finally:
        session.close()


def times_behind(session: Session, behind: int) -> dict[int, float]:
    """Medians of passes over 1 to 16 rows, each row's most likely token included."""
    tokens = [5 + at % 1000 for at in range(behind)]
    session.reserve(behind + max(ROWS))
    session.prefill(tokens)
    medians = {}
    for rows in ROWS:
        times = []
        for _ in range(REPEATS):
            session.rewind(behind)
            began = perf_counter()
            predictions = session.predict(tokens[:rows])
            for row in range(rows):
                predictions.best(row)
            times.append(perf_counter() - began)
        medians[rows] = median(times) * 1e3
    return medians


def answers(
    target: Bundle, drafter: Bundle, devices: tuple[str, str], prompts: Sequence[Prompt], tokens: int
) -> dict[str, Any]:
    """Every prompt plainly and speculatively; what ``edgespec bench --json`` writes."""
    options = BenchOptions(max_new_tokens=tokens, stop_at_eos=False)
    with load(target.path, drafter.path, device=devices[0], drafter_device=devices[1]) as model:
        pairs = list(measure(model, prompts, options))
        return {**summarize(model, pairs, options), "placement": pairs[0].speculative.stats.placement}


def gpu() -> str | None:
    """Name, driver and memory of the GPU; None where there is no nvidia-smi."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or None


def row(name: str, answers: dict[str, Any]) -> str:
    """A line of the table."""

    figures = (
        (answers["plain"]["tokens_per_second"], ".1f"),
        (answers["speculative"]["tokens_per_second"], ".1f"),
        (answers["speedup"]["overall"], ".2f"),
        (answers["block_efficiency"], ".2f"),
        (answers["acceptance_rate"], ".1%"),
        (answers["mbsu"]["bytes"], ".2f"),
    )
    cells = ["" if value is None else format(value, form) for value, form in figures]
    return f"| {' | '.join([name, *cells])} | {answers['identical']} of {answers['prompts']} |"


def markdown(result: dict[str, Any]) -> str:
    """The report."""
    passes = {who: result[f"{who}_passes"]["ms"] for who in ("target", "drafter")}
    lines = [
        f"Target on {result['device']} ({result['gpu'] or 'no nvidia-smi'}); ONNX Runtime "
        f"{result['onnxruntime']}; same bits for any rows: "
        f"{'yes' if result['target_passes']['row_exact'] else 'no'}",
        "",
        f"| a pass, ms, by rows | {' | '.join(str(n) for n in ROWS)} |",
        f"|---|{'---|' * len(ROWS)}",
        *(
            f"| {who}, behind {behind} tokens | {' | '.join(f'{ms:.2f}' for ms in times.values())} |"
            for who, by_place in passes.items()
            for behind, times in by_place.items()
        ),
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(row(name, answers) for name, answers in result["answers"].items()),
    ]
    return "\n".join(lines)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, in turn: models are loaded one pair at a time."""
    device = resolve(options.device)
    prompts = select(load_prompts(options.prompts) if options.prompts else builtin_prompts(), options.limit)
    target, drafter, on_cpu = bundles(options.target, options.drafter, options.work)
    tokens, name = options.max_new_tokens, device.name
    made = {name: (drafter, name), "the CPU": (on_cpu, "cpu")}
    return {
        "device": name,
        "gpu": gpu() if name == "cuda" else None,
        "machine": describe_machine(),
        "onnxruntime": ort.__version__,
        "target_passes": pass_times(target, device, (64, *options.behind)),
        "drafter_passes": pass_times(drafter, device, (64,)),
        "answers": {
            label: answers(target, small, (name, where), prompts, tokens)
            for label, (small, where) in made.items()
        },
    }


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line, measure, print and write."""
    options = arguments(
        __doc__,
        words=words,
        target=Path,
        drafter=Path,
        work=Path,
        device="cuda",
        behind=[int],
        prompts=(Path,),
        limit=(int,),
        max_new_tokens=128,
        json=(Path,),
    )
    try:
        result = run(options)
    except EdgespecError as error:
        sys.exit(f"error: {error}")
    print(markdown(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
