"""Whether ``auto`` has a model exported for a GPU, and why."""

from pathlib import Path

from edgespec.loading.footprint import GPU_BYTES
from edgespec.loading.opening import NGRAM, Reference
from edgespec.loading.options import LoadOptions
from edgespec.loading.planning import footprint, look_up
from edgespec_export.options import ExportOptions
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import EdgespecError, UnsupportedModelError
from edgespec_models.storage import size
from edgespec_runtimes.devices import KINDS
from edgespec_runtimes.discovery import Runtime, resolve

_MARGIN = 1.1  # buffers, and memory that falls into pieces


def choose_gpu(
    target: Reference, drafter: object, options: LoadOptions, runtime: Runtime | None = None
) -> tuple[bool, str]:
    """Whether the target's export is for a GPU, and the reason; no reason where no GPU is looked for.

    Without CUDA's provider, and for bundles, none is. A drafter that is named, an export with exact weights
    or an mmproj file, vectors and scores of texts, and families without a graph for it stay on the CPU.
    """
    machine, cuda = runtime or Runtime(), KINDS["cuda"]
    if cuda.provider not in machine.providers() or options.weights == "exact" or options.mmproj is not None:
        return False, ""
    try:
        export = ExportOptions("target", "portable", adapters=options.adapters)
        model = look_up(target, export)
        if isinstance(model, Bundle) and model.path == Path(target):
            return False, ""
        if not (drafter in ("auto", NGRAM) or drafter is None):
            return False, "no GPU, because a drafter is named; device='cuda' takes one"
        device = resolve("cuda", machine)
        if isinstance(model, Path):
            _check(model)
        planned = footprint(model, export)
    except EdgespecError as error:
        return False, f"no GPU: {error}"
    memory = machine.gpu_memory(device.number)
    if memory is None:
        return False, "no GPU: its memory is unknown; device='cuda' takes it"
    cache = planned.cache.bytes(planned.cache.long_text) // 2  # of float16 there
    needed = int((planned.weights_bytes + planned.table_bytes + cache) * _MARGIN) + GPU_BYTES
    figures = f"{size(needed)} of its {size(memory.available)} free memory"
    if needed > memory.available:
        return False, f"no GPU: the model needs {figures}"
    return True, f"the GPU holds the model: {figures}"


def _check(source: Path) -> None:
    """Raise UnsupportedModelError for a model that runs on the CPU alone."""
    from edgespec_export.sources.open import open_checkpoint
    from edgespec_models.graphs.decoder import check_standard

    with open_checkpoint(source) as checkpoint:
        check_standard(checkpoint.config)
        if checkpoint.embedding() is not None or checkpoint.ranking() is not None:
            raise UnsupportedModelError("vectors and scores of texts are made on CPUs")
