"""``edgespec history``: shows, moves and deletes what was learned from answers."""

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.console import done, figure_table, note, output, print_json, say
from edgespec.cli.options import JsonFlag
from edgespec_models.errors import StorageError
from edgespec_models.storage import size

if TYPE_CHECKING:
    from edgespec.history.manage import Amount, History, LearnedCorrection, LearnedText


history = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Show, export and delete what was learned from answers.

    A history is learned where 'generate', 'chat', 'serve', 'bench' or 'verify' are given --history NAME, or
    a program's load() is, and nowhere else. docs/history.md says what it holds.
    """,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A history that 'list' shows, or a file.")]
Namespace = Annotated[
    str | None,
    typer.Option(metavar="NAMESPACE", help="Only this namespace; '' is the default one."),
]


@history.command("list")
def list_histories(as_json: JsonFlag = False) -> None:
    """List histories, their size, and whose answers they hold.

    Example: edgespec history list
    """
    from rich.markup import escape

    from edgespec.history.manage import histories

    described = [_describe(history) for history in histories()]
    if as_json:
        print_json(described)
        return
    table = figure_table("name", "size", "target", "namespace", "tokens", "taught drafters", names=6)
    for entry in described:
        rows = entry["kept"] or [{"target": entry["problem"] or "-", "namespace": "", "tokens": 0}]
        for row in rows:
            place = row["target"], row["namespace"]
            taught = [c["drafter"] for c in entry["corrections"] if (c["target"], c["namespace"]) == place]
            names, drafters = (escape(str(name)) for name in place), escape(", ".join(taught))
            filled = size(entry["size_bytes"]), *names, f"{row['tokens']:,}", drafters
            table.add_row(escape(entry["name"]), *filled)
    output().print(table)


@history.command()
def show(
    name: Name,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many passages.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Print what was learned, most useful first; before it, which drafters learned from it.

    Examples:

        edgespec history show work

        edgespec history show work --limit 1000 --json
    """
    history = _history(name)
    texts = history.show(namespace)
    shown = texts[:limit]
    if as_json:
        print_json([*map(asdict, shown)])
        return
    for correction in history.corrections(namespace):
        say(_summary(correction), style="dim")
    for text in shown:
        say(_headline(text), style="dim")
        say(text.text.strip("\n"))
    note(f"{len(shown)} of {len(texts)} passages")


@history.command()
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="The file to write or replace.")],
    as_json: JsonFlag = False,
) -> None:
    """Write all that was learned to a JSON file, for yourself or for another machine.

    Example: edgespec history export work work.json
    """
    amount = _history(name).export(file)
    done({**amount._asdict(), "file": str(file)}, f"{_counted(amount)}: {file}", as_json)


@history.command("import")
def import_file(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="The file that 'export' wrote.")],
    as_json: JsonFlag = False,
) -> None:
    """Add what 'export' wrote to a history; it is made if there is none.

    Example: edgespec history import work work.json
    """
    amount = _history(name).load(file)
    done(amount._asdict(), f"{_counted(amount)} added to {name}", as_json)


@history.command()
def delete(
    name: Name,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete a history, or one namespace of it.

    Examples:

        edgespec history delete work

        edgespec history delete work --namespace mail --yes
    """
    what = name if namespace is None else f"namespace {namespace!r} of {name}"
    if not yes:
        typer.confirm(f"Delete {what}?", abort=True, err=True)
    _history(name).delete(namespace)
    done({"deleted": name, "namespace": namespace}, f"deleted {what}", as_json)


@history.command()
def forget(
    name: Name,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Upper and lower case count as the same.")],
    as_json: JsonFlag = False,
) -> None:
    """Delete every passage in which TEXT occurs, and all that drafters learned, since weights cannot be
    searched.

    Example: edgespec history forget work "account 4711"
    """
    amount = _history(name).forget(text)
    line = f"{_counted(amount)} forgotten"
    if amount.corrections:
        line += "; nobody can tell what drafters learned from this text, so they forget all they learned"
    done(amount._asdict(), line, as_json)


def _history(name: str) -> "History":
    from edgespec.history.manage import History

    return History(name)


def _describe(history: "History") -> dict[str, Any]:
    kept: list[dict[str, Any]] = []
    corrections: list[dict[str, Any]] = []
    problem = None
    try:
        rows = history.namespaces().items()
        kept = [{"target": target, "namespace": space, "tokens": n} for (target, space), n in rows]
        corrections = [*map(asdict, history.corrections())]
    except StorageError as error:
        problem = str(error)
    return {
        "name": history.name,
        "path": str(history.path),
        "size_bytes": history.size_bytes,
        "kept": kept,
        "corrections": corrections,
        "problem": problem,
    }


def _counted(amount: "Amount") -> str:
    return f"{amount.passages} passages, {amount.corrections} corrections"


def _where(learned: "LearnedText | LearnedCorrection") -> str:
    return f"{learned.target}, {learned.namespace}" if learned.namespace else learned.target


def _summary(correction: "LearnedCorrection") -> str:
    day = datetime.fromtimestamp(correction.used_on).date().isoformat()
    taught = f"learned from {correction.tokens:,} tokens, last on {day}, {size(correction.size_bytes)}"
    return f"[{_where(correction)}] a correction of the guesses of {correction.drafter}: {taught}"


def _headline(text: "LearnedText") -> str:
    day = datetime.fromtimestamp(text.learned_on).date().isoformat()
    judged = f"{text.right} of {text.right + text.wrong} proposals right"
    return f"[{_where(text)}] learned {day}, worth {text.worth:.1f}, {text.tokens} tokens, {judged}"
