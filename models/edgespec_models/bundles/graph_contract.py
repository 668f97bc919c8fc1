"""What a decoder graph is called with: the one place that says so, for sessions, export checks and tools.

A graph reads a pass's tokens, some facts about the pass, and the KV cache. Which facts it reads shows in its
inputs; their names and values are in :data:`INPUTS`. Graphs that others exported may call them otherwise,
which :class:`GraphTensors` says. Graphs of fixed shapes have the inputs that :class:`StaticInputs` fills.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.config import ModelConfig

_Array = npt.NDArray[Any]


class Part(NamedTuple):
    """What a pass reads of one sequence.

    Attributes:
        tokens: of the sequence, behind the first ``start``, which the KV cache holds.
        rows: of logits that are asked for: the last ones.
        begin: where the sequence begins in the KV cache, in tokens.
        ending: tokens at the end whose logits nobody wants.
        features: what a head reads beside each token, float32 ``(tokens, width)``: the target's features,
        states: or states that it wrote itself.
        slot: where states of the sequence lie.
        behind: and behind how many of its tokens.
    """

    tokens: Sequence[int]
    start: int
    rows: int = 1
    begin: int = 0
    ending: int = 0
    features: npt.NDArray[np.float32] | None = None
    states: npt.NDArray[np.float32] | None = None
    slot: int = 0
    behind: int = 0

    @property
    def end(self) -> int:
        """Tokens of the sequence the KV cache holds afterwards."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over parts of one sequence or, in graphs that take them, of several.

    Attributes:
        offered: tokens that a trimmed LM head gets a column for.
        columns: of the logits.
        features: of a head's first tokens, ``(m, width)``.
        states: of the tokens behind these, ``(k, width)``.
    """

    parts: Sequence[Part]
    offered: Sequence[int] | npt.NDArray[np.int64] = (0,)
    columns: int = 0
    features: npt.NDArray[np.float32] | None = None
    states: npt.NDArray[np.float32] | None = None

    @property
    def tokens(self) -> list[int]:
        """Of all parts."""
        return list(chain.from_iterable(part.tokens for part in self.parts))

    @property
    def rows(self) -> int:
        """Of logits that are asked for."""
        return sum(part.rows for part in self.parts)

    @property
    def wanted(self) -> npt.NDArray[np.int64]:
        """The rows that are asked for, int64 ``(rows,)``; negative ones count from the end, as ONNX does."""
        ends = np.cumsum([len(part.tokens) for part in self.parts])
        lasts = [end - part.ending for end, part in zip(ends, self.parts, strict=True)]
        wanted = [np.arange(last - part.rows, last) for last, part in zip(lasts, self.parts, strict=True)]
        return np.concatenate(wanted)


ROWS: Final = "logits_rows"
"""The input that names the rows whose logits a graph writes; graphs without it write the logits of all."""

INPUTS: Final[Mapping[str, Callable[[Pass], npt.ArrayLike]]] = MappingProxyType(
    {
        "input_ids": lambda run: [run.tokens],
        "attention_mask": lambda run: np.ones((1, run.parts[0].end)),
        "position_ids": lambda run: np.arange(run.parts[0].start, run.parts[0].end)[None],
        "sequences": lambda run: [(part.begin, part.start, len(part.tokens)) for part in run.parts],
        "places": lambda run: [(part.slot, part.behind) for part in run.parts],
        "seqlens_k": lambda run: [run.parts[0].end - 1],
        "total_sequence_length": lambda run: run.parts[0].end,
        ROWS: lambda run: run.wanted,
        "context_tokens": lambda run: run.offered,
        "column_order": lambda run: -np.arange(run.columns),
        "features": lambda run: np.asarray(run.features)[None],
        "states": lambda run: np.asarray(run.states)[None],
    }
)
"""Inputs of graphs of any shape, but for weights and the KV cache, and what they hold in a pass."""

CHANGING: Final = frozenset(
    {"input_ids", "sequences", "places", "seqlens_k", "total_sequence_length", ROWS, "features", "states"}
)
"""Inputs of edgespec's graphs whose values differ between passes over equally many tokens."""


NEW_STATES: Final = "new_states"
"""The output of a head: its states of the rows that are asked for."""

EXPERTS_READ: Final = "experts_read"
"""The output of a graph with experts: how many different ones the rows of a pass used, layer by layer."""


def stream_name(layer: int) -> str:
    """The name of the residual stream that enters ``layer``; ``layer + 1`` names the one that leaves."""
    return f"layers.{layer}.stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensors:
    """The names of inputs and outputs in a graph of any shape.

    Attributes:
        inputs: what the graph calls each of :data:`INPUTS`, by its name there; of a foreign one those it has.
        logits: of every row, ``(1, n, vocabulary)``, or of those that are asked for.
        own: whether edgespec built the graph: names are those of :data:`INPUTS`, the cache is in place.
    """

    inputs: Mapping[str, str] = field(default_factory=lambda: {name: name for name in INPUTS})
    logits: str = "logits"
    own: bool = False


class StaticInputs:
    """Fills the inputs of graphs of fixed shapes (``graphs.static``), but for the KV cache."""

    def __init__(self, config: ModelConfig, masked: float) -> None:
        """Make the rotary tables."""
        from edgespec_models.bundles.layers import rotary_tables  # graphs of any shape have their own

        self._config, self._masked = config, masked
        self._tables: dict[str, npt.NDArray[np.float32]] = rotary_tables(config, config.context_length)

    def fill(self, inputs: Mapping[str, _Array], tokens: Sequence[int], start: int) -> None:
        """Write all inputs but the cache, for a pass over ``tokens`` behind ``start`` cached ones.

        Rows beyond the tokens run with token 0, are seen by none of the others and are to be left out.
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
