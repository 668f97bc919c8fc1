"""Figures as self-contained HTML pages: no scripts, no files beside them, nothing fetched."""

from collections.abc import Mapping
from importlib import resources
from typing import Any

from edgespec.measuring.charts import Bar, BarChart, LineChart, bar_chart, column_chart, line_chart
from edgespec.measuring.costs import as_ranges
from edgespec_models.errors import RequestError

__all__ = ["render_costs", "render_report"]

_FORMAT = 1


def render_report(result: Mapping[str, Any]) -> str:
    """The page for what :func:`edgespec.measuring.bench_json.summarize` returned, or the same read from JSON.

    Raises:
        RequestError: ``result`` is not of that form.
    """
    return _render(
        "bench_report.html",
        _checked(result, "bench"),
        verdict=_verdict(result),
        speedups=_speedup_chart(result),
        cost=_cost_chart(result),
        positions=_position_chart(result),
    )


def render_costs(result: Mapping[str, Any]) -> str:
    """The page for what :meth:`edgespec.measuring.costs.Costs.to_json` returned, or the same read from JSON.

    Raises:
        RequestError: ``result`` is not of that form.
    """
    return _render("cost_report.html", _checked(result, "measurement of costs"), cost=_roofline_chart(result))


def _checked(result: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    if result.get("format") != _FORMAT:
        raise RequestError(
            f"not the result of a {kind} of format {_FORMAT}: format is {result.get('format')!r}"
        )
    return result


def _render(template: str, result: Mapping[str, Any], **parts: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, percent=_percent, gigabytes=_gigabytes, ranges=as_ranges)
    return environment.get_template(template).render(result=result, **parts)


def _source(template: str) -> str:
    return (resources.files("edgespec.measuring") / template).read_text(encoding="utf-8")


def _verdict(result: Mapping[str, Any]) -> str:
    """The headline: what a user wants to know first."""
    ratio = result["speedup"]["overall"]
    if ratio is None:
        return "Nothing was measured"
    if 0.995 <= ratio < 1.005:
        return "As fast as plain decoding"
    return f"{ratio:.2f} times as fast as plain decoding" + (" (slower)" if ratio < 1.0 else "")


def _speedup_chart(result: Mapping[str, Any]) -> BarChart | None:
    speedup = result["speedup"]
    named = [*speedup["by_category"].items(), ("all prompts", speedup["overall"])]
    bars = [Bar(name, ratio, f"{ratio:.2f}×") for name, ratio in named if ratio is not None]
    return bar_chart(bars, mark=1.0) if bars else None


def _cost_chart(result: Mapping[str, Any]) -> LineChart | None:
    points = [(point["n"], point["ms"]) for point in result["cost_curve"]]
    return line_chart(points) if points else None


def _roofline_chart(result: Mapping[str, Any]) -> LineChart:
    rows = result["rows"]
    first, ridge, last = rows[0]["n"], result["ridge_rows"], rows[-1]["n"]
    floor, end = rows[0]["roofline_ms"], rows[-1]["roofline_ms"]
    kink = [(ridge, floor)] if first < ridge < last else []
    return line_chart([(row["n"], row["ms"]) for row in rows], bound=[(first, floor), *kink, (last, end)])


def _position_chart(result: Mapping[str, Any]) -> BarChart | None:
    bars = [
        Bar(str(row["position"]), row["rate"], f"{row['rate']:.0%}", f"{row['accepted']} of {row['drafted']}")
        for row in result["acceptance_by_position"]
        if row["rate"] is not None
    ]
    return column_chart(bars) if bars else None


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _gigabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e9:.2f} GB"
