"""What all commands share: where messages go, progress bars, and how a failure ends the program.

Results go to standard output; progress, notes and errors go to standard error, so that output can be
piped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, NoReturn

import typer

from edgespec_models.progress import Progress, ProgressCallback

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

__all__ = ["amount", "errors", "fail", "note", "output", "progress_bars", "size"]


@cache
def output() -> "Console":
    """The console on standard output."""
    from rich.console import Console

    return Console(highlight=False)


@cache
def errors() -> "Console":
    """The console on standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def note(message: str) -> None:
    """Tell the user something that is not a result."""
    errors().print(message, style="dim", markup=False, soft_wrap=True)


def fail(error: BaseException | str) -> NoReturn:
    """Print ``error: ...`` in red on standard error and leave with exit code 1."""
    message = " ".join(str(error).split()) or type(error).__name__
    errors().print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)


def size(count: int) -> str:
    """``count`` bytes in decimal units: ``98.4 MB``."""
    from rich.filesize import decimal

    return decimal(count)


def amount(report: Progress) -> str:
    """How far a stage is: ``1.2 MB of 98.4 MB``, ``3 of 24 layers``."""
    parts = [size(n) if report.unit == "B" else f"{n:,}" for n in (report.done, report.total) if n]
    return " of ".join(parts or ["0"]) + ("" if report.unit == "B" else f" {report.unit}")


@contextmanager
def progress_bars() -> Iterator[ProgressCallback]:
    """A callback that draws one bar a stage; away from a terminal, a line as a stage begins."""
    if not errors().is_terminal:
        yield _Lines()
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=errors()) as bars:
        yield _Bars(bars)


class _Lines:
    """Progress in a log file: the name of each stage, once."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def __call__(self, report: Progress) -> None:
        if report.stage not in self._begun:
            self._begun.add(report.stage)
            note(report.stage)


class _Bars:
    """Progress on a terminal."""

    def __init__(self, bars: "Bars") -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, report: Progress) -> None:
        if report.stage not in self._tasks:
            self._tasks[report.stage] = self._bars.add_task(report.stage, total=None, amount="")
        self._bars.update(
            self._tasks[report.stage],
            completed=report.done,
            total=report.total or None,
            amount=amount(report),
        )
