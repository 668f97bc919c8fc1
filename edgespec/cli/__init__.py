"""The command line: ``edgespec COMMAND``.

A command is a function ``<name>`` whose parameters typer understands, or a typer application with commands of
its own. It stands in the module ``<name>``, or in the module that :data:`_ELSEWHERE` names, and has one line
in :data:`COMMANDS`. Modules are imported when their command runs, so that ``edgespec --help`` needs none of
them. A command raises :class:`~edgespec_models.errors.EdgespecError` to fail: one line on standard error,
exit code 1. Ctrl-C ends with exit code 130, another signal with 128 and its number.
"""

import errno
import importlib
import signal
import sys
from collections.abc import Mapping
from types import FrameType, MappingProxyType
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from edgespec_models.errors import EdgespecError

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "demo": "Pull two models and show how much faster they are.",
        "chat": "Talk with a model.",
        "generate": "Answer one prompt.",
        "serve": "Serve a model to clients of OpenAI, Anthropic and Ollama, with a page to chat.",
        "cost": "Measure the costs of a model's passes on this machine.",
        "bench": "Measure plain against speculative decoding.",
        "verify": "Check that speculation does not change the output.",
        "plan": "Show the memory and disk that models would take.",
        "devices": "List the devices for models here, and missing ones.",
        "models": "List the models of the catalogue, and what they take on the disk.",
        "pull": "Download models of the catalogue.",
        "rm": "Delete models from this machine.",
        "export": "Make a bundle from a checkpoint.",
        "align": "Train a drafter on its target's answers.",
        "history": "Show, export and delete what was learned.",
        "cache": "Show and clear prompts that are kept on disk.",
        "inspect": "Show the facts of a bundle.",
    }
)
"""Name of each command -> its line in ``edgespec --help``, in the order shown."""
_ELSEWHERE: Final = MappingProxyType({"demo": "bench", "pull": "models", "rm": "models"})


class _LazyGroup(TyperGroup):
    """A group that knows its commands by name and line, and imports one when it is run."""

    def __init__(self, **settings: Any) -> None:
        commands = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}
        super().__init__(**settings | {"commands": commands})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and self._load(str(known.name)), rest

    def _load(self, name: str) -> Any:
        function = getattr(importlib.import_module(f"edgespec.cli.{_ELSEWHERE.get(name, name)}"), name)
        if isinstance(function, typer.Typer):
            return typer.main.get_command(function)
        single = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
        single.command(name=name)(function)
        return typer.main.get_command(single)

    def invoke(self, ctx: Any) -> Any:
        from edgespec.cli.console import errors, fail

        try:
            return super().invoke(ctx)
        except EdgespecError as error:
            fail(error)
        except OSError as error:
            # Windows reports a pipe without a reader so. An error about a bad name carries that name.
            if sys.platform == "win32" and error.errno == errno.EINVAL and error.filename is None:
                raise BrokenPipeError(errno.EPIPE, error.strerror) from error
            raise
        except KeyboardInterrupt:
            errors().print("interrupted")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_LazyGroup,
    name="edgespec",
    help="Speculative decoding on this machine: the same output from a model, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"edgespec {version('edgespec')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Speculative decoding on this machine: the same output from a model, faster."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 misused, 130 interrupted, 143 ended by a signal."""
    from edgespec.cli.console import allow_any_text

    allow_any_text()
    _clean_up_when_ended()
    app()


def _clean_up_when_ended() -> None:
    """Turn signals that end a process into an exception, so that unfinished work is tidied up.

    Signals that are ignored already, as nohup does, stay ignored.
    """
    for name in ("SIGTERM", "SIGHUP", "SIGBREAK"):  # no system has all of them
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
