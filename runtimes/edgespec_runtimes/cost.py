"""The cost of a pass on this machine: T(n), measured, and measured curves checked again later."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from statistics import fmean
from time import perf_counter
from typing import Annotated

from edgespec_models.decoders.kept import BLOCK
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.schema import within
from edgespec_runtimes.session import Session

DEFAULT_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
_REPEATS = 2
_PAST = 16
_AGREE = 1.1  # two samples this near to each other were not disturbed, or both alike
_MORE_REPEATS = 4
_CHECKS = 3
_STEP = 1.25
_SHAPE_TOLERANCE = 1.35
_SLOWER = 1.2
_CONTEXT = 2048  # tokens
_CONTEXT_BYTES = 64 << 20
_CONTEXT_ROWS = 8
_CONTEXT_REPEATS = 3
_SAMPLES = 4
_FEW = 33  # rows
_LEAST_OVERLAP, _HALVINGS = 1e-3, 16
_Seconds = Annotated[float, within(0.0)]


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """The cost of different experts of a mixture, besides rows (formula of MoESD, arXiv 2505.19645).

    ``read_s`` are seconds for each that a pass reads, ``used`` how many one row uses in all layers, and
    ``overlap`` the share of a row's experts that another row uses too. Of n rows that overlap so, ``(1 -
    overlap) ** n`` of the last row's are new.
    """

    read_s: _Seconds
    used: Annotated[int, within(1)]
    overlap: Annotated[float, within(high=1.0, above=0.0)]

    def expected(self, rows: int, overlap: float | None = None) -> float:
        """The number of different experts that this many rows use."""
        share = self.overlap if overlap is None else overlap
        return self.used * (1.0 - (1.0 - share) ** rows) / share

    def overlap_of(self, rows: int, experts: float) -> float:
        """The overlap at which this many rows, two or more, use this many ``experts``."""
        low, high = _LEAST_OVERLAP, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.expected(rows, middle) > experts else (low, middle)
        return high


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a pass by its number of rows.

    Steps and cliffs of the measured points stay as they are. In a ``confirmed`` curve a second sample came
    near every point, so none was disturbed.

    Attention makes a pass longer along a context: by ``context_s`` for each token that a layer attends to,
    and by ``row_context_s`` for each such token and row. Both are 0 if they were not measured.

    ``experts`` has the costs of a mixture of experts, whose points were measured at its overlap; else None.
    """

    seconds_by_rows: Mapping[int, Annotated[float, within(above=0.0)]]
    confirmed: bool = True
    context_s: _Seconds = 0.0
    row_context_s: _Seconds = 0.0
    experts: ExpertCosts | None = None

    def seconds(self, rows: int, context: float = 0.0, sequences: int = 1) -> float:
        """Cost of a pass over ``rows`` tokens of ``sequences``, each behind ``context`` tokens.

        It is linear between measured points and, never falling, beyond.
        """
        attention_s = context * (sequences * self.context_s + rows * self.row_context_s)
        few = self._few
        return (few[rows] if rows < len(few) else self._line(rows)) + attention_s

    @cached_property
    def _few(self) -> list[float]:
        """The cost of few rows, because a round asks for it some fifty times."""
        return [self._line(rows) for rows in range(_FEW)]

    def _line(self, rows: int) -> float:
        points = self._points
        right = min(max(1, bisect_left(points, (rows,))), len(points) - 1)
        (n0, t0), (n1, t1) = points[right - 1 : right + 1]
        slope = (t1 - t0) / (n1 - n0)
        return t1 + (slope if rows <= n1 else max(slope, 0.0)) * (rows - n1)

    @cached_property
    def _points(self) -> list[tuple[int, float]]:
        """The points in order. Nothing is cheaper than the least size."""
        points = sorted(self.seconds_by_rows.items())
        return [(0, points[0][1]), *points]


def measure_cost(
    session: Session,
    rows: Sequence[int] = DEFAULT_ROWS,
    repeats: int = _REPEATS,
    *,
    progress: ProgressCallback = ignore_progress,
) -> CostCurve:
    """Time passes over each number of rows behind 16 tokens, in turn, ``repeats`` times; the least counts.

    The session's sequence is replaced and forgotten. Disturbances of the machine only add time, so the least
    time is nearest to the cost of a pass. It counts as confirmed once a second sample comes near it and no
    wider pass takes clearly less, because samples under a lasting load agree too. Other sizes are timed
    again, at most four times, and then the curve is not ``confirmed``. Its times never fall.
    """
    text = _text(session)
    session.prefill(list(islice(text, _PAST)))
    times: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(repeats + 1 + _MORE_REPEATS):
        unsettled = [n for n in rows if repeat <= repeats or not _settled(n, times)]
        for n in unsettled:
            seconds = _timed(session, list(islice(text, n)))
            if repeat:  # the first round binds and warms up
                times[n].append(seconds)
        progress(Progress("Timing passes", min(repeat + 1, repeats + 1), repeats + 1, "rounds"))
        if not unsettled:
            break
    session.rewind(0)
    confirmed = all(_settled(n, times) for n in rows)
    return CostCurve(_rising({n: min(times[n]) for n in rows}), confirmed)


def sample_cost(session: Session, rows: Sequence[int], passes: int = _SAMPLES) -> CostCurve:
    """T(n) where weights come from the disk: the mean of so many passes over each number of rows.

    The experts in memory differ from pass to pass, so the least time says little. The session's sequence is
    replaced and forgotten.
    """
    text = _text(session)
    session.prefill(list(islice(text, _PAST)))
    for _ in range(passes):  # what loading left in memory is not what passes leave there
        _timed(session, list(islice(text, max(rows))))
    times = {n: fmean(_timed(session, list(islice(text, n))) for _ in range(passes)) for n in rows}
    session.rewind(0)
    return CostCurve(_rising(times))


def look_again(session: Session, curve: CostCurve, rows: int) -> CostCurve:
    """The curve, with steps below ``rows`` timed again: passes that take a quarter longer than narrower ones.

    A step may come from a disturbance that lasted as long as the measuring. Disturbances only add time, so a
    time that is clearly less counts, and steps that are there stay. Of a curve that is not confirmed every
    pass is timed again; if none takes clearly less, the curve is confirmed. The session's sequence is
    replaced and forgotten.
    """
    text, points = _text(session), dict(sorted(curve.seconds_by_rows.items()))
    session.rewind(0)
    narrower = math.inf
    for n in [n for n in points if n < rows]:
        if points[n] > _STEP * narrower or not curve.confirmed:
            seconds = _timed(session, list(islice(text, n)))
            points[n] = seconds if seconds * _AGREE < points[n] else points[n]
        narrower = points[n]
    session.rewind(0)
    if points == curve.seconds_by_rows:
        return curve if curve.confirmed else replace(curve, confirmed=True)
    return replace(curve, seconds_by_rows=_rising(points))


def measure_context(session: Session, curve: CostCurve) -> CostCurve:
    """The curve with the cost of attention along a context.

    Passes over one and over eight rows are timed behind 32 tokens and behind 2,048, or as many as take 64 MB
    of KV cache. The context consists of copies, because reading it would take long. The session's sequence is
    replaced and forgotten, and its cache is freed. If the cache cannot be copied, the curve stays the same.
    """
    wide = max(n for n in curve.seconds_by_rows if n <= _CONTEXT_ROWS)
    tokens = list(islice(_text(session), BLOCK + wide))
    session.prefill(tokens[:BLOCK])
    saved = session.save(0)
    most = min(
        _CONTEXT, session.model.longest - wide, _CONTEXT_BYTES * BLOCK // max(session.model.block_bytes, 1)
    )
    if wide == 1 or most < 2 * BLOCK or saved is None:
        session.rewind(0)
        return curve
    copy = memoryview(bytes(saved))  # a copy, so that each part gets a block of its own
    least, near = {}, session.attended
    for far in (False, True):
        if far:  # timing passes needs no state of the copies
            parts = [(tokens[:BLOCK], copy)] * (most // BLOCK)
            session.resume(0, parts, session.state(), most // BLOCK * BLOCK)
        for n in (1, wide):
            samples = [_timed(session, tokens[-n:]) for _ in range(1 + _CONTEXT_REPEATS)]
            least[far, n] = min(samples[1:])
    span = session.attended - near
    session.release()
    single, several = (max(0.0, least[True, n] - least[False, n]) / span for n in (1, wide))
    row_s = max(0.0, several - single) / (wide - 1)
    return replace(curve, context_s=max(0.0, single - row_s), row_context_s=row_s)


def measure_experts(
    session: Session, curve: CostCurve, typical: Callable[[Sequence[float]], float] = min
) -> CostCurve:
    """The curve with the cost of different experts, if the model has experts.

    A pass over eight different tokens and one over eight equal tokens do the same arithmetic. The difference
    in time is the cost of the further experts. ``typical`` of several passes is the least time, or the mean.
    The session's sequence is replaced and forgotten.
    """
    if not session.model.experts_read:
        return curve
    wide = max(n for n in curve.seconds_by_rows if n <= _CONTEXT_ROWS)
    text = _text(session)
    session.prefill(list(islice(text, _PAST)))
    seconds, experts = {}, {}
    for kind, different, copies in (("one", 1, 1), ("alike", 1, wide), ("apart", wide, 1)):
        rows = [list(islice(text, different)) * copies for _ in range(1 + _CONTEXT_REPEATS)]
        seconds[kind] = typical([_timed(session, tokens) for tokens in rows][1:])
        experts[kind] = session.model.experts_read
    session.rewind(0)
    more = experts["apart"] - experts["alike"]
    if more <= 0:
        return curve
    costs = ExpertCosts(max(0.0, seconds["apart"] - seconds["alike"]) / more, experts["one"], 1.0)
    return replace(curve, experts=replace(costs, overlap=costs.overlap_of(wide, experts["apart"])))


def recheck_cost(session: Session, stored: CostCurve, rows: int) -> CostCurve | None:
    """Adjust a curve that was measured earlier on this machine to the machine's present speed.

    Two passes over one row and one over ``rows`` give the factors by which they changed. If the factors agree
    within a third, all points are scaled by the factor of the wide pass, which depends on the processor's
    speed. The single row, which depends on memory too, gets its present time, and no pass costs less. Samples
    that disagree, or show a slower machine, may have been disturbed and are taken again, twice at most. If
    the machine is faster throughout, the curve itself was disturbed.

    The session's sequence is replaced and forgotten. ``stored`` has a point for one row; ``rows`` is the wide
    pass.

    Returns:
        The adjusted curve; None if its shape has changed or it was disturbed. Then measure again.
    """
    text = _text(session)
    session.rewind(0)
    session.predict([next(text)])  # warms up
    least = {1: math.inf, rows: math.inf}
    for _ in range(_CHECKS):
        for n in (1, 1, rows):
            least[n] = min(least[n], _timed(session, list(islice(text, n))))
        single, wide = (least[n] / stored.seconds(n) for n in (1, rows))
        alike = max(single, wide) <= _SHAPE_TOLERANCE * min(single, wide)
        if alike and min(single, wide) <= _SLOWER:
            break
    session.rewind(0)
    if not alike or max(single, wide) < 1 / _SLOWER:
        return None
    points = {n: max(t * wide, least[1]) for n, t in stored.seconds_by_rows.items()} | {1: least[1]}
    experts = stored.experts and replace(stored.experts, read_s=stored.experts.read_s * wide)
    return CostCurve(points, stored.confirmed, stored.context_s * wide, stored.row_context_s * wide, experts)


def _text(session: Session) -> Iterator[int]:
    """Different tokens. None is read twice, because its experts may be in memory the second time."""
    return (index * 7919 % session.model.vocab_size for index in count())


def _timed(session: Session, tokens: Sequence[int]) -> float:
    """Seconds of a pass over ``tokens``, whose rows are rolled back."""
    text, started = session.stretch.tokens[:], perf_counter()
    session.predict(tokens)
    seconds = perf_counter() - started
    session.prefill(text)  # read again, because states do not go back so far
    return seconds


def _settled(rows: int, times: Mapping[int, Sequence[float]]) -> bool:
    """Whether the least time over ``rows`` is settled; a single sample always is."""
    least, *others = sorted(times[rows])
    return not others or (others[0] <= _AGREE * least and least <= _AGREE * _least(rows, times))


def _least(rows: int, times: Mapping[int, Sequence[float]]) -> float:
    """The least time of passes over ``rows`` or more rows."""
    return min(min(values) for n, values in times.items() if n >= rows)


def _rising(times: Mapping[int, float]) -> dict[int, float]:
    """Times that are at most those of more rows: what a wider pass took, a narrower one can take too."""
    return {rows: min(seconds for n, seconds in times.items() if n >= rows) for rows in times}
