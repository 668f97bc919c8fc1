"""Compare greedy decoding of the same GGUF file, side by side: every mode of edgespec and of its peers.

Every row is a worker process. The rows take turns, prompt by prompt (A B C A B C), so that a machine that
slows down slows all of them; ratios are taken inside one turn. Speeds count from the first new token to the
last. A row that fails says so in the table; the others go on. Ctrl-C ends it with the tables so far. How a
runtime works: see the workers; which modes there are: rows.py.

Usage, from the repository's root, in edgespec's environment, after install.py::

    python -m tools.peers.compare --peers DIR --gguf FILE --draft-gguf SMALL --edgespec exact=TARGET \\
        --drafter DRAFTER --prompts FILE --limit 26 --json OUT
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from edgespec.prompts import Prompt, load_prompts, select
from edgespec_export.gguf_checkpoint import GGUFCheckpoint
from edgespec_models.chat_template import ChatTemplate
from edgespec_models.errors import EdgespecError
from tools.peers.processes import WorkerError, Workers
from tools.peers.protocol import Request
from tools.peers.rows import Row, build, named
from tools.peers.table import Sample, Table, tables

SETTLE_S = 0.2

PLAIN_TEXTS = {
    "write-code": (
        "# Read a CSV file, group its rows by the column `city`, and print the mean of `price`.\nimport csv\n"
    ),
    "refactor": (
        "The same function, rewritten with a dictionary of operations instead of the chain of ifs:\n\n"
        "def apply(op, a, b):\n    if op == 'add':\n        return a + b\n    if op == 'sub':\n"
        "        return a - b\n    if op == 'mul':\n        return a * b\n    raise ValueError(op)\n\n"
    ),
    "explain": "Question: What does a compiler do, and how is it different from an interpreter?\n\nAnswer:",
    "story": "The old ferry had crossed the river twice a day for forty years. On the last morning,",
}


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt as the model reads it, and the user's message in it, if it is a conversation."""

    id: str
    category: str
    text: str
    chat: str | None = None


def tasks(args: argparse.Namespace) -> list[Task]:
    """The prompts of the file, in the GGUF's own chat template; without a file, four plain texts."""
    if args.prompts is None:
        return [Task(name, name, text) for name, text in PLAIN_TEXTS.items()][: args.limit]
    checkpoint = GGUFCheckpoint(args.gguf)
    try:
        source = checkpoint.chat_template()
    finally:
        checkpoint.close()
    if source is None:
        raise EdgespecError(f"{args.gguf} has no chat template; leave out --prompts to measure plain texts")
    template = ChatTemplate(source)  # no BOS in the text: every runtime adds its own
    prompts = select(load_prompts(args.prompts), args.limit)
    return [_conversation(prompt, template) for prompt in prompts]


def _conversation(prompt: Prompt, template: ChatTemplate) -> Task:
    text = template.render([{"role": "user", "content": prompt.turns[0]}])
    return Task(prompt.id, prompt.category, text, prompt.turns[0])


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

    def kl(self, given: Sequence[str]) -> dict[str, float | None]:
        """By row: the KL divergence its worker knows, or that of its group in ``given``."""
        known = {group: float(value) for group, value in (named(text, "") for text in given)}
        facts = self._workers.facts
        return {row.name: known.get(row.group, facts.get(row.command, {}).get("kl")) for row in self.rows}

    def _fail(self, row: Row, error: WorkerError) -> None:
        self.failures[row.name] = " ".join(str(error).split())
        self._report(f"{row.name} does not run: {error}")


def outcome(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables; return everything for ``--json``."""
    table = Table(run.rows, run.samples)
    summary, kl = table.summary(), run.kl(args.kl)
    print(tables(summary, kl))
    for name, reason in run.failures.items():
        print(f"\n{name}: does not run: {reason}")
    headlines, warnings = table.headlines(), table.warnings(args.tokens)
    for line in headlines:
        ratio = line["ratio"] or {"total": 0.0, "median": 0.0}
        print(
            f"\n{line['ours']} / {line['peer']}: {ratio['total']:.3f} over all, {ratio['median']:.3f} median"
        )
    for warning in warnings:
        print(f"warning: {warning}")
    if run.samples:
        print(
            f"\nothers used {statistics.median(s.busy for s in run.samples):.0%} of the processors (median)"
        )
    return {
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "rows": [asdict(row) | {"kl": kl[row.name]} for row in run.rows],
        "summary": summary,
        "headlines": headlines,
        "failures": run.failures,
        "warnings": warnings,
        "samples": [asdict(sample) for sample in run.samples],
    }


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare decoding with the peers, plain and speculative.")
    add = parser.add_argument
    add("--peers", type=Path, required=True, help="the folder install.py filled")
    add("--gguf", type=Path, required=True)
    add("--draft-gguf", type=Path, help="draft model of onnxruntime-genai and llama.cpp (same vocabulary)")
    add("--edgespec", metavar="[NAME=]TARGET", action="append", default=[], help="may be repeated")
    add("--drafter", metavar="[NAME=]DRAFTER", action="append", default=[], help="of every --edgespec")
    add("--genai-model", type=Path, help="default: PEERS/onnx/<name of the GGUF file>")
    add("--rows", action="append", metavar="PATTERN", help="only rows of such names, like 'llama.cpp *'")
    add("--prompts", type=Path, help="JSON Lines: id, category, turns; default: four plain texts")
    add("--limit", type=int, help="at most so many prompts, spread over the categories")
    add("--tokens", type=int, default=128, help="new tokens of each run")
    add("--turns", type=int, default=1, help="how often each prompt is run by each row")
    add("--threads", type=int, default=2)
    add("--reserve-gb", type=float, default=5.0, help="memory to leave free of kept workers")
    add("--kl", metavar="GROUP=VALUE", action="append", default=[], help="known KL against the file")
    add("--json", type=Path, metavar="OUT", help="write every sample and the summary here")
    args = parser.parse_args()
    if args.tokens < 2 or args.turns < 1:
        parser.error("--tokens must be at least 2, --turns at least 1")
    return args


def main() -> None:
    """Start the rows, let them take turns, report."""
    args = parse()

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
