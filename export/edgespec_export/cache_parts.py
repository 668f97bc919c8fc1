"""Parts of a decoder graph, cut out and run by themselves.

A part computes one value from others that are given, and from the numbers of past and new tokens. Shapes
that it asks of the rest of the graph are measured in a few passes of the whole: a dimension must be a fixed
number, so many times the past tokens and so many times the new ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from edgespec_export.cache_graph import GraphIndex, UnsuitableError
from edgespec_models.errors import BundleError
from edgespec_models.graph_tensors import GraphTensors
from edgespec_runtimes.cpu import CpuOptions, open_graph

__all__ = ["GraphParts", "OpenPart", "Part"]

_Arrays = Mapping[str, npt.NDArray[Any]]
_Shape = npt.NDArray[np.int64]

_FILE = "part.onnx"
_MEASURED = ((5, 3), (5, 4), (6, 3), (11, 7))  # past and new tokens; the last checks what the others say
_NUMPY = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes between given values and one result.

    Attributes:
        output: the result, float32.
        nodes: in order.
        shapes: nodes ``Shape`` whose results are given, from the numbers of tokens.
        inputs: given values that are read, and the mask and positions where those are.
        weights: initializers that are read.
    """

    output: str
    nodes: Sequence[onnx.NodeProto]
    shapes: Sequence[onnx.NodeProto]
    inputs: Sequence[str]
    weights: Sequence[str]


class GraphParts:
    """Parts of one graph.

    Args:
        model: which is not changed.
        path: the file it came from; what is run lies beside it for a moment.
        tensors: the graph's inputs and outputs.
    """

    def __init__(self, model: onnx.ModelProto, path: Path, tensors: GraphTensors) -> None:
        self._model, self._path, self._tensors = model, path, tensors
        self._index = GraphIndex(model.graph)
        self._askers = {node.output[0]: node for node in model.graph.node if node.op_type == "Shape"}
        self._shapes: dict[str, _Shape] = {}

    def cut(self, output: str, given: Iterable[str]) -> Part:
        """What computes ``output`` from the values ``given``.

        Raises:
            UnsuitableError: it depends on more than those and the numbers of tokens.
        """
        known = set(given)
        nodes, leaves = self._index.needed([output], known | self._askers.keys())
        inputs = leaves - self._index.weights.keys()
        strange = inputs - {self._tensors.mask, self._tensors.positions}
        if strange:
            raise UnsuitableError(f"{output} depends on {', '.join(sorted(strange))} besides the cache")
        read = dict.fromkeys(name for node in nodes for name in node.input)
        return Part(
            output,
            nodes,
            [self._askers[name] for name in read if name in self._askers],
            sorted(inputs | (known & read.keys())),
            sorted(leaves - inputs),
        )

    def measure(self, values: Iterable[str]) -> None:
        """Find how the shapes of ``values`` follow from the numbers of tokens, by passes of the whole graph.

        Raises:
            UnsuitableError: they do not.
        """
        names = sorted(set(values))
        wanted = [f"edgespec/shape/{number}" for number in range(len(names))]
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        asked = zip(names, wanted, strict=True)
        model.graph.node.extend(onnx.helper.make_node("Shape", [name], [output]) for name, output in asked)
        model.graph.output.extend(_info(output, onnx.TensorProto.INT64) for output in wanted)
        session = _open(model, self._path)
        found = [_run(session, wanted, self._pass(past, new)) for past, new in _MEASURED]
        for number, name in enumerate(names):
            first, more_new, more_past, other = (shapes[number] for shapes in found)
            by_past, by_new = more_past - first, more_new - first
            fixed = first - _MEASURED[0][0] * by_past - _MEASURED[0][1] * by_new
            self._shapes[name] = np.stack([fixed, by_past, by_new])
            if not np.array_equal(self._shape_at(name, _MEASURED[-1]), other):
                raise UnsuitableError(f"the shape of {name} does not follow from the number of tokens")

    def shape(self, value: str) -> _Shape:
        """The measured shape of ``value``.

        Returns:
            int64 ``(3, rank)``: of each dimension a fixed number, how many a past and a new token add.
        """
        return self._shapes[value]

    def open(self, part: Part) -> "OpenPart":
        """Make ``part`` ready to run; the shapes it asks for must have been measured.

        Raises:
            UnsuitableError: ONNX Runtime cannot load it.
        """
        kinds = {value.name: value.type.tensor_type.elem_type for value in self._model.graph.input}
        inputs = [_info(name, kinds.get(name, onnx.TensorProto.FLOAT)) for name in part.inputs]
        inputs += [_info(node.output[0], onnx.TensorProto.INT64) for node in part.shapes]
        outputs = [_info(part.output, onnx.TensorProto.FLOAT)]
        weights = [self._index.weights[name] for name in part.weights]
        graph = onnx.helper.make_graph(part.nodes, "part", inputs, outputs, weights)
        opsets, version = self._model.opset_import, self._model.ir_version
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=version)
        return OpenPart(self, part, _open(model, self._path))

    def feeds(self, part: Part, place: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
        """What ``part`` reads besides given values, behind so many past tokens for so many new ones."""
        values = self._lengths(*place)
        for node in part.shapes:
            ends = {attribute.name: attribute.i for attribute in node.attribute}
            shape = self._shape_at(node.input[0], place)
            values[node.output[0]] = shape[ends.get("start", 0) : ends.get("end", len(shape))]
        return values

    def _pass(self, past: int, new: int) -> dict[str, npt.NDArray[Any]]:
        values = self._lengths(past, new) | {self._tensors.ids: np.ones((1, new))}
        cache = self._tensors.cache
        return values | {t.past: np.zeros((1, t.heads, past, t.head_dim), np.float32) for t in cache}

    def _lengths(self, past: int, new: int) -> dict[str, npt.NDArray[Any]]:
        mask, positions = self._tensors.mask, self._tensors.positions
        values = {mask: np.ones((1, past + new)), positions: np.arange(past, past + new)[None]}
        return {name: array for name, array in values.items() if name is not None}

    def _shape_at(self, value: str, place: tuple[int, int]) -> _Shape:
        at: _Shape = np.array([1, *place]) @ self._shapes[value]
        return at


class OpenPart:
    """A part that can be run; :meth:`GraphParts.open` makes it."""

    def __init__(self, parts: GraphParts, part: Part, session: Any) -> None:
        self._parts, self._part, self._session = parts, part, session

    def run(self, place: tuple[int, int], given: _Arrays) -> npt.NDArray[np.float32]:
        """The part's result.

        Args:
            place: numbers of past and of new tokens.
            given: the given values by name, float32.

        Raises:
            UnsuitableError: ONNX Runtime fails to run it.
        """
        feeds = self._parts.feeds(self._part, place) | dict(given)
        result: npt.NDArray[np.float32] = _run(self._session, [self._part.output], feeds)[0]
        return result


def _info(name: str, kind: int) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, kind, None)


def _open(model: onnx.ModelProto, beside: Path) -> Any:
    """ONNX Runtime's session over ``model``, whose weights may lie in files beside ``beside``."""
    path = beside.with_name(_FILE)
    try:
        onnx.save(model, str(path))
        return open_graph(path, CpuOptions(threads=1))
    except BundleError as error:
        raise UnsuitableError(f"a part of it does not run: {error}") from error
    finally:
        path.unlink(missing_ok=True)


def _run(session: Any, outputs: Sequence[str], feeds: _Arrays) -> list[Any]:
    inputs = {value.name: _NUMPY[value.type] for value in session.get_inputs()}
    try:
        found: list[Any] = session.run(
            outputs, {name: feeds[name].astype(kind) for name, kind in inputs.items()}
        )
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise UnsuitableError(f"a part of it does not run: {error}") from error
    return found
