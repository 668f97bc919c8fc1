"""The task of every client: a question that a tool alone can answer, then one about the first."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

URL, MODEL = os.environ["TASK_URL"], os.environ["TASK_MODEL"]
INSTRUCTIONS, FIRST, SECOND = (os.environ[f"TASK_{name}"] for name in ("INSTRUCTIONS", "FIRST", "SECOND"))
PIECES = os.environ["TASK_PIECES"]
PARAMETERS = {
    "type": "object",
    "properties": {"article": {"type": "string"}},
    "required": ["article"],
    "additionalProperties": False,
}
DESCRIPTION = "Look up how many pieces of an article are in stock."
CALLS: list[str] = []
MOST_CALLS = 4


def stock_level(article: str) -> str:
    """Look up how many pieces of an article are in stock."""
    CALLS.append(article)
    if len(CALLS) > MOST_CALLS:
        sys.exit(f"the model calls the tool again and again: {CALLS}")
    return f"{PIECES} pieces of {article} are in stock"


def report(*answers: str) -> None:
    """Print what came of the two questions."""
    print(json.dumps({"calls": CALLS, "answers": answers}))


def report_commands(*commands: Sequence[str], file: Path | None = None) -> None:
    """Run a program once for each question; its answer is what it prints, or else what ``file`` then holds.

    Its tools are its own, so that nothing is known of its calls but what they brought.
    """
    answers = []
    for command in commands:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, file=sys.stderr)
        if done.returncode:
            sys.exit(
                f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
            )
        answers.append(done.stdout if file is None else file.read_text(encoding="utf-8"))
    print(json.dumps({"answers": answers}))
