"""``edgespec inspect``: shows the facts that a bundle holds about itself."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.console import fact_table, output, print_json
from edgespec.cli.options import JsonFlag
from edgespec_models.decoders.kept import bytes_per_sequence, types_of
from edgespec_models.errors import BundleError
from edgespec_models.storage import size

if TYPE_CHECKING:
    from rich.table import Table

    from edgespec_models.bundles.bundle import Bundle


def inspect(
    bundle: Annotated[
        str,
        typer.Argument(
            metavar="BUNDLE",
            help="A bundle's directory, one made for onnxruntime-genai or by Optimum, or a model that was "
            "loaded before: a name, a GGUF file or a Hugging Face directory.",
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every file with its SHA-256 too, not only its size.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a bundle's facts and what its export measured. A damaged bundle is an error.

    Examples:

        edgespec inspect ./target

        edgespec inspect qwen2.5-coder-1.5b-instruct --verify --json
    """
    from edgespec.loading.inventory import bundle_of
    from edgespec_models.bundles.bundle import REPORT
    from edgespec_models.bundles.foreign import open_bundle

    path = bundle_of(bundle)
    opened = open_bundle(path, verify_digests=verify)
    if as_json:
        manifest = opened.manifest.to_json()
        print_json({"path": str(path), "verified": verify, **opened.report(), "manifest": manifest})
        return
    output().print(_facts(opened, verify), markup=False)  # names may look like markup
    try:
        show_report(opened.report(), opened.manifest.role)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise BundleError(f"{path / REPORT} is damaged ({error!r}); export the model again") from error


def show_report(report: Mapping[str, Any], role: str) -> None:
    """Print an export's measurements: parity, the errors of formats, sizes, time and memory."""
    if not report:
        output().print("The bundle has no export report.")
        return
    table = fact_table()
    parity = report["parity"]
    if parity is None:
        table.add_row("parity", "no reference is stored for this source; the self-check passed")
    else:
        table.add_row("parity", _parity(parity))
        for label, values in parity["by_text"].items():
            table.add_row(f"  {label}", _parity(values))
    for loss in report["weights"]:
        kept = "exact" if loss["relative_error"] == 0 else f"relative error {loss['relative_error']:.2%}"
        table.add_row(f"{loss['source']} weights", f"{loss['weights']:,} as {loss['format']}, {kept}")
    if rounding := report.get("rounding"):
        table.add_row("rounded again", f"{_parity(rounding)} as without --bits")
    if trim := report.get("trim"):
        table.add_row("LM head", f"{trim['rows']:,} of {trim['of']:,} rows: {_trim(trim)}")
    if static := report.get("static"):
        table.add_row("fixed shapes", f"{_parity(static)} from the model in float32")
    sizes = report["bytes"]
    table.add_row("size", f"{size(sizes['bundle'])}, from {size(sizes['source'])}")
    inexact = "no, and drafts need none" if role == "drafter" else "no: a near-tie may flip an answer"
    table.add_row("same bits for any rows", "yes" if report["row_exact"] else inexact)
    most, before = (size(report[f"{name}peak_memory_bytes"]) for name in ("", "conversion_"))
    table.add_row("export", f"{report['seconds']:.1f} s, memory at most {most}, {before} before the checks")
    output().print(table, markup=False)


def _facts(bundle: "Bundle", verified: bool) -> "Table":
    manifest, config = bundle.manifest, bundle.config
    table = fact_table()
    table.add_row("name", manifest.name)
    table.add_row("role", manifest.role)
    table.add_row("architecture", f"{config.architecture}, {config.num_layers} layers")
    table.add_row("vocabulary", f"{config.vocab_size:,}")
    table.add_row("context", f"{config.context_length:,} tokens, {size(manifest.kv_bytes_per_token)} each")
    table.add_row("weights", manifest.weights)
    if manifest.static is not None:
        graphs = manifest.static
        lengths = ", ".join(map(str, graphs.buckets))
        table.add_row(
            "made for", f"{graphs.device}: passes of {graphs.widths} rows, caches of {lengths} tokens"
        )
        if graphs.contexts is not None:
            binaries = (manifest.files[graphs.context_files(name)[1]].size_bytes for name in graphs.graphs)
            table.add_row(
                "compiled for",
                f"{graphs.contexts.chip.name}: {size(sum(binaries))}, by version {graphs.contexts.version}",
            )
    elif manifest.device is not None:
        table.add_row(
            "made for", f"{manifest.device}: {manifest.activations} activations, passes of any size"
        )
    if config.is_head:
        layers, digest = ", ".join(map(str, config.feature_layers)), manifest.provenance.get("target_sha256")
        table.add_row("reads", f"layers {layers} of the target with SHA-256 {digest}")
    states = bytes_per_sequence(manifest.kept)
    kept = types_of(manifest.kept) + (f", {size(states)} of states" if states else "")
    table.add_row("KV cache", kept or "the target's")
    table.add_row(
        "read in a pass", f"{size(manifest.bytes_per_pass)}, {manifest.parameters_per_pass:,} weights"
    )
    if manifest.sampling is not None:
        table.add_row("advised sampling", str(manifest.sampling))
    table.add_row("chat template", "yes" if bundle.chat_template is not None else "no")
    table.add_row("source", manifest.provenance.get("source", "unknown"))
    for change in ("aligned", "adapters"):
        if change in manifest.provenance:
            table.add_row(change, manifest.provenance[change])
    table.add_row("files", _files(bundle, verified))
    return table


def _files(bundle: "Bundle", verified: bool) -> str:
    if not bundle.manifest.files:
        return "of another exporter: no digests are recorded"
    return "sizes and SHA-256 are right" if verified else "sizes are right"


def _trim(trim: Mapping[str, Any]) -> str:
    covered = f"{trim['coverage']:.2%} of the tokens that targets write"
    if "choices" not in trim:  # of an MTP layer
        return covered
    whole = trim["choices"][-1]
    return (
        f"{covered}, {trim['acceptance']:.1%} guessed right "
        f"({whole['acceptance']:.1%} with all rows), {trim['step_ms']:.2f} ms a step ({whole['step_ms']:.2f})"
    )


def _parity(values: Mapping[str, Any]) -> str:
    return f"{values['top1_agreement']:.1%} same most likely token, KL {values['kl']:.4f} nats"
