"""``edgespec chat``: a conversation on the terminal, or line by line for programs."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.answers import (
    allow_any_text,
    answer_json,
    json_text,
    print_json,
    stats_line,
    stream_to_terminal,
)
from edgespec.cli.console import errors, note, progress_bars
from edgespec.cli.options import (
    Device,
    Drafter,
    DrafterDevice,
    HistoryName,
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
from edgespec_models.errors import RequestError

if TYPE_CHECKING:
    from edgespec.engine import Model
    from edgespec.generation import TextStreamer
    from edgespec.request import RequestOptions
    from edgespec.results import Generation

__all__ = ["chat"]

_HELP = """/help   this list
/clear  forget the conversation
/stats  what the last answer cost, in full
/quit   leave (also Ctrl-D)
Ctrl-C  stop the answer"""


def chat(
    context: typer.Context,
    target: Target,
    drafter: Drafter = "auto",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_new_tokens: MaxNewTokens = 1024,
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
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Each line of standard input is a message, each line of output an answer."
        ),
    ] = False,
) -> None:
    """Talk with a model; /help lists what can be typed. Ctrl-C stops an answer, not the program.

    Examples:

        edgespec chat qwen2.5-coder-1.5b-instruct

        edgespec chat ./my-bundle --drafter ngram --temperature 0.7 --system "Answer in one sentence."
    """
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
        if model.target.chat_template is None:
            raise RequestError(
                f"{model.name} has no chat template; use 'edgespec generate', or another model"
            )
        conversation = _Conversation(model, request_options(context), system)
        if as_json:
            _answer_lines(conversation)
        else:
            note(f"{model.name} with {model.drafter_name or 'no drafter'}. /help lists what can be typed.")
            _talk(conversation, _read_line)


class _Conversation:
    """The messages so far; an answer adds two."""

    def __init__(self, model: "Model", options: "RequestOptions", system: str | None) -> None:
        self._model, self._options = model, options
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = [*self._system]
        self.last: Generation | None = None

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages, self.last = [*self._system], None

    def answer(
        self, text: str, run: "Callable[[TextStreamer], Generation]", cancelled: Event
    ) -> "Generation":
        """Answer ``text``. What was said before a cancellation stays part of the conversation."""
        asked = [*self.messages, {"role": "user", "content": text}]
        options: RequestOptions = {**self._options, "cancelled": cancelled.is_set}
        answer = run(self._model.stream_chat(asked, **options))
        if answer.text:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        self.last = answer
        return answer


def _talk(conversation: _Conversation, read_line: Callable[[], str | None]) -> None:
    while (line := read_line()) is not None:
        text = line.strip()
        if text.startswith("/"):
            if text == "/quit":
                return
            _command(text, conversation)
        elif text:
            _show_answer(conversation, text)


def _show_answer(conversation: _Conversation, text: str) -> None:
    try:
        with _interrupt_sets() as cancelled:
            answer = conversation.answer(text, stream_to_terminal, cancelled)
    except RequestError as error:  # such as a conversation that outgrew the context
        errors().print(f"error: {error} (/clear starts anew)", style="red", markup=False, soft_wrap=True)
        return
    stopped = "stopped; " if answer.finish_reason == "cancelled" else ""
    note(stopped + stats_line(answer.stats))


def _command(text: str, conversation: _Conversation) -> None:
    if text == "/help":
        note(_HELP)
    elif text == "/clear":
        conversation.clear()
        note("The conversation is forgotten.")
    elif text == "/stats":
        if conversation.last is None:
            note("There is no answer yet.")
        else:
            print_json(conversation.last.stats.to_json())
    else:
        note(f"{text} is unknown; /help lists what can be typed.")


def _answer_lines(conversation: _Conversation) -> None:
    for line in typer.get_text_stream("stdin", encoding="utf-8-sig"):
        if line.strip():
            answer = conversation.answer(line.strip(), lambda stream: stream.run(), Event())
            typer.echo(json_text(answer_json(answer)))


def _read_line() -> str | None:
    """A line from the user; None at the end of input. Ctrl-C gives an empty line."""
    with contextlib.suppress(ImportError):  # not on Windows, whose console edits lines itself
        import readline  # noqa: F401
    try:
        return input("> ")
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        typer.echo()
        note("/quit or Ctrl-D leaves.")
        return ""


@contextmanager
def _interrupt_sets() -> Iterator[Event]:
    """Inside, Ctrl-C sets the event instead of raising KeyboardInterrupt."""
    event = Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        event.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
