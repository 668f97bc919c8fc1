"""``edgespec verify``: tests that the output is really the same."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.console import print_json, progress_bars, say

_SHOWN_DIFFERENCES = 10


@options.shared(options.loading(), options.sampling())
def verify(
    context: typer.Context,
    target: options.Target,
    prompts: options.PromptsFile = None,
    limit: options.Limit = 100,
    max_new_tokens: options.MaxNewTokens = 64,
    samples: Annotated[
        int,
        typer.Option(
            min=0,
            help="Answers to draw with drafts and without, from each of 3 texts, to test sampling; 0 skips "
            "the test.",
        ),
    ] = 100,
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
    from edgespec.measuring.audit import audit_answers, audit_sampling, verdict

    chosen, sampling = options.prompts_to_run(prompts, limit), options.sampling_options(context)
    with progress_bars() as progress, options.load_model(context, progress) as model:
        options.note_duration(model, 2 * len(chosen), max_new_tokens)
        how: Any = {"sampling": sampling, "progress": progress}
        answers = audit_answers(model, chosen, max_new_tokens=max_new_tokens, **how)
        sampled = audit_sampling(model, samples=samples, **how) if samples else None
        audit = verdict(model, answers, sampled)
    if as_json:
        print_json(audit)
    else:
        _show(audit)
    if not audit["passed"]:
        raise typer.Exit(1)


def _show(audit: Mapping[str, Any]) -> None:
    say(f"{audit['target']} with {audit['drafter'] or 'no drafter'}")
    _show_answers(audit["answers"])
    if audit["sampling"] is None:
        say("sampling: not tested")
    else:
        _show_sampling(audit["sampling"])
    exact = "the same bits" if audit["row_exact"] else "not always the same bits, so that near-ties can flip;"
    say(f"passes: {exact} for any number of rows")
    for problem in audit["problems"]:
        say(f"failed: {problem}", style="red")
    if audit["passed"]:
        say("passed", style="green")


def _show_answers(answers: Mapping[str, Any]) -> None:
    identical = f"{answers['identical']} of {answers['prompts']} identical"
    say(f"answers: {identical}, flip rate {answers['flip_rate']:.2g}; {_drafted(answers)}")
    differences = answers["first_differences"]
    for difference in differences[:_SHOWN_DIFFERENCES]:
        tokens = f"plain {_token(difference['plain'])}, speculative {_token(difference['speculative'])}"
        say(f"  {difference['prompt']}, token {difference['position']}: {tokens}")
    hidden = len(differences) - _SHOWN_DIFFERENCES
    if hidden > 0:
        say(f"  and {hidden} more; --json lists them all")


def _show_sampling(sampling: Mapping[str, Any]) -> None:
    p_value, degrees = sampling["p_value"], sampling["degrees_of_freedom"]
    likely = "nothing to compare" if p_value is None else f"p = {p_value:.3g}"
    result = f"chi-square {sampling['chi_square']:.1f} with {degrees} degrees of freedom, {likely}"
    say(f"sampling: {result}; {_drafted(sampling)}")
    seeds = sampling["equal_seeds"]
    say(f"  equal seeds: {seeds['identical']} of {seeds['pairs']} answers identical")


def _drafted(compared: Mapping[str, Any]) -> str:
    return f"{compared['accepted']:,} of {compared['drafted']:,} drafted tokens accepted"


def _token(token: int | None) -> str:
    return "ended" if token is None else str(token)
