"""Reports of progress: a callable that receives :class:`Progress`.

The library never prints; the command line turns these into bars.
"""

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
