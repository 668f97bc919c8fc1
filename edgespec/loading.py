"""From what a user names to a bundle on disk.

A bundle, a directory that another exporter wrote, a GGUF file, a Hugging Face directory, a catalogue name,
or ``hf:OWNER/REPO``. Checkpoints are exported into the cache at first use; models that are named are pulled
before.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from edgespec_models.bundle import MANIFEST, Bundle, Role
from edgespec_models.catalog import entries, find
from edgespec_models.download import pull
from edgespec_models.errors import BundleError, ModelFileError
from edgespec_models.facts import Facts
from edgespec_models.foreign import is_model, open_bundle
from edgespec_models.hub import PREFIX, HubReference, pull_hub, pulled_hub
from edgespec_models.paths import bundles_dir, model_name
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.static_graphs import ExportDevice

if TYPE_CHECKING:
    from edgespec_export.export import ExportOptions

__all__ = ["NGRAM", "locate_hub", "open_model", "pull_checked", "recommended_drafter"]

_HF_CONFIG = "config.json"
_LOG = logging.getLogger("edgespec")

NGRAM = "ngram"
"""Names the drafter that is no model."""


def open_model(
    reference: str | Path,
    role: Role,
    *,
    weights: str | None = None,
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
        EdgespecError: whatever else keeps the model from being pulled, exported or opened.
    """
    path = Path(reference)
    if str(reference).startswith(PREFIX):
        path = locate_hub(str(reference), progress)
    is_source = (path / _HF_CONFIG).is_file() and not is_model(path)
    if path.is_dir() and not is_source:
        return open_bundle(path)
    if is_source or path.suffix == ".gguf":
        if not path.exists():
            raise ModelFileError(f"{path} does not exist; give a GGUF file, a bundle or a catalogue name")
        name = model_name(path) if is_source else path.stem
        options = _options(role, weights, name, device)
        folder = bundles_dir() / f"{name}-{_mark(path)}-{role}-{_kind(device, weights) or 'default'}"
        return _open_cached(folder) or _export(path, folder, options, progress)
    entry = find(str(reference))
    options = _options(role, weights, entry.name, device)
    kind = _kind(device, weights) or _default(role)
    folder = bundles_dir() / f"{entry.name}-{entry.sha256[:8]}-{role}-{kind}"
    existing = _open_cached(folder)
    if existing is not None:
        return existing
    return _export(pull(entry, progress=progress, notify=_LOG.warning), folder, options, progress)


def locate_hub(reference: str, progress: ProgressCallback) -> Path:
    """The checkpoint that ``hf:OWNER/REPO[/FILE.gguf][@REVISION]`` names, pulled unless it is here already.

    A model that edgespec cannot export is refused before its weights are fetched.

    Raises:
        RequestError: of another form.
        DownloadError: it cannot be pulled.
        UnsupportedModelError: of an architecture or with a feature that edgespec lacks.
        ModelFileError: no checkpoint in safetensors.
    """
    parsed = HubReference.parse(reference)
    return pulled_hub(parsed) or pull_checked(parsed, progress=progress, notify=_LOG.warning)


def pull_checked(
    reference: HubReference, *, progress: ProgressCallback, notify: Callable[[str], None]
) -> Path:
    """Bring a model of the hub up to date; raises as :func:`locate_hub` does."""
    return pull_hub(reference, check=_check_config, progress=progress, notify=notify)


def _check_config(folder: Path) -> None:
    from edgespec_export.hf_config import read_config

    read_config(Facts.read(folder / _HF_CONFIG))


def recommended_drafter(target: Bundle) -> str:
    """The catalogue's drafter for a target it knows by its source file, else n-grams."""
    digest = target.manifest.provenance.get("sha256")
    known = next((entry for entry in entries().values() if entry.sha256 == digest), None)
    return known.drafter if known is not None and known.drafter is not None else NGRAM


def _mark(source: Path) -> str:
    """Changes when the source does."""
    files = [source] if source.is_file() else sorted(file for file in source.iterdir() if file.is_file())
    stats = [(file.name, file.stat()) for file in files]
    key = [str(source.resolve()), *((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)]
    return hashlib.sha256(repr(key).encode()).hexdigest()[:8]


def _kind(device: ExportDevice | None, weights: str | None) -> str:
    """What was asked for of an export; empty where nothing was."""
    return "-".join(part for part in (device, weights) if part)


def _default(role: Role) -> str:
    from edgespec_export.plan import DEFAULT_WEIGHTS

    return DEFAULT_WEIGHTS[role]


def _options(role: Role, weights: str | None, name: str, device: ExportDevice | None) -> "ExportOptions":
    from edgespec_export.export import ExportOptions

    return ExportOptions(role=role, weights=weights, name=name, device=device, overwrite=True)


def _open_cached(folder: Path) -> Bundle | None:
    if not (folder / MANIFEST).is_file():
        return None
    try:
        return Bundle(folder)
    except BundleError:
        return None  # of an older format, or damaged: made again


def _export(source: Path, folder: Path, options: "ExportOptions", progress: ProgressCallback) -> Bundle:
    from edgespec_export.export import export_model

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # another process may be making it
        bundle = _open_cached(folder)
        if bundle is None:
            export_model(source, folder, options=options, progress=_naming(progress, options.name or ""))
            bundle = Bundle(folder)
    return bundle


def _naming(progress: ProgressCallback, name: str) -> ProgressCallback:
    """Two models may be exported in turn; each stage says whose it is."""
    return lambda report: progress(replace(report, stage=f"{report.stage} {name}"))
