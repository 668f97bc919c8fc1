"""What projections are given, on average, when a model reads a text: second moments of their inputs.

The model is written once more, in 8 bits, and run over the text piece by piece
(:mod:`edgespec_export.pieces`) as far as the moments asked for need it, so that those of a few projections
are in memory at any time.
"""

import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from edgespec_export.blocks import F32
from edgespec_export.calibration import calibration_texts
from edgespec_export.checkpoint import Checkpoint
from edgespec_export.pieces import cut, watch_pieces
from edgespec_export.plan import POLICIES, plan_decoder
from edgespec_export.writer import write_weights
from edgespec_models.bundle import GRAPH
from edgespec_models.config import DecoderShape
from edgespec_models.errors import RequestError
from edgespec_models.graphs.decoder import build_decoder
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.tokenizer import SpecialTokens, Tokenizer

__all__ = [
    "Activations",
    "activation_tokens",
    "linears_by_input",
    "open_activations",
    "tokens_to_read",
    "write_reader",
]

_SPAN = 2048  # a few thousand tokens determine the moments of so many columns
_TOKENS = 4096
_LONGEST = 192
_ROWS = 2048  # multiplied at once
_POLICY = "int8"  # near to any source, and its graph gives projections their input as it is
_WEIGHT = ".parts.0.weight"


class Activations:
    """Moments of each projection's input, computed when they are asked for.

    Args:
        graph: of a decoder whose weights are beside it, without ``even_rows``.
        wanted: the projections that will be asked for, by their names in the graph.
        config: its shape.
        texts: token ids.
        progress: is told how much of the graph the texts have been through.
    """

    def __init__(
        self,
        graph: Path,
        wanted: Set[str],
        config: DecoderShape,
        texts: Sequence[Sequence[int]],
        progress: ProgressCallback = ignore_progress,
    ) -> None:
        self._linears = linears_by_input(graph, wanted)
        self._sums: dict[str, list[F32]] = {}
        self._waiting: dict[str, list[F32]] = {}
        self._tokens = sum(len(text) - 1 for text in texts)
        pieces = cut(graph, piece_bytes=1, watched=self._linears.keys())
        self._steps = self._run(pieces, config, texts, progress)

    def moments(self, linear: str) -> list[F32]:
        """The moments of what the projection ``linear`` is given; to be asked for once.

        Args:
            linear: by its name in the graph, such as ``layers.3.mlp.down``.

        Returns:
            ``mean(x x^T)`` over tokens, float32 ``(span, span)`` for each of the spans, 2048 columns or less,
            into which the input is divided.
        """
        while linear not in self._sums:
            next(self._steps)
        means = [total / np.float32(self._tokens) for total in self._sums[linear]]
        self._sums[linear] = []
        return means

    def _run(
        self,
        pieces: Sequence[Path],
        config: DecoderShape,
        texts: Sequence[Sequence[int]],
        progress: ProgressCallback,
    ) -> Iterator[None]:
        for number, _ in enumerate(watch_pieces(pieces, config, texts, self._observe), start=1):
            for value in list(self._waiting):
                self._add(value)
            progress(Progress("Calibrating", number, len(pieces), "step"))
            yield

    def _observe(self, value: str, given: F32) -> None:
        # A text's first token draws attention whatever it is; in some layers its activations are
        # twenty times the others'.
        if value in self._linears:
            rows = self._waiting.setdefault(value, [])
            rows.append(given[1:])
            if sum(map(len, rows)) >= _ROWS:
                self._add(value)

    def _add(self, value: str) -> None:
        """Add what waits to the sums: a product over many rows takes half as long as many over few."""
        rows = np.concatenate(self._waiting.pop(value))
        spans = [rows[:, at : at + _SPAN] for at in range(0, rows.shape[1], _SPAN)]
        products = [x.T @ x for x in spans]
        for linear in self._linears[value]:
            sums = self._sums.setdefault(linear, [np.zeros_like(product) for product in products])
            for total, product in zip(sums, products, strict=True):
                np.add(total, product, out=total)


@contextmanager
def open_activations(
    checkpoint: Checkpoint,
    wanted: Set[str],
    files: Sequence[Path],
    scratch: Path,
    progress: ProgressCallback,
) -> Iterator[Activations]:
    """The activations of ``checkpoint`` over the texts of ``files``, or over the shipped ones without any.

    Args:
        checkpoint: the model.
        wanted: the projections that will be asked for, by their names in the graph.
        files: JSON Lines with texts that targets wrote.
        scratch: a folder that does not exist; it takes a byte a weight, until the context ends.
        progress: is told of the writing and the reading.

    Raises:
        RequestError: calibration text that cannot be read.
        ModelFileError: weights that cannot be read.
    """
    tokens = tokens_to_read(checkpoint, files)
    scratch.mkdir(parents=True)
    try:
        yield Activations(
            write_reader(checkpoint, scratch, progress), wanted, checkpoint.config, tokens, progress
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_reader(checkpoint: Checkpoint, folder: Path, progress: ProgressCallback = ignore_progress) -> Path:
    """Write the model that reads the texts into ``folder``, a byte a weight; returns its graph.

    Raises:
        ModelFileError: weights that cannot be read.
    """
    plan = plan_decoder(checkpoint, POLICIES[_POLICY], spare_rows=False)
    model = build_decoder(checkpoint.config, plan)
    write_weights(model, plan, checkpoint, folder, progress)
    graph = folder / GRAPH
    ir.save(model, graph)
    return graph


def tokens_to_read(checkpoint: Checkpoint, files: Sequence[Path]) -> list[list[int]]:
    """:func:`activation_tokens` of the texts of ``files``, or of the shipped ones without any.

    Raises:
        RequestError: calibration text that cannot be read, or too little of it.
    """
    config = checkpoint.config
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json(), vocab_size=config.vocab_size)
    texts, special = calibration_texts(files), checkpoint.special_tokens()
    return activation_tokens(texts, tokenizer, special, config.context_length)


def activation_tokens(
    texts: Sequence[str], tokenizer: Tokenizer, special: SpecialTokens, longest: int
) -> list[list[int]]:
    """Token ids of the beginnings of some 4,000 tokens' worth of ``texts``, taken from all over them.

    Raises:
        RequestError: the texts are too short to tell anything.
    """
    start = [special.bos] if special.add_bos and special.bos is not None else []
    limit = min(_LONGEST, longest) - len(start)
    encoded = [start + tokenizer.encode(text)[:limit] for text in texts]
    encoded = [tokens for tokens in encoded if len(tokens) > 1]
    if not encoded:
        raise RequestError("the calibration text holds no text of two tokens or more; give longer ones")
    total = sum(map(len, encoded))
    taken = max(1, round(len(encoded) * min(1, _TOKENS / total)))
    return [encoded[number * len(encoded) // taken] for number in range(taken)]


def linears_by_input(graph: Path, wanted: Set[str]) -> dict[str, list[str]]:
    """Those of the projections ``wanted`` that each value of ``graph`` is given to."""
    nodes = onnx.load(str(graph), load_external_data=False).graph.node
    transposed = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Transpose"}
    linears: dict[str, list[str]] = {}
    for node in nodes:
        weight = node.input[1] if node.op_type in ("MatMulNBits", "MatMul") else ""
        weight = transposed.get(weight, weight)
        if weight.endswith(_WEIGHT) and weight.removesuffix(_WEIGHT) in wanted:
            linears.setdefault(node.input[0], []).append(weight.removesuffix(_WEIGHT))
    return linears
