"""The console that all commands share: results, messages, progress bars and the end after a failure.

Results go to standard output; progress, notes and errors go to standard error, so that output can be
piped.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.storage import size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table


_LINE_S = 15.0  # between two lines of a stage, where there is no terminal


@cache
def output() -> "Console":
    """The console on standard output."""
    from rich.console import Console

    return Console(highlight=False, emoji=False)  # emojis would stand for :end: in x[1:end:2]


@cache
def errors() -> "Console":
    """The console on standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False)


def say(line: str, style: str = "") -> None:
    """Print a line of a result as it is, however long."""
    output().print(line, style=style, markup=False, soft_wrap=True)


def note(message: str, style: str = "dim") -> None:
    """Tell the user something that is not a result."""
    errors().print(message, style=style, markup=False, soft_wrap=True)


def fail(error: BaseException | str) -> NoReturn:
    """Print ``error: ...`` in red on standard error and leave with exit code 1."""
    message = " ".join(str(error).split()) or type(error).__name__
    note(f"error: {message}", style="red")
    raise typer.Exit(1)


def allow_any_text() -> None:
    """Let what standard input and output cannot decode or encode become marks instead of errors."""
    for stream in (sys.stdin, sys.stdout):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def json_text(value: Any, indent: int | None = None) -> str:
    """``value`` as JSON; characters are escaped where standard output could not hold them all."""
    encoding = getattr(sys.stdout, "encoding", None) or ""
    return json.dumps(value, indent=indent, ensure_ascii=not encoding.lower().startswith("utf"))


def print_json(value: Any) -> None:
    """Print ``value`` as JSON, indented."""
    typer.echo(json_text(value, indent=2))


def done(value: Any, line: str, as_json: bool) -> None:
    """Say that something is done: as JSON, or in words beside the output."""
    if as_json:
        print_json(value)
    else:
        note(line)


def fact_table() -> "Table":
    """A table of names and values, without lines."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def figure_table(*columns: str, names: int = 1) -> "Table":
    """A table without lines: columns of figures, behind so many of names."""
    from rich.table import Table

    table = Table(*columns[:names], box=None, pad_edge=False)
    for column in columns[names:]:
        table.add_column(column, justify="right")
    return table


def amount(report: Progress) -> str:
    """The progress of a stage: ``1.2 MB of 98.4 MB``, ``3 of 24 layers``."""
    parts = [size(n) if report.unit == "B" else f"{n:,}" for n in (report.done, report.total) if n]
    return " of ".join(parts or ["0"]) + ("" if report.unit == "B" else f" {report.unit}")


@contextmanager
def progress_bars(*, leave: bool = True) -> Iterator[ProgressCallback]:
    """A callback that draws one bar a stage; away from a terminal it prints a line now and then.

    Without ``leave`` nothing of a bar stays behind.
    """
    if not errors().is_terminal:
        told = dict[str, float]()  # when a stage had its last line

        def tell(report: Progress) -> None:
            now = monotonic()
            if report.stage not in told:
                note(report.stage)
            elif now - told[report.stage] < _LINE_S:
                return
            else:
                note(f"{report.stage}: {amount(report)}")
            told[report.stage] = now

        yield tell
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
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=errors(), transient=not leave) as bars:

        def draw(report: Progress) -> None:
            if report.stage not in tasks:
                tasks[report.stage] = bars.add_task(report.stage, total=None, amount="")
            bars.update(
                tasks[report.stage],
                completed=report.done,
                total=report.total or None,
                amount=amount(report),
            )

        yield draw
