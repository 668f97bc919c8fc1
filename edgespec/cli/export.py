"""``edgespec export``: a checkpoint in, a bundle out."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from edgespec.cli.answers import print_json
from edgespec.cli.console import note, output, progress_bars
from edgespec.cli.inspect import show_report
from edgespec.cli.options import JsonFlag
from edgespec_models.errors import ModelFileError
from edgespec_models.progress import ProgressCallback

__all__ = ["export"]


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A GGUF file, a Hugging Face directory (config.json, safetensors), or a catalogue name, "
            "which is pulled first.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="The bundle's directory; it must not exist yet."),
    ],
    role: Annotated[Literal["target", "drafter"], typer.Option(help="What the model is to be.")] = "target",
    weights: Annotated[
        Literal["exact", "close", "balanced", "fast"] | None,
        typer.Option(
            help="How near the weights stay to the source's. Default: close; balanced for checkpoints in "
            "floating point."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name. Default: the source's.")] = None,
    hidden_states: Annotated[
        bool, typer.Option("--hidden-states", help="Add the last hidden state as an output.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a bundle that is there.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Export a model to ONNX, check it against its source, and report what that cost.

    Examples:

        edgespec export ~/models/Llama-3.2-1B-Instruct -o target

        edgespec export qwen2.5-coder-1.5b-instruct -o target

        edgespec export SmolLM2-135M-Instruct.Q8_0.gguf -o drafter --role drafter --weights fast
    """
    from edgespec_export.export import ExportOptions, export_model

    with progress_bars() as progress:
        file, known_as = _locate(source, progress)
        options = ExportOptions(
            role=role,
            weights=weights,
            name=name or known_as,
            hidden_states=hidden_states,
            overwrite=overwrite,
        )
        report = export_model(file, out, options=options, progress=progress)
    value = report.to_json()
    if as_json:
        print_json({"path": str(out), **value})
        return
    output().print(f"{out}", markup=False, soft_wrap=True)
    show_report(value)


def _locate(source: str, progress: ProgressCallback) -> tuple[Path, str | None]:
    """The checkpoint's file or directory, and the name the catalogue gives it."""
    from edgespec_models.catalog import find
    from edgespec_models.download import pull

    path = Path(source)
    if path.exists():
        return path, None
    if path.suffix == ".gguf":
        raise ModelFileError(
            f"{source} does not exist; give a GGUF file, a Hugging Face directory, or a name that "
            "'edgespec models' lists"
        )
    entry = find(source)
    return pull(entry, progress=progress, notify=note), entry.name
