"""Compare greedy decoding of the same GGUF file, side by side: every mode of edgespec and of its peers.

Every row is a worker process. The rows take turns, prompt by prompt (A B C A B C), so that a machine that
slows down slows all of them; ratios are taken inside one turn. Speeds count from the first new token to the
last. A row that fails says so in the table; the others go on. Ctrl-C ends it with the tables so far. How a
runtime works: see the workers; which modes there are: rows.py.

Usage, from the repository's root, in edgespec's environment, after install.py::

    python -m tools.peers.compare --peers DIR --gguf FILE --draft-gguf SMALL --edgespec exact=TARGET \\
        --drafter DRAFTER --prompts FILE --limit 26 --json OUT

--edgespec and --drafter are [NAME=]MODEL and may be repeated; every drafter drafts for every target.
--draft-gguf is the draft model of onnxruntime-genai and llama.cpp, of the same vocabulary; --genai-model is
PEERS/onnx/NAME by default. --rows takes only rows of such names ('llama.cpp *'); each runs a prompt --turns
times for --tokens new tokens. --reserve-gb is memory to leave free of workers that stay.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from edgespec.loading.measurements import describe_machine
from edgespec.measuring.prompts import Prompt, builtin_prompts, load_prompts, select
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_models.errors import EdgespecError
from edgespec_models.text.chat_template import ChatTemplate
from tools.arguments import arguments
from tools.peers.processes import WorkerError, Workers
from tools.peers.protocol import Request
from tools.peers.rows import Row, build
from tools.peers.table import Sample, Table, tables

SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt as the model reads it, and the user's message in it, if it is a conversation."""

    id: str
    category: str
    text: str
    chat: str | None = None


def tasks(args: argparse.Namespace) -> list[Task]:
    """The prompts, in the GGUF's own chat template if it has one."""
    with GGUFCheckpoint(args.gguf) as checkpoint:
        source = checkpoint.chat_templates().get("default")
    # No BOS in the text: every runtime adds its own.
    template = None if source is None else ChatTemplate(source)
    chosen = select(load_prompts(args.prompts) if args.prompts else builtin_prompts(), args.limit)
    return [_task(prompt, template) for prompt in chosen]


def _task(prompt: Prompt, template: ChatTemplate | None) -> Task:
    text = prompt.turns[0]
    if template is None:
        return Task(prompt.id, prompt.category, text)
    return Task(prompt.id, prompt.category, template.render([{"role": "user", "content": text}]), text)


class Run:
    """One comparison: rows that take turns, and what came of it."""

    def __init__(self, rows: Sequence[Row], workers: Workers, report: Callable[[str], None]) -> None:
        self.rows, self._workers, self._report = rows, workers, report
        self.samples: list[Sample] = []
        self.failures: dict[str, str] = {}

    def load(self) -> None:
        """Start every row's worker."""
        for row in self.rows:
            self._report(f"loading {row.name}")
            try:
                self._workers.open(row.command, row.options)
            except WorkerError as error:
                self._fail(row, error)

    def measure(self, task: Task, turn: int, tokens: int) -> None:
        """Let every row that still runs continue one prompt."""
        for row in self.rows:
            if row.name in self.failures:
                continue
            busy = psutil.cpu_percent(interval=SETTLE_S) / 100
            try:
                reply = self._workers.ask(row.command, Request(task.text, tokens, task.chat, row.options))
            except WorkerError as error:
                self._fail(row, error)
                continue
            answer = asdict(reply) | {"tokens": tuple(reply.tokens)}
            self.samples.append(
                Sample(row=row.name, prompt=task.id, category=task.category, turn=turn, busy=busy, **answer)
            )
            self._report(f"{turn} {task.id:16} {row.name:28} {reply.tokens_per_s:6.1f} tokens/s, {busy:4.0%}")

    def kl(self) -> dict[str, float | None]:
        """By row: the KL divergence against the file that its worker knows."""
        return {row.name: self._workers.facts.get(row.command, {}).get("kl") for row in self.rows}

    def _fail(self, row: Row, error: WorkerError) -> None:
        self.failures[row.name] = " ".join(str(error).split())
        self._report(f"{row.name} does not run: {error}")


def outcome(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables; return everything for ``--json``."""
    table = Table(run.rows, run.samples)
    summary, kl = table.summary(), run.kl()
    print(tables(summary, kl))
    for name, reason in run.failures.items():
        print(f"\n{name}: does not run: {reason}")
    headlines, warnings = table.headlines(), table.warnings(args.tokens)
    for line in headlines:
        ratio = line["ratio"] or {"total": 0.0, "median": 0.0}
        print(f"\n{line['ours']} / {line['peer']}: {ratio['total']:.3f} in all, {ratio['median']:.3f} median")
    for warning in warnings:
        print(f"warning: {warning}")
    if run.samples:
        busy = statistics.median(sample.busy for sample in run.samples)
        print(f"\nothers used {busy:.0%} of the processors (median)")
    return {
        "machine": describe_machine(),
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "rows": [asdict(row) | {"kl": kl[row.name]} for row in run.rows],
        "summary": summary,
        "headlines": headlines,
        "failures": run.failures,
        "warnings": warnings,
        "samples": [asdict(sample) for sample in run.samples],
    }


def main() -> None:
    """Start the rows, let them take turns, report."""
    args = arguments(
        __doc__,
        peers=Path,
        gguf=Path,
        draft_gguf=(Path,),
        edgespec=[str],
        drafter=[str],
        genai_model=(Path,),
        rows=[str],
        prompts=(Path,),
        limit=(int,),
        tokens=128,
        turns=1,
        threads=2,
        reserve_gb=5.0,
        json=(Path,),
    )

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    try:
        prompts = tasks(args)
    except EdgespecError as error:
        sys.exit(str(error))
    with Workers(int(args.reserve_gb * 2**30), report) as workers:
        run = Run(build(args), workers, report)
        run.load()
        try:
            for turn, task in product(range(args.turns), prompts):
                run.measure(task, turn, args.tokens)
        except KeyboardInterrupt:
            report("stopped; the tables show what was measured")
        result = outcome(run, args)
    if args.json:
        args.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
