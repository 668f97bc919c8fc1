"""The memory and disk space that models would need here, before they are pulled, exported or loaded."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Annotated, Final

from edgespec.loading import drafters, first_use
from edgespec.loading.first_use import Found, name_of
from edgespec.loading.footprint import (
    CacheSize,
    Footprint,
    Plan,
    State,
    footprint_of,
    footprint_with,
    with_gpu,
)
from edgespec.loading.opening import NGRAM, Reference
from edgespec_export.options import ExportOptions
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.config import DecoderShape
from edgespec_models.decoders.kept import BLOCK, in_bytes
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.downloads.catalog import CatalogueEntry, HubName, entries, hub_names
from edgespec_models.downloads.download import is_pulled, model_path, pulled_path
from edgespec_models.downloads.hub import on_hub, pulled_hub
from edgespec_models.errors import RequestError
from edgespec_models.families import read_config
from edgespec_models.files.facts import Facts
from edgespec_models.progress import ignore_progress
from edgespec_models.schema import checked, within
from edgespec_models.storage import home
from edgespec_runtimes.memory import machine_memory
from edgespec_runtimes.session import KV_STEP

_LENGTHS: Final = (2048, 8192, 32768)


@checked
def plan(
    target: Reference,
    drafter: Reference | None = "auto",
    *,
    context: Annotated[int, within(1)] | None = None,
    weights: str | None = None,
    adapters: tuple[str, ...] = (),
    mmproj: Path | None = None,
    kv: str = "16bit",
) -> Plan:
    """Plan the memory and disk space of a target and its drafter; nothing is pulled, exported or loaded.

    Args:
        target: as :func:`edgespec.load` takes it; a model of the hub without a name (``hf:``) has to be
            pulled before. If a model of the catalogue is not here, its file's size counts as its weights.
        drafter: the same; ``"auto"``, ``"ngram"`` and None as :func:`edgespec.load` takes them.
        context: tokens of a text to plan for besides 2,048, 8,192, 32,768 and the model's whole context.
        weights: policy of exports, as in :class:`edgespec.LoadOptions`.
        adapters: adapters of the target, as there.
        mmproj: the file of the target's tower, as there.
        kv: bits of keys and values, as there.

    Returns:
        A :class:`Plan`. Its verdicts are for the CPU's memory; weights and KV cache of a bundle that was made
        for CUDA count in :meth:`Plan.gpu_bytes`.

    Raises:
        RequestError: a context longer than the model's, a model of the hub that was not pulled.
        EdgespecError: a model that cannot be found, read or exported.
    """
    options = ExportOptions("target", weights, adapters=adapters, mmproj=mmproj)
    located = look_up(target, options)
    first = footprint(located, options)
    if adapters:
        first = replace(first, name=" + ".join((first.name, *adapters)))
    if drafter == "auto":
        drafter = _drafter_of(
            located, first.export_bytes, str(target), portable=not options.native, in_bytes=kv == "8bit"
        )
        if Path(target).exists() and not (Path(drafter).exists() or pulled_path(drafter)):
            drafter = NGRAM  # nothing is fetched unasked for a file of the user's own
    second = None
    if isinstance(located, HubName) and drafter == located.name and located.mtp:
        second = _of_layer(located, options)
    elif drafter is not None and drafter != NGRAM:
        options = ExportOptions("drafter", weights)
        source, path = first_use.checkpoint_of(target), Path(drafter)
        model: Found | HubName | None = None
        if source is not None and path.exists():
            model = first_use.made_for(path, source, options)
        model = model or (path if path == source else look_up(drafter, options))
        second = footprint(model, replace(options, target=source))
    if kv == "8bit":
        first, second = in_8_bits(first), second and in_8_bits(second)
    longest = first.cache.longest
    if context is not None and context > longest:
        raise RequestError(
            f"context is {context:,}; allowed: 1 to {longest:,}, the tokens {first.name} can hold"
        )
    lengths = {min(tokens, longest) for tokens in (*_LENGTHS, longest, context or longest)}
    disk = next(path for path in (home(), *home().resolve().parents) if path.is_dir())
    made = with_gpu(Plan(first, second, machine_memory(), shutil.disk_usage(disk).free))
    return replace(made, contexts=tuple(made.fit(tokens) for tokens in sorted(lengths)))


def in_8_bits(model: Footprint) -> Footprint:
    """The footprint with keys and values in 8 bits."""
    return replace(model, cache=replace(model.cache, kept=in_bytes(model.cache.kept)))


def look_up(reference: Reference, options: ExportOptions) -> Found | HubName:
    """Find what :func:`.opening.open_model` would open for the CPU; nothing is pulled or exported."""
    path: Path | None = Path(reference)
    named = None if Path(reference).exists() else on_hub(str(reference))
    if named is not None:
        path = pulled_hub(named)
    if path is None:
        if str(reference) in hub_names():
            return hub_names()[str(reference)]
        raise RequestError(
            f"{reference} is not on this machine, and a plan needs its files; run 'edgespec pull "
            f"{reference}' first"
        )
    return first_use.found_at(path, str(reference), options)


def _drafter_of(
    target: Found | HubName, n_bytes: int, reference: str, *, portable: bool, in_bytes: bool
) -> str:
    """The drafter that ``"auto"`` would choose, by the bundle, the catalogue, or the file and its export."""

    def layer(shape: DecoderShape, facts: Mapping[str, str]) -> Path | None:
        return None if portable else first_use.mtp_layer(shape, facts.get("left_out"), reference)

    if isinstance(target, CatalogueEntry) and target.drafter is not None:
        return target.drafter
    digest: object = None
    if isinstance(target, Bundle):
        portable = target.manifest.operators != "edgespec"
        n_bytes, facts, config = target.manifest.size_bytes, target.manifest.provenance, target.config
        digest, own = facts.get("sha256"), layer(config, facts)
    elif isinstance(target, CatalogueEntry | HubName):
        n_bytes, config = target.size_bytes, _config_of(target)
        own = Path(target.name) if isinstance(target, HubName) and target.mtp and not portable else None
    else:
        from edgespec_export.sources.open import open_checkpoint

        with open_checkpoint(target) as checkpoint:
            config, own = checkpoint.config, layer(checkpoint.config, checkpoint.changes)
            if checkpoint.n_bytes in {entry.size_bytes for entry in entries().values()}:
                digest = checkpoint.digest(ignore_progress)
    heads_of = "" if portable else reference
    return drafters.recommended(config, n_bytes, digest, heads_of, own, in_bytes=in_bytes)[0]


def footprint(model: Found | HubName, options: ExportOptions) -> Footprint:
    """The footprint of a model of :func:`look_up`, with the same options. A head has a target in them."""
    if isinstance(model, Bundle):
        return footprint_of(model, exact_rows=options.role == "target")
    if isinstance(model, Path):
        return _of_checkpoint(name_of(model, options.target), model, options)
    if isinstance(model, CatalogueEntry) and is_pulled(model):
        return _of_checkpoint(model.name, model_path(model), replace(options, target=None))
    config, size = _config_of(model), model.size_bytes  # as its weights, because an export keeps them
    mmproj, tower = (model.mmproj_bytes, model.tower_bytes) if isinstance(model, HubName) else (0, 0)
    tower = tower if options.role == "target" and options.native else 0
    by_class, sizes = _spread(config, size), {"download_bytes": size + mmproj, "export_bytes": size + tower}
    made = _planned(model.name, config, options, by_class, **sizes)
    return replace(made, working_bytes=made.working_bytes + tower)


def _of_layer(model: HubName, options: ExportOptions) -> Footprint:
    """The footprint of the MTP layer in a model's file."""
    target = _config_of(model)
    layer, size = target.mtp_layer, round(drafters.mtp_price(target, whole=True) * model.size_bytes)
    assert layer is not None  # of a family with such layers
    options = replace(options, role="drafter")
    return _planned(f"{model.name}-mtp", layer, options, _spread(layer, size), export_bytes=size)


def _spread(config: Transformer, size: int) -> dict[str, int]:
    """A file's bytes by class, as if all weights took as many."""
    weights = {"matrices": 0, "experts": 0, "embedding": 0}
    for name, shape in record(config).tensors.items():
        kind = "experts" if ".experts_" in name else "embedding" if name == "inputs" else "matrices"
        weights[kind] += prod(shape) if name != "embed" else 0  # which passes read as the LM head, if tied
    return {kind: size * count // sum(weights.values()) for kind, count in weights.items()}


def _of_checkpoint(name: str, source: Path, options: ExportOptions) -> Footprint:
    """The footprint of the export of a checkpoint on this machine."""
    from edgespec_export.graphs.tower import tower_bytes
    from edgespec_export.graphs.writer import weight_bytes
    from edgespec_export.sources.open import is_head, open_checkpoint

    is_draft = options.role == "drafter" and is_head(source, options.target)
    target = options.target if is_draft else None
    if is_draft and target is None:
        raise RequestError(
            f"{name} is a head, whose plan needs its target's source on this machine; pull the target, or "
            "give its file or folder"
        )
    with open_checkpoint(source, target, options.adapters, options.mmproj) as checkpoint:
        by_class, file_bytes = weight_bytes(checkpoint, options.weights)
        config, sees = checkpoint.config, options.role == "target" and options.native
        tower = tower_bytes(checkpoint.tower[0]) if sees and checkpoint.tower is not None else 0
    made = _planned(name, config, options, by_class, export_bytes=file_bytes + tower)
    return replace(made, working_bytes=made.working_bytes + tower)


def _config_of(model: CatalogueEntry | HubName) -> Transformer:
    if not model.config:
        raise RequestError(
            f"the catalogue has no sizes of {model.name}; run 'edgespec pull {model.name}' first"
        )
    facts = Facts(model.config, f"the config of {model.name}")
    return read_config(
        facts if isinstance(model, CatalogueEntry) else facts.over({"vocab_size": model.vocabulary})
    )


def _planned(
    name: str,
    config: Transformer,
    options: ExportOptions,
    by_class: Mapping[str, int],
    *,
    export_bytes: int,
    download_bytes: int = 0,
) -> Footprint:
    """The footprint of an export for the CPU."""
    native = options.native
    spare, step = int(not native and options.role == "target"), BLOCK if native else KV_STEP
    kept = record(config).kept_in("float16" if native else "float32")
    cache = CacheSize(kept=kept, longest=config.context_length, spare=spare, step=step)
    state: State = "to be pulled" if download_bytes else "to be exported"
    sizes = {"download_bytes": download_bytes, "export_bytes": export_bytes}
    return footprint_with(name, config, by_class, cache, native=native, state=state, **sizes)
