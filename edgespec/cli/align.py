"""``edgespec align``: train a drafter on what its target writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edgespec.cli.console import figure_table, note, output, print_json, progress_bars, say
from edgespec.cli.options import JsonFlag, MaxNewTokens, filled, is_stated, of, shared
from edgespec.decoding.sampling import SamplingParams
from edgespec.loading.options import LoadOptions
from edgespec_export.align.settings import TrainingOptions
from edgespec_models.errors import RequestError, require
from edgespec_models.storage import size

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from edgespec.align.answers import Answer, Answering
    from edgespec.measuring.prompts import Prompt
    from edgespec_models.progress import ProgressCallback


_LONGEST_NAME, _LONGEST_LICENCE = 200, 2000  # characters, in an alignment
_OF_HISTORIES = frozenset({"drafter", "target", "history", "namespace", "device", "threads", "as_json"})


@shared(
    of(SamplingParams, "temperature"),
    of(TrainingOptions, "rank", "rate", "passes", "batch_tokens", "seed"),
    of(LoadOptions, "threads"),
)
def align(
    context: typer.Context,
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            help="The drafter's checkpoint: a GGUF file, a Hugging Face directory or a name.",
        ),
    ],
    target: Annotated[str, typer.Option(metavar="TARGET", help="The model that answers, as for 'chat'.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="The directory for answers and alignment."),
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Train on what this history has kept of the target's answers, instead of prompts; the next "
            "load of the history merges the change if it guesses better.",
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="The namespace of the history.")] = "",
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Prompts that the target answers: id, category and turns on each line. May be repeated. "
            "Default: those of the shipped calibration text, unless --answers-from is given.",
        ),
    ] = None,
    answers_from: Annotated[
        list[Path] | None,
        typer.Option(
            "--answers-from",
            metavar="FILE.jsonl",
            help="Answers from elsewhere, such as a smaller model of the family: prompt and text on "
            "each line. May be repeated.",
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="The file for the target's answers. Default: DIR/answers.jsonl."
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    answers_only: Annotated[
        bool, typer.Option("--answers-only", help="End when the prompts are answered, without training.")
    ] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="Where training runs; auto takes a GPU if there is one."),
    ] = "auto",
    licence: Annotated[
        str, typer.Option(metavar="TEXT", help="The licence of drafter and answers, for the file.")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Train a drafter on its target's answers, so that more of its guesses are right.

    The target answers prompts, many at once; the drafter is trained on the answers in its own tokens, a
    tenth of the prompts held out; and DIR/alignment.safetensors holds the change of its weights: scales and
    minimums of quantized matrices, low-rank changes of float matrices, and gains. An export takes it:
    'edgespec export DRAFTER -o BUNDLE --alignment FILE'. Answering and training may be stopped: run the same
    command again, and it goes on. Needs PyTorch (extra 'align').

    Examples:

        edgespec align smollm2-135m-instruct --target qwen2.5-coder-1.5b-instruct -o aligned

        edgespec align drafter.gguf --target target.gguf --prompts mine.jsonl -o aligned

        edgespec align drafter.gguf --target target.gguf --answers-from written.jsonl -o out

        edgespec align auto --target qwen2.5-coder-1.5b-instruct --history work
    """
    from edgespec.align.answering import answering
    from edgespec.align.answers import read_answers
    from edgespec.align.run import align as run
    from edgespec.align.run import split_texts, torch_device
    from edgespec.asking.request import Request, RequestOptions
    from edgespec.loading.opening import open_model
    from edgespec_models.storage import writing

    if (out is None) is (history is None):
        raise RequestError("give either --out DIR, for an alignment, or --history NAME")
    others = [
        parameter.opts[0]
        for parameter in context.command.params
        if is_stated(context, str(parameter.name)) and str(parameter.name) not in _OF_HISTORIES
    ]
    if history is not None and others:
        raise RequestError(f"--history trains on what it has; leave out {', '.join(others)}")
    if not answers_only:
        require("aligning", "align", "torch")
    if out is None:
        _adapt(drafter, target, str(history), namespace, (device, context.params["threads"]), as_json)
        return
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    # Mistakes are found now, not after the target has answered for hours.
    names, file = (target, drafter), answers or out / "answers.jsonl"
    options, threads = filled(TrainingOptions, context), context.params["threads"]
    facts = _facts(names, licence)
    request = RequestOptions(max_new_tokens=max_new_tokens, temperature=context.params["temperature"])
    Request.of(request)
    recorded = [answer for file in answers_from or () for answer in read_answers(file)]
    with progress_bars() as progress:
        source = None if answers_only else _checkpoint(drafter, progress)
        trained_on = "" if source is None else torch_device(device, threads)
        bundle = None if answers_only else open_model(drafter, "drafter", progress=progress)
        answered = answering(names, request, threads=threads, progress=progress)
        known = _answered(_prompts(prompts, answers_from), file, facts["target"], answered, progress)
        if source is None or bundle is None:
            if as_json:
                print_json({"path": str(file), "answers": len(known)})
            else:
                say(f"{file}: {len(known)} answers")
            return
        texts = split_texts(known + recorded, bundle)
        result = run(source, texts, options, out, device=trained_on, facts=facts, progress=progress)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _adapt(
    drafter: str, target: str, history: str, namespace: str, where: tuple[Any, int], as_json: bool
) -> None:
    """Train on what a history has kept."""
    from dataclasses import asdict

    from edgespec.align.adapting import adapt, prices_of
    from edgespec.align.run import torch_device
    from edgespec.history.changes import learner_of
    from edgespec.history.manage import History
    from edgespec.history.store import Scope
    from edgespec.loading.drafters import choose
    from edgespec.loading.opening import open_model

    named = History(history)
    named.namespaces()  # raises if there is none
    with progress_bars() as progress:
        bundle = open_model(target, "target", progress=progress)
        name = choose(bundle, target) if drafter == "auto" else drafter
        drafting = open_model(name, "drafter", target=target, progress=progress)
        learner = learner_of(named.path, Scope.of(bundle, namespace), drafting, name)
        if learner is None:
            raise RequestError(f"{name} cannot be trained; give a model that drafts, by name or checkpoint")
        device = torch_device(*where)
        result = adapt(learner, prices_of(bundle, drafting), device=device, progress=progress)
    if as_json:
        print_json(asdict(result))
        return
    table = figure_table(f"on {result.held_out} held-out texts", "before", "after")
    table.add_row("right first guesses", f"{result.right_before:.3f}", f"{result.right_after:.3f}")
    table.add_row("replayed speed", f"{result.speed_before:.2f}", f"{result.speed_after:.2f}")
    output().print(table)
    verdict = (
        "kept, and the next load of the history merges it" if result.improved else "no better, and dropped"
    )
    say(f"The change, trained on {result.texts} texts with {result.tokens:,} tokens, is {verdict}.")


def _checkpoint(drafter: str, progress: "ProgressCallback") -> Path:
    """The checkpoint of the drafter to train."""
    from edgespec.loading.first_use import locate
    from edgespec_export.sources.open import open_checkpoint
    from edgespec_models.bundles.foreign import is_model

    source, entry = locate(drafter, progress, note)
    if entry is not None and entry.alignment is not None:
        raise RequestError(f"{drafter} is aligned already; give the drafter without its alignment")
    if is_model(source):
        raise RequestError(f"{drafter} is a bundle; give the checkpoint that it was exported from")
    with open_checkpoint(source):
        return source


def _prompts(files: list[Path] | None, recorded: list[Path] | None) -> "list[Prompt]":
    """The prompts for the target."""
    from edgespec.measuring.prompts import Prompt, load_prompts
    from edgespec_export.graphs.calibration import shipped_prompts

    if files or recorded:
        return [prompt for file in files or () for prompt in load_prompts(file)]
    texts = shipped_prompts()
    return [Prompt(f"shipped-{number}", "shipped", (text,)) for number, text in enumerate(texts)]


def _answered(
    prompts: "list[Prompt]",
    file: Path,
    target: str,
    answering: "AbstractContextManager[Answering]",
    progress: "ProgressCallback",
) -> "list[Answer]":
    """The answers of ``target``, of this run and of earlier ones."""
    from edgespec.align.answers import locked, read_answers, unanswered, write_answers

    with locked(file, f"another run is writing to {file}; wait, or choose another file"):
        if unanswered(prompts, file, target):
            with answering as answers:
                skipped = write_answers(answers, prompts, file, progress, target=target)
            if skipped:
                note(f"{skipped} prompts were left out: longer than the target can hold, or not of its form")
        return read_answers(file) if file.exists() else []


def _facts(names: tuple[str, str], licence: str) -> dict[str, str]:
    """The facts about target and drafter for the file."""
    from edgespec_models.downloads.catalog import entries

    if len(licence) > _LONGEST_LICENCE:
        raise RequestError(f"--licence has {len(licence):,} characters, and may have {_LONGEST_LICENCE:,}")
    target, drafter = (entries().get(name) for name in names)
    if not licence and target is not None and drafter is not None:
        licence = f"drafter: {drafter.licence}; model that wrote the answers: {target.licence}"
    known = (Path(name).resolve().name[:_LONGEST_NAME] or "unnamed" for name in names)
    return {**dict(zip(("target", "model"), known, strict=True)), "licence": licence}


def _show(result: Mapping[str, Any]) -> None:
    from edgespec.align.run import share_right

    guesses = result["before"], result["after"]
    table = figure_table("right first guesses", "of", "before", "after")
    for category in [*guesses[0], None]:
        before, after = (share_right(side, category) for side in guesses)
        of = sum(of for name, (_, of) in guesses[0].items() if category in (name, None))
        table.add_row("all" if category is None else category, f"{of:,}", f"{before:.3f}", f"{after:.3f}")
    output().print(table)
    say(f"{result['path']}: {size(result['size_bytes'])}")
