"""Hidden states that pass out of a target and into a head, which drafts from them (arXiv 2503.01840).

A target gives out its *features*: the residual streams that enter some of its layers, side by side. A head
reads, beside each token, the features of the token before it or, behind its own drafts, the *state* that it
wrote there itself. In a pass tokens with features come first, as graphs of heads have it.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.graph_contract import NEW_STATES, Part

Floats = npt.NDArray[np.float32]
_TENSOR, _FLOAT = 1, 1  # ONNX's TypeProto.tensor_type, TensorProto.FLOAT


KEPT = 128  # tokens, whose features are kept beside those of the last pass


def joined(before: Floats | None, now: Floats | None) -> Floats | None:
    """Features of the end of a text; those of the last pass may be few."""
    return now if before is None or now is None else np.concatenate([before[-KEPT:], now])


class Hidden:
    """What a graph of ONNX Runtime's ``session`` gives out besides logits, or reads besides tokens.

    ``streams`` are outputs of a target; ``width`` is that of each, or of a head's states. Most graphs have
    neither.
    """

    def __init__(self, session: Any, streams: Sequence[str], width: int) -> None:
        self._of_tokens, self._width = bool(streams), width
        states = [value.name for value in session.get_outputs() if value.name == NEW_STATES]
        self.outputs = tuple(streams) or tuple(states)
        shapes = {value.name: value.shape for value in session.get_inputs()}
        self._widths = shapes.get("features", (0,))[-1], shapes.get("states", (0,))[-1]

    def order(self, parts: Sequence[Part]) -> list[int]:
        """Which parts a pass reads first: those with features."""
        return sorted(range(len(parts)), key=lambda at: self._given(parts[at]).shape[1] != self._widths[0])

    def inputs(self, parts: Sequence[Part]) -> tuple[Floats, Floats]:
        """Features and states of all tokens, ``(m, width)`` and ``(k, width)``."""
        given = [self._given(part) for part in parts]

        def joined(width: int) -> Floats:
            return np.concatenate(
                [np.zeros((0, width), np.float32), *(x for x in given if x.shape[1] == width)]
            )

        return joined(self._widths[0]), joined(self._widths[1])

    def arrays(self, tokens: int, rows: int) -> dict[str, Floats]:
        """Where a pass writes each of the outputs, ``(1, n, width)``."""
        shape = 1, tokens if self._of_tokens else rows, self._width
        return {name: np.empty(shape, np.float32) for name in self.outputs}

    def found(self, parts: Sequence[Part], arrays: Iterable[Floats]) -> list[Floats | None]:
        """Of each part, a target's features of all tokens, or a head's states of the wanted rows."""
        if not self.outputs:
            return [None] * len(parts)
        whole = np.concatenate([array[0] for array in arrays], axis=-1)
        counts = [len(part.tokens) if self._of_tokens else part.rows for part in parts]
        return [whole[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]

    def _given(self, part: Part) -> Floats:
        """What is read beside a part's tokens; zeros where it is not given, to see what passes take."""
        if part.hidden is None:
            return np.zeros((len(part.tokens), self._widths[1]), np.float32)
        return part.hidden


def with_outputs(model: bytes, names: Iterable[str]) -> bytes:
    """A serialized ONNX model whose values of these names are outputs too, float32 of any shape.

    Fields of a message that come later are added to its lists (the encoding of Protocol Buffers).
    """
    kind = _field(_TENSOR, bytes([1 << 3, _FLOAT]))
    outputs = b"".join(_field(12, _field(1, name.encode()) + _field(2, kind)) for name in names)
    return model + _field(7, outputs)


def _field(number: int, value: bytes) -> bytes:
    """A field with a value of any length."""
    length, size = bytearray(), len(value)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + value
