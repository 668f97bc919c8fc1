"""Rotary tables: the cosine and sine of every position and frequency."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgespec_models.config import ModelConfig

__all__ = ["rotary_tables"]


def rotary_tables(
    config: ModelConfig, theta: float, factors: Sequence[float] = (), *, positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines, float32 ``(positions, rotary width / 2)`` (Su et al. 2021, section 3.4.2).

    Args:
        config: width and magnitude.
        theta: base of the frequencies.
        factors: what each frequency is divided by; empty where by nothing.
        positions: from 0 on.
    """
    width = config.rotary_width
    frequencies = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if factors:
        frequencies /= factors
    angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    cos *= config.rope_magnitude
    sin *= config.rope_magnitude
    return cos.astype(np.float32), sin.astype(np.float32)
