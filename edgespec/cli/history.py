"""``edgespec history``: shows, moves and deletes what was learned from answers."""

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.console import done, figure_table, json_text, note, output, print_json, say
from edgespec.cli.options import JsonFlag
from edgespec_models.errors import StorageError
from edgespec_models.storage import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgespec.history.manage import History, LearnedText, LearnedTurn


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
    table = figure_table("name", "size", "target", "namespace", "tokens", names=6)
    for entry in described:
        rows = entry["kept"] or [{"target": entry["problem"] or "-", "namespace": "", "tokens": 0}]
        for row in rows:
            names = (escape(str(name)) for name in (row["target"], row["namespace"]))
            table.add_row(escape(entry["name"]), size(entry["size_bytes"]), *names, f"{row['tokens']:,}")
    output().print(table)


@history.command()
def show(
    name: Name,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many passages.")] = 20,
    turns: Annotated[
        bool, typer.Option("--turns", help="Show kept turns instead, the latest first.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print what was learned, most useful first.

    Examples:

        edgespec history show work

        edgespec history show work --limit 1000 --json
    """
    history = _history(name)
    texts: Sequence[LearnedTurn | LearnedText]
    texts = history.turns(namespace) if turns else history.show(namespace)
    shown = texts[:limit]
    if as_json:
        print_json([*map(asdict, shown)])
        return
    for text in shown:
        say(_headline(text), style="dim")
        say(text.text.strip("\n"))
    note(f"{len(shown)} of {len(texts)} {'turns' if turns else 'passages'}")


@history.command()
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="The file to write or replace.")],
    as_json: JsonFlag = False,
) -> None:
    """Write all that was learned to a JSON file, for yourself or for another machine.

    Example: edgespec history export work work.json
    """
    count = _history(name).export(file)
    done({"passages": count, "file": str(file)}, f"{count} passages: {file}", as_json)


@history.command("import")
def import_file(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="The file that 'export' wrote.")],
    as_json: JsonFlag = False,
) -> None:
    """Add what 'export' wrote to a history; it is made if there is none.

    Example: edgespec history import work work.json
    """
    count = _history(name).load(file)
    done({"passages": count}, f"{count} passages added to {name}", as_json)


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
    """Delete every passage and turn in which TEXT occurs, and all that drafters have learned.

    Example: edgespec history forget work "account 4711"
    """
    count = _history(name).forget(text)
    done({"passages": count}, f"{count} passages and turns forgotten", as_json)


def _history(name: str) -> "History":
    from edgespec.history.manage import History

    return History(name)


def _describe(history: "History") -> dict[str, Any]:
    kept: list[dict[str, Any]] = []
    problem = None
    try:
        rows = history.namespaces().items()
        kept = [{"target": target, "namespace": space, "tokens": n} for (target, space), n in rows]
    except StorageError as error:
        problem = str(error)
    return {
        "name": history.name,
        "path": str(history.path),
        "size_bytes": history.size_bytes,
        "kept": kept,
        "problem": problem,
    }


def _headline(text: "LearnedTurn | LearnedText") -> str:
    from edgespec.history.manage import LearnedTurn

    if isinstance(text, LearnedTurn):
        return f"{datetime.fromtimestamp(text.written_on):%Y-%m-%d %H:%M} {json_text(text.prompt)}"
    day = datetime.fromtimestamp(text.learned_on).date().isoformat()
    judged = f"{text.right} of {text.right + text.wrong} proposals right"
    where = f"{text.target}, {text.namespace}" if text.namespace else text.target
    return f"[{where}] learned {day}, worth {text.worth:.1f}, {text.tokens} tokens, {judged}"
