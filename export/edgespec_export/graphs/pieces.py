"""Runs a graph piece by piece, so that checking a model takes less memory than running it.

ONNX Runtime keeps a packed copy of every weight it has loaded: a whole model takes more than its file. An
export's check knows all its texts beforehand, so it may take them through the first layers, free those,
and go on with the next: the same kernels, one piece in memory at a time.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

from edgespec_models.bundles.bundle import Manifest
from edgespec_models.bundles.graph_contract import INPUTS, Part, Pass
from edgespec_models.decoders.kept import KeptTensor
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_runtimes.cpu import CpuOptions, open_graph
from edgespec_runtimes.ort import TYPES
from edgespec_runtimes.predictions import Logits

PIECE_BYTES = 256 << 20
"""Weights of a piece, roughly; a larger fused projection is loaded whole."""

_Values = dict[str, npt.NDArray[Any]]
# Where a graph may be cut: a layer's normalization. Only its two results, in its weight's type, cross there.
_CUT_BEHIND = "SkipSimplifiedLayerNormalization"
_NORM_WEIGHT = 2
_TEST_TOKENS = (7, 11, 13, 5)


def cut(graph: Path, piece_bytes: int = PIECE_BYTES, *, watched: Set[str] = frozenset()) -> list[Path]:
    """Write the pieces of ``graph`` beside it, over the same weights file; returns their paths in order.

    The values that ``watched`` names become outputs of the piece that computes them.
    """
    model = onnx.load(str(graph), load_external_data=False)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    produced_at = {name: i for i, node in enumerate(model.graph.node) for name in node.output}
    # Which columns are the most likely follows from the logits; pieces go as far as those.
    whole = [value.name for value in model.graph.output if not value.name.startswith("best_")]
    stop = 1 + max(produced_at[name] for name in whole)
    spans, start, size = [], 0, 0
    for index, node in enumerate(model.graph.node[:stop]):
        size += sum(_stored_bytes(weights[name]) for name in node.input if name in weights)
        if size >= piece_bytes and node.op_type == _CUT_BEHIND:
            spans.append((start, index + 1))
            start, size = index + 1, 0
    spans.append((start, stop))
    paths = []
    for number, (begin, end) in enumerate(spans):
        paths.append(graph.with_name(f"piece-{number}.onnx"))
        later = {name for node in model.graph.node[end:stop] for name in node.input}
        onnx.save(_piece(model, (begin, end), later | watched, weights, produced_at), str(paths[-1]))
    return paths


class PiecePass(NamedTuple):
    """A text's pass through a piece: the number of the text, its inputs and its results.

    After the ``last`` text the piece is closed.
    """

    piece: "_Piece"
    text: int
    entering: _Values
    left: _Values
    last: bool


def walk(
    pieces: Sequence[Path], kept: Sequence[KeptTensor], texts: Sequence[Sequence[int]]
) -> Iterator[PiecePass]:
    """Take ``texts``, token ids, through all ``pieces`` of a graph: each text through one, then the next.

    ``kept`` are the graph's kept tensors.
    """
    carried: list[_Values] = [{"input_ids": np.array([tokens], np.int64)} for tokens in texts]
    for path, following in zip_longest(pieces, pieces[1:]):
        piece = _Piece(path, kept)
        needed = set() if following is None else _input_names(following)
        for index, values in enumerate(carried):
            left, _ = piece.run(values)
            carried[index] = {name: array for name, array in left.items() if name in needed}
            yield PiecePass(piece, index, values, left, index == len(carried) - 1)
        piece.close()  # even if it is still referenced


def run_pieces(
    pieces: Sequence[Path],
    manifest: Manifest,
    texts: Sequence[Sequence[int]],
    progress: ProgressCallback = ignore_progress,
) -> tuple[bool, bool, Iterator[Logits]]:
    """Take a few fixed tokens and ``texts`` through all ``pieces``, one piece after the other.

    Returns:
        Whether tokens gave the same results, but for rounding, after rolling back; whether passes over one,
        three and four tokens gave the same bits; and the logits of each text, float32 ``(tokens, vocab)``,
        computed when they are read.

    Raises:
        BundleError: ONNX Runtime cannot load a piece.
    """
    own = [token % manifest.config.vocab_size for token in _TEST_TOKENS]
    steps = walk(pieces, manifest.kept, (own, *texts))
    rolls_back, row_exact, done = True, True, 0
    for step in steps:
        if step.text == 0:
            progress(Progress("Checking", done, len(pieces), "step"))
            done += 1
            same, exact = step.piece.test(step.entering)
            rolls_back, row_exact = rolls_back and same, row_exact and exact
            if "logits" in step.left:
                break  # what is left of the steps are the texts' last
    return rolls_back, row_exact, (step.left["logits"][0] for step in steps)


def _input_names(path: Path) -> set[str]:
    return {value.name for value in onnx.load(str(path), load_external_data=False).graph.input}


class _Piece:
    def __init__(self, path: Path, kept: Sequence[KeptTensor]) -> None:
        self._session = open_graph(path, CpuOptions())
        self._inputs = {value.name: TYPES[value.type] for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        self._kept = [tensor for tensor in kept if tensor.input in self._inputs]

    def run(self, values: _Values, past: _Values | None = None, start: int = 0) -> tuple[_Values, _Values]:
        """Results for ``values``, arrays (1, rows, ...), behind ``start`` tokens; and the KV cache.

        Runs a single token twice, as :class:`edgespec_runtimes.graph_io.NativeModel` does.
        """
        count = next(iter(values.values())).shape[1]
        rows = np.arange(count) if count > 1 else np.zeros(2, np.int64)
        example = Pass([Part([0] * len(rows), start, len(rows))])
        feeds = {n: np.array(INPUTS[n](example), kind) for n, kind in self._inputs.items() if n in INPUTS}
        for tensor in self._kept:
            empty = np.zeros(tensor.of_tokens(start + len(rows) + 1), tensor.dtype)
            feeds[tensor.input] = past[tensor.input] if past else empty
        feeds |= {name: array[:, rows] for name, array in values.items()}
        results = dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
        cache = {tensor.input: results.pop(tensor.output) for tensor in self._kept}
        return {name: array[:, :count] for name, array in results.items()}, cache

    def test(self, values: _Values) -> tuple[bool, bool]:
        """Roll back and compare: whether the results are the same but for rounding, and to the bit."""
        together, cache = self.run(values)
        again, _ = self.run(_rows(values, 1, None), cache, 1)
        same = exact = True
        for name, expected in together.items():
            scale = float(np.abs(expected).max())
            same &= bool(np.isfinite(expected).all())
            same &= bool(np.allclose(expected[:, 1:], again[name], atol=1e-2 * scale))
            exact &= bool(np.array_equal(expected[:, 1:], again[name]))
        for row in range(1, next(iter(values.values())).shape[1]):
            single, cache = self.run(_rows(values, row, row + 1), cache, row)
            exact &= all(
                np.array_equal(together[name][:, row : row + 1], array) for name, array in single.items()
            )
        return same, exact

    def close(self) -> None:
        """Free the session."""
        self._session = None


def _rows(values: _Values, start: int, stop: int | None) -> _Values:
    return {name: array[:, start:stop] for name, array in values.items()}


def _stored_bytes(tensor: onnx.TensorProto) -> int:
    return next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), 0)


def _piece(
    model: onnx.ModelProto,
    span: tuple[int, int],
    wanted: Set[str],
    weights: Mapping[str, onnx.TensorProto],
    produced_at: Mapping[str, int],
) -> onnx.ModelProto:
    """The nodes of ``span`` as a model, whose outputs are ``wanted`` and the inputs of later nodes."""
    begin, end = span
    types = {
        name: weights[node.input[_NORM_WEIGHT]].data_type
        for node in model.graph.node
        if node.op_type == _CUT_BEHIND
        for name in node.output
    }
    nodes = model.graph.node[begin:end]
    used = {name for node in nodes for name in node.input if name}
    entering = sorted(name for name in used if produced_at.get(name, begin) < begin)
    leaving = sorted(name for name in wanted if name in produced_at and begin <= produced_at[name] < end)
    inputs = [value for value in model.graph.input if value.name in used]
    inputs += [onnx.helper.make_tensor_value_info(name, types[name], None) for name in entering]
    outputs = [value for value in model.graph.output if begin <= produced_at[value.name] < end]
    outputs += [onnx.ValueInfoProto(name=name) for name in leaving]  # ONNX Runtime infers their types
    graph = onnx.helper.make_graph(
        nodes, "piece", inputs, outputs, [tensor for name, tensor in weights.items() if name in used]
    )
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
