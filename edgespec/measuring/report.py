"""Figures as self-contained HTML pages: no scripts, no files beside them, nothing fetched."""

from collections.abc import Mapping
from importlib import resources
from typing import Any

from edgespec.measuring.costs import as_ranges
from edgespec_models.errors import RequestError

_FORMAT = 1


def render_report(result: Mapping[str, Any]) -> str:
    """The page of a result of :func:`edgespec.measuring.bench.summarize`, which may come from JSON.

    Raises:
        RequestError: ``result`` does not have this form.
    """
    return _render("bench_report.html", result, "bench", verdict=_verdict(result))


def render_costs(result: Mapping[str, Any]) -> str:
    """The page of a result of :meth:`edgespec.measuring.costs.Costs.to_json`, which may come from JSON.

    Raises:
        RequestError: ``result`` does not have this form.
    """
    return _render("cost_report.html", result, "measurement of costs")


def _render(template: str, result: Mapping[str, Any], kind: str, **parts: Any) -> str:
    import jinja2

    if (format_ := result.get("format")) != _FORMAT:
        raise RequestError(f"not the result of a {kind} of format {_FORMAT}: format is {format_!r}")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, percent=_percent, gigabytes=_gigabytes, ranges=as_ranges)
    return environment.get_template(template).render(result=result, **parts)


def _source(template: str) -> str:
    return (resources.files("edgespec.measuring") / template).read_text(encoding="utf-8")


def _verdict(result: Mapping[str, Any]) -> str:
    """The headline, with the speedup or its absence."""
    ratio = result.get("speedup", {}).get("overall")
    if ratio is None:
        return "Nothing was measured"
    if 0.995 <= ratio < 1.005:
        return "As fast as plain decoding"
    return f"{ratio:.2f} times as fast as plain decoding" + (" (slower)" if ratio < 1.0 else "")


def number(value: float | None, digits: int = 1) -> str:
    """A figure; a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _gigabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e9:.2f} GB"
