"""From what a user names to a bundle on disk: a directory, a catalogue name or a GGUF file.

Catalogue models are pulled and exported into the cache at first use.
"""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from edgespec_models.bundle import MANIFEST, Bundle, Role
from edgespec_models.catalog import entries, find
from edgespec_models.download import pull
from edgespec_models.errors import BundleError, ModelFileError
from edgespec_models.paths import bundles_dir
from edgespec_models.progress import ProgressCallback, ignore_progress

__all__ = ["NGRAM", "open_model", "recommended_drafter"]

_LOG = logging.getLogger("edgespec")

NGRAM = "ngram"
"""Names the drafter that is no model."""


def open_model(
    reference: str | Path,
    role: Role,
    *,
    weights: str | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Bundle:
    """Open the bundle ``reference`` names, making it first if need be.

    Args:
        reference: a bundle's directory, a GGUF file, or a catalogue name.
        role: what a new export is for.
        weights: policy of a new export; None takes the role's default.
        progress: told of downloads and exports.

    Raises:
        CatalogueError: neither a path nor a name of the catalogue.
        EdgespecError: whatever keeps the model from being pulled, exported or opened.
    """
    path = Path(reference)
    if path.is_dir():
        return Bundle(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelFileError(f"{path} does not exist; give a GGUF file, a bundle or a catalogue name")
        stat = path.stat()
        key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        return _cached(name, path, role, weights, progress)
    entry = find(str(reference))
    name = f"{entry.name}-{entry.sha256[:8]}"
    existing = _open_cached(name, role, weights)
    return existing or _cached(
        name, pull(entry, progress=progress, notify=_LOG.warning), role, weights, progress, entry.name
    )


def recommended_drafter(target: Bundle) -> str:
    """The catalogue's drafter for a target it knows by its source file, else n-grams."""
    digest = target.manifest.provenance.get("sha256")
    known = next((entry for entry in entries().values() if entry.sha256 == digest), None)
    return known.drafter if known is not None and known.drafter is not None else NGRAM


def _folder(name: str, role: Role, weights: str | None) -> Path:
    from edgespec_export.export import DEFAULT_WEIGHTS

    return bundles_dir() / f"{name}-{role}-{weights or DEFAULT_WEIGHTS[role]}"


def _open_cached(name: str, role: Role, weights: str | None) -> Bundle | None:
    folder = _folder(name, role, weights)
    if not (folder / MANIFEST).is_file():
        return None
    try:
        return Bundle(folder)
    except BundleError:
        return None  # of an older format, or damaged: made again


def _cached(
    name: str,
    source: Path,
    role: Role,
    weights: str | None,
    progress: ProgressCallback,
    model_name: str | None = None,
) -> Bundle:
    from edgespec_export.export import ExportOptions, export_model

    folder = _folder(name, role, weights)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # another process may be making it
        bundle = _open_cached(name, role, weights)
        if bundle is None:
            options = ExportOptions(
                role=role, weights=weights, name=model_name or source.stem, overwrite=True
            )
            export_model(source, folder, options=options, progress=_naming(progress, options.name or ""))
            bundle = Bundle(folder)
    return bundle


def _naming(progress: ProgressCallback, name: str) -> ProgressCallback:
    """Two models may be exported in turn; each stage says whose it is."""
    return lambda report: progress(replace(report, stage=f"{report.stage} {name}"))
