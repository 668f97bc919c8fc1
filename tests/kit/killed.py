"""Work that is killed before one of the changes it makes to files.

A process of its own does the work; an audit hook (PEP 578) counts what changes a file, and SIGKILL comes
before the change with a random number. What is left has to be whole or absent; the same call mends it.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec_export.export import export_model
from edgespec_export.graphs import writer
from edgespec_export.journal import DATA_FILE
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.downloads.download import is_pulled, pull
from tests.kit.downloads import CONTENT, FROM_HUB, assert_whole, running_hub
from tests.kit.gguf import tiny_gguf

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.utime"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def killed(work: str, folder: Path, number: int) -> bool:
    """Do ``work`` in a process that is killed before its ``number``-th change; whether it came so far."""
    command = [sys.executable, "-m", "tests.kit.killed", work, str(folder), str(number)]
    return subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL


def work_until(work: Callable[[], object], number: int) -> None:
    """Do ``work``, and end before the change with that number."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        seen += event in CHANGES or bool(writes)
        if seen > number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work()


def kill_exports(folder: Path, times: int) -> None:
    """An export leaves a sound bundle, the old one or none, and what the next goes on with."""
    writer.JOURNALED_BYTES = 0
    source, out = tiny_gguf("llama", "Q4_K").write(folder / "m.gguf"), folder / "bundles" / "out"
    out.parent.mkdir()
    expected = b""
    for _ in range(times):
        killed("export", folder, random.randrange(50))
        if not out.exists():
            export_model(source, out)
        Bundle(out, verify_digests=True)
        weights = (out / DATA_FILE).read_bytes()
        expected = expected or weights
        assert weights == expected
        left = {path.name for path in out.parent.iterdir() if not path.name.endswith(".lock")}
        assert left == {out.name}, left
        shutil.rmtree(out)


def kill_downloads(folder: Path, times: int) -> None:
    """A pull leaves a whole file, or what the next pull goes on with."""
    with pytest.MonkeyPatch.context() as patch, running_hub() as hub:
        patch.setenv("EDGESPEC_HOME", str(folder))
        hub.content = CONTENT
        patch.setenv("HF_ENDPOINT", hub.address)
        for _ in range(times):
            killed("download", folder, random.randrange(12))
            if is_pulled(FROM_HUB):
                assert (folder / "models" / "toy.gguf").read_bytes() == CONTENT
            pull(FROM_HUB)
            assert_whole(folder / "models")
            for path in (folder / "models").iterdir():
                path.unlink()


if __name__ == "__main__":
    writer.JOURNALED_BYTES = 0
    kind, place, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    works = {
        "export": lambda: export_model(place / "m.gguf", place / "bundles" / "out"),
        "download": lambda: pull(FROM_HUB),
    }
    work_until(works[kind], count)
