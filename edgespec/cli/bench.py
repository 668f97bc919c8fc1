"""``edgespec bench``: how much faster is it on this machine, with these prompts?"""

from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.console import progress_bars
from edgespec.cli.measuring import exit_if_stopped, measured, show, write_results
from edgespec.cli.options import (
    Device,
    Drafter,
    DrafterDevice,
    HistoryName,
    Limit,
    MaxNewTokens,
    PromptsFile,
    Target,
    Temperature,
    Threads,
    TrainingShare,
    load_model,
    prompts_to_run,
)

__all__ = ["bench"]


def bench(
    target: Target,
    drafter: Drafter = "auto",
    prompts: PromptsFile = None,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="The seed of sampled answers.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Make every answer as long as --max-new-tokens.")
    ] = False,
    threads: Threads = 0,
    device: Device = "auto",
    drafter_device: DrafterDevice = "auto",
    history: HistoryName = None,
    training_share: TrainingShare = 0.0,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="OUT", help="Write all figures as JSON; '-' prints them instead of the table."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write a page with pictures.")
    ] = None,
) -> None:
    """Answer prompts with and without drafts in turn, and compare the times.

    Each prompt's first turn is asked, in the chat template if the model has one. The speedup is the decode
    time per token without drafts over that with drafts, summed over the prompts. Ctrl-C ends the run and
    shows what was measured so far.

    Examples:

        edgespec bench qwen2.5-coder-1.5b-instruct --drafter smollm2-135m-instruct

        edgespec bench ./target --drafter ngram --prompts my.jsonl --limit 20 --report out.html
    """
    from edgespec.measuring.bench import BenchOptions
    from edgespec_models.files.replacing import check_writable

    for file in (json_file, report):
        if file is not None and file != Path("-"):
            check_writable(file)
    chosen = prompts_to_run(prompts, limit)
    options = BenchOptions(
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stop_at_eos=not ignore_eos
    )
    with (
        progress_bars() as progress,
        load_model(
            target,
            drafter,
            threads=threads,
            progress=progress,
            history=history,
            training_share=training_share,
            devices=(device, drafter_device),
        ) as model,
    ):
        result = measured(model, chosen, options, progress)
    if json_file != Path("-"):
        show(result)
    write_results(result, json_file=json_file, report=report)
    exit_if_stopped(result)
