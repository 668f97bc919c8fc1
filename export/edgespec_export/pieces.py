"""Run a graph piece by piece, so that checking a model takes less memory than running it.

ONNX Runtime keeps a packed copy of every weight it has loaded: a whole model takes more than its file. An
export's check knows all its texts beforehand, so it may take them through the first layers, free those,
and go on with the next: the same kernels, one piece in memory at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnx

from edgespec_models.config import DecoderShape
from edgespec_runtimes.cpu import CpuOptions, open_graph
from edgespec_runtimes.session import Logits

__all__ = [
    "PIECE_BYTES",
    "CacheStatistics",
    "PiecewiseResult",
    "cache_statistics",
    "cut",
    "run_pieces",
    "watch_pieces",
]

PIECE_BYTES = 256 << 20
"""Weights of a piece, about: what one fused projection needs more is loaded with it."""

_Values = dict[str, npt.NDArray[Any]]
# Where a graph may be cut: a layer's normalization. Only its two results, in its weight's type, cross there.
_CUT_BEHIND = "SkipSimplifiedLayerNormalization"
_NORM_WEIGHT = 2
_CACHE_TYPES = {"tensor(int8)": np.int8, "tensor(float16)": np.float16}  # else float32
_TEST_TOKENS = (7, 11, 13, 5)


@dataclass(frozen=True, slots=True)
class PiecewiseResult:
    """What the pieces computed.

    Attributes:
        rolls_back: whether tokens gave the same results, but for rounding, after a truncation.
        row_exact: whether passes over one, three and four tokens gave the same bits.
        logits: of each text, float32 ``(tokens, vocab)``; a text is computed when its turn comes.
    """

    rolls_back: bool
    row_exact: bool
    logits: Iterator[Logits]


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


def run_pieces(
    pieces: Iterable[Path], config: DecoderShape, texts: Sequence[Sequence[int]]
) -> PiecewiseResult:
    """Take a few fixed tokens and ``texts`` through all ``pieces``, one piece after the other.

    Raises:
        BundleError: ONNX Runtime cannot load a piece.
    """
    test = [token % config.vocab_size for token in _TEST_TOKENS]
    carried: list[_Values] = [{"input_ids": np.array([tokens], np.int64)} for tokens in (test, *texts)]
    rolls_back = row_exact = True
    logits: Iterator[Logits] = iter(())
    for path in pieces:
        piece = _Piece(path, config)
        same, exact = piece.test(carried[0])
        rolls_back, row_exact = rolls_back and same, row_exact and exact
        if piece.is_last:
            logits = (piece.run(values)[0]["logits"][0] for values in carried[1:])
        else:
            carried = [piece.run(values)[0] for values in carried]
            del piece
    return PiecewiseResult(rolls_back, row_exact, logits)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What texts leave in one tensor of the KV cache; float32 ``(kv heads, head_dim)`` each.

    Attributes:
        largest: magnitude of each channel.
        spread: standard deviation of each channel over all tokens.
    """

    largest: npt.NDArray[np.float32]
    spread: npt.NDArray[np.float32]

    @classmethod
    def of(cls, values: npt.NDArray[np.float32]) -> Self:
        """Of keys or values, float32 ``(kv heads, tokens, head_dim)``."""
        return cls(np.abs(values).max(axis=1), values.std(axis=1))


def cache_statistics(
    pieces: Iterable[Path], config: DecoderShape, texts: Sequence[Sequence[int]]
) -> dict[str, CacheStatistics]:
    """What ``texts`` leave in the KV cache, one piece after the other; by the names of the cache's inputs.

    Raises:
        BundleError: ONNX Runtime cannot load a piece.
    """
    carried: list[_Values] = [{"input_ids": np.array([tokens], np.int64)} for tokens in texts]
    found: dict[str, CacheStatistics] = {}
    for path in pieces:
        piece, seen = _Piece(path, config), defaultdict[str, list[npt.NDArray[Any]]](list)
        for index, values in enumerate(carried):
            kept, cache = piece.run(values)
            carried[index] = {} if piece.is_last else kept
            for name, array in cache.items():
                seen[name].append(array[0, :, : len(texts[index])])
        found |= {name: CacheStatistics.of(np.concatenate(rows, axis=1)) for name, rows in seen.items()}
        del piece
    return found


def watch_pieces(
    pieces: Sequence[Path],
    config: DecoderShape,
    texts: Sequence[Sequence[int]],
    observe: Callable[[str, npt.NDArray[np.float32]], None],
) -> Iterator[None]:
    """Take ``texts`` through all ``pieces``, one piece at each step of the iteration.

    Args:
        pieces: of a graph.
        config: the model's shape.
        texts: token ids.
        observe: is given the name of every value that leaves a piece and what it is for each text, float32
            ``(tokens, width)``.

    Raises:
        BundleError: ONNX Runtime cannot load a piece.
    """
    carried: list[_Values] = [{"input_ids": np.array([tokens], np.int64)} for tokens in texts]
    for path, following in zip_longest(pieces, pieces[1:]):
        piece = _Piece(path, config)
        needed = _input_names(following) if following is not None else set()
        for index, values in enumerate(carried):
            kept, _ = piece.run(values)
            for name, array in kept.items():
                observe(name, array[0])
            carried[index] = {name: array for name, array in kept.items() if name in needed}
        del piece
        yield


def _input_names(path: Path) -> set[str]:
    return {value.name for value in onnx.load(str(path), load_external_data=False).graph.input}


class _Piece:
    def __init__(self, path: Path, config: DecoderShape) -> None:
        self._session, self._config = open_graph(path, CpuOptions()), config
        self._inputs = {value.name: value.type for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    @property
    def is_last(self) -> bool:
        """Whether logits come out."""
        return "logits" in self._outputs

    def run(self, values: _Values, past: _Values | None = None, start: int = 0) -> tuple[_Values, _Values]:
        """Results for ``values``, arrays (1, rows, ...), behind ``start`` tokens; and the KV cache.

        Runs a single token twice, as :class:`edgespec_runtimes.graph_io.EdgespecIO` does.
        """
        count = next(iter(values.values())).shape[1]
        rows = np.arange(count) if count > 1 else np.zeros(2, np.int64)
        total = start + len(rows)
        feeds: _Values = {
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logits_rows": np.arange(count, dtype=np.int64),
            "context_tokens": np.zeros(1, np.int64),
        }
        feeds |= past or self._empty(total + 1)
        feeds |= {name: array[:, rows] for name, array in values.items()}
        results = self._session.run(
            self._outputs, {name: feeds[name] for name in feeds.keys() & self._inputs.keys()}
        )
        named = dict(zip(self._outputs, results, strict=True))
        kept = {name: array[:, :count] for name, array in named.items() if not name.startswith("present.")}
        cache = {
            name.replace("present.", "past_key_values."): array
            for name, array in named.items()
            if name.startswith("present.")
        }
        return kept, cache

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

    def _empty(self, capacity: int) -> _Values:
        shape = (1, self._config.num_kv_heads, capacity, self._config.head_dim)
        return {
            name: np.zeros(shape, _CACHE_TYPES.get(kind, np.float32))
            for name, kind in self._inputs.items()
            if name.startswith("past_key_values.")
        }


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
    """The nodes of ``span`` as a model of its own, with what later nodes need and ``wanted`` as outputs."""
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
