"""The matrices that a bundle for edgespec's kernels holds, as floats."""

import numpy as np
import numpy.typing as npt
import onnx

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.tiles import unpack_tiles
from tests.kit.kernels import inputs_of


def stored_matrix(bundle: Bundle, name: str) -> npt.NDArray[np.float32]:
    """A projection's weights ``(out_features, in_features)``, by its name in the graph."""
    graph = onnx.load(str(bundle.graph)).graph
    raw = {tensor.name: np.frombuffer(tensor.raw_data, np.uint8) for tensor in graph.initializer}
    for node in graph.node:
        weights = node.input[inputs_of("Linear").index("weights") :]
        if node.op_type == "Linear" and weights[0].partition(".parts.")[0] == name:
            facts = {fact.name: onnx.helper.get_attribute_value(fact) for fact in node.attribute}
            parts = [part.split(":") for part in facts["parts"].decode().split(",")]
            return np.concatenate(
                [
                    unpack_tiles(part[0], raw[weight], int(part[1]), facts["inputs"])
                    for weight, part in zip(weights, parts, strict=True)
                ]
            )
    raise KeyError(name)
