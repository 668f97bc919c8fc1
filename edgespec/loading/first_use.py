"""Models made at first use: they are pulled, exported into the cache, and opened from there later."""

import glob
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from edgespec_export.options import ExportOptions
from edgespec_export.recipe import RECIPES
from edgespec_models.bundles.bundle import HF_CONFIG, MANIFEST, WEIGHTS, Bundle
from edgespec_models.bundles.foreign import is_model, open_bundle
from edgespec_models.bundles.static_graphs import ExportDevice
from edgespec_models.decoders.config import DecoderShape
from edgespec_models.downloads.catalog import CatalogueEntry, entries, find, hub_heads
from edgespec_models.downloads.download import pull, pulled_path
from edgespec_models.downloads.hub import HubReference, on_hub, pull_hub, pulled_hub
from edgespec_models.errors import BundleError, ModelFileError, RequestError, shell_word
from edgespec_models.families import named, read_config
from edgespec_models.files.facts import Facts
from edgespec_models.files.gguf_parts import parts_of, stem_of
from edgespec_models.progress import ProgressCallback
from edgespec_models.storage import alone, bundles_dir, is_file, model_name, writing

_RECIPE_MARK = "-r"
_LONGEST_NAME = 120
_LOG = logging.getLogger("edgespec")


Found = Bundle | CatalogueEntry | Path
"""What a reference names on this machine: a bundle, or the source of one."""


def check_weights(options: ExportOptions) -> None:
    """Raise the RequestError of weights that the device does not take, before anything is pulled."""
    weights, device = options.weights, options.device
    if weights is None or device is None or (weights, device) == ("portable", "cuda"):
        return
    raise RequestError(
        f"weights={weights!r}: an export for {device} chooses formats itself; leave out weights"
    )


def folder_of(options: ExportOptions, name: str, mark: str) -> Path:
    """The folder in which a model of such an export is cached; ``mark`` identifies its source.

    The recipe is a part of the folder's name, not of the bundle, so that two versions of edgespec on one
    machine do not replace each other's bundles.
    """
    kind = "-".join(part for part in (options.device, options.weights) if part) or WEIGHTS[0]
    if options.target is not None:
        mark = f"{mark}-{mark_of(options.target)}"
    if options.adapters:
        from edgespec_export.sources.adapters import adapter_of

        marks = [(mark_of(path), scale) for path, scale in map(adapter_of, options.adapters)]
        mark = f"{mark}-{hashlib.sha256(repr(marks).encode()).hexdigest()[:8]}"
    if options.mmproj is not None:
        if not is_file(options.mmproj):
            raise ModelFileError(
                f"mmproj is {options.mmproj}, which is no file; give a model's mmproj-*.gguf"
            )
        mark = f"{mark}-{mark_of(options.mmproj)}"
    recipe = RECIPES[options.device]
    return bundles_dir() / f"{name}-{mark}-{options.role}-{kind}{_RECIPE_MARK}{recipe}"


def found_at(path: Path, name: str, options: ExportOptions) -> Found:
    """The bundle at ``path``, of the checkpoint there, or of the catalogue's entry ``name``.

    If the bundle does not exist yet, return its source instead: the checkpoint's path, or the entry.
    """
    is_folder = (path / HF_CONFIG).is_file()
    if path.is_dir() and (is_model(path) or not is_folder):
        if options.adapters or options.mmproj:
            raise RequestError(
                f"{path} is no model's source, which exports read with adapters and an mmproj file; give that"
            )
        return open_bundle(path)
    if is_folder or is_file(path) or path.suffix.lower() == ".gguf":
        if not path.exists():
            raise ModelFileError(f"{path} does not exist; give a GGUF file, a bundle or a catalogue name")
        path = path if is_folder else parts_of(path)[0]
        return open_cached(folder_of(options, name_of(path), mark_of(path))) or path
    entry = find(name)
    if entry.alignment is not None and options.role == "target":
        raise RequestError(f"{entry.name} is aligned to draft and is no target; give it with --drafter")
    return open_cached(folder_of(options, entry.name, entry.mark)) or entry


def open_made(
    path: Path, name: str, options: ExportOptions, progress: ProgressCallback, target: str | None = None
) -> Bundle:
    """The bundle that :func:`look_up` finds, made first if it is missing. A head is made for ``target``.

    A target's own file also names its MTP layer, if it has one.
    """
    source = None if target is None or options.role == "target" else checkpoint_of(target)
    if source is not None and path.exists() and path.samefile(source):
        path = source
    made = None if source is None or not path.exists() else made_for(path, source, options)
    if made is not None:
        return made
    model: Found = path if path == source and _is_head(path, source) else found_at(path, name, options)
    if isinstance(model, Bundle):
        return model
    check_weights(options)
    if isinstance(model, Path):
        if options.role == "drafter" and _is_head(model, source):
            options = replace(options, target=_checkpoint_for(model, target, progress))
        name = name_of(model, options.target)
        return _export(model, folder_of(options, name, mark_of(model)), name, options, progress)
    source = pull(model, progress=progress, notify=_LOG.warning)
    folder = folder_of(options, model.name, model.mark)
    return _export(source, folder, model.name, options, progress, alignment_of(model, options.device))


def open_changed(
    source: Path,
    alignment: Path,
    weights: str | None,
    device: ExportDevice | None,
    progress: ProgressCallback,
) -> Bundle:
    """The bundle of the drafter ``source`` with an alignment, made beside that if it does not exist."""
    options = ExportOptions("drafter", weights, device=device)
    folder = alignment.parent / folder_of(options, "bundle", mark_of(alignment)).name
    return _export(source, folder, name_of(source), options, progress, alignment)


def made_for(head: Path, target: Path, options: ExportOptions) -> Bundle | None:
    """The earlier made bundle of a head for the checkpoint ``target``; None if there is none."""
    return open_cached(folder_of(replace(options, target=target), name_of(head, target), mark_of(head)))


def checkpoint_of(reference: str | Path) -> Path | None:
    """The checkpoint of a model on this machine; None if there is none, as for bundles."""
    path = Path(reference)
    if _is_here(path):
        return None if is_model(path) else path
    return pulled_path(str(reference))


def mtp_layer(target: DecoderShape, left_out: object, reference: str | Path) -> Path | None:
    """The file or directory with the MTP layer of ``target``, which ``reference`` names.

    That is the target's own file if its export has ``left_out`` the layer (:attr:`Manifest.provenance`), or a
    file beside it.
    """
    family = named(target.architecture)
    source = checkpoint_of(reference) if family is not None and family.mtp else None
    if source is None or left_out == "mtp" or source.is_dir():
        return source if left_out == "mtp" else None
    from edgespec_export.sources.mtp import beside

    return beside(source, target)


def check_drafter(
    drafter: str | Path, target: str | Path, progress: ProgressCallback, *, native: bool
) -> None:
    """Find a drafter before its target is pulled or exported. One of the hub is pulled.

    ``native`` says whether exports of both would be for edgespec's kernels.

    Raises:
        RequestError: a head beside graphs of ONNX Runtime's operators, which return no states. The
            catalogue's are not pulled before.
        EdgespecError: there is no such drafter, or it cannot be used.
    """
    target_made = _made(target)
    if target_made is not None:
        native = target_made.manifest.operators == "edgespec"
    made, source = _made(drafter), checkpoint_of(drafter)
    is_head = str(drafter) in hub_heads() if made is None else made.config.is_head
    if made is None and source is None and str(drafter) not in entries() and (native or not is_head):
        source = locate(str(drafter), progress)[0]
    if native:
        return
    if is_head or (source is not None and _is_head(source, checkpoint_of(target))):
        raise RequestError(
            f"{drafter} is a head, which reads states of its target's layers, and graphs of ONNX Runtime's "
            "operators return none; leave out device and weights 'portable', or take another drafter"
        )


def _made(reference: str | Path) -> Bundle | None:
    """What is at this path, if it runs without an export."""
    path = Path(reference)
    return open_bundle(path) if _is_here(path) and is_model(path) else None


def _is_here(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - Path's fails for long names


def _is_head(source: Path, target: Path | None) -> bool:
    from edgespec_export.sources.open import is_head

    return is_head(source, target)


def _checkpoint_for(head: Path, target: str | None, progress: ProgressCallback) -> Path:
    """The checkpoint that the target was made from. Its head's export reads tokens and matrices there."""
    source = None if target is None else locate(target, progress)[0]
    if source is None or is_model(source):
        raise RequestError(
            f"{head} is a head, whose export needs its target's source; run 'edgespec export "
            f"{shell_word(head)} --target SOURCE -o DIR' and give DIR as the drafter"
        )
    return source


def alignment_of(entry: CatalogueEntry, device: ExportDevice | None) -> Path | None:
    """The alignment that an export for ``device`` merges into the weights; None for NPUs."""
    return entry.alignment.path if entry.alignment is not None and device in (None, "cuda") else None


def locate(
    source: str,
    progress: ProgressCallback,
    notify: Callable[[str], None] = _LOG.warning,
    *,
    native: bool = True,
) -> tuple[Path, CatalogueEntry | None]:
    """The checkpoint's file or directory, pulled if it is missing, and its entry in the catalogue.

    ``native`` is as in :func:`locate_hub`.
    """
    path = Path(source)
    if path.exists():
        return path, None
    named = on_hub(source)
    if named is not None:
        return locate_hub(named, progress, native=native), None
    if path.suffix.lower() == ".gguf":
        raise ModelFileError(
            f"{source} does not exist; give a GGUF file, a Hugging Face directory, or a name that "
            "'edgespec models' lists"
        )
    entry = find(source)
    return pull(entry, progress=progress, notify=notify), entry


def locate_hub(reference: HubReference, progress: ProgressCallback, *, native: bool = True) -> Path:
    """A checkpoint of the hub, pulled unless it is here already.

    A model that edgespec cannot export, if not ``native`` for ONNX Runtime's operators, is refused before its
    weights are fetched.

    Raises:
        DownloadError: it cannot be pulled.
        UnsupportedModelError: of an architecture or with a feature that edgespec lacks.
        ModelFileError: no checkpoint in safetensors.
    """
    return pulled_hub(reference) or pull_checked(
        reference, progress=progress, notify=_LOG.warning, native=native
    )


def pull_checked(
    reference: HubReference,
    *,
    progress: ProgressCallback,
    notify: Callable[[str], None],
    native: bool = True,
) -> Path:
    """Bring a model of the hub up to date; raises as :func:`locate_hub` does."""
    return pull_hub(reference, check=partial(_check_config, native), progress=progress, notify=notify)


def _check_config(native: bool, folder: Path) -> None:
    config = read_config(Facts.read(folder / HF_CONFIG))
    if not native:
        from edgespec_models.graphs.decoder import check_standard

        check_standard(config)


def name_of(source: Path, target: Path | None = None) -> str:
    """The name of a checkpoint's model; if ``target`` is the same file, the name of its MTP layer.

    It is short enough for additions: systems allow 255 bytes in a file's name.
    """
    name = model_name(source) if source.is_dir() else stem_of(source)
    text = os.fsencode(name).decode("utf-8", "replace")
    name = text.encode()[:_LONGEST_NAME].decode("utf-8", "ignore")
    return f"{name}-mtp" if source == target else name


def mark_of(source: Path) -> str:
    """A text that changes when the source does."""
    beside = [*source.glob("*/config.json"), *source.glob("*/*.jinja")]
    towers = source.parent.glob("*mmproj*.gguf")
    listed = [*parts_of(source), *towers] if source.is_file() else [*source.iterdir(), *beside]
    files = sorted(file for file in listed if file.is_file())
    stats = [(file.name, file.stat()) for file in files]
    key = [str(source.resolve()), *((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)]
    return hashlib.sha256(repr(key).encode()).hexdigest()[:8]


def open_cached(folder: Path) -> Bundle | None:
    """The bundle in ``folder``; None if there is none, or none that this version reads."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        return Bundle(folder)
    except BundleError:
        return None  # of an older format, or damaged: made again


def _export(
    source: Path,
    folder: Path,
    name: str,
    options: ExportOptions,
    progress: ProgressCallback,
    alignment: Path | None = None,
) -> Bundle:
    from edgespec_export.export import export_model

    options = replace(options, name=name, overwrite=True, alignment=alignment)
    lock = folder.with_name(f".{folder.name}.lock")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with writing(folder), alone(lock, f"exporting {name}", _LOG.warning):
        bundle = open_cached(folder)
        if bundle is None:
            export_model(source, folder, options=options, progress=_naming(progress, name))
            bundle = Bundle(folder)
            for other in _by_other_recipes(folder):
                _LOG.warning(
                    "%s was made by another version of edgespec; 'edgespec rm --outdated' deletes all such",
                    other,
                )
    return bundle


def _by_other_recipes(folder: Path) -> list[Path]:
    """Bundles like ``folder`` of other recipes."""
    stem = folder.name.rpartition(_RECIPE_MARK)[0]
    alike = folder.parent.glob(f"{glob.escape(stem + _RECIPE_MARK)}*")
    return sorted(path for path in alike if path != folder and (path / MANIFEST).is_file())


def _naming(progress: ProgressCallback, name: str) -> ProgressCallback:
    """Add the model's name to each stage, because two models may be exported in turn."""
    return lambda report: progress(replace(report, stage=f"{report.stage} {name}"))
