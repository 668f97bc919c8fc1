"""Hours of mixed requests to a real model: does memory stay flat, is any request lost, is any answer changed?

    python -m tools.soak qwen2.5-coder-0.5b-instruct --seconds 7200 --out soak.jsonl

Two processes share a new history. In each, four threads ask a loaded model for random things: greedy and
sampled answers to prompts of 1 to 8,000 tokens, conversations, JSON after a schema, several answers at once,
deadlines, streams that are left half-read, and requests that are cancelled while they wait. Every greedy
answer has to be plain decoding's: each process first decodes its prompts plainly. Every ten seconds each
process writes a line with its memory, threads and open files. The end compares the tenth of the time that
follows warming up (a quarter) with the last tenth. Exit code 1 if anything is wrong.
"""

import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

import edgespec
from tools.arguments import arguments

THREADS, LOOK_S, WARM, PART, GROWTH = 4, 10.0, 0.25, 0.1, 1.05
SOURCES = sorted(Path(statistics.__file__).parent.glob("*.py"))
SCHEMA = {
    "type": "object", "required": ["name", "lines"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 20}, "lines": {"type": "integer"}},
}  # fmt: skip

Prompts = Sequence[tuple[str, tuple[int, ...]]]


def prompts_of(model: edgespec.Model, count: int, longest: int, draws: random.Random) -> Prompts:
    """Pieces of Python's library, of 1 to ``longest`` tokens, with plain decoding's greedy answers."""
    problems = []
    for _ in range(count):
        text = draws.choice(SOURCES).read_text(encoding="utf-8")
        begin, length = draws.randrange(len(text) // 2 + 1), int(longest ** draws.random())
        piece = model.detokenize(model.tokenize(text[begin : begin + 8 * length])[:length]) or "#"
        problems.append((piece, model.generate(piece, max_new_tokens=24, speculate=False).tokens))
    return problems


class Asker(threading.Thread):
    """Asks for random things until the time is over; ``seen`` counts what came of it, ``wrong`` says what."""

    def __init__(self, model: edgespec.Model, prompts: Prompts, seed: int, ends: float) -> None:
        super().__init__()
        self.seen, self.wrong = Counter[str](), list[str]()
        self._model, self._prompts, self._ends, self._draws = model, prompts, ends, random.Random(seed)
        self._conversation = model.conversation(max_new_tokens=16)

    def run(self) -> None:
        """Ask."""
        kinds: Mapping[str, Callable[[], bool]] = {
            "greedy": self._greedy, "sampled": self._sampled, "conversation": self._talk,
            "schema": self._schema, "several": self._several, "deadline": self._deadline,
            "left half-read": self._leave, "cancelled while waiting": self._withdraw,
        }  # fmt: skip
        weights = (8, 3, 3, 2, 1, 1, 2, 1)
        while monotonic() < self._ends:
            (kind,) = self._draws.choices(list(kinds), weights)
            try:
                good = kinds[kind]()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a find
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
                continue
            self.seen[kind] += 1
            if not good:
                self.wrong.append(f"{kind}: not as asked for")

    def _greedy(self) -> bool:
        prompt, plain = self._draws.choice(self._prompts)
        return self._model.generate(prompt, max_new_tokens=24).tokens == plain

    def _sampled(self) -> bool:
        prompt, temperature = self._draws.choice(self._prompts)[0], self._draws.choice((0.3, 0.8, 1.2))
        answer = self._model.generate(prompt, max_new_tokens=24, temperature=temperature, top_p=0.95)
        return answer.finish_reason in {"stop", "length"}

    def _talk(self) -> bool:
        if len(self._conversation.messages) > 8:
            self._conversation = self._model.conversation(max_new_tokens=16)
        before = len(self._conversation.messages)
        answer = self._conversation.ask(f"Say {self._draws.randrange(1000)} in words.")
        return len(self._conversation.messages) - before == (2 if answer.text else 0)

    def _schema(self) -> bool:
        messages = [{"role": "user", "content": f"Describe file {self._draws.randrange(100)} as JSON."}]
        form = edgespec.JsonSchema(SCHEMA)
        answer = self._model.chat(messages, max_new_tokens=60, response_format=form)
        return answer.finish_reason == "length" or json.loads(answer.text).keys() == {"name", "lines"}

    def _several(self) -> bool:
        prompt = self._draws.choice(self._prompts)[0]
        return len(self._model.generate(prompt, max_new_tokens=8, n=3, temperature=1.0, seed=1).choices) == 3

    def _deadline(self) -> bool:
        prompt, plain = max(self._prompts, key=lambda pair: len(pair[0]))
        answer = self._model.generate(prompt, max_new_tokens=24, timeout=0.05)
        return answer.finish_reason == "timeout" or answer.tokens == plain

    def _leave(self) -> bool:
        prompt, plain = self._draws.choice(self._prompts)
        with self._model.stream(prompt, max_new_tokens=24) as stream:
            next(stream, None)
        return stream.result.tokens == plain[: len(stream.result.tokens)]

    def _withdraw(self) -> bool:
        stream = self._model.stream(self._draws.choice(self._prompts)[0], max_new_tokens=24)
        threading.Timer(0.02, stream.cancel).start()
        return stream.run().finish_reason in {"cancelled", "stop", "length"}


def work(number: int, options: Any, history: str, lines: Any) -> None:
    """One process: load, ask, look; ``lines`` takes what it saw."""
    chosen = edgespec.LoadOptions(threads=options.threads, huge_pages=False)
    with edgespec.load(options.target, options.drafter, options=chosen, history=history) as model:
        prompts = prompts_of(model, options.prompts, options.longest, random.Random(number))
        started = monotonic()
        ends = started + options.seconds
        askers = [Asker(model, prompts, 100 * number + n, ends) for n in range(THREADS)]
        for asker in askers:
            asker.start()
        while any(asker.is_alive() for asker in askers):
            lines.put({"process": number, "second": round(monotonic() - started, 1)} | state())
            sleep(LOOK_S)
        seen = sum((asker.seen for asker in askers), Counter[str]())
        lines.put({"process": number, "seen": seen, "wrong": [w for asker in askers for w in asker.wrong]})


def state() -> dict[str, int]:
    """What this process holds: its own memory in bytes (mapped weights are not in it), threads, files."""
    process = psutil.Process()
    return {
        "memory": process.memory_full_info().uss, "threads": process.num_threads(),
        "files": process.num_fds(),
    }  # fmt: skip


def compare(lines: Sequence[Mapping[str, Any]], seconds: float) -> list[str]:
    """What grew between the time after warming up and the end, of one process; prints both."""
    problems = []
    early = [x for x in lines if WARM <= x["second"] / seconds <= WARM + PART]
    late = [x for x in lines if x["second"] / seconds >= 1 - PART]
    for what in "memory", "threads", "files":
        before, after = (statistics.median(x[what] for x in part) for part in (early, late))
        print(f"  {what}: {before:,.0f} after warming up, {after:,.0f} at the end ({after / before:.3f})")
        if after > before * (GROWTH if what == "memory" else 1):
            problems.append(f"{what} grew")
    return problems


def main() -> None:
    """Run two processes; print what they saw."""
    options = arguments(
        __doc__, "target", drafter="auto", seconds=7200.0, prompts=60, longest=8000, threads=1, out=Path
    )
    context = multiprocessing.get_context("spawn")
    lines, written, problems = context.Queue(), list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory() as folder, options.out.open("w", encoding="utf-8") as out:
        history = str(Path(folder, "history.db"))
        processes = [context.Process(target=work, args=(n, options, history, lines)) for n in range(2)]
        for process in processes:
            process.start()
        while sum("seen" in line for line in written) < len(processes):
            if not all(process.is_alive() or process.exitcode == 0 for process in processes):
                sys.exit("a process died")
            written.append(lines.get())
            print(json.dumps(written[-1]), file=out, flush=True)
        for process in processes:
            process.join()
    for n in range(len(processes)):
        mine = [line for line in written if line["process"] == n]
        end = next(line for line in mine if "seen" in line)
        print(f"process {n}: {sum(end['seen'].values()):,} requests: {dict(end['seen'])}")
        problems += compare([line for line in mine if "memory" in line], options.seconds) + end["wrong"]
    print("\n".join(problems) or "nothing grew, nothing was lost, every greedy answer was plain decoding's")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
