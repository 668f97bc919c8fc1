"""Answers that targets wrote: read from files, and written now, a line each, by a run that may be stopped.

A file holds a JSON object a line (JSON Lines, UTF-8). ``prompt`` and ``text`` are needed, the rest is there
for the reader and the next run:

    {"prompt": "...", "text": "...", "complete": true, "category": "coding", "temperature": 0.8}
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, TextIO

from filelock import FileLock, Timeout

from edgespec.measuring.prompts import Prompt
from edgespec_models.errors import RequestError
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.schema import length, read_lines
from edgespec_models.storage import writing

_BEGIN = b'{"prompt": '


@dataclass(frozen=True, slots=True)
class Answer:
    """A target's answer to a prompt, which is the only message of its conversation.

    It is ``complete`` where the model itself ended the text; ``category`` is the prompt's.
    """

    prompt: Annotated[str, length(1)]
    text: str
    complete: bool = False
    category: str = ""
    temperature: float = 0.0
    target: str = ""


Answering = Callable[[Sequence[Prompt]], Iterable[Answer | None]]
"""Answers prompts, each once, in any order; None stands for one that the model cannot read."""


def number_of(prompt: str) -> int:
    """A number of the prompt, from 0 to 2 ** 31 - 1, which is the same in every run and file."""
    return int.from_bytes(hashlib.sha256(prompt.encode(errors="replace")).digest()[:4]) >> 1


def read_answers(path: Path) -> list[Answer]:
    """The answers in a file. Raises RequestError if it is unreadable or a line is not of the form above."""
    return read_lines(Answer, path, 'Write one JSON object on each line, with "prompt" and "text"')


def unanswered(prompts: Sequence[Prompt], path: Path, target: str) -> list[Prompt]:
    """The prompts without an answer in the file at ``path``; a killed run's half-written line is removed.

    Raises:
        RequestError: the file holds no answers, or another target's.
    """
    with writing(path):
        _drop_half_a_line(path)
    answers = read_answers(path) if path.exists() else []
    other = next((answer.target for answer in answers if answer.target not in ("", target)), None)
    if other is not None:
        raise RequestError(
            f"{path} holds answers of {other}, not of {target}; choose another file or directory, or add "
            "them with --answers-from"
        )
    known = {answer.prompt for answer in answers}
    once = {prompt.turns[0]: prompt for prompt in prompts}
    return [prompt for text, prompt in once.items() if text not in known]


def write_answers(
    answering: Answering, prompts: Sequence[Prompt], path: Path, progress: ProgressCallback, *, target: str
) -> int:
    """Write answers to the prompts that have none in ``path``; return the number that the model cannot read.

    Each answer is written to the file as soon as it is complete.

    Raises:
        RequestError: the file is not one of this target's answers.
        StorageError: the disk is full, or the file cannot be written.
    """
    wanted = unanswered(prompts, path, target)
    skipped, done = 0, len(prompts) - len(wanted)
    with writing(path), path.open("a", encoding="utf-8", newline="\n") as file:
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write("\n")
        for number, answer in enumerate(answering(wanted), start=done + 1):
            if answer is None:
                skipped += 1
            else:
                _write(file, replace(answer, target=target))
            progress(Progress("Answering", number, len(prompts), "prompts"))
    progress(Progress("Answering", len(prompts), len(prompts), "prompts"))
    return skipped


def _write(file: TextIO, answer: Answer) -> None:
    file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
    file.flush()


def _drop_half_a_line(path: Path) -> None:
    """Remove the last line if a killed run wrote only a part of it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if _BEGIN.startswith(data[whole:][: len(_BEGIN)]) and not _is_json(data[whole:]):
            file.truncate(whole)


@contextmanager
def locked(path: Path, problem: str) -> Iterator[None]:
    """Lock ``path`` against other runs.

    Raises:
        RequestError: another one has it locked; the message is ``problem``.
        StorageError: the directory cannot be written.
    """
    with writing(path):
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RequestError(problem) from error
    try:
        yield
    finally:
        lock.release()


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
