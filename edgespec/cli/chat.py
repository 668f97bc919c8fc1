"""``edgespec chat``: a conversation on the terminal, or line by line for programs."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli import options
from edgespec.cli.answers import answer_json, content_of, sources_line, stats_line, stream_to_terminal
from edgespec.cli.console import errors, json_text, note, print_json, progress_bars
from edgespec_models.errors import EdgespecError, RequestError

if TYPE_CHECKING:
    from edgespec.answering.results import Generation
    from edgespec.asking.request import RequestOptions
    from edgespec.running.conversation import Conversation
    from edgespec_models.text.tokenizer import Tokenizer


_HELP = """/help     show this list
/clear    forget the conversation
/stats    show all statistics of the last answer
/image FILE   show a picture with the next question
/sources on   mark drafted tokens, by source (off: do not)
/quit     leave (also Ctrl-D)
Ctrl-C    stop the answer"""


@options.shared(options.loading(), options.prompts(), options.request())
def chat(
    context: typer.Context,
    target: options.Target,
    system: Annotated[str | None, typer.Option(help="The system message, which comes first.")] = None,
    image: options.Images = None,
    max_new_tokens: options.MaxNewTokens = 1024,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Each line of standard input is a message, each line of output is an answer."
        ),
    ] = False,
) -> None:
    """Talk with a model; /help lists the commands. Ctrl-C stops an answer, not the program.

    Examples:

        edgespec chat qwen2.5-coder-1.5b-instruct

        edgespec chat ./my-bundle --drafter ngram --temperature 0.7 --system "Answer in one sentence."
    """
    request: RequestOptions = {"sampling": "recommended", **options.request_options(context)}
    with progress_bars() as progress:
        model = options.load_model(context, progress)
    with model:
        if model.target.chat_template is None:
            raise RequestError(
                f"{model.name} has no chat template; give one (--chat-template), use 'edgespec generate', or "
                "another model"
            )
        if (advice := model.target.manifest.sampling) is not None:
            note(f"The model's makers advise {advice}. With --temperature 0 answers are greedy.")

        def begin() -> "Conversation":
            return model.conversation(system or None, **request)

        if as_json:
            _answer_lines(begin(), image or [])
        else:
            note(f"{model.name} with {model.drafter_name or 'no drafter'}. /help lists the commands.")
            _talk(_Chat(begin, model.target.tokenizer, image or []), _read_line)


class _Chat:
    """A conversation that can begin anew, its last answer, and the way that answers are shown.

    ``images`` go with the next question.
    """

    def __init__(
        self, begin: "Callable[[], Conversation]", tokenizer: "Tokenizer", images: Sequence[Path] = ()
    ) -> None:
        self.begin, self.tokenizer, self.conversation = begin, tokenizer, begin()
        self.last: Generation | None = None
        self.sources, self.images = False, [*images]


def _talk(talk: _Chat, read_line: Callable[[], str | None]) -> None:
    while (line := read_line()) is not None:
        text = line.strip()
        if text.startswith("/"):
            if text == "/quit":
                return
            _command(text, talk)
        elif text:
            with contextlib.suppress(KeyboardInterrupt):  # again, while the answer was ending
                _show_answer(talk, text)


def _show_answer(talk: _Chat, text: str) -> None:
    try:
        images, talk.images = talk.images, []
        stream = talk.conversation.stream(content_of(text, images))
        try:
            answer = stream_to_terminal(stream, talk.tokenizer if talk.sources else None)
        except KeyboardInterrupt:
            stream.cancel()
            answer = stream.result
    except EdgespecError as error:  # such as a conversation that outgrew the context
        note(f"error: {error} (/clear starts anew)", style="red")
        return
    talk.last = answer
    stopped = "stopped; " if answer.finish_reason == "cancelled" else ""
    note(stopped + stats_line(answer.stats))
    if talk.sources:
        errors().print(sources_line(answer), soft_wrap=True)


def _command(text: str, talk: _Chat) -> None:
    if text == "/help":
        note(_HELP)
    elif text == "/clear":
        talk.conversation, talk.last = talk.begin(), None
        note("The conversation is forgotten.")
    elif text == "/stats":
        if talk.last is None:
            note("There is no answer yet.")
        else:
            print_json(talk.last.stats.to_json())
    elif text in ("/sources on", "/sources off"):
        talk.sources = text.endswith("on")
        note("Drafted tokens are marked." if talk.sources else "Tokens are not marked.")
    elif text.startswith("/image "):
        talk.images.append(Path(text.removeprefix("/image ").strip()))
        note(f"Pictures that go with the next question: {len(talk.images)}.")
    else:
        note(f"{text} is unknown; /help lists the commands.")


def _answer_lines(conversation: "Conversation", images: Sequence[Path]) -> None:
    for line in typer.get_text_stream("stdin", encoding="utf-8-sig"):
        if line.strip():
            answer = conversation.ask(content_of(line.strip(), images))
            images = ()
            typer.echo(json_text(answer_json(answer)))


def _read_line() -> str | None:
    """A line from the user; None at the end of input. Ctrl-C gives an empty line."""
    with contextlib.suppress(ImportError):  # not on Windows, whose console edits lines itself
        import readline  # noqa: F401 - its import alone gives input() lines to edit
    try:
        return input("> ")
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        typer.echo()
        note("/quit or Ctrl-D leaves.")
        return ""
