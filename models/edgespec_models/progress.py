"""Reports of progress: a callable that receives :class:`Progress`.

The command line turns reports into bars. :func:`show_progress` prints them in one line of a terminal.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One report: ``done`` of ``total`` ``unit`` in ``stage`` (a short phrase such as "Exporting").

    ``total`` is 0 if it is unknown. A stage is over when ``done == total``.
    """

    stage: str
    done: int
    total: int
    unit: str = "B"


ProgressCallback = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Ignore reports."""


_LINE = 78  # characters, so that the line stays one in a terminal of 80


def show_progress(progress: Progress) -> None:
    """Show the report in a line of standard error, which the next report replaces.

    The line is removed when its stage is over. Without a terminal nothing is printed.
    """
    if sys.stderr is None or not sys.stderr.isatty():  # apps without a console have no standard error
        return
    done, total = progress.done, progress.total
    share = f"{done / total:4.0%}" if total else f"{done:,} {progress.unit}"
    line = "" if 0 < total <= done else f"{progress.stage[: _LINE - len(share) - 1]} {share}"
    print(f"\r{line:{_LINE}}", end="" if line else "\r", file=sys.stderr, flush=True)
