"""From a checkpoint to a bundle: plan, write, check, place."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from edgespec_export.bundle_files import (
    Conversion,
    describe,
    hash_files,
    parameters_by_class,
    write_json,
    write_texts,
)
from edgespec_export.extra import require_extra
from edgespec_export.formats.quantization import Quantization
from edgespec_export.graphs.trim import Tokens, Trim, TrimOptions
from edgespec_export.report import ActivationRanges, ExportReport, FormatLoss
from edgespec_export.staging import check_place, staging, storage_errors
from edgespec_models.bundles.bundle import GRAPH, MANIFEST, TOKENIZER, WEIGHTS, Bundle, KVType, Manifest, Role
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.static_graphs import PREFILL_ROWS, ExportDevice, find_chip
from edgespec_models.errors import ModelFileError, ParityError, RequestError, naming
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.schema import check_fields, checked, length, one_of, within
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer

if TYPE_CHECKING:
    from edgespec_export.graphs.parity import Golden

__all__ = ["ExportOptions", "ExportReport", "export_model"]

_CUDA_ROWS = 8
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to make of a checkpoint.

    Attributes:
        role: ``target`` or ``drafter``.
        weights: one of :data:`edgespec_export.recipe.WEIGHTS`: ``exact`` keeps the file's blocks, for
            edgespec's own kernels; ``portable`` is a graph of standard operators. None is ``exact`` where
            those kernels run: on CPUs, with no other KV cache asked for than theirs.
        quantization: how to round every matrix, instead.
        kv: what the KV cache of a portable bundle holds; ``int8`` takes a quarter of the memory of
            ``float32`` and is calibrated at export. None is ``float32``, and what else edgespec's kernels and
            devices have: float16, or formats of an NPU.
        name: the model's name; None takes the source's.
        overwrite: replace a bundle that is there already.
        trim: which rows a drafter's LM head keeps, and the texts that settle it.
        device: what else than the CPU the bundle is for; None is the CPU. ``cuda`` computes in float16, its
            KV cache too. Graphs for NPUs have fixed shapes, and the device settles the formats of weights and
            KV cache.
        buckets: with an NPU, lengths of the KV cache in tokens; empty takes 512, 1024 and 2048.
        alignment: a file that 'edgespec align' wrote for this drafter; it goes into the weights before they
            are rounded.
        chip: with ``npu-qnn``, one of :data:`CHIPS` to compile every graph
            for; None leaves that to the device, at each load.
    """

    role: Role = "target"
    weights: Annotated[str, one_of(WEIGHTS)] | None = None
    quantization: Quantization | None = None
    kv: KVType | None = None
    name: Annotated[str, length(1, 200)] | None = None
    overwrite: bool = False
    trim: TrimOptions = field(default_factory=TrimOptions)
    device: ExportDevice | None = None
    buckets: tuple[Annotated[int, within(PREFILL_ROWS)], ...] = ()
    chip: str | None = None
    alignment: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def native(self) -> bool:
        """Whether the graph consists of edgespec's own operators."""
        return self.weights in (None, "exact") and self.device is None and self.kv is None


@checked
def export_model(
    source: Path,
    out: Path,
    *,
    options: ExportOptions | None = None,
    progress: ProgressCallback = ignore_progress,
) -> ExportReport:
    """Export ``source``, a GGUF file or a Hugging Face directory, to the bundle ``out``.

    The bundle appears at ``out`` when it is complete and has passed its checks, or not at all.

    Raises:
        ModelFileError, UnsupportedModelError, TokenizerError: the source cannot be exported: damaged, or of
            an architecture, feature or weight format that edgespec lacks.
        ParityError: the export does not compute what the source computes.
        BundleError: ONNX Runtime cannot load the graphs, or they cannot roll back.
        RequestError: an option out of range, options that exclude each other, or ``out`` exists.
        StorageError: the disk is full, or ``out`` cannot be written.
        DeviceError: a chip is named, and its compiler is missing or refuses a graph.
        EdgespecError: the ``export`` extra is not installed.
    """
    options = options or ExportOptions()
    require_extra()
    _check_request(source, out, options)
    started = perf_counter()
    with storage_errors(out), staging(out) as folder, naming(source):
        if options.device in (None, "cuda"):
            report = _build(source, folder, options, progress, started)
        else:
            from edgespec_export.devices.device_bundle import build_for_device

            report = build_for_device(source, folder, options, progress, started)
    return report


def _build(
    source: Path, folder: Path, options: ExportOptions, progress: ProgressCallback, started: float
) -> ExportReport:
    trim = _plan_trim(source, folder, options, progress)
    ranges = _ranges(source, folder, options, progress)
    settled = None if trim is None else trim.tokens, ranges
    manifest, losses, conversion = _write(source, folder, options, settled, progress, started)
    try:
        # Stored references are of models as they were made.
        digest = manifest.provenance["sha256"] if options.alignment is None else ""
        row_exact, parity = _check(folder, digest, progress)
    except RequestError as error:  # of a pass over our own tokens, which nobody asked for
        raise ModelFileError(f"the model cannot be run: {error}. Download or convert it again.") from error
    return conversion.finish(
        folder,
        manifest,
        parity=parity,
        row_exact=row_exact,
        weights=losses,
        trim=None if trim is None else trim.report,
        activations=ranges,
    )


def _plan_trim(source: Path, folder: Path, options: ExportOptions, progress: ProgressCallback) -> Trim | None:
    from edgespec_export.align.merge import open_aligned
    from edgespec_export.graphs.sizing import plan_trim

    on_cpu = options.device is None
    size = options.trim.size or ("auto" if options.role == "drafter" and on_cpu else "full")
    if size == "full":
        return None
    with open_aligned(source, options.alignment) as checkpoint:
        text, special = checkpoint.tokenizer_json(), checkpoint.special_tokens()
        tokenizer = Tokenizer.from_json(text, vocab_size=checkpoint.config.vocab_size)

    def write(place: Path, tokens: Tokens) -> None:
        _write(source, place, options, (tokens, None), ignore_progress, perf_counter())

    trim = replace(options.trim, size=size)
    return plan_trim(trim, (tokenizer, special), write, scratch=folder / "sizing", progress=progress)


def _write(
    source: Path,
    folder: Path,
    options: ExportOptions,
    settled: tuple[Tokens | None, ActivationRanges | None],
    progress: ProgressCallback,
    started: float,
) -> tuple[Manifest, tuple[FormatLoss, ...], Conversion]:
    """Everything of a bundle but the report; what the formats cost the weights.

    ``settled`` are tokens that a trimmed LM head keeps, and what float16 would have to hold.
    """
    from edgespec_export.align.merge import open_aligned
    from edgespec_export.graphs.graph_files import write_graph

    head_rows = None if settled[0] is None else len(settled[0])
    with open_aligned(source, options.alignment) as checkpoint:
        config, special = checkpoint.config, checkpoint.special_tokens()
        write_texts(checkpoint, folder)
        digest = hash_files(checkpoint.files, progress)
        written = write_graph(checkpoint, folder, options, settled, progress)
        float_kv_layers: tuple[int, ...] = ()
        if options.kv == "int8":
            float_kv_layers = _quantize_cache(folder, config, special)
        head = config.hidden_size * (head_rows or config.vocab_size)
        manifest = describe(
            checkpoint,
            folder,
            options,
            digest,
            weights=written.weights,
            formats=_weights_by_format(written.losses),
            bytes_by_class=written.bytes_by_class,
            parameters_by_class=parameters_by_class(checkpoint, head),
            head_rows=head_rows,
            kv=options.kv or ("float16" if options.native else written.activations),
            float_kv_layers=float_kv_layers,
            activations=written.activations,
            device="cuda" if options.device == "cuda" else None,
            choices=written.choices,
            operators="edgespec" if options.native else "standard",
        )
        conversion = Conversion.of(checkpoint.files, started)
    write_json(folder / MANIFEST, manifest.to_json())
    return manifest, written.losses, conversion


def _ranges(
    source: Path, folder: Path, options: ExportOptions, progress: ProgressCallback
) -> ActivationRanges | None:
    """How large activations become; None where they are float32, which holds all."""
    from edgespec_export.align.merge import open_aligned
    from edgespec_export.graphs.ranges import measure_ranges

    if options.device is None:
        return None
    with open_aligned(source, options.alignment) as checkpoint:
        return measure_ranges(checkpoint, options.trim.texts, folder / "ranges", progress)


def _quantize_cache(folder: Path, config: ModelConfig, special: SpecialTokens) -> tuple[int, ...]:
    from edgespec_export.graphs.kv_cache import calibration_tokens, quantize_cache

    tokenizer = Tokenizer.from_file(folder / TOKENIZER, vocab_size=config.vocab_size)
    texts = calibration_tokens(tokenizer, special)
    return quantize_cache(folder / GRAPH, config, texts)


def _weights_by_format(losses: Sequence[FormatLoss]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for loss in losses:
        counts[loss.format] += loss.weights
    return dict(counts)


def _check(folder: Path, digest: str, progress: ProgressCallback) -> tuple[bool, Any]:
    """Roll-back self-test, and the comparison with the stored reference if there is one, piece by piece."""
    from edgespec_export.graphs.parity import check_parity, find_golden
    from edgespec_export.graphs.pieces import cut, run_pieces

    bundle = Bundle(folder)
    _ = bundle.tokenizer, bundle.chat_template
    golden = find_golden(digest)
    if bundle.manifest.operators == "edgespec":
        return _check_native(bundle, golden, progress)
    pieces = cut(folder / GRAPH)
    texts = () if golden is None else golden.texts
    result = run_pieces(pieces, bundle.config, texts, progress)
    if not result.rolls_back:
        raise ParityError("the exported graph gives other logits after a truncation; nothing was kept")
    logits = ([rows] for rows in result.logits)
    parity = None if golden is None else check_parity(logits, golden, bundle.head_tokens)
    for piece in pieces:
        piece.unlink()
    progress(Progress("Checking", len(pieces), len(pieces), "step"))
    return result.row_exact, parity


def _check_native(bundle: Bundle, golden: "Golden | None", progress: ProgressCallback) -> tuple[bool, Any]:
    """The same, of a whole session: its weights are mapped, so that it takes no more memory than a piece."""
    from edgespec_export.graphs.parity import check_parity, session_logits
    from edgespec_runtimes.cpu import CpuSession

    session = CpuSession(bundle)
    progress(Progress("Checking", 0, 1, "step"))
    try:
        row_exact, parity = session.self_test(), None
        if golden is not None:
            texts = session_logits(session, golden)
            parity = check_parity(_counted(texts, len(golden.texts), progress), golden, bundle.head_tokens)
    finally:
        session.close()
    progress(Progress("Checking", 1, 1, "step"))
    return row_exact, parity


def _counted(items: Iterable[T], count: int, progress: ProgressCallback) -> Iterator[T]:
    for number, item in enumerate(items):
        progress(Progress("Checking", number, count, "step"))
        yield item


def _check_request(source: Path, out: Path, options: ExportOptions) -> None:
    if options.role == "target" and options.trim.size not in (None, "full"):
        raise RequestError(
            f"trim size {options.trim.size} with role=target: a target must be able to write every token; "
            "only drafters are trimmed (role=drafter)"
        )
    if options.role == "target" and options.alignment is not None:
        raise RequestError("role=target with an alignment: only drafters are aligned; use role=drafter")
    _check_weights(options)
    _check_device(options)
    check_place(source, out, overwrite=options.overwrite, replaceable=(out / MANIFEST).is_file)


def _check_weights(options: ExportOptions) -> None:
    if options.weights is not None and options.quantization is not None:
        raise RequestError(
            f"weights={options.weights!r} and quantization {options.quantization.name!r} exclude each other; "
            "give a policy, or bits and method"
        )
    if options.weights == "exact" and options.kv is not None:
        raise RequestError(
            "weights='exact' is of graphs for edgespec's kernels, whose KV cache is float16; leave out "
            f"weights, or kv={options.kv!r}"
        )


def _check_device(options: ExportOptions) -> None:
    """With a device, what it settles cannot be chosen; only bundles with fixed shapes have buckets."""
    if options.chip is not None:
        _check_chip(options.chip, options.device)
    if options.device in (None, "cuda") and options.buckets:
        raise RequestError("buckets are of bundles with fixed shapes; give an NPU as device, such as npu-qnn")
    if options.device is None:
        return
    if options.device == "cuda":
        _check_cuda(options)
        return
    settled = {
        "weights": options.weights,
        "quantization": options.quantization,
        "kv": options.kv,
        "trim": options.trim.size not in (None, "full"),
        "alignment": options.alignment,
    }
    given = ", ".join(name for name, value in settled.items() if value)
    if given:
        raise RequestError(
            f"device={options.device} settles formats and keeps the whole LM head; leave out {given}"
        )


def _check_chip(name: str, device: ExportDevice | None) -> None:
    """Before the export's minutes: the chip is known, and there is a compiler for it."""
    from edgespec_export.devices.contexts import compiler_for

    if device != "npu-qnn":
        raise RequestError(
            f"chip={name!r} is of bundles for the device npu-qnn, not for {device or 'the CPU'}"
        )
    compiler_for(find_chip(name))


def _check_cuda(options: ExportOptions) -> None:
    if options.weights == "exact":
        raise RequestError(
            "weights='exact' is of graphs for edgespec's kernels, which run on CPUs; leave out weights"
        )
    if options.kv is not None:
        raise RequestError(f"device=cuda has a float16 KV cache; leave out kv={options.kv!r}")
    size = options.trim.size
    if size == "auto":
        raise RequestError("trim size auto measures on this CPU; with device=cuda give a number, or 'full'")
    if isinstance(size, int) and size % _CUDA_ROWS:
        more = size - size % -_CUDA_ROWS
        raise RequestError(
            f"trim size is {size}; CUDA's kernels for few rows take a multiple of {_CUDA_ROWS}, such as "
            f"{more}"
        )
