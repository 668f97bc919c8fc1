"""What programs that were killed have left behind: temporary files and folders that name their process."""

import os
from collections.abc import Iterator
from glob import escape
from pathlib import Path

import psutil

__all__ = ["leftovers", "own_name"]


def own_name(prefix: str) -> str:
    """How names of this process's temporary files begin."""
    return f"{prefix}{os.getpid()}-"


def leftovers(folder: Path, prefix: str) -> Iterator[Path]:
    """What lies in ``folder`` under names of :func:`own_name` whose processes are no more."""
    for path in folder.glob(f"{escape(prefix)}*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            yield path
