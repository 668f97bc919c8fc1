"""What models would take of this machine, before they are pulled, exported or loaded."""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

from edgespec.loading.first_use import Wanted, mark_of, open_cached
from edgespec.loading.footprint import WORKING_BYTES, CacheSize, Footprint, Plan, footprint_of
from edgespec.loading.names import NGRAM, Reference, open_model, recommended_drafter
from edgespec_export.recipe import require_extra
from edgespec_models.bundles.bundle import Bundle, CacheType, Role
from edgespec_models.bundles.config import DecoderShape
from edgespec_models.bundles.foreign import is_model
from edgespec_models.downloads.catalog import CatalogueEntry, CatalogueShape, entries, find
from edgespec_models.downloads.download import is_pulled, model_path
from edgespec_models.downloads.hub import PREFIX, HubReference, pulled_hub
from edgespec_models.errors import ModelFileError, RequestError
from edgespec_models.paths import home, model_name
from edgespec_models.schema import checked, within
from edgespec_runtimes.kv_buffers import KEY_TILE
from edgespec_runtimes.memory import machine_memory

__all__ = ["plan"]

_LENGTHS: Final = (2048, 8192, 32768)


@checked
def plan(
    target: Reference,
    drafter: Reference | None = "auto",
    *,
    context: Annotated[int, within(1)] | None = None,
    weights: str | None = None,
) -> Plan:
    """What a target and its drafter would take of this machine; nothing is pulled, exported or loaded.

    Args:
        target: as :func:`edgespec.load` takes it; a model of the hub (``hf:``) has to be pulled before. Of
            models of the catalogue that are not here the file's size stands for the weights.
        drafter: the same; ``"auto"``, ``"ngram"`` and None as :func:`edgespec.load` takes them.
        context: tokens of a text to plan for besides 2,048, 8,192, 32,768 and the model's whole context.
        weights: policy of exports, as in :class:`edgespec.LoadOptions`.

    Returns:
        A :class:`Plan`. Its verdicts are for the CPU; weights and KV cache of a bundle that was made for
        CUDA are not counted, since they lie in the GPU's memory.

    Raises:
        RequestError: a context longer than the model's, a model of the hub that was not pulled.
        EdgespecError: a model that cannot be found, read or exported.
    """
    located = look_up(target, "target", weights)
    first = footprint(located, "target", weights)
    if drafter == "auto":
        drafter = recommended(located)
    second = None
    if drafter is not None and drafter != NGRAM:
        second = footprint(look_up(drafter, "drafter", weights), "drafter", weights)
    longest = first.cache.longest
    if context is not None and context > longest:
        raise RequestError(
            f"context is {context:,}; allowed: 1 to {longest:,}, the tokens {first.name} can hold"
        )
    lengths = {min(each, longest) for each in (*_LENGTHS, longest, context or longest)}
    made = Plan(first, second, machine_memory(), shutil.disk_usage(_existing(home())).free)
    return replace(made, contexts=tuple(made.fit(each) for each in sorted(lengths)))


@dataclass(frozen=True, slots=True)
class Located:
    """What a reference names, as far as it is on this machine.

    Attributes:
        name: the model's.
        source: the checkpoint of an export, here or yet to be pulled; or the bundle.
        bundle: what can be opened at once; None where an export comes before.
        entry: of the catalogue, where the reference names one.
    """

    name: str
    source: Path
    bundle: Bundle | None = None
    entry: CatalogueEntry | None = None


def look_up(reference: Reference, role: Role, weights: str | None) -> Located:
    """What :func:`edgespec.loading.names.open_model` would open for the CPU; nothing is pulled or exported.

    Raises:
        RequestError: a model of the hub that was not pulled.
        EdgespecError: neither a path nor a name of the catalogue, a bundle that is damaged.
    """
    path, wanted = Path(reference), Wanted(role, weights, None)
    if str(reference).startswith(PREFIX):
        pulled = pulled_hub(HubReference.parse(str(reference)))
        if pulled is None:
            raise RequestError(
                f"{reference} is not on this machine, and what it is can only be read from its files; run "
                f"'edgespec pull {reference}' first"
            )
        path = pulled
    is_source = path.suffix == ".gguf" or ((path / "config.json").is_file() and not is_model(path))
    if path.is_dir() and not is_source:
        bundle = open_model(path, role)
        return Located(bundle.manifest.name, path, bundle)
    if is_source:
        if not path.exists():
            raise ModelFileError(f"{path} does not exist; give a GGUF file, a bundle or a catalogue name")
        name = path.stem if path.is_file() else model_name(path)
        folder = wanted.folder(name, mark_of(path))
        return Located(name, path, open_cached(folder))
    entry = find(str(reference))
    folder = wanted.folder(entry.name, entry.mark)
    return Located(entry.name, model_path(entry), open_cached(folder), entry)


def recommended(target: Located) -> str:
    """What ``"auto"`` would be: by the bundle, the catalogue, or the digest of a file of a known size."""
    if target.bundle is not None:
        return recommended_drafter(target.bundle)
    if target.entry is not None:
        return target.entry.drafter or NGRAM
    source = target.source
    if not source.is_file() or source.stat().st_size not in {
        entry.size_bytes for entry in entries().values()
    }:
        return NGRAM
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    known = next((entry.drafter for entry in entries().values() if entry.sha256 == digest), None)
    return known or NGRAM


def footprint(located: Located, role: Role, weights: str | None = None) -> Footprint:
    """What the model takes that :func:`look_up` found; ``weights`` as given there.

    Raises:
        EdgespecError: a checkpoint that cannot be exported, or not without the ``export`` extra.
        RequestError: a model of the catalogue that was not pulled, and whose entry has no shape.
    """
    if located.bundle is not None:
        return footprint_of(located.bundle, exact_rows=role == "target")
    if located.entry is not None and not is_pulled(located.entry):
        return _of_entry(located.entry, role, weights)
    return _of_checkpoint(located, role, weights)


def _of_checkpoint(located: Located, role: Role, weights: str | None) -> Footprint:
    """A checkpoint that is here: what its export will be."""
    require_extra()
    from edgespec_export.graphs.writer import weight_bytes
    from edgespec_export.sources.open import open_checkpoint

    with open_checkpoint(located.source) as checkpoint:
        by_class, file_bytes = weight_bytes(checkpoint, role, weights)
        config = checkpoint.config
    return _planned(located.name, config, (role, weights), by_class, (0, file_bytes))


def _of_entry(entry: CatalogueEntry, role: Role, weights: str | None) -> Footprint:
    """A model that is not here: its file's size stands for its weights, which an export keeps as they are."""
    shape = entry.shape
    if shape is None:
        raise RequestError(
            f"the catalogue does not say what {entry.name} takes; run 'edgespec pull {entry.name}' first"
        )
    disk = entry.size_bytes, entry.size_bytes
    return _planned(
        entry.name, _shape_of(entry, shape), (role, weights), {"matrices": entry.size_bytes}, disk
    )


def _shape_of(entry: CatalogueEntry, shape: CatalogueShape) -> DecoderShape:
    return DecoderShape(
        architecture=entry.architecture,
        vocab_size=shape.vocabulary,
        num_layers=shape.layers,
        num_heads=shape.kv_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        context_length=shape.context,
    )


def _planned(
    name: str,
    config: DecoderShape,
    wanted: tuple[Role, str | None],
    by_class: Mapping[str, int],
    disk: tuple[int, int],
) -> Footprint:
    """What an export for the CPU will take; ``disk`` are bytes to download and to write."""
    role, weights = wanted
    native = weights in (None, "exact")
    kind: CacheType = "float16" if native else "float32"
    tables = sum(by_class.get(name, 0) for name in ("embedding", "other"))
    cache = CacheSize(
        kind=kind,
        bytes_per_token=config.kv_bytes_per_token // (2 if native else 1),
        longest=config.context_length,
        spare=int(not native and role == "target"),
        tile=KEY_TILE,
    )
    return Footprint(
        name=name,
        state="to be pulled" if disk[0] else "to be exported",
        weights_bytes=sum(by_class.values()) - tables,
        mapped=native,
        table_bytes=tables,
        twice_bytes=by_class.get("lm_head", 0) if native else 0,
        working_bytes=WORKING_BYTES * config.vocab_size,
        cache=cache,
        download_bytes=disk[0],
        export_bytes=disk[1],
    )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
