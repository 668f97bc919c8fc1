"""Run a graph of fixed shapes piece by piece, so that checking a model takes less memory than running it.

All texts go through the first layers, those are freed, and so on; the last piece is the LM head. Between two
pieces each text's residual stream is kept. As :mod:`pieces` does with graphs of any shape,
but nothing is cut here: the pieces are built, so that weights need not be there before their piece is run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec_export.devices.static_weights import WeightFile
from edgespec_export.graphs.pieces import PIECE_BYTES
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.graph_contract import StaticInputs
from edgespec_models.graphs.static_decoder import build_static_decoder
from edgespec_models.graphs.static_points import StaticPlan
from edgespec_runtimes.cpu import CpuOptions, open_graph
from edgespec_runtimes.ort import TYPES

__all__ = ["StaticPieces", "save_static", "split"]

_Values = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StaticPieces:
    """A graph, a few of its layers at a time.

    Attributes:
        config: the model's facts.
        plan: of the whole graph, with all logits.
        masked: what the attention mask holds where a row must not look.
        weights: the file that holds the weights of some parts. It is asked once for each piece, when the one
            before is closed.
        folder: the file's, where each piece's graph lies while it is opened.
    """

    config: ModelConfig
    plan: StaticPlan
    masked: float
    weights: Callable[[range], WeightFile]
    folder: Path

    @property
    def pieces(self) -> list[range]:
        """The parts of each piece."""
        return split(self.config)

    def run(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, _Values]]:
        """Take ``texts``, of as many tokens as the plan has rows or fewer, through all pieces.

        Yields, piece by piece, every text's number and what its pass returned: the values of points, the new
        rows of the KV cache, and of the last piece ``logits``, float32 ``(1, rows, vocab)``. The dictionary
        is emptied when the next is asked for.

        Raises:
            BundleError: ONNX Runtime cannot load a piece.
        """
        carried: list[_Values] = [{} for _ in texts]
        host = StaticInputs(self.config, self.masked)
        for parts in self.pieces:
            session = self._open(parts)
            inputs = {value.name: np.zeros(value.shape, TYPES[value.type]) for value in session.get_inputs()}
            names = [value.name for value in session.get_outputs()]
            for index, tokens in enumerate(texts):
                host.fill(inputs, tokens, 0)
                values = dict(zip(names, session.run(names, inputs | carried[index]), strict=True))
                if "residual_out" in values:
                    carried[index] = {"residual_in": values.pop("residual_out")}
                yield index, values
                values.clear()  # or the next pass would run beside them
            del session  # the next piece may lie in the same file

    def _open(self, parts: range) -> Any:
        path = self.folder / f"piece-{parts.start}.onnx"
        save_static(self.config, replace(self.plan, parts=parts), self.weights(parts), path)
        try:
            return open_graph(path, CpuOptions(keep_memory=False))
        finally:
            path.unlink()


def split(config: ModelConfig, piece_bytes: int = PIECE_BYTES) -> list[range]:
    """The parts of each piece: as many layers as take ``piece_bytes`` in float32; the LM head is a piece."""
    layer = (
        4 * config.hidden_size * (2 * config.query_width + 2 * config.kv_width + 3 * config.intermediate_size)
    )
    count, layers = max(1, piece_bytes // layer), config.num_layers
    starts = range(0, layers, count)
    return [*(range(start, min(start + count, layers)) for start in starts), range(layers, layers + 1)]


def save_static(config: ModelConfig, plan: StaticPlan, weights: WeightFile, path: Path) -> None:
    """Write the graph of ``plan``, over ``weights``, which lie in the same folder."""
    model = build_static_decoder(config, plan)
    weights.fill(model)
    ir.save(model, path)
