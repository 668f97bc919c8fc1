"""``edgespec models``: the catalogue as a table."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.console import output, size

if TYPE_CHECKING:
    from edgespec_models.downloads.catalog import CatalogueEntry

__all__ = ["describe", "models"]


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a model.")] = False,
) -> None:
    """List the models of the catalogue, and which of them are on this machine.

    Example: edgespec models
    """
    from rich.table import Table

    from edgespec_models.downloads.catalog import entries
    from edgespec_models.downloads.download import is_pulled

    known = list(entries().values())
    if as_json:
        typer.echo(json.dumps([describe(entry) for entry in known], indent=2))
        return
    table = Table("name", "role", "size", "licence", "pulled", box=None, pad_edge=False)
    for entry in known:
        pulled = "yes" if is_pulled(entry) else "-"
        table.add_row(entry.name, entry.role, size(entry.size_bytes), entry.licence, pulled)
    output().print(table)


def describe(entry: "CatalogueEntry") -> dict[str, object]:
    """An entry as JSON: what a user may want to know, and where the file lies (None: not pulled)."""
    from edgespec_models.downloads.download import is_pulled, model_path

    return {
        "name": entry.name,
        "title": entry.title,
        "architecture": entry.architecture,
        "role": entry.role,
        "parameters": entry.parameters,
        "size_bytes": entry.size_bytes,
        "sha256": entry.sha256,
        "licence": entry.licence,
        "licence_url": entry.licence_url,
        "drafter": entry.drafter,
        "alignment": None if entry.alignment is None else entry.alignment.sha256,
        "path": str(model_path(entry)) if is_pulled(entry) else None,
    }
