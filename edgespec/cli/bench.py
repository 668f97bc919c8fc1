"""``edgespec bench`` and ``edgespec demo``: how much faster is it on this machine?"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.console import (
    errors,
    fact_table,
    figure_table,
    note,
    output,
    print_json,
    progress_bars,
    say,
)
from edgespec.loading.options import LoadOptions
from edgespec.measuring.bench import BenchOptions, measure, summarize, typical
from edgespec.measuring.report import number, render_report
from edgespec_models.storage import size

if TYPE_CHECKING:
    from rich.table import Table

    from edgespec.measuring.prompts import Prompt


_DEMO = {"target": "qwen2.5-coder-1.5b-instruct", "drafter": "smollm2-135m-qwen2.5-coder"}
_DEMO_PROMPTS, _DEMO_TOKENS = 6, 64
_DEMO_TURNS = 4  # so that a busy neighbour shows in no category, of which the demo asks a prompt each
_SHOWN_REASONS = 3
_KERNELS = options.of(LoadOptions, "instructions")

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="OUT", help="Write all figures as JSON; '-' prints them instead of the table."
    ),
]


@options.shared(options.loading(), options.of(BenchOptions, "temperature"), _KERNELS)
def bench(
    context: typer.Context,
    target: options.Target,
    prompts: options.PromptsFile = None,
    select: options.Select = None,
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Make every answer as long as --max-new-tokens.")
    ] = False,
    prompt_cache: options.PromptCache = False,
    json_file: JsonFile = None,
    report: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write a page with pictures.")
    ] = None,
) -> None:
    """Answer prompts with and without drafts in turn, and compare the times.

    Each prompt's first turn is asked, in the chat template if the model has one. The speedup is the decode
    time per token without drafts over that with drafts, summed over the prompts. Ctrl-C ends the run and
    shows what was measured so far. With --prompt-cache, run it twice: from the second run on all prompts are
    on disk, for both ways of answering.

    Examples:

        edgespec bench qwen2.5-coder-1.5b-instruct --drafter smollm2-135m-instruct

        edgespec bench ./target --drafter ngram --prompts my.jsonl --limit 20 --report out.html

        edgespec bench ./target --prompts question.jsonl --select ids.txt
    """
    chosen = options.prompts_to_run(prompts, limit, select)
    answers = options.filled(BenchOptions, context, stop_at_eos=not ignore_eos)
    _run(context, chosen, answers, json_file, report)


@options.shared(options.of(LoadOptions, "threads"), _KERNELS)
def demo(
    context: typer.Context,
    report: Annotated[
        Path, typer.Option(metavar="OUT.html", help="The file for the page with pictures.")
    ] = Path("edgespec-report.html"),
    json_file: JsonFile = None,
) -> None:
    """Pull two models, export them, and show what speculative decoding gains on this machine.

    The first run downloads about 1.2 GB into the cache (EDGESPEC_HOME moves it) and takes some minutes;
    later runs start at once. 'edgespec bench' does the same with models and prompts that you name.

    Example: edgespec demo
    """
    prompts = options.prompts_to_run(None, _DEMO_PROMPTS)
    note(f"Loading {_DEMO['target']} with {_DEMO['drafter']}; missing models are pulled and exported.")
    answers = BenchOptions(max_new_tokens=_DEMO_TOKENS)
    _run(context, prompts, answers, json_file, report, _DEMO_TURNS, **_DEMO)
    if json_file != Path("-"):
        _what_next()


def _run(
    context: typer.Context,
    prompts: "Sequence[Prompt]",
    answers: BenchOptions,
    json_file: Path | None,
    report: Path | None,
    turns: int = 1,
    **models: str,
) -> None:
    """Measure until done or stopped, print the table, write the files."""
    from edgespec.measuring.other_programs import OtherPrograms, warning
    from edgespec_models.storage import check_writable

    for file in (json_file, report):
        if file is not None and file != Path("-"):
            check_writable(file)
    pairs, others, complete = [], OtherPrograms(), False
    with progress_bars() as progress, options.load_model(context, progress, **models) as model:
        options.note_duration(model, 2 * turns * len(prompts), answers.max_new_tokens)
        try:
            for pair in measure(model, prompts, answers, turns=turns, progress=progress):
                pairs.append(pair)
            complete = True
        except KeyboardInterrupt:
            if not pairs:
                raise
        result = summarize(model, typical(pairs), answers, complete=complete)
    result["other_programs"] = others.share()
    if json_file != Path("-"):
        _show(result)
    _write(result, json_file, report)
    if words := warning(result["other_programs"]):
        note(words, style="yellow")
    if not result["complete"]:
        errors().print("interrupted")
        raise typer.Exit(130)


def _write(result: Mapping[str, Any], json_file: Path | None, report: Path | None) -> None:
    from edgespec_models.storage import write_text

    if json_file == Path("-"):
        print_json(result)
    elif json_file is not None:
        write_text(json_file, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        note(f"Figures: {json_file}")
    if report is not None:
        write_text(report, render_report(result))
        note(f"Report: {report.absolute()}")


def _what_next() -> None:
    target, drafter = _DEMO["target"], _DEMO["drafter"]
    say("\nNext:")
    for command, purpose in (
        (f"chat {target}", "talk with it"),
        (f"bench {target} --drafter {drafter} --prompts FILE.jsonl", "measure your own prompts"),
        (f"verify {target} --drafter {drafter}", "check that the output is the same"),
    ):
        say(f"  {_program()} {command}\n      {purpose}")


def _program() -> str:
    """This program as a user can type it here."""
    program = Path(sys.argv[0])
    if program.stem != "edgespec":  # as in python -m edgespec
        return f"{sys.executable} -m edgespec"
    on_path = shutil.which("edgespec")
    if on_path is not None and Path(on_path).resolve() == program.resolve():
        return "edgespec"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)


def _show(result: Mapping[str, Any]) -> None:
    """Print the speedup by category, then the figures behind it."""
    models = result["models"]
    say(f"\n{models['name']} with {models['drafter_name'] or 'no drafter'}\n", style="bold")
    output().print(_speed_table(result))
    output().print()
    output().print(_fact_table(result))
    output().print()
    same = f"{result['identical']} of {result['prompts']} answers are the same token by token."
    say(same, style="" if result["identical"] == result["prompts"] else "yellow")
    for title, key in (("Few or no drafts", "speculation_off"), ("Rolled back", "rolled_back")):
        reasons = sorted(result[key].items(), key=lambda item: -item[1])
        for reason, count in reasons[:_SHOWN_REASONS]:
            say(f"{title} in {count} answers: {reason}")


def _speed_table(result: Mapping[str, Any]) -> "Table":
    from rich.markup import escape

    table = figure_table("category", "prompts", "plain, tokens/s", "speculative, tokens/s", "speedup")
    for name, ratio in result["speedup"]["by_category"].items():
        rows = [row for row in result["rows"] if row["category"] == name]
        speeds = _speed(rows, "plain"), _speed(rows, "speculative")
        table.add_row(escape(name), str(len(rows)), *speeds, _times(ratio))
    table.add_section()
    table.add_row(
        "all",
        str(result["prompts"]),
        number(result["plain"]["tokens_per_second"]),
        number(result["speculative"]["tokens_per_second"]),
        _times(result["speedup"]["overall"]),
        style="bold",
    )
    return table


def _fact_table(result: Mapping[str, Any]) -> "Table":
    table = fact_table()
    spread = result["spread"]["speedup"]
    middle = f"{spread['q1']:.2f} to {spread['q3']:.2f}, median {spread['median']:.2f}" if spread else "–"
    table.add_row("speedup of whole requests", _times(result["speedup"]["request"]))
    table.add_row("speedup, middle half of prompts", middle)
    for name, key in (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms")):
        sides = result[key]
        table.add_row(
            name, f"{number(sides['plain'])} ms plain, {number(sides['speculative'])} ms speculative"
        )
    table.add_row("tokens per target pass", number(result["block_efficiency"], 2))
    rate = result["acceptance_rate"]
    table.add_row("drafted tokens accepted", "nothing drafted" if rate is None else f"{rate:.1%}")
    mbsu = result["mbsu"]
    by_bytes, by_parameters = number(mbsu["bytes"], 2), number(mbsu["parameters"], 2)
    table.add_row("memory-bound speedup", f"{by_bytes} by bytes, {by_parameters} by parameters")
    curve = [f"{point['n']}: {point['ms']:.1f}" for point in result["cost_curve"]]
    table.add_row("a pass over n tokens, ms", ", ".join(curve))
    if result["drafter_step_ms"] is not None:
        table.add_row("a drafter step, ms", number(result["drafter_step_ms"]))
    if result["drafter_share"]:
        table.add_row("time of decoding that drafts take", f"{result['drafter_share']:.1%}")
    table.add_row("weights read in plain decoding", f"{number(result['gigabytes_per_second']['plain'])} GB/s")
    table.add_row("prompts", f"{number(result['prompt_tokens_per_second'])} tokens/s")
    table.add_row("peak memory", size(result["peak_memory_bytes"]))
    return table


def _speed(rows: Sequence[Mapping[str, Any]], side: str) -> str:
    """Tokens per second over some rows: every answer's decode tokens, over their times."""
    decoded = [(row[side]["new_tokens"] - 1, row[side]["tpot_ms"] / 1e3) for row in rows]
    seconds = sum(tokens * tpot_s for tokens, tpot_s in decoded)
    return number(sum(tokens for tokens, _ in decoded) / seconds if seconds > 0 else None)


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}x"
