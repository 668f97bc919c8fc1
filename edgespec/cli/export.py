"""``edgespec export``: a checkpoint in, a bundle out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from edgespec.cli.answers import print_json
from edgespec.cli.console import note, output, progress_bars
from edgespec.cli.inspect import show_report
from edgespec.cli.options import JsonFlag
from edgespec_models.errors import ModelFileError, RequestError
from edgespec_models.progress import ProgressCallback

if TYPE_CHECKING:
    from edgespec_export.trim import TrimSize

__all__ = ["export"]


def export(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A GGUF file, or a catalogue name, which is pulled first."),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="The bundle's directory; it must not exist yet."),
    ],
    role: Annotated[Literal["target", "drafter"], typer.Option(help="What the model is to be.")] = "target",
    weights: Annotated[
        Literal["exact", "close", "fast"] | None,
        typer.Option(help="How near the weights stay to the source's. Default: by role."),
    ] = None,
    trim_vocab: Annotated[
        str | None,
        typer.Option(
            "--trim-vocab",
            metavar="N|auto|full",
            help="Rows a drafter's LM head keeps; auto measures. Default: auto for a drafter, else full.",
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.jsonl", help='Texts that targets wrote, {"text": ...} a line. Repeatable.'
        ),
    ] = None,
    calibrate_with: Annotated[
        list[Path] | None,
        typer.Option(metavar="BUNDLE", help="A target that is to write such texts now. Repeatable."),
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

        edgespec export qwen2.5-coder-1.5b-instruct -o target

        edgespec export SmolLM2-135M-Instruct.Q8_0.gguf -o drafter --role drafter --weights fast

        edgespec export gemma-3-270m -o drafter --role drafter --trim-vocab 16384 --calibrate-with target
    """
    from edgespec_export.export import ExportOptions, export_model
    from edgespec_export.trim import TrimOptions

    with progress_bars() as progress:
        file, known_as = _locate(source, progress)
        options = ExportOptions(
            role=role,
            weights=weights,
            name=name or known_as,
            hidden_states=hidden_states,
            overwrite=overwrite,
            trim=TrimOptions(_trim_size(trim_vocab), tuple(calibration or ()), tuple(calibrate_with or ())),
        )
        report = export_model(file, out, options=options, progress=progress)
    value = report.to_json()
    if as_json:
        print_json({"path": str(out), **value})
        return
    output().print(f"{out}", markup=False, soft_wrap=True)
    show_report(value)


def _trim_size(value: str | None) -> "TrimSize | None":
    if value is None:
        return None
    if value in ("auto", "full"):
        return cast("TrimSize", value)
    if value.isdecimal():
        return int(value)
    raise RequestError(f"--trim-vocab is {value!r}; give a number of rows, auto or full")


def _locate(source: str, progress: ProgressCallback) -> tuple[Path, str | None]:
    """The checkpoint's file, and the name the catalogue gives it."""
    from edgespec_models.catalog import find
    from edgespec_models.download import pull

    path = Path(source)
    if path.is_file():
        return path, None
    if path.suffix == ".gguf" or path.is_dir():
        raise ModelFileError(
            f"{source} is not a file; give a GGUF file or a name that 'edgespec models' lists"
        )
    entry = find(source)
    return pull(entry, progress=progress, notify=note), entry.name
