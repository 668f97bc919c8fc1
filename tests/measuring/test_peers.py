"""tools/peers: the protocol, the rows, a comparison with fake workers, and what the tables say."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tools.peers import compare, processes
from tools.peers.processes import Worker, WorkerError, Workers
from tools.peers.protocol import Request
from tools.peers.rows import Row, build
from tools.peers.table import Sample, Table, tables

FAKE = """
import argparse, os, sys
from tools.peers.protocol import Reply, reporting, serve

parser = argparse.ArgumentParser()
parser.add_argument("--speed", type=float, default=10.0)
parser.add_argument("--fail", default="")
args = parser.parse_args()

def answer(request):
    if args.fail == "answer" and not request.prompt.startswith("Once"):
        raise RuntimeError("no such mode")
    if args.fail == "die" and not request.prompt.startswith("Once"):
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    tokens = list(range(request.max_new_tokens))
    speed = args.speed * request.options.get("times", 1)
    print("noise that must not reach the protocol")
    return Reply(len(request.prompt), tokens, request.chat or request.prompt, speed, drafted=4, accepted=3)

with reporting() as channel:
    if args.fail == "load":
        raise ValueError("cannot read the model")
    serve(channel, {"kl": 0.25, "pid": os.getpid()}, answer)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker without a model; it runs where the tests do, so that it finds ``tools``."""
    monkeypatch.setattr(processes, "IDLE_S", 0.01)
    path = tmp_path / "fake_worker.py"
    path.write_text(FAKE, encoding="utf-8")
    return path


def command(fake: Path, *options: str) -> tuple[str, ...]:
    return (sys.executable, str(fake), *options)


def ignore(line: str) -> None:
    del line


def test_a_worker_answers_until_it_is_closed(fake: Path) -> None:
    worker = Worker(command(fake, "--speed", "7"))
    reply = worker.ask(Request("text", 3, chat="hello", options={"times": 2}))
    worker.close()
    assert (reply.tokens, reply.text, reply.tokens_per_s) == ([0, 1, 2], "hello", 14.0)
    assert reply.request_s > 0
    assert worker.facts["kl"] == 0.25


def test_a_worker_that_fails_says_why(fake: Path, tmp_path: Path) -> None:
    for kind, said in (("answer", "RuntimeError: no such mode"), ("die", "it ended with 3; out of luck")):
        worker = Worker(command(fake, "--fail", kind))
        with pytest.raises(WorkerError, match=f"^{said}$"):
            worker.ask(Request("text", 3))
    with pytest.raises(WorkerError, match=r"^ValueError: cannot read the model$"):
        Worker(command(fake, "--fail", "load"))
    with pytest.raises(WorkerError, match="absent"):
        Worker((str(tmp_path / "absent"),))


def test_failing_rows_end_no_comparison(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("edgespec close plain", "edgespec close", command(fake, "--speed", "10")),
        Row("edgespec close ngram", "edgespec close", command(fake, "--speed", "15")),
        Row("peer plain", "peer", command(fake, "--speed", "12")),
        Row("peer fast", "peer", command(fake, "--speed", "12"), {"times": 0.5}),
        Row("peer broken", "peer", command(fake, "--fail", "answer")),
        Row("peer absent", "peer", ("no-such-program",)),
    ]
    tasks = [compare.Task("one", "x", "text"), compare.Task("two", "y", "longer text", "hi")]
    with Workers(0, ignore) as workers:
        run = compare.Run(rows, workers, ignore)
        run.load()
        for task in tasks:
            run.measure(task, 0, 4)
        result = compare.outcome(run, Namespace(tokens=5))
    assert set(run.failures) == {"peer broken", "peer absent"}
    assert [s.row for s in run.samples[:4]] == [row.name for row in run.rows[:4]]
    assert [s.text for s in run.samples[4:]] == ["hi"] * 4
    assert result["headlines"][0]["ours"] == "edgespec close ngram"
    assert result["headlines"][0]["ratio"] == pytest.approx({"total": 1.25, "median": 1.25})
    assert [row["kl"] for row in result["rows"][-2:]] == [0.25, None]
    printed = capsys.readouterr().out
    assert "peer broken: does not run: RuntimeError: no such mode" in printed
    assert "peer plain made [4] tokens, not 5" in printed
    assert json.loads(json.dumps(result))["samples"][0]["tokens"] == [0, 1, 2, 3]


def sample(row: str, prompt: str, speed: float, **other: Any) -> Sample:
    values: dict[str, Any] = {"turn": 0, "prompt_tokens": 5, "tokens": (1, 2), "text": ""}
    values |= {"busy": 0.0, "request_s": 1.0}
    return Sample(row=row, prompt=prompt, category=prompt, tokens_per_s=speed, **values | other)


def test_ratios_are_taken_over_the_prompts_both_ran() -> None:
    rows = [Row(name, "edgespec", ()) for name in ("edgespec plain", "fast")]
    samples = [
        sample("edgespec plain", "a", 10.0),
        sample("edgespec plain", "b", 20.0),
        sample("edgespec plain", "c", 1.0),
        sample("fast", "a", 40.0, tokens=(1, 3), drafted=4, accepted=1),
        sample("fast", "b", 10.0, prompt_tokens=6, drafted=4, accepted=2),
    ]
    table = Table(rows, samples)
    row = table.summary()["fast"]
    assert row["gain"] == pytest.approx({"total": 1.2, "median": 2.25})
    assert row["by_category"]["a"]["gain"]["total"] == pytest.approx(4.0)
    assert row["by_category"]["c"] == {"total": None, "gain": None}
    assert row["same_as_plain"] == pytest.approx(0.75)
    assert row["acceptance_rate"] == pytest.approx(3 / 8)
    assert row["total"] == pytest.approx(16.0)
    assert row["request"] == pytest.approx(2.0)
    (warning,) = table.warnings(2)
    assert warning.startswith("b: the rows read prompts of different lengths")
    assert len(tables(table.summary(), {}).split("\n\n")) == 2


def arguments(**changes: Any) -> Namespace:
    values: dict[str, Any] = {"peers": Path("peers"), "gguf": Path("big.gguf"), "rows": None, "threads": 2}
    values |= {"draft_gguf": Path("small.gguf"), "genai_model": None}
    values |= {"edgespec": ["close=A", "fast=B"], "drafter": ["smol=C", "D"]}
    return Namespace(**values | changes)


def test_every_mode_is_a_row_and_every_group_starts_plain() -> None:
    rows = build(arguments())
    names = [row.name for row in rows]
    assert names[:4] == [f"edgespec close {mode}" for mode in ("plain", "ngram", "smol", "drafter")]
    assert len(set(names)) == len(names)
    first = {row.group: row for row in reversed(rows)}
    assert all(row.name == row.plain for row in first.values())
    assert first.keys() == {"edgespec close", "edgespec fast", "openvino", "genai", "llama.cpp"}
    assert len({row.command for row in rows if row.group == "genai"}) == 2


def test_rows_can_be_chosen_and_need_no_drafter() -> None:
    chosen = build(arguments(rows=["llama.cpp *"], draft_gguf=None))
    assert chosen[0].name == "llama.cpp plain"
    assert all("-md" not in row.command and row.group == "llama.cpp" for row in chosen)
    assert build(arguments(edgespec=["A"]))[0].name == "edgespec plain"
