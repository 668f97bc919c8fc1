"""Where the parts of a picture go: values in, coordinates out. The report's template draws them as SVG.

Coordinates are those of an SVG view box: x to the right, y downwards.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "Bar",
    "BarChart",
    "LineChart",
    "Point",
    "Tick",
    "bar_chart",
    "column_chart",
    "line_chart",
    "ticks",
]

_WIDTH = 640.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 16.0, 20.0, 40.0
_PLOT_HEIGHT = 200.0
_LABELS = 150.0
_VALUES = 64.0
_ROW = 30.0
_BAR_SHARE = 0.64


@dataclass(frozen=True, slots=True)
class Bar:
    """A value by name: ``text`` is the value as shown, ``note`` says more."""

    label: str
    value: float
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Box:
    """Where a bar lies."""

    bar: Bar
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars along one axis, which lies between ``start`` and ``end``; ``mark`` is a value to compare with."""

    width: float
    height: float
    start: float
    end: float
    boxes: tuple[Box, ...]
    ticks: tuple[Tick, ...]
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point and its label."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class LineChart:
    """Points joined. ``line``, ``compare`` and ``bound`` are SVG point lists; the last may be empty."""

    width: float
    height: float
    points: tuple[Point, ...]
    line: str
    compare: str
    bound: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    left: float
    right: float
    top: float
    bottom: float


def ticks(largest: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least ``largest`` (above 0), about ``count`` steps of 1, 2 or 5 * 10^k."""
    rough = largest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1.0 - 1e-9))
    return [round(index * step, 12) for index in range(math.ceil(largest / step - 1e-9) + 1)]


def bar_chart(bars: Sequence[Bar], *, mark: float | None = None) -> BarChart:
    """Horizontal bars from 0, names on the left; values are 0 or more."""
    height = _TOP + _ROW * len(bars) + _BOTTOM
    values = ticks(max([bar.value for bar in bars] + [mark or 0.0, 1e-9]))
    scale = (_WIDTH - _LABELS - _VALUES) / values[-1]
    thickness = _ROW * _BAR_SHARE
    boxes = tuple(
        Box(bar, _LABELS, _TOP + _ROW * row + (_ROW - thickness) / 2, bar.value * scale, thickness)
        for row, bar in enumerate(bars)
    )
    return BarChart(
        width=_WIDTH,
        height=height,
        start=_TOP,
        end=height - _BOTTOM,
        boxes=boxes,
        ticks=tuple(Tick(_LABELS + value * scale, f"{value:g}") for value in values),
        mark=None if mark is None else _LABELS + mark * scale,
    )


def column_chart(bars: Sequence[Bar]) -> BarChart:
    """Vertical bars for shares from 0 to 1."""
    bottom = _TOP + _PLOT_HEIGHT
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(bars), 1)
    width = min(step * _BAR_SHARE, 56.0)
    boxes = tuple(
        Box(
            bar,
            _LEFT + step * index + (step - width) / 2,
            bottom - bar.value * _PLOT_HEIGHT,
            width,
            bar.value * _PLOT_HEIGHT,
        )
        for index, bar in enumerate(bars)
    )
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return BarChart(
        width=_WIDTH,
        height=bottom + _BOTTOM,
        start=_LEFT,
        end=_WIDTH - _RIGHT,
        boxes=boxes,
        ticks=tuple(Tick(bottom - share * _PLOT_HEIGHT, f"{share:.0%}") for share in shares),
    )


def line_chart(
    points: Sequence[tuple[int, float]], *, bound: Sequence[tuple[float, float]] = ()
) -> LineChart:
    """Measured values by whole number, with the straight line n * value(first) to compare.

    Args:
        points: at least one, by rising number; numbers and values are above 0.
        bound: corners of another line, between the first and the last number.
    """
    (first, base), bottom = points[0], _TOP + _PLOT_HEIGHT
    last = max(points[-1][0], first + 1)
    y_values = ticks(max(value for _, value in (*points, *bound)) * 1.05)

    def place(number: float, value: float) -> tuple[float, float]:
        across = (number - first) / (last - first)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), bottom - value / y_values[-1] * _PLOT_HEIGHT

    # The comparing line leaves the picture where it passes the highest tick.
    leaves = min(float(last), y_values[-1] / base * first)
    ends = (place(first, base), place(leaves, leaves / first * base))
    return LineChart(
        width=_WIDTH,
        height=bottom + _BOTTOM,
        points=tuple(Point(*place(n, value), f"{value:.1f} ms for {n}") for n, value in points),
        line=_joined(place(n, value) for n, value in points),
        compare=_joined(ends),
        bound=_joined(place(n, value) for n, value in bound),
        x_ticks=tuple(Tick(place(n, 0.0)[0], str(n)) for n, _ in points),
        y_ticks=tuple(Tick(place(first, value)[1], f"{value:g}") for value in y_values),
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        bottom=bottom,
    )


def _joined(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
