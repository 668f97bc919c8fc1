"""What an export measured: stored in the bundle, shown by ``edgespec inspect``."""

from dataclasses import asdict, dataclass
from typing import Any

from edgespec_models.bundles.config import FloatType

LARGEST_FLOAT16 = 65_504.0
_STREAM_MARGIN = 8.0  # other texts may go further; a stream in float32 costs two casts in each sublayer


@dataclass(frozen=True, slots=True)
class FormatLoss:
    """What a format costs the weights it holds.

    Attributes:
        source: weight format in the checkpoint.
        format: format in the bundle.
        relative_error: root mean square of the differences over that of the weights, on a sample of rows.
    """

    source: str
    format: str
    weights: int
    relative_error: float


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How near an export is to its reference.

    Attributes:
        positions: next tokens compared.
        top1_agreement: share of positions where both name the same most probable token.
        kl: mean Kullback-Leibler divergence of the export from the reference, nats a token. The reference
            keeps its k most probable tokens; all others count as one, so this is a lower bound.
        by_text: the same by text label.
    """

    positions: int
    top1_agreement: float
    kl: float
    by_text: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class StaticReport:
    """What the format costs, against the same model in float32, on texts it was not calibrated on.

    Figures are those of :class:`ParityReport`; ``calibration_texts`` are the texts that ranges come from.
    """

    positions: int
    top1_agreement: float
    kl: float
    calibration_texts: int


@dataclass(frozen=True, slots=True)
class ActivationRanges:
    """Largest magnitudes on some text, of a model that is to compute in float16.

    Attributes:
        residual: of the residual stream and of what is added to it.
        inner: of everything within a layer.
        tokens: how many were read.
    """

    residual: float
    inner: float
    tokens: int

    @property
    def residual_type(self) -> FloatType:
        """What holds the residual stream, with room for other texts."""
        return "float16" if self.residual * _STREAM_MARGIN <= LARGEST_FLOAT16 else "float32"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "residual_type": self.residual_type}


@dataclass(frozen=True, slots=True)
class TrimChoice:
    """What a size would mean.

    Attributes:
        rows: of the LM head.
        coverage: share of the drafter's tokens of held-out target text that it can still write.
        acceptance: share of those tokens that are its first guess, given the text before.
        step_ms: milliseconds of a drafter step.
        relative_tokens_per_second: what that promises, over the whole vocabulary.
    """

    rows: int
    coverage: float
    acceptance: float
    step_ms: float
    relative_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class TrimReport:
    """What trimming did: the choice made, rows before, texts counted, and all that was weighed."""

    chosen: TrimChoice
    of: int
    texts: int
    choices: tuple[TrimChoice, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, those of the choice made at the top."""
        choices = [asdict(choice) for choice in self.choices]
        return {**asdict(self.chosen), "of": self.of, "texts": self.texts, "choices": choices}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """One export; times in seconds, sizes in bytes.

    ``parity`` is None where no reference is stored for the source file, ``trim`` where no row was left out,
    ``static`` where the graphs take any shape, ``activations`` where they compute in float32.
    The conversion's peak memory leaves out the checks, which run the model and need what running it needs.
    """

    parity: ParityReport | None
    row_exact: bool
    weights: tuple[FormatLoss, ...]
    source_bytes: int
    bundle_bytes: int
    bytes_by_class: dict[str, int]
    seconds: float
    peak_memory_bytes: int
    conversion_peak_memory_bytes: int
    trim: TrimReport | None = None
    static: StaticReport | None = None
    activations: ActivationRanges | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "parity": None if self.parity is None else asdict(self.parity),
            "row_exact": self.row_exact,
            "trim": None if self.trim is None else self.trim.to_json(),
            "static": None if self.static is None else asdict(self.static),
            "activations": None if self.activations is None else self.activations.to_json(),
            "weights": [asdict(loss) for loss in self.weights],
            "bytes": {
                "source": self.source_bytes,
                "bundle": self.bundle_bytes,
                "by_class": self.bytes_by_class,
            },
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "conversion_peak_memory_bytes": self.conversion_peak_memory_bytes,
        }
