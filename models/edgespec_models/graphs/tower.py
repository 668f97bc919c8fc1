"""The graph of a tower: ONNX Runtime's operators, and products of 8-bit weights on edgespec's kernels."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import onnx_ir as ir

from edgespec_models.bundles.weight_format import FORMATS, WeightFormat, tile_bytes
from edgespec_models.families.towers import Operations, Tower
from edgespec_models.graphs.graph_decoder import FLOAT, IR_VERSION, parameter
from edgespec_models.graphs.native import DOMAIN, OPSET

TILES: Final = WeightFormat(8, 32, tiles="Q8_0")
"""The format of matrices: nobody has measured a loss by it."""
_KINDS: Final = {"float": (FLOAT, np.float32), "int": (ir.DataType.INT64, np.int64)}


class _TowerGraph(Operations):
    """The graph under construction.

    ``shapes`` are those of its weights in files. With ``exact`` operators are ONNX Runtime's, in float32.
    """

    def __init__(self, *, exact: bool = False) -> None:
        opsets = {"": OPSET, DOMAIN: 1, "com.microsoft": 1}
        self.graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name="tower")
        self.shapes, self._exact = dict[str, tuple[int, ...]](), exact

    def input(self, name: str, shape: Sequence[int | str], kind: Literal["float", "int"] = "float") -> Any:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(_KINDS[kind][0]))
        self.graph.inputs.append(value)
        return value

    def op(self, kind: str, *inputs: Any, domain: str = "", **attributes: Any) -> Any:
        node = ir.node(kind, list(inputs), attributes=attributes, domain=domain)
        self.graph.append(node)
        return node.outputs[0]

    def constant(self, values: Any, kind: Literal["float", "int"] = "int") -> Any:
        return self.op("Constant", value=ir.tensor(np.array(values, _KINDS[kind][1])))

    def parameter(self, name: str, *shape: int) -> Any:
        self.shapes[name] = shape
        return parameter(self.graph, name, shape, FLOAT)

    def linear(self, x: Any, name: str, rows: int, columns: int, *, bias: bool = False) -> Any:
        tiles, inputs = TILES.tiles, padded(columns)
        added = self.parameter(f"{name.removesuffix('weight')}bias", rows) if bias else None
        if self._exact:
            y = self.op("MatMul", x, self.op("Transpose", self.parameter(name, rows, columns)))
            return y if added is None else self.op("Add", y, added)
        self.shapes[name] = rows, columns
        if inputs != columns:
            x = self.op("Pad", x, self.constant([0, 0, 0, 0, 0, inputs - columns]))
        weights = parameter(self.graph, name, [tile_bytes(tiles, rows, inputs)], ir.DataType.UINT8)
        facts: dict[str, Any] = {"inputs": inputs, "epsilon": 0.0, "gate": "", "parts": f"{tiles}:{rows}"}
        return self.op("Linear", x, None, added, None, None, weights, domain=DOMAIN, **facts)

    def attention(self, query: Any, key: Any, value: Any, heads: int, scale: float) -> Any:
        rows = query, key, value
        if self._exact:
            facts: dict[str, Any] = {"num_heads": heads, "scale": scale, "domain": "com.microsoft"}
            return self.op("MultiHeadAttention", *rows, **facts)
        return self.op("FullAttention", *rows, heads=heads, scale=scale, domain=DOMAIN)


def padded(columns: int) -> int:
    """The columns of a matrix of so many with zeros behind each row up to a whole block."""
    inputs = FORMATS[TILES.tiles].inputs
    return -(-columns // inputs) * inputs


def build_tower(tower: Tower, *, exact: bool = False) -> tuple[ir.Model, dict[str, tuple[int, ...]]]:
    """The graph, whose parameters have no data, and the shapes of these in files.

    Its output is ``vectors``, float32 (1, n, width).
    """
    graph = _TowerGraph(exact=exact)
    vectors = tower.build(graph)
    vectors.name, vectors.type, vectors.shape = (
        "vectors",
        ir.TensorType(FLOAT),
        ir.Shape([1, "m", tower.width]),
    )
    graph.graph.outputs.append(vectors)
    return ir.Model(graph.graph, ir_version=IR_VERSION, producer_name="edgespec"), graph.shapes
