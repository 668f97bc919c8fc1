"""Draw ``docs/figures/speed.svg`` and write the table of ``README.md``, both from ``docs/figures.json``.

Run ``python -m tools.picture`` when a figure has changed; a test compares its output with the files. In
``README.md`` the text from ``<!-- figures: table -->`` to ``<!-- figures: end -->`` is replaced. Its words
are in ``figures.json`` too: the ``table`` there names figures in braces.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).parents[1]
_END: Final = "<!-- figures: end -->"
_WIDTH, _HEIGHT, _TOP, _BOTTOM = 960, 380, 76, 316
_LEFT, _RIGHT = 64, 348  # of the lines; their names follow on the right
_BARS, _LONGEST, _STEP = 694, 192, 30  # where bars begin, how long and how far apart they are


def drawn(root: Path = _ROOT) -> dict[Path, str]:
    """What the tool writes: file -> content."""
    docs = root / "docs"
    figures = json.loads(_read(docs / "figures.json"))
    readme = root / "README.md"
    return {
        docs / "figures" / "speed.svg": _picture(figures, _read(docs / "figures" / "style.css")),
        readme: _filled(_read(readme), figures),
    }


def main() -> None:
    """Write every file."""
    for path, text in drawn().items():
        path.write_text(text, encoding="utf-8", newline="\n")


def _ticks(largest: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least ``largest`` (above 0), about ``count`` steps of 1, 2 or 5 * 10^k."""
    rough = largest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1.0 - 1e-9))
    return [round(index * step, 12) for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _filled(page: str, figures: Mapping[str, Any]) -> str:
    """The page with its table."""
    header, *rows = [f"| {' | '.join(cell.format(**figures) for cell in row)} |" for row in figures["table"]]
    before, begin, rest = page.partition("<!-- figures: table -->\n")
    table = "\n".join([header, "|---" * len(figures["table"][0]) + "|", *rows])
    return f"{before}{begin}{table}\n{_END}{rest.partition(_END)[2]}"


def _picture(figures: Mapping[str, Any], style: str) -> str:
    title = "Milliseconds of a pass, and tokens per second, of edgespec and other runtimes"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
    card = f'<rect class="card" x="1" y="1" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="8"/>'
    parts = [f'{head} aria-label="{title}">', f"<style>\n{style}</style>", card]
    return "\n".join([*parts, *_lines(figures["passes"]), *_bars(figures["speeds"]), "</svg>\n"])


def _lines(passes: Mapping[str, Any]) -> list[str]:
    """T(n) of each runtime: a line over the number of rows."""
    rows: list[float] = passes["rows"]
    times: dict[str, list[float]] = passes["milliseconds"]
    marks = _ticks(max(map(max, times.values())))

    def x(n: float) -> float:
        return _LEFT + (n - rows[0]) / (rows[-1] - rows[0]) * (_RIGHT - _LEFT)

    def y(value: float) -> float:
        return _BOTTOM - value / marks[-1] * (_BOTTOM - _TOP)

    parts = [_text(24, 40, passes["title"], "title")]
    for mark in marks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(mark):.1f}H{_RIGHT}"/>')
        parts.append(_text(_LEFT - 8, y(mark) + 4, f"{mark:g}", "muted end"))
    parts += [_text(x(n), _BOTTOM + 20, f"{n}", "muted mid") for n in rows if n % 2 == 0 or n == rows[0]]
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 44, "n, the tokens that a pass checks", "muted mid"))
    for name, values in times.items():
        points = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in zip(rows, values, strict=True))
        parts.append(f'<polyline class="{_class(name)} line" points="{points}"/>')
        parts.append(_text(_RIGHT + 10, y(values[-1]) + 4, name, f"{_class(name)} name"))
    return parts


def _bars(speeds: Mapping[str, Any]) -> list[str]:
    """Tokens per second of each runtime and mode: a bar each."""
    most = max(value for *_, value in speeds["tokens_per_s"])
    parts = [_text(_BARS - 204, 40, speeds["title"], "title")]
    for row, (name, mode, value) in enumerate(speeds["tokens_per_s"]):
        y, length = _TOP + _STEP * row, value / most * _LONGEST
        kind = f"{_class(name)} bar"
        parts.append(f'<rect class="{kind}" x="{_BARS}" y="{y}" width="{length:.1f}" height="18" rx="2"/>')
        parts.append(_text(_BARS - 10, y + 14, f"{name}, {mode}", "end"))
        parts.append(_text(_BARS + length + 8, y + 14, f"{value:.1f}", "muted"))
    return parts


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def _class(name: str) -> str:
    return name.replace(".", "-")


if __name__ == "__main__":
    main()
