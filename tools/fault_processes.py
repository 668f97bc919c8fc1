"""Forked processes that say what they are at, for ``tools.faults``."""

import importlib
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Child", "import_all", "say"]


def say(line: str) -> None:
    """Tell whoever reads standard output, at once."""
    os.write(1, f"{line}\n".encode())


def import_all(names: str) -> None:
    """Import what a child had imported, so that the next ones need not."""
    for name in names.split():
        with suppress(Exception):
            importlib.import_module(name)


@dataclass
class Child:
    """A forked process, and what it says."""

    pid: int
    out: int
    said: bytes = b""

    @classmethod
    def of(cls, work: Callable[[], None]) -> "Child":
        """Begin ``work``."""
        out, into = os.pipe()
        pid = os.fork()
        if pid:
            os.close(into)
            return cls(pid, out)
        os.dup2(into, 1)
        try:
            work()
        except BaseException:  # noqa: BLE001 - told to the parent
            say(traceback.format_exc())
            os._exit(1)
        os._exit(0)

    def end(self) -> tuple[int, list[str]]:
        """Wait for it; its status, and the lines it said."""
        while piece := os.read(self.out, 1 << 16):
            self.said += piece
        os.close(self.out)
        return os.waitpid(self.pid, 0)[1], self.said.decode().splitlines()

    def kill(self) -> None:
        """End it on the spot."""
        os.kill(self.pid, signal.SIGKILL)
