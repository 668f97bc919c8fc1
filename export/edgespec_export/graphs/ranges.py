"""Ranges of a model's activations, and the types of a graph in 16-bit floats.

float16 ends at 65,504. The residual stream is a sum over all layers: Gemma 3's exceeds that, and in many
models a few channels of the first token are thousands of times larger than the rest (Sun et al. 2024,
"Massive Activations in Large Language Models"). So the model, in 8 bits and float32, reads some text, and the
residual stream stays in float32 if it comes near the end.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgespec_export.formats.plan import plan_decoder
from edgespec_export.formats.quantization import Quantization
from edgespec_export.graphs.calibration import calibration_tokens
from edgespec_export.graphs.pieces import cut, walk
from edgespec_export.graphs.writer import write_graph
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.bundle import GRAPH
from edgespec_models.decoders.config import FloatType
from edgespec_models.decoders.record import record
from edgespec_models.errors import RequestError, UnsupportedModelError
from edgespec_models.files.blocks import F32
from edgespec_models.graphs.plan import Precision
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.text.tokenizer import Tokenizer

LARGEST_FLOAT16 = 65_504.0
_STREAM_MARGIN = 8.0  # other texts may go further; a stream in float32 costs two casts in each sublayer
_INNER_MARGIN = 2.0  # the largest are the first token's, which hardly depend on the text
_TEXTS, _LONGEST = 16, 192  # tokens of a text
_SUM = 3  # SkipSimplifiedLayerNormalization's output
_PRODUCTS = ("MatMulNBits", "MatMul")
_INNER = (*_PRODUCTS, "GroupQueryAttention", "Mul", "Gelu", "QuickGelu")
_BLOCK = 32  # columns whose sum formats with minimums multiply too
_READER = Quantization(8)  # near to any source, and its graph gives projections their input as it is


@dataclass(frozen=True, slots=True)
class ActivationRanges:
    """Largest magnitudes of a model's activations on some text.

    Attributes:
        residual: in the residual stream and its addends.
        inner: within layers.
        tokens: the number of tokens that were read.
    """

    residual: float
    inner: float
    tokens: int

    @property
    def residual_type(self) -> FloatType:
        """The type that holds the residual stream, with room for other texts."""
        return "float16" if self.residual * _STREAM_MARGIN <= LARGEST_FLOAT16 else "float32"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "residual_type": self.residual_type}


def precision_for(ranges: ActivationRanges) -> Precision:
    """The types of a graph in 16-bit floats; UnsupportedModelError if float16 does not hold enough."""
    if not ranges.inner * _INNER_MARGIN <= LARGEST_FLOAT16:
        raise UnsupportedModelError(
            f"within its layers this model computes values up to {ranges.inner:,.0f}; float16 ends at "
            f"{LARGEST_FLOAT16:,.0f} and other texts may go further. Export it for the CPU (without --device)"
        )
    return Precision("float16", ranges.residual_type)


def measure_ranges(
    checkpoint: Checkpoint, files: Sequence[Path], scratch: Path, progress: ProgressCallback
) -> ActivationRanges:
    """Run ``checkpoint`` over the texts of ``files``, or over the shipped ones without files.

    ``scratch`` is a folder that does not exist; it takes a byte a weight until the function returns.

    Raises:
        RequestError: calibration text that cannot be read.
        ModelFileError: weights that cannot be read.
    """
    tokens = _tokens(checkpoint, files)
    scratch.mkdir()
    try:
        write_graph(checkpoint, plan_decoder(checkpoint, _READER), scratch, progress)
        graph = scratch / GRAPH
        stream, inner, inputs = _watched(graph)
        largest = dict.fromkeys((*stream, *inner), 0.0)

        pieces = cut(graph, watched=largest.keys())
        done = 0
        for step in walk(pieces, record(checkpoint.config).kept_in("float32"), tokens):
            for name in step.left.keys() & largest.keys():
                # Unlike max, np.maximum takes NaN for the largest.
                value = _largest(step.left[name][0], sums=name in inputs)
                largest[name] = float(np.maximum(largest[name], value))
            done += step.last
            if step.last:
                progress(Progress("Calibrating", done, len(pieces), "step"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    residual, within = (float(np.max([largest[name] for name in names])) for names in (stream, inner))
    return ActivationRanges(residual, within, sum(map(len, tokens)))


def _largest(value: F32, *, sums: bool) -> float:
    """The largest magnitude in ``value``, and of the ``sums`` that formats with minimums multiply."""
    whole = sums and value.shape[-1] % _BLOCK == 0
    blocks = value.reshape(-1, _BLOCK).sum(axis=1) if whole else value
    return float(np.maximum(np.abs(value).max(), np.abs(blocks).max()))


def _tokens(checkpoint: Checkpoint, files: Sequence[Path]) -> list[list[int]]:
    config, special = checkpoint.config, checkpoint.special_tokens()
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json(), vocab_size=config.vocab_size)
    longest = min(_LONGEST, config.context_length)
    texts = calibration_tokens(tokenizer, special, files, count=_TEXTS, longest=longest)
    if not any(texts):
        raise RequestError("the calibration text holds no tokens; give longer ones")
    return [tokens for tokens in texts if tokens]


def _watched(graph: Path) -> tuple[set[str], set[str], set[str]]:
    """Names of values of ``graph``: in the residual stream, within layers, and multiplied ones of these."""
    nodes = onnx.load(str(graph), load_external_data=False).graph.node
    skips = [node for node in nodes if node.op_type == "SkipSimplifiedLayerNormalization"]
    stream = {node.output[_SUM] for node in skips} | {name for node in skips for name in node.input[:2]}
    inner = {node.output[0] for node in nodes if node.op_type in _INNER} | {n.output[0] for n in skips}
    inputs = {node.input[0] for node in nodes if node.op_type in _PRODUCTS}
    inner = (inner | inputs) - {"logits"}
    return stream - inner, inner, inputs
