"""``edgespec cost``: the cost of verification on this machine."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.console import figure_table, note, output, print_json, progress_bars, say
from edgespec.loading.options import LoadOptions
from edgespec_runtimes.cpu import CpuOptions

if TYPE_CHECKING:
    from rich.table import Table


_COSTS = {
    "rows": "{n}",
    "ms": "{ms:.2f}",
    "T(n)/T(1)": "{relative:.2f}",
    "ms a row": "{ms_per_row:.2f}",
    "GB/s": "{gigabytes_per_second:.1f}",
    "GOPS": "{gops:,.0f}",
    "roofline, ms": "{roofline_ms:.2f}",
    "bound by": "{bound}",
}
_GAINS = {
    "accepted": "{acceptance:.0%}",
    "best length": "{best_length}",
    "tokens a pass": "{tokens_per_pass:.2f}",
    "speedup": "{speedup:.2f}x",
    "lengths that pay": "{paying}",
}
"""Columns, and the figures in them."""


@options.shared({**options.of(CpuOptions, "threads", "instructions"), **options.of(LoadOptions, "kv")})
def cost(
    context: typer.Context,
    bundle: options.Target,
    as_drafter: Annotated[
        bool, typer.Option("--drafter", help="Measure the model as a drafter, which needs no exact rows.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again, also if an earlier measurement is kept.")
    ] = False,
    as_json: options.JsonFlag = False,
    report: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write a page with a chart.")
    ] = None,
) -> None:
    """Time passes over 1 to 32 rows, beside what memory and arithmetic allow.

    Verifying k drafted tokens takes a pass over k + 1 rows. Rows are free as long as a pass over them takes
    little longer than over one row; a pass is bound by memory while reading the weights takes longer than
    computing with them. Behind a long text attention makes rows dearer.

    The times are kept in the folder 'measurements' under EDGESPEC_HOME, or in the user's cache folder, and
    used by every later load with these threads after a short check. --fresh measures them again; the
    folder may be deleted at any time.

    Examples:

        edgespec cost qwen2.5-coder-1.5b-instruct

        edgespec cost smollm2-135m-instruct --drafter --threads 2 --json

        edgespec cost ./target --fresh --report cost.html

        edgespec cost ./target --instructions avx2
    """
    from edgespec.loading.measurements import recall
    from edgespec.loading.opening import conditions_of, open_model
    from edgespec.measuring.costs import measure_costs
    from edgespec.measuring.other_programs import warning
    from edgespec_models.storage import check_writable, write_text

    cpu = options.filled(CpuOptions, context)  # refused before a model is pulled
    if report is not None:
        check_writable(report)
    with progress_bars() as progress:
        opened = open_model(bundle, "drafter" if as_drafter else "target", progress=progress)
        if context.params["kv"] == "8bit":
            opened.keep_bytes()
        drafts = as_drafter or opened.manifest.role == "drafter"
        cpu = replace(cpu, exact_rows=not drafts)
        result = measure_costs(opened, cpu, fresh=fresh, progress=progress).to_json()
    if as_json:
        print_json(result)
    else:
        _show(result)
    if recall(conditions := conditions_of(opened, cpu)) is not None:
        note(f"Kept for later loads: {conditions.path}")
    if not result["confirmed"]:
        note("Other programs disturbed the times; close them and run this again with --fresh.")
    if words := warning(result["other_programs"]):
        note(words, style="yellow")
    if report is not None:
        from edgespec.measuring.report import render_costs

        write_text(report, render_costs(result))
        note(f"Report: {report.absolute()}")


def _show(result: Mapping[str, Any]) -> None:
    from edgespec.measuring.costs import as_ranges

    how = "measured earlier and checked now" if result["remembered"] else "measured now"
    say(f"\n{result['name']} as a {result['role']}, {result['threads']} threads, {how}\n")
    output().print(_table(_COSTS, result["rows"]))
    say(
        f"\nA pass reads {result['bytes_per_pass'] / 1e9:.2f} GB of weights. Memory delivers "
        f"{result['memory_gigabytes_per_second']:.1f} GB/s to {result['threads']} threads. The best of these "
        f"passes reached {result['peak_gops']:,.0f} GOPS, which is what the kernels do, not the processor's "
        "peak on paper."
    )
    say(_bounds(result))
    say(f"A prompt is read at {result['prompt_tokens_per_second']:,.0f} tokens a second.")
    free = result["free_rows"]
    say(
        f"Up to {free} rows cost within a tenth of a single row; drafts of {free - 1} are free to check."
        if free > 1
        else "No second row is free: a pass over 2 takes over a tenth longer than one over 1."
    )
    if (experts := result["experts"]) is not None:
        say(
            f"A row uses {experts['used']} experts in all layers. These tokens' rows share "
            f"{experts['overlap']:.0%} of them; each different one takes {experts['us']:.0f} µs."
        )
    for context in result["contexts"] if any(result["attention_us"].values()) else ():
        times = ", ".join(f"{rows}: {ms:.1f}" for rows, ms in context["ms"].items())
        say(f"Behind {context['tokens']:,} tokens a pass takes, by rows, {times} ms.")
    if result["role"] == "target":
        say("\nProposals that cost nothing to make (n-grams), by the share of them accepted:\n")
        gains = ({**gain, "paying": as_ranges(gain["lengths_that_pay"])} for gain in result["free_drafts"])
        output().print(_table(_GAINS, gains))


def _bounds(result: Mapping[str, Any]) -> str:
    bound = [row["n"] for row in result["rows"] if row["bound"] == "memory"]
    if not bound:
        return "No pass is bound by memory: computing takes longer than reading at any number of rows."
    return f"Passes over up to {bound[-1]} of these rows are bound by memory, wider ones by arithmetic."


def _table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> "Table":
    table = figure_table(*columns, names=0)
    for row in rows:
        table.add_row(*(figure.format_map(row) for figure in columns.values()))
    return table
