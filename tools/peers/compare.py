"""Compare plain greedy decoding of the same GGUF file, side by side: edgespec, onnxruntime-genai, llama.cpp.

Every row is a worker process that keeps its model loaded. The rows take turns, prompt by prompt (A B C A B
C), so that a machine that slows down slows all of them; ratios are taken inside one turn. Speeds count from
the first new token to the last. It knows nothing of how a runtime works: see the workers.

Usage, from the repository's root, in edgespec's environment, after install.py::

    python -m tools.peers.compare --peers DIR --gguf FILE --edgespec TARGET --json OUT

A new mode is a new entry in :func:`rows`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tools.peers.protocol import Reply, Request

MAX_IDLE_CPU = 0.05
SETTLE_S = 0.3
QUIET = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}

PROMPTS = {
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
class Sample:
    """One measurement. ``busy`` is the share of the processors others used just before it."""

    row: str
    prompt: str
    turn: int
    tokens_per_s: float
    prompt_tokens: int
    new_tokens: int
    busy: float
    text: str


class Worker:
    """A running row: a process that answers requests."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | QUIET
        )
        self._read()

    def ask(self, request: Request) -> Reply:
        """Run one request to its end."""
        assert self._process.stdin is not None
        print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        return Reply(**json.loads(self._read()))

    def cpu_s(self) -> float:
        """Processor seconds used so far, child processes included."""
        process = psutil.Process(self._process.pid)
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return float(sum(t.user + t.system for t in times))

    def close(self) -> None:
        """Let the worker end by itself, then make sure."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.terminate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f"{self.name} ended with {self._process.wait()}; its messages are above")
        return line


def rows(args: argparse.Namespace) -> dict[str, list[str]]:
    """The command of every row, by name, in the order they take turns."""
    python = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    threads = ["--threads", str(args.threads)]
    onnx = args.genai_model or args.peers / "onnx" / args.gguf.stem
    server = str(args.peers / "llama.cpp" / "bin" / "llama-server")
    genai = [str(args.peers / "genai" / python), "-m", "tools.peers.genai_worker", str(onnx), *threads]
    llama = [sys.executable, "-m", "tools.peers.llama_worker", str(args.gguf), "--server", server, *threads]
    commands = {"onnxruntime-genai": genai, "llama.cpp": llama}
    if args.edgespec:
        own = [sys.executable, "-m", "tools.peers.edgespec_worker", args.edgespec, *threads]
        commands = {"edgespec": own, **commands}
    return commands


def check_idle(workers: list[Worker]) -> None:
    """Refuse workers that burn CPU while the others are measured."""
    before = [worker.cpu_s() for worker in workers]
    time.sleep(1.0)
    for worker, start in zip(workers, before, strict=True):
        used = worker.cpu_s() - start
        if used > MAX_IDLE_CPU:
            raise RuntimeError(f"{worker.name} used {used:.2f} s of CPU in an idle second")


def measure(workers: list[Worker], turns: int, tokens: int, report: Callable[[str], None]) -> list[Sample]:
    """Let the workers take turns over all prompts."""
    samples: list[Sample] = []
    for turn in range(turns):
        for name, prompt in PROMPTS.items():
            for worker in workers:
                busy = psutil.cpu_percent(interval=SETTLE_S) / 100
                reply = worker.ask(Request(prompt, tokens))
                if reply.new_tokens != tokens:
                    raise RuntimeError(f"{worker.name} made {reply.new_tokens} tokens, not {tokens}")
                speed, read = reply.tokens_per_s, reply.prompt_tokens
                samples.append(Sample(worker.name, name, turn, speed, read, tokens, busy, reply.text))
                report(f"{turn} {name:12} {worker.name:18} {speed:6.1f} tokens/s, others {busy:4.0%} busy")
    return samples


def summary(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """By row: the median speed, its extremes, and ``ratio``, the first row's speed over its own."""
    names = list(dict.fromkeys(sample.row for sample in samples))
    base = {(s.prompt, s.turn): s.tokens_per_s for s in samples if s.row == names[0]}
    result = {}
    for name in names:
        own = [s for s in samples if s.row == name]
        speeds = [s.tokens_per_s for s in own]
        ratios = [base[s.prompt, s.turn] / s.tokens_per_s for s in own]
        result[name] = {
            "median": statistics.median(speeds),
            "min": min(speeds),
            "max": max(speeds),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    return result


def print_summary(table: dict[str, dict[str, float]], samples: list[Sample]) -> None:
    """The table for people; a warning where the prompts were not the same tokens."""
    first = next(iter(table))
    print(f"\n{'row':18} {'tokens/s':>8} {'min - max':>15}  {first} / row (min - max)")
    for name, row in table.items():
        spread = f"{row['min']:.1f} - {row['max']:.1f}"
        ratio = f"{row['ratio']:.3f} ({row['ratio_min']:.3f} - {row['ratio_max']:.3f})"
        print(f"{name:18} {row['median']:8.1f} {spread:>15}  {ratio}")
    for prompt in PROMPTS:
        lengths = {s.row: s.prompt_tokens for s in samples if s.prompt == prompt}
        if len(set(lengths.values())) > 1:
            print(f"warning: {prompt}: the rows read prompts of different lengths: {lengths}")
    print(f"others used {statistics.median(s.busy for s in samples):.0%} of the processors (median)")


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare plain greedy decoding with the peers.")
    parser.add_argument("--peers", type=Path, required=True, help="the folder install.py filled")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument(
        "--edgespec", metavar="TARGET", help="catalogue name, GGUF or bundle; default: peers only"
    )
    parser.add_argument("--genai-model", type=Path, help="default: PEERS/onnx/<name of the GGUF file>")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each run")
    parser.add_argument("--turns", type=int, default=3, help="how often each prompt is run by each row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every sample and the summary here")
    args = parser.parse_args()
    if args.tokens < 2 or args.turns < 1:
        parser.error("--tokens must be at least 2, --turns at least 1")
    return args


def main() -> None:
    """Start the rows, let them take turns, report."""
    args = parse()
    workers: list[Worker] = []
    try:
        for name, command in rows(args).items():
            print(f"loading {name}", file=sys.stderr)
            workers.append(Worker(name, command))
        for worker in workers:
            worker.ask(Request(PROMPTS["story"], 8))  # warm-up
        time.sleep(1.0)
        check_idle(workers)
        samples = measure(workers, args.turns, args.tokens, lambda line: print(line, file=sys.stderr))
    finally:
        for worker in workers:
            worker.close()
    table = summary(samples)
    print_summary(table, samples)
    if args.json:
        machine = {"system": platform.platform(), "cpus": os.cpu_count(), "threads": args.threads}
        result = {"machine": machine, "model": args.gguf.name, "summary": table}
        result["samples"] = [asdict(sample) for sample in samples]
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
