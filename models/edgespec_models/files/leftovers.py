"""What programs that were killed have left behind: temporary files and folders that name their process."""

import os
import platform
import re
import time
import zlib
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import Final

import psutil

__all__ = ["leftovers", "own_name"]

_PROCESS: Final = re.compile(r"(\d+)@([0-9a-f]{8})-")
_LONG_S: Final = 86_400.0


def own_name(prefix: str, pid: int | None = None) -> str:
    """How names of temporary files of this process begin, or of another one of this machine."""
    return f"{prefix}{os.getpid() if pid is None else pid}@{_machine()}-"


def leftovers(folder: Path, prefix: str) -> Iterator[Path]:
    """What lies in ``folder`` under names of :func:`own_name` whose processes are no more.

    Whether those of another machine or container live cannot be seen: a day later they are taken for dead.
    """
    for path in folder.glob(f"{escape(prefix)}*"):
        process = _PROCESS.match(path.name.removeprefix(prefix))
        if process is None:
            continue  # somebody else's
        try:
            old = time.time() - path.stat().st_mtime > _LONG_S
        except OSError:
            continue  # gone already
        if old if process[2] != _machine() else not psutil.pid_exists(int(process[1])):
            yield path


def _machine() -> str:
    return f"{zlib.crc32(platform.node().encode()):08x}"
