"""Programs that learn into one history and are killed at random, two at a time.

After every kill the file must open, hold all that a killed program had reported as written, and all that it
had learned longer ago than the flush interval and half a second for a busy machine.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgespec.history.passages import Passage
from edgespec.history.store import Scope, Store
from edgespec.history.use import Writer

_SCOPE: Final = Scope("target", "digest")
_FLUSH_S: Final = 0.05
_SLACK_S: Final = 0.5
_WRITERS: Final = 2


def passage(writer: int, number: int) -> Passage:
    """What the program ``writer`` learns as its ``number``-th."""
    return Passage((writer,), (number, *range(30)))


def write_until_killed(path: Path, writer: int) -> None:
    """Learn a passage every millisecond; report what is learned and what is written."""

    class Reporting(Store):
        def merge(self, *arguments: object) -> None:
            super().merge(*arguments)  # type: ignore[arg-type]
            for change in arguments[1].changes.values():  # type: ignore[attr-defined]
                _say(f"written {change.passage.body[0]}")

    store = Reporting.open(path, max_bytes=1 << 30, max_tokens=1 << 30)
    background = Writer(
        store, path, scope=_SCOPE, text_of=lambda tokens: b"?" * len(tokens), flush_s=_FLUSH_S
    )
    for number in range(1_000_000):
        background.tell(lambda delta, number=number: delta.wrote(passage(writer, number)))  # type: ignore[misc]
        _say(f"learned {number} {time.time()}")
        time.sleep(0.001)


def kill_writers(path: Path, kills: int, *, seed: int = 0) -> tuple[int, int]:
    """Kill ``kills`` programs; passages that had to be there, and those that were not."""
    rng, expected = random.Random(seed), set[bytes]()
    for round_ in range(0, kills, _WRITERS):
        numbers = range(round_, min(round_ + _WRITERS, kills))
        running = [_start(path, number) for number in numbers]
        for number, process in zip(numbers, running, strict=True):
            with process:
                assert process.stdout is not None
                process.stdout.readline()  # it runs
                time.sleep(rng.uniform(0.0, 0.25))
                killed_at = time.time()
                process.kill()
                lines = process.stdout.read().splitlines()
            expected |= promised(number, lines, killed_at)
        store = Store.open(path)
        there = {entry.passage.digest for entry in store.read(_SCOPE).entries}
        store.close()
        if not expected <= there:
            break
    return len(expected), len(expected - there)


def promised(writer: int, lines: Sequence[str], killed_at: float, slack_s: float = _SLACK_S) -> set[bytes]:
    """What must be there, by the complete lines that a program wrote."""
    promised = set[bytes]()
    for words in map(str.split, lines[:-1]):
        late = words[0] == "learned" and float(words[2]) > killed_at - _FLUSH_S - slack_s
        if not late:
            promised.add(passage(writer, int(words[1])).digest)
    return promised


def _start(path: Path, writer: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.kit.kills", str(path), str(writer)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
