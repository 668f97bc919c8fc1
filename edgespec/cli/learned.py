"""``edgespec learned``: what was learned from answers, and the ways to take it along or get rid of it."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.answers import allow_any_text, print_json
from edgespec.cli.console import note, output, size
from edgespec.cli.options import JsonFlag

if TYPE_CHECKING:
    from edgespec.profile.manage import Amount, LearnedCorrection, LearnedText, Profile

__all__ = ["learned"]

learned = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Show, export and delete what was learned from answers.

    A profile is learned where 'generate', 'chat', 'bench' or 'verify' are given --profile NAME, and nowhere
    else.
    docs/profile.md says what it holds.
    """,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A profile that 'list' shows, or a file.")]
Namespace = Annotated[
    str | None,
    typer.Option(metavar="NAMESPACE", help="Of this namespace only; '' is the one without a name."),
]


@learned.command("list")
def list_profiles(as_json: JsonFlag = False) -> None:
    """List profiles, their size, and whose answers they hold.

    Example: edgespec learned list
    """
    from rich.markup import escape
    from rich.table import Table

    from edgespec.profile.manage import profiles

    described = [_describe(each) for each in profiles()]
    if as_json:
        print_json(described)
        return
    columns = ("name", "size", "target", "namespace", "tokens", "taught drafters")
    table = Table(*columns, box=None, pad_edge=False)
    for each in described:
        rows = each["kept"] or [{"target": each["problem"] or "-", "namespace": "", "tokens": 0}]
        for row in rows:
            place = row["target"], row["namespace"]
            taught = [c["drafter"] for c in each["corrections"] if (c["target"], c["namespace"]) == place]
            names, drafters = (escape(str(name)) for name in place), escape(", ".join(taught))
            filled = size(each["size_bytes"]), *names, f"{row['tokens']:,}", drafters
            table.add_row(escape(each["name"]), *filled)
    output().print(table)


@learned.command()
def show(
    name: Name,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many passages.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Print what was learned, most useful first; before it, which drafters learned from it.

    Examples:

        edgespec learned show work

        edgespec learned show work --limit 1000 --json
    """
    allow_any_text()
    profile = _profile(name)
    texts = profile.show(namespace)
    shown = texts[:limit]
    if as_json:
        print_json([text.to_json() for text in shown])
        return
    for correction in profile.corrections(namespace):
        output().print(_said_of(correction), style="dim", markup=False, soft_wrap=True)
    for text in shown:
        output().print(_headline(text), style="dim", markup=False, soft_wrap=True)
        output().print(text.text.strip("\n"), markup=False, soft_wrap=True)
    note(f"{len(shown)} of {len(texts)} passages")


@learned.command()
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="Replaced if it exists.")],
    as_json: JsonFlag = False,
) -> None:
    """Write all that was learned to a JSON file, for yourself or for another machine.

    Example: edgespec learned export work work.json
    """
    amount = _profile(name).export(file)
    _done({**amount._asdict(), "file": str(file)}, f"{_counted(amount)}: {file}", as_json)


@learned.command("import")
def import_file(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="What 'export' wrote.")],
    as_json: JsonFlag = False,
) -> None:
    """Add what 'export' wrote to a profile; it is made if there is none.

    Example: edgespec learned import work work.json
    """
    amount = _profile(name).load(file)
    _done(amount._asdict(), f"{_counted(amount)} added to {name}", as_json)


@learned.command()
def delete(
    name: Name,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete a profile, or one namespace of it.

    Examples:

        edgespec learned delete work

        edgespec learned delete work --namespace mail --yes
    """
    what = name if namespace is None else f"namespace {namespace!r} of {name}"
    if not yes:
        typer.confirm(f"Delete {what}?", abort=True, err=True)
    _profile(name).delete(namespace)
    _done({"deleted": name, "namespace": namespace}, f"deleted {what}", as_json)


@learned.command()
def forget(
    name: Name,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Upper and lower case are the same.")],
    as_json: JsonFlag = False,
) -> None:
    """Delete every passage in which TEXT occurs, and all corrections, which cannot be searched for it.

    Example: edgespec learned forget work "account 4711"
    """
    amount = _profile(name).forget(text)
    line = f"{_counted(amount)} forgotten"
    if amount.corrections:
        line += "; nobody can tell what drafters learned from this text, so they forget all they learned"
    _done(amount._asdict(), line, as_json)


def _profile(name: str) -> "Profile":
    from edgespec.profile.manage import Profile

    return Profile(name)


def _describe(profile: "Profile") -> dict[str, Any]:
    from edgespec_models.errors import StorageError

    kept: list[dict[str, Any]] = []
    corrections: list[dict[str, Any]] = []
    problem = None
    try:
        rows = profile.namespaces().items()
        kept = [{"target": target, "namespace": space, "tokens": n} for (target, space), n in rows]
        corrections = [correction.to_json() for correction in profile.corrections()]
    except StorageError as error:
        problem = str(error)
    return {
        "name": profile.name,
        "path": str(profile.path),
        "size_bytes": profile.size_bytes,
        "kept": kept,
        "corrections": corrections,
        "problem": problem,
    }


def _counted(amount: "Amount") -> str:
    return f"{amount.passages} passages, {amount.corrections} corrections"


def _where(learned: "LearnedText | LearnedCorrection") -> str:
    return f"{learned.target}, {learned.namespace}" if learned.namespace else learned.target


def _said_of(correction: "LearnedCorrection") -> str:
    day = datetime.fromtimestamp(correction.used_on).date().isoformat()
    taught = f"learned from {correction.tokens:,} tokens, last on {day}, {size(correction.size_bytes)}"
    return f"[{_where(correction)}] a correction of the guesses of {correction.drafter}: {taught}"


def _headline(text: "LearnedText") -> str:
    day = datetime.fromtimestamp(text.learned_on).date().isoformat()
    judged = f"{text.right} of {text.right + text.wrong} proposals right"
    return f"[{_where(text)}] learned {day}, worth {text.worth:.1f}, {text.tokens} tokens, {judged}"


def _done(value: dict[str, Any], line: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        note(line)
