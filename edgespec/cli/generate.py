"""``edgespec generate``: one prompt, one answer."""

from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.answers import allow_any_text, answer_json, print_json, stats_line, stream_to_terminal
from edgespec.cli.console import note, progress_bars
from edgespec.cli.options import (
    Device,
    Drafter,
    DrafterDevice,
    HistoryName,
    JsonFlag,
    MaxNewTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Stop,
    Target,
    Temperature,
    Threads,
    TopK,
    TopP,
    TrainingShare,
    WithoutSpeculation,
    load_model,
    request_options,
)

if TYPE_CHECKING:
    from edgespec.engine import Model
    from edgespec.requests.request import RequestOptions
    from edgespec.requests.stream import Stream

__all__ = ["generate"]


def generate(
    context: typer.Context,
    target: Target,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt; '-' reads it from standard input.")
    ] = "-",
    drafter: Drafter = "auto",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    no_speculation: WithoutSpeculation = False,
    threads: Threads = 0,
    device: Device = "auto",
    drafter_device: DrafterDevice = "auto",
    history: HistoryName = None,
    training_share: TrainingShare = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Answer a prompt. The text goes to standard output, what it cost goes to standard error.

    Examples:

        edgespec generate qwen2.5-coder-1.5b-instruct "Reverse a string in Python."

        edgespec generate ./my-bundle - --drafter ngram --max-new-tokens 400 < question.txt

        edgespec generate qwen2.5-coder-0.5b-instruct "def fib(n):" --raw --json
    """
    text = _read(prompt)
    allow_any_text()
    with progress_bars() as progress:
        model = load_model(
            target,
            drafter,
            threads=threads,
            progress=progress,
            history=history,
            training_share=training_share,
            devices=(device, drafter_device),
        )
    with model:
        stream = _start(model, text, raw, request_options(context))
        if as_json:
            print_json(answer_json(stream.run()))
            return
        answer = stream_to_terminal(stream)
        note(stats_line(answer.stats))


def _read(prompt: str) -> str:
    if prompt != "-":
        return prompt
    stdin = typer.get_text_stream("stdin", encoding="utf-8-sig", errors="strict")
    if stdin.isatty():
        note("Reading the prompt from standard input; end it with Ctrl-D (Windows: Ctrl-Z, Enter).")
    try:
        text = stdin.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8 text: {error}", param_hint="PROMPT") from error
    if not text.strip():
        raise typer.BadParameter("standard input held no prompt", param_hint="PROMPT")
    return text


def _start(model: "Model", text: str, raw: bool, options: "RequestOptions") -> "Stream":
    if raw or model.target.chat_template is None:
        return model.stream(text, **options)
    return model.stream_chat([{"role": "user", "content": text}], **options)
