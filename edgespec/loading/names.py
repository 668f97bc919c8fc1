"""From what a user names to a bundle on disk.

A bundle, a directory that another exporter wrote, a GGUF file, a Hugging Face directory, a catalogue name,
or ``hf:OWNER/REPO``. What is no bundle yet is made at first use (:mod:`edgespec.loading.first_use`).
"""

from pathlib import Path
from typing import Annotated

from edgespec_models.bundles.bundle import WEIGHTS, Bundle, Role
from edgespec_models.bundles.foreign import is_model, open_bundle
from edgespec_models.bundles.static_graphs import ExportDevice
from edgespec_models.errors import RequestError
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.schema import checked, length, one_of, shown

__all__ = ["NGRAM", "Reference", "open_model", "recommended_drafter"]

_HUB = "hf:"

NGRAM = "ngram"
"""Names the drafter that is no model."""
Reference = Annotated[str | Path, length(1, 4096)]
"""What names a model or a file; systems know no longer paths."""


@checked
def open_model(
    reference: Reference,
    role: Role,
    *,
    weights: Annotated[str, one_of(WEIGHTS)] | None = None,
    device: ExportDevice | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Bundle:
    """Open the bundle ``reference`` names, making it first if need be.

    Args:
        reference: a bundle's directory, one that onnxruntime-genai's builder, mobius or Optimum wrote, a
            Hugging Face directory (``config.json``, safetensors), a GGUF file, a catalogue name, or a model
            on the hub: ``hf:OWNER/REPO[/FILE.gguf][@REVISION]``, which is asked for at first use only.
        role: what a new export is for.
        weights: policy of a new export; None takes the default.
        device: what else than the CPU a new export is for.
        progress: told of downloads and exports.

    Raises:
        CatalogueError: neither a path nor a name of the catalogue.
        DownloadError: what was named cannot be pulled.
        RequestError: weights that are not known, or for a device that leaves no choice.
        StorageError: the cache cannot be written.
        EdgespecError: whatever else keeps the model from being pulled, exported or opened.
    """
    path = Path(reference)
    try:
        path.is_dir()
    except OSError as error:  # a name too long, a folder that cannot be entered
        raise RequestError(
            f"{shown(str(reference))} cannot be looked for: {error.strerror}. Give a path that can be "
            "read, or a name that 'edgespec models' lists."
        ) from error
    if is_model(path):
        return open_bundle(path)
    from edgespec.loading.first_use import Wanted, locate_hub, open_made  # bundles need none of it

    wanted = Wanted(role, weights, device)
    if str(reference).startswith(_HUB):
        wanted.check()
        path = locate_hub(str(reference), progress)
    return open_made(path, str(reference), wanted, progress)


def recommended_drafter(target: Bundle) -> str:
    """The catalogue's drafter for a target it knows by its source file, else n-grams."""
    from edgespec_models.downloads.catalog import entries  # only where no drafter is named

    digest = target.manifest.provenance.get("sha256")
    known = next((entry for entry in entries().values() if entry.sha256 == digest), None)
    return known.drafter if known is not None and known.drafter is not None else NGRAM
