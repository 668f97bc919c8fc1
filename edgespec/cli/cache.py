"""``edgespec cache``: shows and deletes the prompts that are kept on disk."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.console import done, figure_table, output, print_json, say
from edgespec.cli.options import JsonFlag
from edgespec_models.errors import RequestError
from edgespec_models.storage import size

if TYPE_CHECKING:
    from edgespec_runtimes.block_files import Stored

cache = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Show and clear the prompts that are kept on disk ('show' is the default).

    Keys and values of prompts are kept, so that prompts that begin alike need not be read again. Prompts can
    be read out of them; docs/security.md says by whom.
    """,
)


@cache.callback()
def _show_by_default(context: typer.Context, as_json: JsonFlag = False) -> None:
    if context.invoked_subcommand is None:
        show(as_json)


@cache.command()
def show(as_json: JsonFlag = False) -> None:
    """Show the folder, and what of it is each model's.

    Examples:

        edgespec cache

        edgespec cache show --json
    """
    from edgespec_models.decoders.kept import BLOCK
    from edgespec_models.storage import prompts_dir

    models: list[dict[str, Any]] = []
    for name, own in _by_model().items():
        total = sum(block.size for block in own)
        models.append({"name": name, "blocks": len(own), "tokens": BLOCK * len(own), "bytes": total})
    if as_json:
        print_json({"path": str(prompts_dir()), "models": models})
        return
    table = figure_table("model", "blocks", "tokens", "size")
    for model in models:
        table.add_row(model["name"], f"{model['blocks']:,}", f"{model['tokens']:,}", size(model["bytes"]))
    output().print(table)
    say(f"in {prompts_dir()}")


@cache.command()
def clear(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model that 'show' lists; without it, all.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete what is kept; prompts are then read anew.

    Examples:

        edgespec cache clear

        edgespec cache clear qwen2.5-coder-1.5b-instruct
    """
    from edgespec_runtimes.block_files import delete

    models = _by_model()
    if model is not None and model not in models:
        raise RequestError(f"no prompts are kept of {model!r}; there is: {', '.join(models) or 'nothing'}")
    chosen = [block for name, own in models.items() if model in (None, name) for block in own]
    delete(chosen)
    freed = sum(block.size for block in chosen)
    line = f"{len(chosen):,} blocks deleted, {size(freed)}"
    done({"blocks": len(chosen), "bytes": freed}, line, as_json)


def _by_model() -> "dict[str, list[Stored]]":
    """Blocks by the names of models, which several versions of a model may share."""
    from edgespec_models.storage import prompts_dir
    from edgespec_runtimes.block_files import stored

    models: dict[str, list[Stored]] = {}
    for block in stored(prompts_dir()):
        models.setdefault(block.path.parent.name.rpartition("-")[0], []).append(block)
    return dict(sorted(models.items()))
