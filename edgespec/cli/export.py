"""``edgespec export``: makes a bundle of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from edgespec.cli import options
from edgespec.cli.console import note, print_json, progress_bars, say
from edgespec.cli.inspect import show_report
from edgespec_export.options import ExportOptions
from edgespec_models.errors import RequestError
from edgespec_models.storage import size

_MUCH_LOST = 0.02  # of the most likely tokens

if TYPE_CHECKING:
    from edgespec_export.formats.quantization import Quantization
    from edgespec_export.options import TrimSize


_FIELDS = ("weights", "alignment", "calibration", "calibrate_with", "name", "chip", "chat_template", "mmproj")
_OF_OPTIMUM = ("source", "out", "via", "optimum_cli", "overwrite", "as_json")


@options.shared(options.of(ExportOptions, *_FIELDS, adapters="--adapter", overwrite="--overwrite"))
def export(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A GGUF file, a Hugging Face directory (config.json, safetensors), a catalogue name, or a "
            "model on the hub, hf:OWNER/REPO[/FILE.gguf][@REVISION]; models by name are pulled first.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="The bundle's directory; it must not exist yet."),
    ],
    role: Annotated[
        Literal["target", "drafter"] | None,
        typer.Option(help="The role of the model. Default: target, but drafter if aligned or a head."),
    ] = None,
    trim_vocab: Annotated[
        str | None,
        typer.Option(
            "--trim-vocab",
            metavar="N|auto|full",
            help="Rows that a drafter's LM head keeps; auto measures. Default: auto for drafters on "
            "CPUs, else full.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="For a head or an MTP layer: the source of its target."),
    ] = None,
    bits: Annotated[
        Literal["4", "8"] | None,
        typer.Option(
            help="Round all weights again, to this many bits, which makes a file that is quantized already "
            "worse; the export measures how much. Not with --weights exact. Default: 4 with --mixed."
        ),
    ] = None,
    mixed: Annotated[
        Literal["none", "head", "sensitive"] | None,
        typer.Option(
            help="The matrices that keep 8 bits if --bits is 4: none; the LM head (head); the LM head and "
            "half of the value and down projections (sensitive). Default: head."
        ),
    ] = None,
    via: Annotated[
        Literal["edgespec", "optimum"],
        typer.Option(
            help="The program that builds the graph. optimum has more architectures, keeps weights "
            "in floating point, and copies the KV cache in every pass."
        ),
    ] = "edgespec",
    optimum_cli: Annotated[
        str,
        typer.Option(
            "--optimum-cli", metavar="PROGRAM", help="Optimum's command, in an environment of its own."
        ),
    ] = "optimum-cli",
    device: Annotated[
        Literal["cpu", "npu-qnn", "npu-openvino", "cuda"],
        typer.Option(
            help="The device of the bundle. For cuda activations and KV cache are float16, and weights lie "
            "in blocks of 32. For NPUs graphs have fixed shapes and int8 weights; graphs for npu-qnn also "
            "have 16-bit activations, which are calibrated on text."
        ),
    ] = "cpu",
    buckets: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="For an NPU: the lengths of the KV cache in tokens, each with graphs of its own. "
            "Default: 512,1024,2048.",
        ),
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Export a model to ONNX, compare it with its source, and report the result.

    Examples:

        edgespec export ~/models/Llama-3.2-1B-Instruct -o target

        edgespec export hf:HuggingFaceTB/SmolLM2-360M-Instruct -o target

        edgespec export qwen2.5-coder-1.5b-instruct -o target

        edgespec export SmolLM2-135M-Instruct.Q8_0.gguf -o drafter --role drafter --bits 4

        edgespec export gemma-3-270m -o drafter --role drafter --trim-vocab 16384 --calibrate-with target

        edgespec export SmolLM2-135M.gguf -o drafter --alignment alignment.safetensors

        edgespec export hf:AngelSlim/Qwen3-4B_eagle3 -o head --target hf:Qwen/Qwen3-4B

        edgespec export Qwen3.5-4B-MTP.gguf -o head --target Qwen3.5-4B-MTP.gguf

        edgespec export model.gguf -o mine --adapter ./lora --adapter style.gguf=0.5

        edgespec export gemma-4-E4B-it-Q4_K_M.gguf -o sees --mmproj mmproj-gemma-4-E4B-it-Q8_0.gguf

        edgespec export model.gguf -o small --bits 4 --mixed sensitive

        edgespec export qwen2.5-coder-0.5b-instruct -o npu --device npu-qnn --buckets 512,2048

        edgespec export qwen2.5-coder-0.5b-instruct -o laptop --device npu-qnn --chip snapdragon-x-elite

        edgespec export qwen2.5-coder-1.5b-instruct -o gpu --device cuda

        edgespec export ~/models/pythia-160m -o pythia --via optimum --optimum-cli optimum/bin/optimum-cli
    """
    from edgespec.loading.first_use import alignment_of, check_drafter, locate
    from edgespec_export.export import export_model

    quantization = _quantization(bits, mixed)
    name, alignment = context.params["name"], context.params["alignment"]
    made_for = None if device == "cpu" else device
    if via == "optimum":
        _refuse_with_optimum(context)
        _via_optimum(source, out, optimum_cli, overwrite=context.params["overwrite"], as_json=as_json)
        return
    native = ExportOptions(weights=context.params["weights"], device=made_for).native
    with progress_bars() as progress:
        if target is not None and not native:
            check_drafter(source, target, progress, native=False)
        file, entry = locate(source, progress, note, native=native)
        drafts = bool(alignment or target) or (entry is not None and entry.alignment is not None)
        made = options.filled(
            ExportOptions,
            context,
            role=role or ("drafter" if drafts else "target"),
            quantization=quantization,
            name=name or (None if entry is None else entry.name),
            alignment=alignment or (None if entry is None else alignment_of(entry, made_for)),
            target=None if target is None else locate(target, progress, note)[0],
            device=made_for,
            buckets=_buckets(buckets),
            trim=_trim_size(trim_vocab),
        )
        report = export_model(file, out, options=made, progress=progress)
    if as_json:
        print_json({"path": str(out), **report})
        return
    say(f"{out}")
    show_report(report, made.role)
    _warn_of_rounding(report)


def _warn_of_rounding(report: Mapping[str, Any]) -> None:
    """Warn where weights that were rounded again change many of the model's choices."""
    rounding = report["rounding"]
    if rounding is not None and 1 - rounding["top1_agreement"] >= _MUCH_LOST:
        kept, now = report["bytes"]["source"], report["bytes"]["bundle"]
        changed = f"{1 - rounding['top1_agreement']:.1%} of the most likely tokens"
        note(
            f"Rounding the weights again changed {changed} ({size(now)} instead of {size(kept)}). Without "
            "--bits and --mixed the source's weights are kept.",
            style="yellow",
        )


def _refuse_with_optimum(context: typer.Context) -> None:
    stated = [
        parameter.opts[0]
        for parameter in context.command.params
        if (name := str(parameter.name)) not in _OF_OPTIMUM
        and options.is_stated(context, name)
        and (name, context.params[name]) not in (("role", "target"), ("device", "cpu"))
    ]
    if stated:
        raise RequestError(
            "--via optimum keeps the weights as Optimum writes them, for targets and drafters; leave out "
            f"{', '.join(stated)}"
        )


def _via_optimum(source: str, out: Path, program: str, *, overwrite: bool, as_json: bool) -> None:
    from edgespec_export.optimum import export_with_optimum
    from edgespec_models.downloads.hub import on_hub, pull_hub, pulled_hub

    with progress_bars() as progress:
        folder, reference = Path(source), on_hub(source)
        if reference is not None:
            folder = pulled_hub(reference) or pull_hub(reference, progress=progress, notify=note)
        report = export_with_optimum(folder, out, program=program, overwrite=overwrite, progress=progress)
    if as_json:
        print_json({"path": str(out), **report})
        return
    cache = "copied in every pass" if report["copies_cache"] else "in place"
    exact = (
        "yes" if report["row_exact"] else "no: where two tokens are nearly equally likely, answers may differ"
    )
    say(f"{out}: {report['architecture']}, {size(report['bytes'])}, from {size(report['source_bytes'])}")
    say(f"  KV cache: {cache}")
    say(f"  same bits for any rows: {exact}")
    say(f"  export: {report['seconds']:.1f} s, by Optimum; not compared with its source")


def _trim_size(value: str | None) -> "TrimSize | None":
    if value is None:
        return None
    if value in ("auto", "full"):
        return cast("TrimSize", value)
    if value.isdecimal():
        return int(value)
    raise RequestError(f"--trim-vocab is {value!r}; give a number of rows, auto or full")


def _buckets(value: str | None) -> tuple[int, ...]:
    if value is None:
        return ()
    numbers = [part.strip() for part in value.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise RequestError(f"--buckets is {value!r}; give numbers of tokens, such as 512,2048")
    return tuple(map(int, numbers))


def _quantization(bits: str | None, mixed: str | None) -> "Quantization | None":
    """The settings of the options, others by default; None without any of these options."""
    from edgespec_export.formats.quantization import Quantization

    options = {"bits": None if bits is None else int(bits), "mixed": mixed}
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return Quantization(**chosen) if chosen else None
