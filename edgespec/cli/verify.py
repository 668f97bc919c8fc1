"""``edgespec verify``: is the output really the same?"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.console import print_json, progress_bars, say

if TYPE_CHECKING:
    from edgespec.measuring.audit import AnswersAudit, Audit, SamplingAudit


_SHOWN_DIFFERENCES = 10


def verify(
    context: typer.Context,
    target: options.Target,
    drafter: options.Drafter = "auto",
    prompts: options.PromptsFile = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Take at most so many prompts, spread over the categories.")
    ] = 100,
    max_new_tokens: options.MaxNewTokens = 64,
    samples: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many answers are drawn each way, from each of 3 texts, to test sampling; 0 skips the "
            "test.",
        ),
    ] = 100,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    threads: options.Threads = 0,
    history: options.HistoryName = None,
    training_share: options.TrainingShare = 0.0,
    device: options.Device = "auto",
    drafter_device: options.DrafterDevice = "auto",
    as_json: options.JsonFlag = False,
) -> None:
    """Check that speculation changes neither greedy answers nor the distribution of sampled ones.

    Without --temperature answers are greedy and the distribution is tested at temperature 1. With it, both
    use that temperature, and answers are compared with equal seeds. The exit code is 1 if
    anything differs, or if nothing was drafted and so nothing was tested.

    With --history the answers are learned too, so name a history of its own.

    Examples:

        edgespec verify qwen2.5-coder-1.5b-instruct --drafter smollm2-135m-instruct --prompts my.jsonl

        edgespec verify ./target --drafter ngram --limit 12 --samples 0 --json

        edgespec verify ./target --temperature 0.8 --top-p 0.9 --samples 400

        edgespec verify ./target --history trial
    """
    from edgespec.measuring.audit import Audit, audit_answers, audit_sampling

    chosen, sampling = options.prompts_to_run(prompts, limit), options.sampling_options(context)
    with progress_bars() as progress, options.load_model(context, progress) as model:
        how: Any = {"sampling": sampling, "progress": progress}
        audit = Audit(
            target=model.name,
            drafter=model.drafter_name,
            row_exact=model.row_exact,
            answers=audit_answers(model, chosen, max_new_tokens=max_new_tokens, **how),
            sampling=audit_sampling(model, samples=samples, **how) if samples else None,
        )
    if as_json:
        print_json(audit.to_json())
    else:
        _show(audit)
    if audit.problems():
        raise typer.Exit(1)


def _show(audit: "Audit") -> None:
    say(f"{audit.target} with {audit.drafter or 'no drafter'}")
    _show_answers(audit.answers)
    if audit.sampling is None:
        say("sampling: not tested")
    else:
        _show_sampling(audit.sampling)
    exact = "the same bits" if audit.row_exact else "not always the same bits, so that near-ties can flip;"
    say(f"passes: {exact} for any number of rows")
    problems = audit.problems()
    for problem in problems:
        say(f"failed: {problem}", style="red")
    if not problems:
        say("passed", style="green")


def _show_answers(answers: "AnswersAudit") -> None:
    drafted = f"{answers.accepted:,} of {answers.drafted:,} drafted tokens accepted"
    identical = f"{answers.identical} of {answers.prompts} identical"
    say(f"answers: {identical}, flip rate {answers.flip_rate:.2g}; {drafted}")
    for difference in answers.first_differences[:_SHOWN_DIFFERENCES]:
        tokens = f"plain {_token(difference.plain)}, speculative {_token(difference.speculative)}"
        say(f"  {difference.prompt}, token {difference.position}: {tokens}")
    hidden = len(answers.first_differences) - _SHOWN_DIFFERENCES
    if hidden > 0:
        say(f"  and {hidden} more; --json lists them all")


def _show_sampling(sampling: "SamplingAudit") -> None:
    test = sampling.chi_square
    p_value = "nothing to compare" if test.p_value is None else f"p = {test.p_value:.3g}"
    drafted = f"{sampling.accepted:,} of {sampling.drafted:,} drafted tokens accepted"
    found = f"chi-square {test.statistic:.1f} with {test.degrees} degrees of freedom, {p_value}"
    say(f"sampling: {found}; {drafted}")
    say(f"  equal seeds: {sampling.equal_seeds_identical} of {sampling.equal_seeds} answers identical")


def _token(token: int | None) -> str:
    return "ended" if token is None else str(token)
