"""``edgespec demo``: from nothing to a speedup, with one command."""

from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.console import note, output, progress_bars
from edgespec.cli.measuring import exit_if_stopped, measured, show, write_results
from edgespec.cli.options import MaxNewTokens, Threads, load_model, prompts_to_run

__all__ = ["demo"]

_TARGET = "qwen2.5-coder-1.5b-instruct"
_DRAFTER = "smollm2-135m-qwen2.5-coder"


def demo(
    report: Annotated[
        Path, typer.Option(metavar="OUT.html", help="Where the page with pictures goes.")
    ] = Path("edgespec-report.html"),
    target: Annotated[str, typer.Option(help="The target.")] = _TARGET,
    drafter: Annotated[str, typer.Option(help="The drafter, or 'ngram'.")] = _DRAFTER,
    limit: Annotated[int, typer.Option(min=1, help="How many of the built-in prompts are asked.")] = 6,
    max_new_tokens: MaxNewTokens = 96,
    threads: Threads = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write all figures as JSON; '-' prints them.")
    ] = None,
) -> None:
    """Pull two models, export them, and show what speculative decoding gains on this machine.

    The first run downloads about 1.2 GB into the cache (EDGESPEC_HOME moves it) and takes some minutes;
    later runs start at once.

    Examples:

        edgespec demo

        edgespec demo --target qwen2.5-coder-0.5b-instruct --drafter ngram --limit 3
    """
    from edgespec.measuring.bench import BenchOptions
    from edgespec_models.files.replacing import check_writable

    check_writable(report)
    chosen = prompts_to_run(None, limit)
    options = BenchOptions(max_new_tokens=max_new_tokens)
    with progress_bars() as progress:
        note(f"Loading {target} with {drafter}; what is not on this machine yet is pulled and exported.")
        with load_model(target, drafter, threads=threads, progress=progress) as model:
            result = measured(model, chosen, options, progress)
    if json_file != Path("-"):
        show(result)
    write_results(result, json_file=json_file, report=report)
    exit_if_stopped(result)
    if json_file != Path("-"):
        _what_next(target, drafter)


def _what_next(target: str, drafter: str) -> None:
    output().print("\nNext:")
    for command, purpose in (
        (f"edgespec chat {target}", "talk with it"),
        (f"edgespec bench {target} --drafter {drafter} --prompts FILE.jsonl", "measure your own prompts"),
        (f"edgespec verify {target} --drafter {drafter}", "check that the output is the same"),
    ):
        output().print(f"  {command}\n      {purpose}", markup=False, soft_wrap=True)
