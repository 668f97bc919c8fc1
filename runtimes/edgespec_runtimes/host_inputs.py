"""What a graph of fixed shapes is told about a pass: token ids, positions, what may be looked at."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.config import ModelConfig
from edgespec_models.rope import rotary_tables

__all__ = ["HostInputs"]

_Array = npt.NDArray[Any]


class HostInputs:
    """Fills the inputs of graphs of :func:`edgespec_models.graphs.static_decoder.build_static_decoder`."""

    def __init__(self, config: ModelConfig, masked: float) -> None:
        """Make the rotary tables.

        Args:
            config: the model's facts.
            masked: what a mask holds where a row must not look.
        """
        self._config, self._masked = config, masked
        bases = [("rope", config.rope_theta, config.rope_factors)]
        if config.rope_local_theta is not None:
            bases.append(("rope_local", config.rope_local_theta, ()))
        self._tables: dict[str, npt.NDArray[np.float32]] = {}
        for name, theta, factors in bases:
            cos, sin = rotary_tables(config, theta, factors, positions=config.context_length)
            self._tables |= {f"{name}_cos": cos, f"{name}_sin": sin}

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
