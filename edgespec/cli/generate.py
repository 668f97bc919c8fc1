"""``edgespec generate``: one prompt, one answer."""

from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.cli.answers import answer_json, content_of, stats_line, stream_to_terminal
from edgespec.cli.console import note, print_json, progress_bars


@options.shared(options.loading(), options.prompts(), options.request())
def generate(
    context: typer.Context,
    target: options.Target,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt; '-' reads it from standard input.")
    ] = "-",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    special: Annotated[
        bool, typer.Option("--special", help="The same, and read the control tokens that it spells.")
    ] = False,
    image: options.Images = None,
    max_new_tokens: options.MaxNewTokens = 256,
    as_json: options.JsonFlag = False,
) -> None:
    """Answer a prompt. The text goes to standard output, what it cost goes to standard error.

    Examples:

        edgespec generate qwen2.5-coder-1.5b-instruct "Reverse a string in Python."

        edgespec generate ./my-bundle - --drafter ngram --max-new-tokens 400 < question.txt

        edgespec generate qwen2.5-coder-0.5b-instruct "def fib(n):" --raw --json
    """
    text, request = _read(prompt), options.request_options(context)
    with progress_bars() as progress:
        model = options.load_model(context, progress)
    with model:
        if raw or special or model.target.chat_template is None:
            if image:
                raise typer.BadParameter("only the chat template shows pictures", param_hint="--image")
            stream = model.stream(text, **request | {"special": special})
        else:
            stream = model.stream_chat(
                [{"role": "user", "content": content_of(text, image or ())}], **request
            )
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
