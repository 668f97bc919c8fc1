"""From a checkpoint to a bundle: the request is checked, the bundle is built and put in its place."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec_export.options import ExportOptions
from edgespec_export.staging import check_place, staging
from edgespec_models.bundles.bundle import MANIFEST
from edgespec_models.bundles.static_graphs import find_chip
from edgespec_models.errors import RequestError, naming
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.schema import checked
from edgespec_models.storage import writing

__all__ = ["ExportOptions"]

_CUDA_ROWS = 8


@checked
def export_model(
    source: Path,
    out: Path,
    *,
    options: ExportOptions | None = None,
    progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Export ``source``, a GGUF file or a Hugging Face directory, to the bundle ``out``.

    A head, or a model's MTP layer, becomes a drafter for the target that ``options`` name.

    The bundle appears at ``out`` only when it is complete and has passed its checks. If an export for CPUs or
    CUDA is stopped by KeyboardInterrupt or SystemExit, or killed, large weights stay in a hidden folder
    beside ``out``, and the same call goes on there. Returns its report
    (:func:`edgespec_export.bundle_files.finish`).

    Raises:
        ModelFileError, UnsupportedModelError, TokenizerError: the source cannot be exported: damaged, or of
            an architecture, feature or weight format that edgespec lacks.
        ParityError: the export computes something else than the source.
        BundleError: ONNX Runtime cannot load the graphs, or they cannot roll back.
        RequestError: an option is out of range, options exclude each other, a head has no target or a wrong
            one, or ``out`` exists. If it appeared during the export, the message says where the bundle is.
        StorageError: the disk is full, or ``out`` cannot be written or replaced.
        DeviceError: a chip is named, and its compiler is missing or refuses a graph.
    """
    options = options or ExportOptions()
    _check_request(options)
    started = perf_counter()
    single = options.alignment, options.target, options.chat_template, options.mmproj
    check = partial(
        check_place,
        source,
        out,
        overwrite=options.overwrite,
        replaceable=(out / MANIFEST).is_file,
        others=[*options.calibration, *options.calibrate_with, *filter(None, single), *_adapters(options)],
    )
    with writing(out), staging(out, check) as folder, naming(source):
        if options.device in (None, "cuda"):
            from edgespec_export.graph_bundle import build_bundle as build
        else:
            from edgespec_export.devices.device_bundle import build_for_device as build
        return build(source, folder, options, progress, started)


def _adapters(options: ExportOptions) -> list[Path]:
    if not options.adapters:
        return []
    from edgespec_export.sources.adapters import adapter_of

    return [adapter_of(text)[0] for text in options.adapters]


def _check_request(options: ExportOptions) -> None:
    """Refuse impossible requests before the export takes minutes."""
    contradiction = next(_contradictions(options), None)
    if contradiction is not None:
        raise RequestError(contradiction)
    if options.chip is not None:
        from edgespec_export.devices.device_bundle import compiler_for

        compiler_for(find_chip(options.chip))


def _contradictions(options: ExportOptions) -> Iterator[str]:
    """The options that exclude each other."""
    device, size = options.device, options.trim
    if options.target is not None:
        yield from _contradictions_of_heads(options)
    if options.role == "target" and size not in (None, "full"):
        yield (
            f"trim size {size} with role=target: a target must be able to write every token; only drafters "
            "are trimmed (role=drafter)"
        )
    if options.role == "target" and options.alignment is not None:
        yield "role=target with an alignment: only drafters are aligned; use role=drafter"
    if options.adapters and (options.alignment is not None or options.target is not None):
        yield "adapters are for models, not for heads or beside an alignment; leave out adapters"
    if options.mmproj is not None and not (options.native and options.role == "target"):
        yield "mmproj is for targets on edgespec's own kernels (weights 'exact', on CPUs); leave out mmproj"
    if options.weights == "exact" and options.quantization is not None:
        yield (
            f"weights='exact' and quantization {options.quantization.name!r} exclude each other; leave out "
            "one of them"
        )
    if options.chip is not None and device != "npu-qnn":
        yield (
            f"chip={options.chip!r} needs the device npu-qnn, and the device is {device or 'the CPU'}; leave "
            "out chip"
        )
    if device in (None, "cuda") and options.buckets:
        yield "buckets are for bundles with fixed shapes; give an NPU as device, or leave them out"
    if device == "cuda":
        yield from _contradictions_of_cuda(options)
    elif device is not None:
        settled = {
            "weights": options.weights,
            "quantization": options.quantization,
            "trim": size not in (None, "full"),
            "alignment": options.alignment,
        }
        names = ", ".join(name for name, value in settled.items() if value)
        if names:
            yield f"device={device} chooses formats itself and keeps the whole LM head; leave out {names}"


def _contradictions_of_heads(options: ExportOptions) -> Iterator[str]:
    if options.role == "target":
        yield f"a head drafts for {options.target} and is no target itself; use role=drafter"
    names = [name for name in ("device", "alignment") if getattr(options, name)]
    names += ["weights"] * (options.weights == "portable")
    if names:
        yield f"heads run on edgespec's kernels, in their own formats; leave out {', '.join(names)}"


def _contradictions_of_cuda(options: ExportOptions) -> Iterator[str]:
    size = options.trim
    if options.weights == "exact":
        yield "weights='exact' is for edgespec's kernels, which run on CPUs; leave out weights"
    if size == "auto":
        yield "trim size auto measures on this CPU; with device=cuda give a number, or 'full'"
    if isinstance(size, int) and size % _CUDA_ROWS:
        more = size - size % -_CUDA_ROWS
        yield (
            f"trim size is {size}; CUDA's kernels for few rows take a multiple of {_CUDA_ROWS}, such as "
            f"{more}"
        )
