"""What bench and demo share: measure until done or stopped, print the table, write the files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgespec.cli.answers import print_json
from edgespec.cli.console import errors, note, output, size
from edgespec_models.progress import ProgressCallback

if TYPE_CHECKING:
    from rich.table import Table

    from edgespec.engine import Model
    from edgespec.measuring.bench import BenchOptions
    from edgespec.measuring.prompts import Prompt

__all__ = ["exit_if_stopped", "measured", "show", "write_results"]

_SHOWN_REASONS = 3


def measured(
    model: "Model", prompts: "Sequence[Prompt]", options: "BenchOptions", progress: ProgressCallback
) -> dict[str, Any]:
    """The figures of a bench; Ctrl-C ends it early, with those of the prompts answered until then."""
    from edgespec.measuring.bench import measure, summarize

    pairs = []
    try:
        for pair in measure(model, prompts, options, progress=progress):
            pairs.append(pair)
    except KeyboardInterrupt:
        if not pairs:
            raise
    return summarize(model, pairs, options, complete=len(pairs) == len(prompts))


def exit_if_stopped(result: Mapping[str, Any]) -> None:
    """Leave with exit code 130 if the bench was stopped before its end."""
    if not result["complete"]:
        errors().print("interrupted")
        raise typer.Exit(130)


def write_results(result: Mapping[str, Any], *, json_file: Path | None, report: Path | None) -> None:
    """Write the figures as JSON and as a page, where asked for. The JSON file ``-`` is standard output."""
    from edgespec.measuring.report import render_report
    from edgespec_models.files.replacing import write_text

    if json_file == Path("-"):
        print_json(result)
    elif json_file is not None:
        write_text(json_file, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        note(f"Figures: {json_file}")
    if report is not None:
        write_text(report, render_report(result))
        note(f"Report: {report.absolute()}")


def show(result: Mapping[str, Any]) -> None:
    """Print the speedup by category, then what lies behind it."""
    from rich.markup import escape

    models = result["models"]
    title = f"{models['name']} with {models['drafter_name'] or 'no drafter'}"
    output().print(f"\n[bold]{escape(title)}[/bold]\n")
    output().print(_speed_table(result))
    output().print()
    output().print(_fact_table(result))
    output().print()
    same = f"{result['identical']} of {result['prompts']} answers are the same token by token."
    output().print(same, style="" if result["identical"] == result["prompts"] else "yellow")
    for title, key in (("Few or no drafts", "speculation_off"), ("Rolled back", "rolled_back")):
        reasons = sorted(result[key].items(), key=lambda item: -item[1])
        for reason, count in reasons[:_SHOWN_REASONS]:
            output().print(f"{title} in {count} answers: {reason}", markup=False, soft_wrap=True)


def _speed_table(result: Mapping[str, Any]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("category")
    for name in ("prompts", "plain, tokens/s", "speculative, tokens/s", "speedup"):
        table.add_column(name, justify="right")
    for name, ratio in result["speedup"]["by_category"].items():
        rows = [row for row in result["rows"] if row["category"] == name]
        speeds = _speed(rows, "plain"), _speed(rows, "speculative")
        table.add_row(escape(name), str(len(rows)), *speeds, _times(ratio))
    table.add_section()
    table.add_row(
        "all",
        str(result["prompts"]),
        _figure(result["plain"]["tokens_per_second"]),
        _figure(result["speculative"]["tokens_per_second"]),
        _times(result["speedup"]["overall"]),
        style="bold",
    )
    return table


def _fact_table(result: Mapping[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    spread = result["spread"]["speedup"]
    middle = f"{spread['q1']:.2f} to {spread['q3']:.2f}, median {spread['median']:.2f}" if spread else "–"
    table.add_row("speedup of whole requests", _times(result["speedup"]["request"]))
    table.add_row("speedup, middle half of prompts", middle)
    for name, key in (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms")):
        sides = result[key]
        table.add_row(
            name, f"{_figure(sides['plain'])} ms plain, {_figure(sides['speculative'])} ms speculative"
        )
    table.add_row("tokens per target pass", _figure(result["block_efficiency"], 2))
    rate = result["acceptance_rate"]
    table.add_row("drafted tokens accepted", "nothing drafted" if rate is None else f"{rate:.1%}")
    mbsu = result["mbsu"]
    by_bytes, by_parameters = _figure(mbsu["bytes"], 2), _figure(mbsu["parameters"], 2)
    table.add_row("memory-bound speedup", f"{by_bytes} by bytes, {by_parameters} by parameters")
    curve = [f"{point['n']}: {point['ms']:.1f}" for point in result["cost_curve"]]
    table.add_row("a pass over n tokens, ms", ", ".join(curve))
    if result["drafter_step_ms"] is not None:
        table.add_row("a drafter step, ms", _figure(result["drafter_step_ms"]))
    table.add_row(
        "weights read in plain decoding", f"{_figure(result['gigabytes_per_second']['plain'])} GB/s"
    )
    table.add_row("peak memory", size(result["peak_memory_bytes"]))
    return table


def _speed(rows: Sequence[Mapping[str, Any]], side: str) -> str:
    """Tokens per second over some rows: every answer's decode tokens, over their times."""
    decoded = [(row[side]["new_tokens"] - 1, row[side]["tpot_ms"] / 1e3) for row in rows]
    seconds = sum(tokens * each for tokens, each in decoded)
    return _figure(sum(tokens for tokens, _ in decoded) / seconds if seconds > 0 else None)


def _figure(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}x"
