"""What every target of the fuzzers is, and what it holds whoever reads a strange input to."""

import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec_models.errors import EdgespecError
from tools.fuzz.forms import JSON, Form, as_bytes
from tools.fuzz.trees import Tree

__all__ = ["Rule", "Target", "only", "table", "text_of", "untouched", "write_files", "write_with_hole"]

Rule = Callable[[bytes], None]
"""Tries one input; whatever it raises is a find."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_HOLE = 1 << 22  # bytes of weights, all zero, which take no room


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something that reads what strangers wrote.

    Attributes:
        form: how its inputs become trees, and trees inputs.
        seeds: makes sound inputs.
        rule: makes the rule, which may use a folder of its own.
        words: texts that mean something to it.
    """

    form: Form
    seeds: Callable[[], Sequence[bytes]]
    rule: Callable[[Path], Rule]
    words: Sequence[str] = ()


@contextmanager
def only(*kinds: type[EdgespecError], names: str = "") -> Iterator[None]:
    """What is within may raise these errors and no others; they say ``names``, and can be printed."""
    try:
        yield
    except kinds as error:
        assert type(error) in kinds, f"{type(error).__name__} is not documented here"
        said = str(error)
        assert not _UNPRINTABLE.search(said), "a message that would command a terminal, or cannot be printed"
        assert names in said, f"{names} is not named: {said:.300}"
        assert len(said) < 5_000, "a very long message"


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """What is within makes, changes and deletes nothing in ``folder``."""
    before = _seen(folder)
    try:
        yield
    finally:
        after = _seen(folder)
        assert before == after, f"changed: {set(before.items()) ^ set(after.items())}"


def write_files(folder: Path, tree: Tree, names: Sequence[str]) -> None:
    """Those of ``names`` that a tree says something of: a text stands for bytes, all else for JSON.

    JSON in ``.safetensors`` is the file's header; weights follow it.
    """
    files = table(tree)
    for name in names:
        path, content = folder / name, files.get(name)
        if name not in files:
            path.unlink(missing_ok=True)
            continue
        data = as_bytes(content) if isinstance(content, str) else JSON.write(content)
        if name.endswith(".safetensors") and not isinstance(content, str):
            write_with_hole(path, struct.pack("<Q", len(data)) + data)
        else:
            path.write_bytes(data)


def table(data: bytes | Tree) -> dict[str, Tree]:
    """An input in JSON, or a part of one, as a table; empty if it is something else."""
    if isinstance(data, bytes):
        with suppress(ValueError):
            data = JSON.read(data)
    return data if isinstance(data, dict) else {}


def text_of(tree: Tree) -> str:
    """A part of an input as a text; empty if it is something else."""
    return tree if isinstance(tree, str) else ""


def write_with_hole(path: Path, data: bytes) -> None:
    """A file that begins with ``data``; zeros follow, as weights."""
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + _HOLE)


def _seen(folder: Path) -> dict[str, tuple[int, int, int]]:
    seen = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            found = os.lstat(os.path.join(root, name))  # noqa: PTH118 - twenty times as fast as Path
            seen[f"{root}/{name}"] = found.st_size if name in files else 0, found.st_mtime_ns, found.st_ino
    return seen
