"""A bundle of one graph of any shape, for CPUs and for CUDA: planned, written, checked, and described."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgespec_export.align.alignment import open_aligned
from edgespec_export.bundle_files import describe, finish, parameters_by_class, write_json, write_texts
from edgespec_export.formats.plan import plan_decoder
from edgespec_export.graphs.calibration import calibration_tokens
from edgespec_export.graphs.parity import (
    Golden,
    check_parity,
    compare,
    find_golden,
    measure_losses,
    session_logits,
)
from edgespec_export.graphs.pieces import cut, run_pieces
from edgespec_export.graphs.ranges import ActivationRanges, measure_ranges, precision_for
from edgespec_export.graphs.tower import write_tower
from edgespec_export.graphs.trim import Tokens, keep_frequent, plan_trim
from edgespec_export.graphs.writer import write_graph
from edgespec_export.options import ExportOptions
from edgespec_export.recipe import RECIPES
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import GRAPH, HEAD_TOKENS, MANIFEST, RANK_HEAD, Bundle, Manifest
from edgespec_models.decoders.config import MTP_ROWS
from edgespec_models.decoders.record import record
from edgespec_models.errors import ModelFileError, ParityError, RequestError
from edgespec_models.graphs.plan import FULL, DecoderPlan
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.memory import peak_memory_bytes
from edgespec_runtimes.predictions import Logits
from edgespec_runtimes.session import Session

_ROUNDING_TEXTS, _ROUNDING_TOKENS = 12, 48


def build_bundle(
    source: Path, folder: Path, options: ExportOptions, progress: ProgressCallback, started: float
) -> dict[str, Any]:
    """Build a bundle for CPUs or CUDA in ``folder``. Raises as ``export_model`` does."""
    kept, trim = _plan_trim(source, folder, options, progress) or (None, None)
    ranges = _ranges(source, folder, options, progress)
    manifest, facts = _write(source, folder, options, (kept, ranges), progress)
    try:
        # Stored references belong to models without changes.
        changed = options.alignment is not None or options.adapters
        digest = "" if changed else manifest.provenance["sha256"]
        row_exact, parity = _check(folder, digest, progress)
    except RequestError as error:  # from a pass over our own tokens, which no user requested
        raise ModelFileError(f"the model cannot be run: {error}. Download or convert it again.") from error
    rounding = None
    if options.native and options.quantization is not None and options.target is None:
        rounding = _measure_rounding(source, folder, options, kept, progress)
    facts |= {"parity": parity, "row_exact": row_exact, "trim": trim, "rounding": rounding}
    facts["activations"] = None if ranges is None else ranges.to_json()
    return finish(folder, manifest, started, **facts)


def _plan_trim(
    source: Path, folder: Path, options: ExportOptions, progress: ProgressCallback
) -> tuple[Tokens, dict[str, Any]] | None:
    on_cpu = options.device is None
    size = options.trim or ("auto" if options.role == "drafter" and on_cpu else "full")
    if size == "full":
        return None
    with _open(source, options) as checkpoint:
        config = checkpoint.config
        if checkpoint.keeps_rows:
            if isinstance(size, int):
                raise RequestError(f"{source.name} is a head whose LM head is not trimmed; leave out trim")
            return None
        if config.is_head and size == "auto" and config.vocab_size <= MTP_ROWS:
            return None
        text, special = checkpoint.tokenizer_json(), checkpoint.special_tokens()
        tokenizer = Tokenizer.from_json(text, vocab_size=config.vocab_size)
    if config.is_head:
        rows = MTP_ROWS if size == "auto" else size
        return keep_frequent(rows, options, (tokenizer, special), progress)

    def write(place: Path, tokens: Tokens) -> None:
        _write(source, place, options, (tokens, None), ignore_progress)

    sized = replace(options, trim=size)
    return plan_trim(sized, (tokenizer, special), write, scratch=folder / "sizing", progress=progress)


def _write(
    source: Path,
    folder: Path,
    options: ExportOptions,
    settled: tuple[Tokens | None, ActivationRanges | None],
    progress: ProgressCallback,
) -> tuple[Manifest, dict[str, Any]]:
    """Write a bundle without its report, and return the facts for it.

    ``settled`` are the tokens of a trimmed LM head, and the ranges for float16.
    """
    with _open(source, options) as checkpoint:
        if not options.native:
            checkpoint.shorten_context()
        kept = settled[0] if checkpoint.head_tokens is None else checkpoint.head_tokens
        config = checkpoint.config
        write_texts(checkpoint, folder, options.chat_template)
        digest, plan = checkpoint.digest(progress), _plan(checkpoint, options, settled)
        if kept is not None:
            np.save(folder / HEAD_TOKENS, kept)
        ranking = checkpoint.ranking() if options.native else None
        if ranking is not None:
            np.save(folder / RANK_HEAD, ranking[1])
        made_of = {
            "source": f"{digest} {dict(checkpoint.changes)}",
            "version of edgespec": f"{version('edgespec')}, recipe {RECIPES[options.device]}",
            "set of options": repr(replace(options, overwrite=False)),
        }
        model, by_class = write_graph(checkpoint, plan, folder, progress, made_of)
        tower = checkpoint.tower if plan.pictures and not config.is_head else None
        if tower is not None:
            write_tower(*tower, folder)
        losses = measure_losses(plan, checkpoint, model)
        rows = config.vocab_size if kept is None else len(kept)
        activations = plan.precision.activations
        policy = "exact" if options.native else "portable"
        manifest = describe(
            checkpoint,
            folder,
            options,
            digest,
            weights=policy if options.quantization is None else options.quantization.name,
            formats=_weights_by_format(losses),
            bytes_by_class=by_class,
            parameters_by_class=parameters_by_class(checkpoint, config.hidden_size * rows),
            head_rows=None if kept is None else rows,
            kept=record(config).kept_in("float16" if options.native else activations),
            activations=activations,
            device="cuda" if options.device == "cuda" else None,
            choices=plan.choices,
            operators="edgespec" if options.native else "standard",
            ranking=None if ranking is None else ranking[0],
            vision=None if tower is None else tower[0],
        )
        facts = {"source_bytes": checkpoint.n_bytes, "conversion_peak": peak_memory_bytes()}
    write_json(folder / MANIFEST, manifest.to_json())
    return manifest, {"weights": losses, **facts}


def _open(source: Path, options: ExportOptions) -> Checkpoint:
    """The checkpoint of a head, or of a model with its alignment or adapters."""
    if options.alignment is None:
        return open_checkpoint(source, options.target, options.adapters, options.mmproj)
    return open_aligned(source, options.alignment)


def _plan(
    checkpoint: Checkpoint, options: ExportOptions, settled: tuple[Tokens | None, ActivationRanges | None]
) -> DecoderPlan:
    kept, ranges = settled
    plan = plan_decoder(
        checkpoint,
        options.quantization,
        native=options.native,
        head_tokens=None if kept is None else tuple(kept.tolist()),
        precision=FULL if ranges is None else precision_for(ranges),
    )
    # Those of a picture are read by heads too.
    if checkpoint.tower is None or not (options.role == "target" or checkpoint.config.is_head):
        return plan
    if not options.native:
        checkpoint.warn_of_left_out_tower()
        return plan
    tower = checkpoint.tower[0]
    return replace(plan, pictures=True, axes=tower.axes, whole_pictures=tower.whole)


def _ranges(
    source: Path, folder: Path, options: ExportOptions, progress: ProgressCallback
) -> ActivationRanges | None:
    """Ranges of activations; None for float32, which holds all."""
    if options.device is None:
        return None
    with _open(source, options) as checkpoint:
        checkpoint.shorten_context()
        return measure_ranges(checkpoint, options.calibration, folder / "ranges", progress)


def _weights_by_format(losses: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for loss in losses:
        counts[loss["format"]] += loss["weights"]
    return dict(counts)


def _measure_rounding(
    source: Path, folder: Path, options: ExportOptions, kept: Tokens | None, progress: ProgressCallback
) -> dict[str, Any]:
    """Compare the bundle with one whose weights are not rounded again (:func:`.parity.compare`)."""
    with TemporaryDirectory(dir=folder) as place:
        exact = Path(place)
        _write(source, exact, replace(options, quantization=None), (kept, None), ignore_progress)
        bundle = Bundle(folder)
        texts = calibration_tokens(
            bundle.tokenizer,
            bundle.manifest.special_tokens,
            options.calibration,
            count=_ROUNDING_TEXTS,
            longest=min(_ROUNDING_TOKENS, bundle.config.context_length),
        )
        cpu = CpuOptions(huge_pages=False)
        with closing(open_cpu(Bundle(exact), cpu)) as before, closing(open_cpu(bundle, cpu)) as after:
            return compare(_logits(before, texts, progress), _logits(after, texts, ignore_progress))


def _logits(session: Session, texts: Sequence[Sequence[int]], progress: ProgressCallback) -> Iterator[Logits]:
    for number, tokens in enumerate(texts, start=1):
        session.prefill([])
        yield session.predict(tokens).logits
        progress(Progress("Comparing with the source", number, len(texts), "texts"))


def _check(folder: Path, digest: str, progress: ProgressCallback) -> tuple[bool, dict[str, Any] | None]:
    """The self-test of rolling back, and the comparison with the stored reference if there is one."""
    bundle, golden = Bundle(folder), find_golden(digest)
    _ = bundle.tokenizer, bundle.chat_template
    if bundle.manifest.operators == "edgespec":
        return _check_whole(bundle, golden, progress)
    pieces = cut(folder / GRAPH)
    texts = () if golden is None else golden.texts
    rolls_back, row_exact, rows = run_pieces(pieces, bundle.manifest, texts, progress)
    if not rolls_back:
        raise ParityError("the exported graph gives other logits after a roll-back; nothing was kept")
    parity = None if golden is None else check_parity(([text] for text in rows), golden, bundle.head_tokens)
    for piece in pieces:
        piece.unlink()
    progress(Progress("Checking", len(pieces), len(pieces), "step"))
    return row_exact, parity


def _check_whole(
    bundle: Bundle, golden: Golden | None, progress: ProgressCallback
) -> tuple[bool, dict[str, Any] | None]:
    """The same checks on a whole session. Its weights are mapped, so it takes no more memory than a piece."""
    progress(Progress("Checking", 0, 1, "step"))
    with closing(open_cpu(bundle, CpuOptions(huge_pages=False))) as session:
        row_exact, parity = session.self_test(), None
        if golden is not None:
            parity = check_parity(session_logits(session, golden, progress), golden, bundle.head_tokens)
    progress(Progress("Checking", 1, 1, "step"))
    return row_exact, parity
