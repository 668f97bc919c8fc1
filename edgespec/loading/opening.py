"""Opening: a name or path becomes a bundle on disk, and bundles become running models with measured costs.

Models open side by side. Sessions copy or repack their weights, which holds no lock of Python's; the
tokenizers, which take as long and hold it, load meanwhile. Measurements of an earlier load
(:mod:`.measurements`) are used again: sessions on the CPU are not tested again for whether they can roll
back, and T(n) takes a few passes instead of dozens.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

from edgespec.loading.measurements import Conditions, Measurement, recall, remember
from edgespec_models.bundles.bundle import MANIFEST, WEIGHTS, Bundle, Role
from edgespec_models.bundles.static_graphs import ExportDevice
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import DeviceError, RequestError
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.schema import checked, length, one_of, shown
from edgespec_runtimes.cost import (
    DEFAULT_ROWS,
    CostCurve,
    look_again,
    measure_context,
    measure_cost,
    measure_experts,
    recheck_cost,
    sample_cost,
)
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.devices import AUTO, PROCESSOR, Device, Placement
from edgespec_runtimes.session import Session

NGRAM = "ngram"
"""Names the drafter that is no model."""
Reference = Annotated[str | Path, length(1, 4096)]
"""A model's name, or a path; no system has longer paths."""
DRAFTER_READING_ROWS = 32
"""The rows of the pass that tells how long a drafter takes to read a token of a prompt."""

_DRAFTER_ROWS = (1, 2, DRAFTER_READING_ROWS)
_RECHECKED_ROWS = 8  # at most, because passes over more rows would delay the load


@dataclass(frozen=True, slots=True)
class TimedModel:
    """A running model and the costs of its passes.

    ``placed`` is where it was to run, and why. ``remembered`` says whether the curve is an earlier load's,
    checked, or was measured now.
    """

    bundle: Bundle
    session: Session
    curve: CostCurve
    placed: Placement
    remembered: bool = False

    @property
    def placement(self) -> Placement:
        """Where the model runs now, and why. Opening a longer bucket may change the reason."""
        return self.placed.opened(self.session)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A target and its drafter."""

    target: TimedModel
    drafter: TimedModel | None = None
    same_vocabulary: bool = False


@checked
def open_model(
    reference: Reference,
    role: Role,
    *,
    weights: Annotated[str, one_of(WEIGHTS)] | None = None,
    device: ExportDevice | None = None,
    target: Reference | None = None,
    adapters: tuple[str, ...] = (),
    mmproj: Path | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Bundle:
    """Open the bundle that ``reference`` names; make it first if it does not exist.

    Args:
        reference: a bundle's directory, one that onnxruntime-genai's builder, mobius or Optimum wrote, a
            Hugging Face directory (``config.json``, safetensors), a GGUF file, a catalogue name, or a model
            on the hub: ``hf:OWNER/REPO[/FILE.gguf][@REVISION]``, which is asked for at first use only.
        role: what a new export is for.
        weights: policy of a new export; None takes the default.
        device: what else than the CPU a new export is for.
        target: what a head drafts for; its export reads that too.
        adapters: what a new export merges; see :attr:`.LoadOptions.adapters`.
        mmproj: the file of its tower; see :attr:`.LoadOptions.mmproj`.
        progress: told of downloads and exports.

    Raises:
        CatalogueError: neither a path nor a name of the catalogue.
        DownloadError: what was named cannot be pulled.
        RequestError: weights that are not known, or for a device that leaves no choice.
        StorageError: the cache cannot be written.
        EdgespecError: the model cannot be pulled, exported or opened for another reason.
    """
    path = Path(reference)
    try:
        path.is_dir()
    except OSError as error:  # a name too long, a folder that cannot be entered
        raise RequestError(
            f"{shown(str(reference))} cannot be opened: {error.strerror}. Give a path that can be "
            "read, or a name that 'edgespec models' lists."
        ) from error
    if (path / MANIFEST).is_file() and not (adapters or mmproj):
        return Bundle(path)
    from edgespec_models.bundles.foreign import is_model, open_bundle  # what follows, bundles do not need

    if is_model(path) and not (adapters or mmproj):
        return open_bundle(path)
    from edgespec.loading.first_use import check_weights, locate_hub, open_made
    from edgespec_export.options import ExportOptions
    from edgespec_models.downloads.hub import on_hub

    options = ExportOptions(role, weights, device=device, adapters=adapters, mmproj=mmproj)
    named = None if path.exists() else on_hub(str(reference))
    if named is not None:
        check_weights(options)
        path = locate_hub(named, progress, native=options.native)
    return open_made(path, str(reference), options, progress, None if target is None else str(target))


def check_target(bundle: Bundle) -> None:
    """Raise an error if ``bundle`` cannot be a target."""
    if bundle.manifest.role == "drafter":
        raise RequestError(
            f"{bundle.path} was exported as a drafter, which may lack tokens; export the model with the role "
            "target"
        )


def _layers_for(drafter: Bundle | None, target: Bundle) -> tuple[int, ...]:
    """The layers of ``target`` whose states a head reads, after a check of its shapes, or texts need."""
    made = target.config
    if drafter is None or not drafter.config.is_head:
        return (made.num_layers,) if target.embeds or target.ranks else ()
    head = drafter.config
    if not isinstance(made, Transformer) or target.manifest.operators != "edgespec":
        raise RequestError(
            f"{drafter.path.name} is a head, which reads states of the target's layers, and the bundle "
            f"{target.path.name} has no such outputs; export the target for the CPU, with --weights exact"
        )
    last, whole = max(head.feature_layers), len(head.feature_layers) == 1  # what leaves the last layer
    reads = last == made.num_layers if whole else last <= made.num_layers
    if isinstance(head, Transformer):
        if record(head).read and "int8" in {tensor.type for tensor in target.manifest.kept}:
            raise RequestError(
                f"{drafter.path.name} reads its target's keys and values in 16 bits; leave out kv, or take "
                "another drafter"
            )
        reads &= {*record(head).read_in("float16")} <= {*target.manifest.kept}
    wanted = head.vocab_size, head.feature_width, reads
    if wanted != (made.vocab_size, made.hidden_size, True):
        raise RequestError(
            f"{drafter.path.name} is a head for a target of {head.vocab_size} tokens, width "
            f"{head.feature_width} and {last} layers{' or more' * (not whole)}; "
            f"{target.path.name} has {made.vocab_size}, {made.hidden_size} and {made.num_layers}; use the "
            "head of this target"
        )
    late = record(made).late
    if late is not None and min(head.feature_layers) < late <= last:
        raise RequestError(
            f"{drafter.path.name} reads layers {', '.join(map(str, head.feature_layers))} of its target, and "
            f"from layer {late} on {target.path.name} computes rows with logits alone; edgespec has "
            "heads of layers before it, or from it on"
        )
    return head.feature_layers


def open_pair(
    target: Bundle,
    drafter: Bundle | None,
    options: CpuOptions,
    placements: tuple[Placement | None, Placement | None] = (None, None),
    *,
    progress: ProgressCallback = ignore_progress,
) -> Loaded:
    """Load a target and its drafter. After an error, neither stays loaded.

    ``options`` are the target's; the drafter's are the same, without exact rows. Without ``placements`` the
    bundles say where they run. ``progress`` is told of measurements.
    """
    check_target(target)
    with closed_on_failure() as opened:
        # Leaving the pool waits for its threads, so that a session they open late is closed too.
        with ThreadPoolExecutor(2, thread_name_prefix="edgespec-load") as pool:
            read_layers = _layers_for(drafter, target)
            opening = [pool.submit(_open, target, options, opened, placements[0], read_layers)]
            if drafter is not None:
                faster = replace(options, exact_rows=False)
                opening.append(pool.submit(_open, drafter, faster, opened, placements[1]))
            own, marks = target.tokenizer, target.marks  # special in the target alone: drafts are ids
            same = drafter is not None and drafter.tokenizer.with_special(marks).matches(own)
            timed = [future.result() for future in opening]
        # Only now, when nothing else runs, do passes take their own time.
        drafting = None
        if drafter is not None:
            drafting = timed[1](_DRAFTER_ROWS if drafter.config.block is None else DEFAULT_ROWS, progress)
        return Loaded(timed[0](timed_rows(options), progress), drafting, same)


def open_one(
    bundle: Bundle,
    options: CpuOptions,
    rows: Sequence[int],
    *,
    progress: ProgressCallback = ignore_progress,
) -> TimedModel:
    """Load one model. Its curve has a point for each number of ``rows`` that fits in its context."""
    with closed_on_failure() as opened:
        return _open(bundle, options, opened)(rows, progress)


def timed_rows(options: CpuOptions) -> Sequence[int]:
    """Rows of the target's passes that are timed; wide ones take seconds where weights come from the disk."""
    return [n for n in DEFAULT_ROWS if options.copied_bytes is None or n <= _RECHECKED_ROWS]


@contextmanager
def closed_on_failure() -> Iterator[list[Session]]:
    """A list of sessions that are closed if the block ends with an exception."""
    opened: list[Session] = []
    try:
        yield opened
    except BaseException as error:
        for session in opened:
            session.close()
        if isinstance(error, MemoryError):
            raise DeviceError(
                "not enough memory to load the models; free some, or take smaller ones"
            ) from error
        raise


def placed(bundle: Bundle, wanted: str = AUTO) -> Placement:
    """The placement of ``bundle``. Devices are searched only if the choice is not plainly the CPU.

    Raises:
        DeviceError: the wanted device is unknown or missing, or it cannot run this bundle.
    """
    if wanted == AUTO and bundle.manifest.graph_kind == "dynamic":
        return Placement(PROCESSOR, "the bundle was made for the CPU")
    from edgespec_runtimes.discovery import place

    return place(bundle, wanted)


def conditions_of(bundle: Bundle, options: CpuOptions, device: Device | None = None) -> Conditions:
    """The conditions of ``bundle``'s measurements. Without a device they are for the one it would open on."""
    if bundle.manifest.graph_kind == "dynamic":
        return Conditions.of(bundle, options)
    return Conditions.of(bundle, options, (device or placed(bundle).device).identity)


def _open(
    bundle: Bundle,
    options: CpuOptions,
    opened: list[Session],
    where: Placement | None = None,
    read_layers: Sequence[int] = (),
) -> Callable[..., TimedModel]:
    """Open a session into ``opened``, which closes it; returns the function that times its passes."""
    placement = where or placed(bundle)
    conditions = conditions_of(bundle, options, placement.device)
    known = recall(conditions)
    # Of other devices, what measurements are kept under does not name the chip.
    row_exact = known.row_exact if known is not None and conditions.device == "cpu" else None
    if bundle.manifest.graph_kind == "dynamic":
        session = open_cpu(bundle, options, row_exact=row_exact, read_layers=read_layers)
    elif bundle.manifest.graph_kind == "dynamic-float16":
        from edgespec_runtimes.cuda import open_cuda

        session = open_cuda(bundle, placement.device, options, row_exact=row_exact)
    else:
        from edgespec_runtimes.static import open_static

        session = open_static(bundle, placement.device, options, row_exact=row_exact)
    opened.append(session)

    def timed(rows: Sequence[int], progress: ProgressCallback = ignore_progress) -> TimedModel:
        fitting = [n for n in rows if n <= bundle.config.context_length // 2]
        curve, remembered = _curve(session, fitting, conditions, known, progress)
        return TimedModel(bundle, session, curve, placement, remembered)

    return timed


def _curve(
    session: Session,
    rows: Sequence[int],
    conditions: Conditions,
    known: Measurement | None,
    progress: ProgressCallback,
) -> tuple[CostCurve, bool]:
    """The earlier curve if it still holds, and whether it does; else a new one, which is kept.

    On a machine that is never quiet no curve is confirmed. One that is in doubt is kept too, because the next
    load's check of it mends what was disturbed, in a part of the time.
    """
    from_disk = conditions.options.copied_bytes is not None
    if known is not None and known.curve.seconds_by_rows.keys() >= set(rows):
        if from_disk:  # where the mean of a few passes says little
            return known.curve, True
        checked = recheck_cost(session, known.curve, max(n for n in rows if n <= _RECHECKED_ROWS))
        if checked is not None:
            curve = look_again(session, checked, _RECHECKED_ROWS)
            if curve != checked:  # it had been measured while the machine was busy
                remember(conditions, Measurement(known.row_exact, curve))
            return curve, True
    if from_disk:
        curve = measure_experts(session, sample_cost(session, rows), fmean)
    else:
        curve = measure_experts(session, measure_cost(session, rows, progress=progress))
    curve = measure_context(session, curve)
    if not from_disk:
        curve = look_again(session, curve, _RECHECKED_ROWS)  # later than the samples before
    remember(conditions, Measurement(session.model.row_exact, curve))
    return curve, False
