"""The inputs of decoder graphs, for sessions, export checks and tools.

A graph reads a pass's tokens, some facts about the pass, and the KV cache. Its inputs show which facts it
reads; their names and values are in :data:`INPUTS`. Graphs of other exporters may have other names, which
:class:`GraphTensors` holds. Graphs of fixed shapes have the inputs that :class:`StaticInputs` fills.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.transformer import Transformer

_Array = npt.NDArray[Any]


class Part(NamedTuple):
    """The part of a pass that belongs to one sequence.

    Attributes:
        tokens: tokens of the sequence behind the first ``start``, which the KV cache holds. Negative ones
            stand for rows of pictures.
        rows: the number of last tokens whose logits are wanted.
        blocks: numbers of the KV cache's blocks with the tokens before and in the pass; for graphs with a
            table of them.
        ending: tokens at the end without wanted logits.
        features: inputs of a head beside each token, float32 ``(tokens, width)``: the target's features,
        states: or states that the head wrote itself.
        slot: slot of the sequence's states.
        behind: the number of tokens behind which these states are.
        cache: the KV cache with ``blocks``, if it is another model's.
        injected: the number of first tokens that leave keys and values of their features alone.
        vectors: the rows of pictures among the tokens, float32 ``(rows, width)``.
        positions: times, rows and columns of the tokens, int64 ``(tokens, 3)``; None if each is the token's
            place in the sequence.
    """

    tokens: Sequence[int]
    start: int
    rows: int = 1
    blocks: Sequence[int] = ()
    ending: int = 0
    features: npt.NDArray[np.float32] | None = None
    states: npt.NDArray[np.float32] | None = None
    slot: int = 0
    behind: int = 0
    cache: Any = None
    injected: int = 0
    vectors: npt.NDArray[np.float32] | None = None
    positions: npt.NDArray[np.int64] | None = None

    @property
    def end(self) -> int:
        """Tokens of the sequence that the KV cache holds after the pass."""
        return self.start + len(self.tokens)

    @property
    def row_positions(self) -> npt.NDArray[np.int64]:
        """:attr:`positions` as an array."""
        if self.positions is not None:
            return self.positions
        return np.repeat(np.arange(self.start, self.end)[:, None], 3, axis=1)

    @property
    def row_ends(self) -> list[int]:
        """The tokens of the sequence that each row sees where rows of a picture see each other.

        Rows of pictures that follow each other are of one picture, as in transformers: prompts have tokens
        between two.
        """
        ends = [*range(self.start + 1, self.end + 1)]
        for at in reversed(range(len(ends) - 1)):
            if self.tokens[at] < 0 and self.tokens[at + 1] < 0:
                ends[at] = ends[at + 1]
        return ends


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over parts of one sequence or, in graphs for several, of several.

    Attributes:
        offered: tokens for which a trimmed LM head gets a column.
        columns: columns of the logits.
        features: features of a head's first tokens, ``(m, width)``.
        states: states of the tokens behind these, ``(k, width)``.
        vectors: rows of pictures of all parts, ``(p, width)``.
    """

    parts: Sequence[Part]
    offered: Sequence[int] | npt.NDArray[np.int64] = (0,)
    columns: int = 0
    features: npt.NDArray[np.float32] | None = None
    states: npt.NDArray[np.float32] | None = None
    vectors: npt.NDArray[np.float32] | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of all parts, but for those with injected keys and values."""
        return list(chain.from_iterable(part.tokens[part.injected :] for part in self.parts))

    @property
    def rows(self) -> int:
        """The number of wanted rows of logits."""
        return sum(part.rows for part in self.parts)

    @property
    def wanted(self) -> npt.NDArray[np.int64]:
        """The wanted rows, int64 ``(rows,)``; negative ones count from the end, as in ONNX."""
        ends = np.cumsum([len(part.tokens) - part.injected for part in self.parts])
        lasts = [end - part.ending for end, part in zip(ends, self.parts, strict=True)]
        wanted = [np.arange(last - part.rows, last) for last, part in zip(lasts, self.parts, strict=True)]
        return np.concatenate(wanted)


ROWS: Final = "logits_rows"
"""The input that names the rows whose logits a graph writes; graphs without it write the logits of all."""

BLOCKS: Final = "blocks"
"""Graphs with this input have a cache of blocks. Each sequence has a table of its blocks."""

INPUTS: Final[Mapping[str, Callable[[Pass], npt.ArrayLike]]] = MappingProxyType(
    {
        "input_ids": lambda run: [[max(token, 0) for token in run.tokens]],
        "attention_mask": lambda run: np.ones((1, run.parts[0].end)),
        "position_ids": lambda run: np.arange(run.parts[0].start, run.parts[0].end)[None],
        "sequences": lambda run: [(part.start, len(part.tokens)) for part in run.parts],
        "wanted_sequences": lambda run: [
            (part.end - part.ending - part.rows, part.rows) for part in run.parts
        ],
        BLOCKS: lambda run: [*chain.from_iterable(part.blocks for part in run.parts)],
        "injected_rows": lambda run: [part.injected for part in run.parts],
        "places": lambda run: [(part.slot, part.behind) for part in run.parts],
        "seqlens_k": lambda run: [run.parts[0].end - 1],
        "total_sequence_length": lambda run: run.parts[0].end,
        ROWS: lambda run: run.wanted,
        "context_tokens": lambda run: run.offered,
        "column_order": lambda run: -np.arange(run.columns),
        "features": lambda run: np.asarray(run.features)[None],
        "states": lambda run: np.asarray(run.states)[None],
        "picture_rows": lambda run: np.reshape(
            [(0, row) for row, token in enumerate(run.tokens) if token < 0], (-1, 2)
        ),
        "picture_vectors": lambda run: np.asarray(run.vectors),
        "row_positions": lambda run: np.concatenate([part.row_positions for part in run.parts]),
        "row_ends": lambda run: [*chain.from_iterable(part.row_ends for part in run.parts)],
    }
)
"""Inputs of graphs of any shape, but for weights and the KV cache, and their values in a pass."""

CHANGING: Final = frozenset(
    {
        *("input_ids", "sequences", "wanted_sequences", "injected_rows", "places", "seqlens_k"),
        *("total_sequence_length", ROWS, "features", "states", "picture_rows", "picture_vectors"),
        "row_positions",
        "row_ends",
    }
)
"""Inputs of edgespec's graphs whose values differ between passes over equally many tokens."""


NEW_STATES: Final = "new_states"
"""The output of a head: its states of the wanted rows."""

EXPERTS_READ: Final = "experts_read"
"""The output of a graph with experts: the number of different experts in a pass, layer by layer."""


def stream_name(layer: int) -> str:
    """The name of the residual stream that enters ``layer``; ``layer + 1`` names the one that leaves."""
    return f"layers.{layer}.stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensors:
    """The names of inputs and outputs in a graph of any shape.

    Attributes:
        inputs: the graph's names of :data:`INPUTS`, by their names there; a foreign graph has some of them.
        logits: name of the logits of every row, ``(1, n, vocabulary)``, or of the wanted ones.
        own: whether edgespec built the graph: it has the names of :data:`INPUTS`, and writes the cache in
            place.
    """

    inputs: Mapping[str, str] = field(default_factory=lambda: {name: name for name in INPUTS})
    logits: str = "logits"
    own: bool = False


class StaticInputs:
    """Fills the inputs of graphs of fixed shapes (``graphs.static``), but for the KV cache."""

    def __init__(
        self, config: Transformer, tables: Mapping[str, npt.NDArray[np.float32]], masked: float
    ) -> None:
        """``tables`` are the rotary tables of the whole context, by the names of their inputs."""
        self._config, self._tables, self._masked = config, tables, masked

    def fill(self, inputs: Mapping[str, _Array], tokens: Sequence[int], start: int) -> None:
        """Write all inputs but the cache, for a pass over ``tokens`` behind ``start`` cached ones.

        Rows beyond the tokens run with token 0. No other row sees them, and callers leave them out.
        """
        ids = inputs["input_ids"]
        rows = ids.shape[1]
        ids[:] = 0
        ids[0, : len(tokens)] = tokens
        positions = np.minimum(np.arange(start, start + rows), self._config.context_length - 1)
        for name, table in self._tables.items():
            if name in inputs:
                inputs[name][0, 0] = table[positions]
        for name, window in (("attention_mask", None), ("sliding_mask", self._config.sliding_window)):
            if name in inputs:
                self._mask(inputs[name][0, 0], start, window)
        if "wanted_rows" in inputs:
            inputs["wanted_rows"][:] = 0
            inputs["wanted_rows"][0, 0, len(tokens) - 1] = 1

    def _mask(self, mask: _Array, start: int, window: int | None) -> None:
        """Row i sees the first ``start`` places of the cache and the pass's rows up to itself."""
        rows = len(mask)
        places = np.arange(mask.shape[1] - rows)
        position = np.concatenate([places, start + np.arange(rows)])
        own = (start + np.arange(rows))[:, None]
        sees = np.concatenate([places < start, np.ones(rows, bool)]) & (position <= own)
        if window is not None:
            sees &= position > own - window
        mask[:] = np.where(sees, 0.0, self._masked)
