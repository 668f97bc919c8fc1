"""``edgespec verify``: is the output really the same?"""

from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.answers import print_json
from edgespec.cli.console import output, progress_bars
from edgespec.cli.options import (
    Device,
    Drafter,
    DrafterDevice,
    HistoryName,
    JsonFlag,
    MaxNewTokens,
    MinP,
    PromptsFile,
    RepetitionPenalty,
    Target,
    Temperature,
    Threads,
    TopK,
    TopP,
    TrainingShare,
    load_model,
    prompts_to_run,
    sampling_options,
)
from edgespec_models.progress import ProgressCallback

if TYPE_CHECKING:
    from edgespec.engine import Model
    from edgespec.measuring.audit import AnswersAudit, Audit, SamplingAudit
    from edgespec.measuring.prompts import Prompt
    from edgespec.requests.request import RequestOptions

__all__ = ["verify"]

_SHOWN_DIFFERENCES = 10


def verify(
    context: typer.Context,
    target: Target,
    drafter: Drafter = "auto",
    prompts: PromptsFile = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Take at most so many prompts, spread over the categories.")
    ] = 100,
    max_new_tokens: MaxNewTokens = 64,
    samples: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many answers are drawn each way, from each of 3 texts, to test sampling; 0 skips the "
            "test.",
        ),
    ] = 100,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    threads: Threads = 0,
    history: HistoryName = None,
    training_share: TrainingShare = 0.0,
    device: Device = "auto",
    drafter_device: DrafterDevice = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Check that speculation changes neither greedy answers nor the distribution of sampled ones.

    The prompts' answers are greedy, and the distribution is tested at temperature 1, unless you give a
    temperature: then it holds for both, and answers are compared with equal seeds. The exit code is 1 if
    anything differs, or if nothing was drafted and so nothing was tested.

    With --history the answers are learned, as everywhere, so name a history for trials.

    Examples:

        edgespec verify qwen2.5-coder-1.5b-instruct --drafter smollm2-135m-instruct --prompts my.jsonl

        edgespec verify ./target --drafter ngram --limit 12 --samples 0 --json

        edgespec verify ./target --temperature 0.8 --top-p 0.9 --samples 400

        edgespec verify ./target --history trial
    """
    chosen = prompts_to_run(prompts, limit)
    with (
        progress_bars() as progress,
        load_model(
            target,
            drafter,
            threads=threads,
            history=history,
            training_share=training_share,
            progress=progress,
            devices=(device, drafter_device),
        ) as model,
    ):
        audit = _audit(model, chosen, sampling_options(context), (max_new_tokens, samples), progress)
    if as_json:
        print_json(audit.to_json())
    else:
        _show(audit)
    if audit.problems():
        raise typer.Exit(1)


def _audit(
    model: "Model",
    prompts: "tuple[Prompt, ...]",
    sampling: "RequestOptions",
    sizes: tuple[int, int],
    progress: ProgressCallback,
) -> "Audit":
    from edgespec.measuring.audit import Audit, audit_answers, audit_sampling

    tokens, samples = sizes

    return Audit(
        target=model.name,
        drafter=model.drafter_name,
        row_exact=model.row_exact,
        answers=audit_answers(model, prompts, max_new_tokens=tokens, sampling=sampling, progress=progress),
        sampling=audit_sampling(model, samples=samples, sampling=sampling, progress=progress)
        if samples
        else None,
    )


def _show(audit: "Audit") -> None:
    _say(f"{audit.target} with {audit.drafter or 'no drafter'}")
    _show_answers(audit.answers)
    if audit.sampling is None:
        _say("sampling: not tested")
    else:
        _show_sampling(audit.sampling)
    exact = "the same bits" if audit.row_exact else "not always the same bits, so that near-ties can flip;"
    _say(f"passes: {exact} for any number of rows")
    problems = audit.problems()
    for problem in problems:
        output().print(f"failed: {problem}", style="red", markup=False, soft_wrap=True)
    if not problems:
        output().print("passed", style="green")


def _show_answers(answers: "AnswersAudit") -> None:
    drafted = f"{answers.accepted:,} of {answers.drafted:,} drafted tokens accepted"
    identical = f"{answers.identical} of {answers.prompts} identical"
    _say(f"answers: {identical}, flip rate {answers.flip_rate:.2g}; {drafted}")
    for difference in answers.first_differences[:_SHOWN_DIFFERENCES]:
        tokens = f"plain {_token(difference.plain)}, speculative {_token(difference.speculative)}"
        _say(f"  {difference.prompt}, token {difference.position}: {tokens}")
    hidden = len(answers.first_differences) - _SHOWN_DIFFERENCES
    if hidden > 0:
        _say(f"  and {hidden} more; --json lists them all")


def _show_sampling(sampling: "SamplingAudit") -> None:
    test = sampling.chi_square
    p_value = "nothing to compare" if test.p_value is None else f"p = {test.p_value:.3g}"
    drafted = f"{sampling.accepted:,} of {sampling.drafted:,} drafted tokens accepted"
    found = f"chi-square {test.statistic:.1f} with {test.degrees} degrees of freedom, {p_value}"
    _say(f"sampling: {found}; {drafted}")
    _say(f"  equal seeds: {sampling.equal_seeds_identical} of {sampling.equal_seeds} answers identical")


def _token(token: int | None) -> str:
    return "ended" if token is None else str(token)


def _say(line: str) -> None:
    output().print(line, markup=False, soft_wrap=True)
