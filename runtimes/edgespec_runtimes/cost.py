"""What a pass costs on this machine: T(n), measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from edgespec_runtimes.session import Session

__all__ = ["CostCurve", "measure_cost"]

DEFAULT_ROWS = (1, 2, 3, 4, 5, 6, 8)
_REPEATS = 2
_PAST = 64


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a pass by its number of rows.

    Attributes:
        seconds_by_rows: measured points; steps and cliffs are kept as they are.
    """

    seconds_by_rows: Mapping[int, float]

    def seconds(self, rows: int) -> float:
        """Cost of a pass over ``rows`` tokens: linear between measured points and, never falling, beyond."""
        points = sorted(self.seconds_by_rows.items())
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        last = len(points) - 1
        index = next((i for i in range(1, last) if rows <= points[i][0]), last)
        (n0, t0), (n1, t1) = points[index - 1], points[index]
        slope = (t1 - t0) / (n1 - n0)
        return t0 + slope * (rows - n0) if rows <= n1 else t1 + max(slope, 0.0) * (rows - n1)


def measure_cost(
    session: Session, rows: Sequence[int] = DEFAULT_ROWS, repeats: int = _REPEATS, *, past: int = _PAST
) -> CostCurve:
    """Time passes over each number of rows behind ``past`` tokens, in turn, ``repeats`` times; the least.

    The session's sequence is replaced and forgotten. Disturbances of the machine only ever add time, so
    the least is the nearest to what a pass costs.
    """
    tokens = [index * 7919 % session.vocab_size for index in range(past + max(rows))]
    session.prefill(tokens[:past])
    times: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(repeats + 1):
        for n in rows:
            started = perf_counter()
            session.forward(tokens[past : past + n])
            if repeat:  # the first round binds and warms up
                times[n].append(perf_counter() - started)
            session.truncate(past)
    session.truncate(0)
    return CostCurve({n: min(values) for n, values in times.items()})
